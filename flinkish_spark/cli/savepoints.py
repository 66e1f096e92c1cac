"""`flinkish savepoint` and `flinkish cancel`: take, stop with, and list savepoints; cancel a job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from flinkish_spark.cli.client import (
    SAVEPOINT_FILE,
    ExitStatus,
    complain,
    confirm,
    directories_argument,
    end_with,
    job_argument,
    json_option,
    local_time,
    print_json,
    print_line,
    print_table,
    report,
    target_argument,
    timeout_option,
    yes_option,
)
from flinkish_spark.core.errors import CorruptObjectError, FlinkishError
from flinkish_spark.job.asking import (
    RequestTimeouts,
    ask,
)
from flinkish_spark.job.requests import RequestKind, StopMode
from flinkish_spark.job.stored_job import (
    StoredJob,
    raise_as_corrupt,
)
from flinkish_spark.protocol.savepoints import SavepointMetadata

_LIST = ("path", "job", "checkpoint", "taken", "key groups", "bytes", "operators", "claimed by")


@click.group()
def savepoint() -> None:
    """Take savepoints of a running job, or list savepoints."""


@savepoint.command("trigger")
@job_argument
@target_argument
@timeout_option
@json_option
def trigger_savepoint(job: StoredJob, target: str, timeout_s: float, as_json: bool) -> None:
    """Take a savepoint of a running job in the new directory TARGET, and wait until it is complete.

    The job continues. TARGET must be on a file system that driver and executors share.
    """
    _refuse_inside(job, target)
    reply = ask(job, RequestKind.SAVEPOINT, RequestTimeouts.from_seconds(timeout_s), target=target)
    report(
        reply, {**job.to_json(), "target": target}, lambda r: _format_savepoint(r.checkpoint, target), as_json
    )


@savepoint.command("stop")
@job_argument
@target_argument
@click.option(
    "--suspend",
    "stop_mode",
    flag_value=StopMode.SUSPEND.value,
    default=StopMode.SUSPEND.value,
    help="The job may be started again from it and continues as if it had not stopped (the default).",
)
@click.option(
    "--drain",
    "stop_mode",
    flag_value=StopMode.DRAIN.value,
    help="The job ends for good: the watermark rises to its maximum before the savepoint.",
)
@timeout_option
@json_option
def stop_with_savepoint(job: StoredJob, target: str, stop_mode: str, timeout_s: float, as_json: bool) -> None:
    """Stop a running job with a savepoint in the new directory TARGET.

    No record after the savepoint is committed. If the savepoint fails, the job does not stop: it restarts
    from its last checkpoint.
    """
    _refuse_inside(job, target)
    mode = StopMode(stop_mode)
    patience = RequestTimeouts.from_seconds(timeout_s)
    reply = ask(job, RequestKind.STOP_WITH_SAVEPOINT, patience, target=target, stop_mode=mode)
    asked = {**job.to_json(), "target": target, "stop_mode": mode.value}
    report(reply, asked, lambda r: f"{_format_savepoint(r.checkpoint, target)}; the job stops", as_json)


def _format_savepoint(checkpoint: object, target: str) -> str:
    return f"savepoint of checkpoint {checkpoint}: {target}"


def _refuse_inside(job: StoredJob, target: str) -> None:
    if not job.place.is_local or "://" in target:
        # The job refuses such a target.
        return
    # Not Path.resolve(), which raises if links form a circle.
    path, root = Path(os.path.realpath(target)), Path(os.path.realpath(job.place.folder))
    if path.is_relative_to(root):
        raise click.UsageError(f"{target} is inside the job directory, which savepoints outlive.")
    if root.is_relative_to(path):
        raise click.UsageError(f"the job directory is inside {target}; give a directory of its own.")


@dataclass(frozen=True, slots=True)
class FoundSavepoint:
    path: Path
    #: None if it cannot be read; then `error` has the reason.
    metadata: SavepointMetadata | None
    #: The job directory that owns its files; empty if the user owns them.
    claimed_by: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "error": self.error,
            "claimed_by": self.claimed_by,
            "savepoint": None if self.metadata is None else _metadata_json(self.metadata),
        }


@savepoint.command("list")
@directories_argument
@json_option
def list_savepoints(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the savepoints in and below directories, oldest first.

    A savepoint with an unreadable description is listed with the reason, and the exit status is 1. State
    files are not checked.
    """
    found = sorted(_find_below(folders), key=_when)
    if as_json:
        print_json({"savepoints": [one.to_json() for one in found]})
    elif found:
        print_table(_LIST, [_row(one) for one in found])
    else:
        print_line("no savepoints")
    broken = [one for one in found if one.metadata is None]
    for one in broken:
        complain(one.error)
    if broken:
        end_with(ExitStatus.NOT_DONE)


def _find_below(folders: Iterable[Path]) -> Iterator[FoundSavepoint]:
    seen = set()
    for folder in folders:
        for place, below, files in os.walk(
            folder, onerror=lambda error: complain(f"not all directories could be searched: {error}")
        ):
            if SAVEPOINT_FILE in files and place not in seen:
                seen.add(place)
                # Subdirectories belong to the savepoint.
                below.clear()
                yield _read(Path(place))


def _read(path: Path) -> FoundSavepoint:
    # Imported here, since it imports Arrow, which other commands do not need.
    from flinkish_spark.savepoints.files import SavepointDir

    directory = SavepointDir(path)
    try:
        if not (path / SAVEPOINT_FILE).is_file():
            # Reading a named pipe would block.
            raise CorruptObjectError(f"{path / SAVEPOINT_FILE} is no file")
        with raise_as_corrupt(f"the savepoint {path}"):
            metadata = directory.metadata()
            claim = directory.find_claim(metadata.savepoint)
    except FlinkishError as error:
        return FoundSavepoint(path, None, error=str(error))
    return FoundSavepoint(path, metadata, "" if claim is None else claim.owner)


def _when(found: FoundSavepoint) -> tuple[int, str]:
    return (0 if found.metadata is None else found.metadata.decided_at_ms), str(found.path)


def _row(found: FoundSavepoint) -> tuple[object, ...]:
    metadata = found.metadata
    if metadata is None:
        return (found.path, "cannot be read", *[None] * 6)
    return (
        found.path,
        metadata.job,
        int(metadata.checkpoint),
        local_time(metadata.decided_at_ms),
        metadata.rows,
        metadata.size_bytes,
        ", ".join(metadata.operators),
        found.claimed_by,
    )


def _metadata_json(metadata: SavepointMetadata) -> dict[str, Any]:
    """Return the JSON of a savepoint: names and numbers, no state and no positions."""
    return {
        "savepoint": metadata.savepoint,
        "job": metadata.job,
        "job_uuid": str(metadata.job_uuid),
        "checkpoint": int(metadata.checkpoint),
        "lineage": int(metadata.lineage),
        "batch": int(metadata.batch),
        "decided_at_ms": metadata.decided_at_ms,
        "shuffle_partitions": metadata.shuffle_partitions,
        "operators": {uid: operator.to_json() for uid, operator in metadata.operators.items()},
        "sources": {uid: source.kind for uid, source in metadata.sources.items()},
        "sinks": list(metadata.sinks),
        "hooks": sorted(metadata.hooks),
        "finished": list(metadata.finished),
        "upstream": dict(metadata.upstream),
        "key_groups": metadata.rows,
        "bytes": metadata.size_bytes,
        "files": len(metadata.files),
    }


@click.command()
@job_argument
@yes_option
@timeout_option
@json_option
def cancel(job: StoredJob, yes: bool, timeout_s: float, as_json: bool) -> None:
    """Cancel a running job at once, without a last checkpoint.

    The next start commits or aborts data staged since the last checkpoint. With DELETE_ON_CANCELLATION the
    checkpoints of the job are deleted, and the next start begins without state; savepoints stay in any case.
    """
    confirm(f"The job '{job.name}' ends without a last checkpoint.", "Cancel it?", yes, as_json)
    reply = ask(job, RequestKind.CANCEL, RequestTimeouts.from_seconds(timeout_s))
    report(reply, job.to_json(), lambda _: "the job is being cancelled", as_json)
