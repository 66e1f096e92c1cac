"""`flinkish audit`: compares input and outputs of a job, record by record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from flinkish_spark.cli.client import (
    ExitStatus,
    brokers_options,
    complain,
    connection_of,
    end_with,
    job_argument,
    json_option,
    print_line,
    print_table,
)
from flinkish_spark.job.stored_job import StoredJob

if TYPE_CHECKING:
    from flinkish_spark.audit.audit import AuditResult
    from flinkish_spark.audit.outputs import OriginNames, OutputSpec


_OUTPUT = re.compile(r"([^=]+)=(kafka|delta|parquet):(.+)", re.DOTALL)
_LIST = ("output", "rows", "lost", "duplicated", "reordered", "partial", "superseded", "unnamed", "outside")
_OFFSETS_EXAMPLE = '{"orders": {"0": 100, "1": 100}}'


@click.command()
@job_argument
@brokers_options
@click.option(
    "--input", "inputs", multiple=True, required=True, metavar="TOPIC", help="A topic that the job reads."
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    required=True,
    metavar="UID=KIND:PLACE",
    help="What a sink writes: totals=kafka:TOPIC,... or table=delta:PATH or files=parquet:PATH.",
)
@click.option(
    "--origin",
    default="_topic,_partition,_offset",
    show_default=True,
    metavar="NAMES",
    help="Headers, JSON fields or columns with the origin of a row; PARTITION,OFFSET for one topic.",
)
@click.option(
    "--complete",
    type=click.Choice(["each", "together", "none"]),
    default="each",
    show_default=True,
    help="Whether each output has to name each record of the input, all of them together, or nobody.",
)
@click.option("--from", "first", metavar="JSON", help="Offsets to begin at, in place of the job's beginning.")
@click.option("--to", "end", metavar="JSON", help="Offsets to end before, in place of the newest checkpoint.")
@json_option
def audit(
    job: StoredJob,
    servers: str,
    config: Any,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    origin: str,
    complete: str,
    first: str | None,
    end: str | None,
    as_json: bool,
) -> None:
    """Count lost, duplicated, reordered and unexpected records, and partly visible checkpoints.

    Reads the input up to the job's newest confirmed checkpoint, and the outputs as readers see them. The job
    may run or not. The exit status is 1 if there are findings.
    """
    specs = _outputs(outputs)
    names = _names(origin)
    offsets = {"first": _offsets("--from", first), "end": _offsets("--to", end)}
    connection = connection_of(servers, config)
    from flinkish_spark.audit import audit as running

    topics = tuple(dict.fromkeys(inputs))
    settings = running.AuditSettings(
        connection,
        topics,
        specs,
        names,
        running.Completeness(complete.upper()),
        began=running.began_at(job.job_dir, job.place, topics),
        **offsets,
    )
    result = running.audit(job.job_dir, job.uuid, settings)
    if as_json:
        # One line, for collectors of JSON lines.
        click.echo(json.dumps({**job.to_json(), **result.to_json()}, ensure_ascii=True, allow_nan=False))
    else:
        _print(result)
    if not result.is_exact:
        end_with(ExitStatus.NOT_DONE)


def _outputs(texts: tuple[str, ...]) -> tuple[OutputSpec, ...]:
    from flinkish_spark.audit.outputs import OutputKind, OutputSpec

    found: dict[str, OutputSpec] = {}
    for text in texts:
        match = _OUTPUT.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not UID=kafka:TOPIC, UID=delta:PATH or UID=parquet:PATH.")
        uid, kind, place = match.groups()
        if uid in found:
            raise click.BadParameter(f"the sink {uid!r} is named twice.")
        found[uid] = OutputSpec(uid, OutputKind(kind), place.removeprefix("file://"))
    return tuple(found.values())


def _names(text: str) -> OriginNames:
    from flinkish_spark.audit.outputs import OriginNames

    try:
        return OriginNames.of(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


def _offsets(option: str, text: str | None) -> Mapping[str, Mapping[int, int]]:
    """Parse JSON offsets by topic and partition; raise BadParameter for anything else."""
    if text is None:
        return {}
    try:
        content = json.loads(text)
        found = {
            str(topic): {_whole(partition): _whole(offset) for partition, offset in partitions.items()}
            for topic, partitions in content.items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError):
        found = {}
    if not found or any(number < 0 for ps in found.values() for pair in ps.items() for number in pair):
        raise click.BadParameter(f"{option} is {text!r}: write it like {_OFFSETS_EXAMPLE}.")
    return found


def _whole(value: object) -> int:
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


def _print(result: AuditResult) -> None:
    rows = [
        (
            one.spec.sink,
            one.rows,
            result.lost_by_sink.get(one.spec.sink),
            one.named.duplicated,
            one.reordered,
            result.partial_of(one) if one.is_judged else None,
            one.superseded,
            one.unnamed,
            one.named.outside,
        )
        for one in result.outputs
    ]
    print_table(_LIST, rows)
    print_line()
    print_line(
        f"{result.records} records of the input up to checkpoint {result.checkpoint}; "
        f"{result.checkpoints} checkpoints compared with their decisions"
    )
    print_line(", ".join(f"{number} {name.replace('_', ' ')}" for name, number in result.zeros.items()))
    for text in result.examples:
        print_line(f"- {text}")
    for one in result.outputs:
        for note in one.notes:
            complain(f"'{one.spec.sink}': {note}")
        if one.named.unexpected and not result.keeps_all:
            complain(
                f"'{one.spec.sink}' names {one.named.unexpected} offsets at which the input has no record "
                "(any more): it is compacted, or does not show whether it is"
            )
