"""The upstream job of a chained source: its settings, the search for its barriers, and status texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flinkish_spark.checkpoint.control import AlignmentStatus
from flinkish_spark.connectors.kafka.chaining.alignment import (
    MOST_MICRO_BATCHES,
    View,
    next_barrier,
    turns_unaligned_at_ms,
)
from flinkish_spark.connectors.kafka.chaining.cut_state import CutState, channel_of, place_of
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.barriers import BarrierScan, SeenBarrier
from flinkish_spark.connectors.kafka.client.client import WIRES
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import ConfigError, InternalError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.validation import raise_config_errors
from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Place
from flinkish_spark.protocol.input_gate import AlignmentMode, AlignmentPhase, AlignmentSettings, InputGate
from flinkish_spark.protocol.limits import MOST_MS


@dataclass(frozen=True)
class UpstreamJob(StoredObject):
    """The job that writes the topics of a source, and how the source aligns to its checkpoints.

    The upstream job's Kafka sinks need ``barriers=BarrierRecords.EACH_CHECKPOINT``. Every checkpoint of the
    downstream job is then taken at a checkpoint of the upstream job, so that the two are one consistent cut.
    See `docs/chained-jobs.md`.

    Parameters
    ----------
    mode
        ``AlignmentMode.ALIGNED``: a partition waits at the barrier of an upstream checkpoint until all
        partitions have reached theirs. ``UNALIGNED``: the checkpoint is taken at the first of these
        barriers and includes the offsets up to the others. ``ALIGNED_WITH_TIMEOUT``: aligned, but
        unaligned after a timeout. ``AT_LEAST_ONCE``: no partition waits.
    alignment_timeout_ms
        Time since the first barrier, 0 to 365 days; for ``ALIGNED_WITH_TIMEOUT`` only.
    job
        Uuid of the upstream job, as in its job.json; empty for the first job whose barriers are found.
        Needed if several jobs write the topics, or another one than before.

    Examples
    --------
    >>> UpstreamJob(mode=AlignmentMode.ALIGNED_WITH_TIMEOUT, alignment_timeout_ms=30_000).settings.mode
    <AlignmentMode.ALIGNED_WITH_TIMEOUT: 'ALIGNED_WITH_TIMEOUT'>
    """

    mode: AlignmentMode = AlignmentMode.ALIGNED
    alignment_timeout_ms: Annotated[Milliseconds | None, Range(0, MOST_MS)] = None
    job: str = ""

    def __post_init__(self) -> None:
        what_to_do = "describe the upstream job as flinkish_spark.UpstreamJob says"
        check_fields(self, what_to_do, job="give the uuid in the job.json of a job")
        with raise_config_errors(what_to_do):
            _ = self.settings
            if self.job:
                JobUuid(self.job)

    @property
    def settings(self) -> AlignmentSettings:
        """Settings of the input gate."""
        return AlignmentSettings(self.mode, alignment_timeout_ms=self.alignment_timeout_ms)

    @property
    def wanted(self) -> JobUuid | None:
        """The job to align to; None for the first one whose barriers are found."""
        return JobUuid(self.job) if self.job else None

    def to_option(self) -> str:
        """Return the value of the source option."""
        return json.dumps(self.to_json())

    @classmethod
    def from_option(cls, text: str) -> UpstreamJob:
        """Parse the value that :meth:`to_option` wrote."""
        return cls.from_json(json.loads(text))

    def check_topics(self, connection: KafkaConnection, topics: Sequence[str]) -> None:
        """Refuse unaligned checkpoints of compacted topics, which lose barriers; called by the preflight."""
        if self.mode in (AlignmentMode.ALIGNED, AlignmentMode.AT_LEAST_ONCE):
            return
        with WIRES.wire(connection) as wire:
            found = KafkaAdmin.from_wire(wire).topics(topics)
        compacted = next((topic for topic in topics if topic in found and found[topic].is_compacted), None)
        if compacted is not None:
            raise ConfigError(
                f"the topic '{compacted}' is compacted, and its source has AlignmentMode.{self.mode.name}",
                why="an unaligned checkpoint is taken before its last barrier records are read, which "
                "compaction may remove",
                what_to_do="use AlignmentMode.ALIGNED, or a topic with cleanup.policy=delete",
            )


#: Sizes in offsets of the windows that are scanned one after the other, backward from the end.
_WINDOWS = (64, 512, 4_096)
#: Offsets per scan if the backward scan does not suffice.
_PORTION = 100_000

Scan = Callable[[Place, int, int], BarrierScan]


@dataclass(frozen=True, slots=True)
class PassedBarrier:
    job: JobUuid
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class _KnownRange:
    """The part of a partition from the reader's position up to `upto`, which was scanned."""

    start: int
    upto: int
    end: int
    barriers: tuple[SeenBarrier, ...] = ()


class BarrierFinder:
    """Finds the barriers ahead of one reader; remembers what it has scanned."""

    # It scans backward from the end of the log first: the upstream job writes a barrier right after the
    # records of a checkpoint, and each barrier names the one before it. Only if that leaves a gap it scans
    # all records, a portion at a time.

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._known: dict[Place, _KnownRange] = {}

    def find_ahead(self, place: Place, position: int, end: int, passed: PassedBarrier | None) -> BarrierScan:
        """Return the barriers from `position` to before `end`, or to a nearer end that was scanned so far."""
        known = self._known.get(place)
        if known is None or not known.start <= position <= known.upto:
            known = _KnownRange(position, position, position)
        if end > known.upto:
            known = self._extend(place, known, end, passed)
        barriers = tuple(seen for seen in known.barriers if seen.offset >= position)
        self._known[place] = _KnownRange(position, known.upto, max(known.end, position), barriers)
        return BarrierScan(max(known.end, position), barriers)

    def _extend(
        self, place: Place, known: _KnownRange, end: int, passed: PassedBarrier | None
    ) -> _KnownRange:
        newest = passed
        if known.barriers:
            mark = known.barriers[-1].mark
            newest = PassedBarrier(mark.job, mark.checkpoint)
        upto, more = end, self._scan_backward(place, known.upto, end, newest)
        if more is None:
            upto = min(end, known.upto + _PORTION)
            more = self._scan(place, known.upto, upto)
        behind = more.end if more.end > known.upto else known.end
        return _KnownRange(known.start, upto, behind, (*known.barriers, *more.barriers))

    def _scan_backward(
        self, place: Place, start: int, end: int, newest: PassedBarrier | None
    ) -> BarrierScan | None:
        """Scan backward from `end`; return None if a few windows do not reach a known barrier."""
        behind, upper = start, end
        barriers: tuple[SeenBarrier, ...] = ()
        for window in _WINDOWS:
            lower = max(start, upper - window)
            seen = self._scan(place, lower, upper)
            if behind == start and seen.end > lower:
                behind = seen.end
            barriers = (*seen.barriers, *barriers)
            mark = seen.barriers[0].mark if seen.barriers else None
            # Checkpoint ids rise along a partition: no barrier lies between this one and the newest known.
            is_next = (
                mark is not None
                and newest is not None
                and mark.job == newest.job
                and mark.previous is not None
                and mark.previous <= newest.checkpoint
            )
            if lower == start or is_next:
                return BarrierScan(behind, barriers)
            upper = lower
        return None


Offset = dict[str, Any]


class SharedPlan:
    """Lets all scans of a query end each micro-batch at the same offset; each scan has one instance."""

    # Spark scans a source once for every branch of the plan, and asks each scan, in a process of its own,
    # once per round for its offset. All must end a micro-batch at the same offset, or a checkpoint would be
    # at the cut in one branch and not in another. So the first scan that is asked in a round plans for all.

    def __init__(self, path: Path) -> None:
        self._path = path
        self._round = 0

    def plan_once(self, start: Offset, plan: Callable[[], Offset]) -> Offset:
        """Return the offset of this round; call `plan` if no other scan has done it."""
        self._round += 1
        if self._path.exists():
            known: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            end: Offset = known["end"]
            if known["round"] == self._round and known["start"] == start:
                return end
            if known["round"] >= self._round:
                raise InternalError(
                    "two scans of a chained source are not at the same place",
                    why=f"one is in round {known['round']}, another in round {self._round}",
                )
        end = plan()
        # After a start from a savepoint the folder may not exist yet.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"round": self._round, "start": start, "end": end}), encoding="utf-8")
        os.replace(temporary, self._path)
        return end


def describe_status(state: CutState, view: View, topics: str) -> AlignmentStatus:
    gate, cut, drawn = state.gate, state.cut, int(view.drawn)
    if cut is not None and state.is_reached:
        text = f"stands at upstream checkpoint {cut.checkpoint} and waits for a checkpoint of this job"
        return AlignmentStatus(not view.is_offered, text, int(cut.checkpoint), drawn)
    at_ms = turns_unaligned_at_ms(state, view)
    if gate.blocked and at_ms is not None and view.now_ms >= at_ms and not view.is_offered:
        return AlignmentStatus(True, _describe_alignment(gate, view), int(gate.pending[-1].checkpoint), drawn)
    return AlignmentStatus(False, _describe_waiting(state, view, topics), None, drawn)


def _describe_waiting(state: CutState, view: View, topics: str) -> str:
    """Describe why the source cannot take a checkpoint now."""
    gate, cut = state.gate, state.cut
    if any(alignment.phase is not AlignmentPhase.COLLECTING for alignment in gate.pending):
        return _describe_alignment(gate, view)
    if state.stands_at_cut:
        where = "the beginning" if cut is None else f"upstream checkpoint {cut.checkpoint}"
        return f"stands at {where}; nothing new is there"
    if state.job is None:
        return (
            f"has read records of {topics} and has seen no barrier record yet. The upstream job's Kafka "
            "sink needs barriers=BarrierRecords.EACH_CHECKPOINT; without barrier records this job can "
            "take no checkpoint: leave aligned_with out then"
        )
    if state.micro_batches >= MOST_MICRO_BATCHES:
        return (
            f"has read {state.micro_batches} micro-batches since the last checkpoint of this job and waits "
            "until the barriers of the next upstream checkpoint are visible"
        )
    if cut is None:
        return "reads on to the first upstream checkpoint whose barriers it finds in all partitions"
    if view.held:
        return f"reads the channel state of upstream checkpoint {cut.checkpoint} first"
    return f"reads on to the next upstream checkpoint behind {cut.checkpoint}"


def _describe_alignment(gate: InputGate, view: View) -> str:
    alignment = gate.pending[-1]
    missing = sorted(place_of(channel) for channel in alignment.awaited)
    places = []
    for place in missing[:5]:
        barrier = next_barrier(gate, view.ahead[place]) if place in view.ahead else None
        where = "not visible yet" if barrier is None else f"at offset {barrier.offset}"
        read = gate.channels[channel_of(place)]
        places.append(f"{place[0]}-{place[1]} ({where}, read up to {read})")
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return f"waits for the barrier of upstream checkpoint {alignment.checkpoint} on {', '.join(places)}{more}"
