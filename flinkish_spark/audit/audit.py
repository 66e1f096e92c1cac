"""An audit, from its settings to its result."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.audit.counting import EXAMPLES, Extent, InputOffsets, Place, find_lost
from flinkish_spark.audit.decided import JobDecisions, Partial, partial_checkpoints
from flinkish_spark.audit.outputs import (
    OriginNames,
    OutputCounts,
    OutputReader,
    OutputSpec,
    drop_barriers,
    ranges_of,
)
from flinkish_spark.checkpoint.spark_log import log_of
from flinkish_spark.connectors.kafka.checks import read_topic_retention
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings
from flinkish_spark.core.errors import InputLostError, UserError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.lineage import FIRST_LINEAGE

Offsets = Mapping[str, Mapping[int, int]]


class Completeness(enum.Enum):
    """The outputs that must contain a record of the input."""

    #: Each output.
    EACH = "EACH"
    #: At least one output: the input is split among them.
    TOGETHER = "TOGETHER"
    #: None: the job drops records, so missing ones are no error.
    NONE = "NONE"


@dataclass(frozen=True, slots=True)
class AuditSettings:
    #: Kafka servers of the input and output topics.
    connection: KafkaConnection
    inputs: tuple[str, ...]
    outputs: tuple[OutputSpec, ...]
    names: OriginNames = field(default_factory=OriginNames)
    completeness: Completeness = Completeness.EACH
    #: Offsets by topic and partition; the default is the job's first offset, and the position of the newest
    #: confirmed checkpoint.
    first: Offsets = field(default_factory=dict)
    end: Offsets = field(default_factory=dict)
    #: The job's first offsets, as far as they are known; records that the topics no longer have are not
    #: audited.
    began: Offsets = field(default_factory=dict)


@dataclass(frozen=True)
class AuditResult:
    """The findings of an audit; :attr:`is_exact` is the verdict."""

    #: The checkpoint whose position ends the audited input.
    checkpoint: int
    extents: Mapping[Place, Extent]
    records: int
    outputs: tuple[OutputCounts, ...]
    #: Numbers by sink, or under "" for all outputs together.
    lost_by_sink: Mapping[str, int]
    #: Checkpoints that an output shows only in part, with too many rows, or without a decision.
    partial: tuple[Partial, ...]
    checkpoints: int
    #: True if the input's topics keep each record until retention deletes it: then an offset without a record
    #: never had a visible one.
    keeps_all: bool
    examples: tuple[str, ...]

    @property
    def zeros(self) -> dict[str, int | None]:
        """The numbers that must be 0; None for unknown ones."""
        return {
            "lost": sum(self.lost_by_sink.values()),
            "duplicated": sum(one.named.duplicated for one in self.outputs),
            "reordered": sum(one.reordered or 0 for one in self.outputs),
            "partial_checkpoints": (
                len({one.what for one in self.partial})
                if any(one.is_judged for one in self.outputs)
                else None
            ),
            "unexpected": sum(one.named.unexpected for one in self.outputs) if self.keeps_all else None,
        }

    @property
    def is_exact(self) -> bool:
        return not any(self.zeros.values())

    def to_json(self) -> dict[str, Any]:
        partitions: dict[str, dict[str, list[int]]] = {}
        for (topic, partition), extent in self.extents.items():
            partitions.setdefault(topic, {})[str(partition)] = [extent.start, extent.end]
        return {
            **self.zeros,
            "records": self.records,
            "checkpoint": self.checkpoint,
            "checkpoints": self.checkpoints,
            "input": partitions,
            "outputs": {one.spec.sink: self._output_json(one) for one in self.outputs},
            "examples": list(self.examples),
        }

    def _output_json(self, one: OutputCounts) -> dict[str, Any]:
        return {
            "kind": one.spec.kind.value,
            "place": one.spec.place,
            "rows": one.rows,
            "lost": self.lost_by_sink.get(one.spec.sink),
            "duplicated": one.named.duplicated,
            "reordered": one.reordered,
            "partial_checkpoints": self.partial_of(one) if one.is_judged else None,
            "superseded": one.superseded,
            "unnamed": one.unnamed,
            "outside": one.named.outside,
            "unexpected": one.named.unexpected,
            "notes": one.notes,
        }

    def partial_of(self, one: OutputCounts) -> int:
        return len({partial.what for partial in self.partial if partial.sink == one.spec.sink})


def audit(job_dir: JobDir, job: JobUuid, settings: AuditSettings) -> AuditResult:
    """Read input and outputs, and compare them with each other and with the decisions.

    The job may run: it is audited up to its newest confirmed checkpoint.
    """
    # This order matters: data confirmed now is visible to later reads, and data visible then was decided
    # before the second look.
    before = JobDecisions.read(job_dir)
    if before.newest is None:
        raise UserError("the job has no confirmed checkpoint", what_to_do="audit it when it has one")
    for spec in settings.outputs:
        before.check_sink(spec.sink)
    extents = extents_of(settings, LoggedOffsets.parse(before.newest.offsets_text))
    expected = _read_input(settings.connection, extents)
    reader = OutputReader(expected, settings.names, job, before, lambda: settings.connection)
    outputs = tuple(reader.read(spec) for spec in settings.outputs)
    after = JobDecisions.read(job_dir)
    partial = tuple(p for one in outputs for p in partial_checkpoints(before, one.visible, after))
    missing, examples = _find_lost(settings.completeness, expected, outputs)
    examples += [f"duplicated in '{o.spec.sink}': {place}" for o in outputs for place in o.named.examples]
    examples += [str(one) for one in partial[:EXAMPLES]]
    kept = read_topic_retention(settings.connection, settings.inputs)
    examples += [
        f"'{one.spec.sink}' names {place}, where the input has no record"
        for one in outputs
        for place in one.named.examples_of_unexpected
    ]
    confirmed = sum(one.is_confirmed for one in before.checkpoints.values())
    return AuditResult(
        int(before.newest.checkpoint),
        extents,
        expected.records,
        outputs,
        missing,
        partial,
        confirmed,
        not any(keeping is None or keeping.is_compacted for keeping in kept.values()),
        tuple(examples),
    )


def began_at(job_dir: JobDir, place: StoreSpec, topics: Sequence[str]) -> Offsets:
    if job_dir.history().log_began_in != FIRST_LINEAGE:
        # The record has the offsets at which Spark's checkpoint was restarted.
        return {}
    log = log_of(job_dir.store, place, job_dir.newest_owner())
    return log.find_first_offsets().kafka(frozenset(topics))


def extents_of(settings: AuditSettings, position: LoggedOffsets) -> dict[Place, Extent]:
    known = position.kafka(frozenset(settings.inputs))
    extents = {}
    for topic in settings.inputs:
        if topic not in known and topic not in settings.end:
            raise UserError(
                f"the job's newest confirmed checkpoint has no position in topic '{topic}'",
                what_to_do="name a topic that the job reads",
            )
        for there, _ in ranges_of(settings.connection, topic):
            began = max(there.start, settings.began.get(topic, {}).get(there.partition, there.start))
            first = settings.first.get(topic, {}).get(there.partition, began)
            asked = settings.end.get(topic, {}).get(there.partition)
            end = known.get(topic, {}).get(there.partition, first) if asked is None else asked
            if first < there.start:
                raise InputLostError(
                    f"{topic}-{there.partition} begins at offset {there.start}, and the audit at {first}",
                    why="Kafka's retention removed records",
                    what_to_do="begin the audit at a later offset",
                )
            if asked is not None and asked > there.end:
                raise UserError(
                    f"{there.topic}-{there.partition} ends at offset {there.end}, and the audit at {asked}",
                    what_to_do="end the audit at an earlier offset",
                )
            if first > end and there.partition in settings.first.get(topic, {}):
                raise UserError(
                    f"the audit of {there.topic}-{there.partition} begins at offset {first}, "
                    f"after its end at {end}",
                    what_to_do="begin the audit at an earlier offset",
                )
            extents[topic, there.partition] = Extent(first, max(first, end))
    for offsets in (settings.first, settings.end):
        for place in ((topic, partition) for topic, of in offsets.items() for partition in of):
            if place not in extents:
                raise UserError(
                    f"{place[0]}-{place[1]} is no partition of the input",
                    what_to_do="correct --from and --to",
                )
    return extents


def _read_input(connection: KafkaConnection, extents: Mapping[Place, Extent]) -> InputOffsets:
    expected = InputOffsets(extents)
    reader = RangeReader(connection, ReaderSettings(include_headers=True))
    for number, ((topic, partition), extent) in enumerate(extents.items()):
        for batch in reader.read(OffsetRange(topic, partition, extent.start, extent.end)):
            # Barriers of an upstream job are no input.
            expected.note(number, drop_barriers(batch).column("offset").to_numpy())
    return expected


def _find_lost(
    completeness: Completeness, expected: InputOffsets, outputs: Sequence[OutputCounts]
) -> tuple[dict[str, int], list[str]]:
    """Return the numbers of missing records by sink, and examples in words."""
    groups: dict[str, list[OutputCounts]] = {}
    if completeness is Completeness.EACH:
        groups = {one.spec.sink: [one] for one in outputs}
    elif completeness is Completeness.TOGETHER:
        groups = {"": list(outputs)}
    counts, examples = {}, []
    for sink, group in groups.items():
        found = find_lost(expected, [one.named for one in group])
        counts[sink] = found.count
        where = f"in '{sink}'" if sink else "in all outputs"
        examples += [f"missing {where}: {place}" for place in found.examples]
    return counts, examples
