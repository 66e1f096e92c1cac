"""What a chained source knows of its upstream job, and what lies ahead of it in the topics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.control import AlignmentStatus
from flinkish_spark.connectors.kafka.chaining.alignment import (
    MOST_MICRO_BATCHES,
    View,
    next_barrier,
    turns_unaligned_at_ms,
)
from flinkish_spark.connectors.kafka.client.barriers import Scanned, SeenBarrier
from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.upstream_cut import CutState, channel_of, place_of
from flinkish_spark.core.validation import hold_plain_values, raise_config_errors
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Place
from flinkish_spark.protocol.input_gate import AlignmentMode, AlignmentPhase, AlignmentSettings, InputGate
from flinkish_spark.protocol.limits import UnusableValueError


@dataclass(frozen=True)
class UpstreamJob(Stored):
    """The job that writes the topics of a source, and how the source follows its checkpoints.

    The upstream job's Kafka sinks need ``barriers=BarrierRecords.EACH_CHECKPOINT``. Every checkpoint
    of the job that has this source is then drawn at a checkpoint of the upstream job, so that the
    two are one consistent cut. See `docs/chained-jobs.md`.

    Parameters
    ----------
    mode
        ``AlignmentMode.ALIGNED``: a partition waits at the barrier of an upstream checkpoint until all
        partitions have come to theirs. ``UNALIGNED``: the checkpoint is drawn at the first of these
        barriers, and the offsets up to the others are part of it. ``ALIGNED_WITH_TIMEOUT``: the first,
        and the second if it takes too long. ``AT_LEAST_ONCE``: nothing waits.
    alignment_timeout_ms
        From the first barrier on, 0 to 365 days; with ``ALIGNED_WITH_TIMEOUT`` and only there.
    job
        Uuid of the upstream job, as in its job.json; empty for the first one that is seen. Needed when
        the topics are written by several jobs, or by another one than before.

    Raises
    ------
    ConfigError
        A setting cannot be used, or has another type.

    Examples
    --------
    >>> UpstreamJob(mode=AlignmentMode.ALIGNED_WITH_TIMEOUT, alignment_timeout_ms=30_000).settings.mode
    <AlignmentMode.ALIGNED_WITH_TIMEOUT: 'ALIGNED_WITH_TIMEOUT'>
    """

    mode: AlignmentMode = AlignmentMode.ALIGNED
    alignment_timeout_ms: Milliseconds | None = None
    job: str = ""

    def __post_init__(self) -> None:
        hold_plain_values(self)
        with raise_config_errors("describe the upstream job as flinkish_spark.UpstreamJob says"):
            _ = self.settings
            if not isinstance(self.job, str):
                raise UnusableValueError("job", self.job, "the uuid in the job.json of a job, as a str")
            if self.job:
                JobUuid(self.job)

    @property
    def settings(self) -> AlignmentSettings:
        """How the gate aligns."""
        return AlignmentSettings(self.mode, alignment_timeout_ms=self.alignment_timeout_ms)

    @property
    def wanted(self) -> JobUuid | None:
        """The job whose barriers count; None for the first one that is seen."""
        return JobUuid(self.job) if self.job else None

    def to_option(self) -> str:
        """Return the value of the source option."""
        return json.dumps(self.to_json())

    @classmethod
    def from_option(cls, text: str) -> UpstreamJob:
        """Return what :meth:`to_option` wrote."""
        return cls.from_json(json.loads(text))


#: Offsets looked at backward from the end, one window after the other.
_WINDOWS = (64, 512, 4_096)
#: Offsets looked at in one go where there is no shorter way.
_PORTION = 100_000

Scan = Callable[[Place, int, int], Scanned]


@dataclass(frozen=True, slots=True)
class Passed:
    job: JobUuid
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class _Known:
    """Everything from where the reader stood up to `upto` has been looked at."""

    start: int
    upto: int
    end: int
    barriers: tuple[SeenBarrier, ...] = ()


class LookAhead:
    """Answers for one reader, again and again; keeps what it has seen ahead of the reader."""

    # From the end of the log backward first: the upstream job writes a barrier right behind the records of a
    # checkpoint, and the barrier says which one came before it. Only where that does not tell every record in
    # between is passed over, a portion at a time.

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._known: dict[Place, _Known] = {}

    def ahead(self, place: Place, position: int, end: int, passed: Passed | None) -> Scanned:
        """Return barriers and end of what lies between `position` and `end`, or up to a nearer end."""
        known = self._known.get(place)
        if known is None or not known.start <= position <= known.upto:
            known = _Known(position, position, position)
        if end > known.upto:
            known = self._extended(place, known, end, passed)
        barriers = tuple(seen for seen in known.barriers if seen.offset >= position)
        self._known[place] = _Known(position, known.upto, max(known.end, position), barriers)
        return Scanned(max(known.end, position), barriers)

    def _extended(self, place: Place, known: _Known, end: int, passed: Passed | None) -> _Known:
        newest = passed
        if known.barriers:
            mark = known.barriers[-1].mark
            newest = Passed(mark.job, mark.checkpoint)
        upto, more = end, self._from_the_end(place, known.upto, end, newest)
        if more is None:
            upto = min(end, known.upto + _PORTION)
            more = self._scan(place, known.upto, upto)
        behind = more.end if more.end > known.upto else known.end
        return _Known(known.start, upto, behind, (*known.barriers, *more.barriers))

    def _from_the_end(self, place: Place, start: int, end: int, newest: Passed | None) -> Scanned | None:
        """Return all that is between, None if that takes more than a few looks."""
        behind, upper = start, end
        barriers: tuple[SeenBarrier, ...] = ()
        for window in _WINDOWS:
            lower = max(start, upper - window)
            seen = self._scan(place, lower, upper)
            if behind == start and seen.end > lower:
                behind = seen.end
            barriers = (*seen.barriers, *barriers)
            mark = seen.barriers[0].mark if seen.barriers else None
            # Ids rise along a partition: no barrier lies between the newest one and this.
            is_next = (
                mark is not None
                and newest is not None
                and mark.job == newest.job
                and mark.previous is not None
                and mark.previous <= newest.checkpoint
            )
            if lower == start or is_next:
                return Scanned(behind, barriers)
            upper = lower
        return None


Offset = dict[str, Any]


class SharedPlan:
    """The rounds of one start of a query; each scan has one of these, made when the query starts."""

    # Spark scans a source again for every branch of the plan, and asks each scan for its offset once per
    # round, in a process of its own. All must end every micro-batch at the same place, or a checkpoint would
    # be at the cut for one branch and elsewhere for another: whoever is asked first in a round plans for all.

    def __init__(self, path: Path) -> None:
        self._path = path
        self._round = 0

    def agreed(self, start: Offset, plan: Callable[[], Offset]) -> Offset:
        """Return the offset of this round, planning it if no other scan has."""
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
        # Where the job began with a savepoint nobody else may have made the folder yet.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"round": self._round, "start": start, "end": end}), encoding="utf-8")
        os.replace(temporary, self._path)
        return end


def described(state: CutState, view: View, topics: str) -> AlignmentStatus:
    gate, cut, drawn = state.gate, state.cut, int(view.drawn)
    if cut is not None and state.is_reached:
        text = f"stands at upstream checkpoint {cut.checkpoint} and waits for a checkpoint of this job"
        return AlignmentStatus(not view.is_offered, text, int(cut.checkpoint), drawn)
    at_ms = turns_unaligned_at_ms(state, view)
    if gate.blocked and at_ms is not None and view.now_ms >= at_ms and not view.is_offered:
        return AlignmentStatus(True, _aligning(gate, view), int(gate.pending[-1].checkpoint), drawn)
    return AlignmentStatus(False, _text(state, view, topics), None, drawn)


def _text(state: CutState, view: View, topics: str) -> str:
    """Return what is to be said of a source that can do nothing with a checkpoint now."""
    gate, cut = state.gate, state.cut
    if any(alignment.phase is not AlignmentPhase.COLLECTING for alignment in gate.pending):
        return _aligning(gate, view)
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


def _aligning(gate: InputGate, view: View) -> str:
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
