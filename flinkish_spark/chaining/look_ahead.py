"""What lies ahead of a position in each partition: barrier records, and the last record there is.

The planner of a chained source must know the next barrier before it plans a micro-batch, and must
not read the whole topic for that. So it looks from the end of the log backward first: the upstream
job writes a barrier right behind the records of a checkpoint, and the barrier says which one came
before it. Only where that does not tell (the reader lags by more than one checkpoint, the upstream
job was restarted, other writers write to the topic) every record in between is passed over, a
portion at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.barrier_records import BarrierMark
from flinkish_spark.kafka.barrier_scan import Scanned, SeenBarrier
from flinkish_spark.protocol.ids import CheckpointId, JobUuid

#: Offsets looked at backward from the end, one window after the other.
_WINDOWS = (64, 512, 4_096)
#: Offsets looked at in one go where there is no shorter way.
_PORTION = 100_000

Scan = Callable[[Place, int, int], Scanned]


@dataclass(frozen=True, slots=True)
class Passed:
    """The last barrier that a reader has passed in a partition."""

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
    """Answers for one reader, again and again; keeps what it has seen ahead of the reader.

    Parameters
    ----------
    scan
        Returns what a range of a partition holds.
    """

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._known: dict[Place, _Known] = {}

    def ahead(self, place: Place, position: int, end: int, passed: Passed | None) -> Scanned:
        """Return the barriers and the end of the records between `position` and `end`.

        May stop short of `end` where much has to be looked at: the answer then holds all up to its
        own end, and the next call goes on from there.

        Parameters
        ----------
        end
            Where the log ends for a read_committed reader.
        passed
            The last barrier before `position`, if any is known.
        """
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
            if lower == start or (seen.barriers and _follows(seen.barriers[0].mark, newest)):
                return Scanned(behind, barriers)
            upper = lower
        return None


def _follows(mark: BarrierMark, newest: Passed | None) -> bool:
    """Return whether no barrier lies between `newest` and `mark`: ids rise along a partition."""
    return (
        newest is not None
        and mark.job == newest.job
        and mark.previous is not None
        and mark.previous <= newest.checkpoint
    )
