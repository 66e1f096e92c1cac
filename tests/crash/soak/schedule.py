"""The disturbances of a soak, minute by minute: drawn by a seed, and each kind comes again and again.

For instance, five minutes of a run:

    minute 1: a savepoint; the driver is killed
    minute 2: OPTIMIZE and VACUUM; the broker is stopped and started; a worker is killed
    minute 3: a partition more; the process dies before sink-commit of totals-delta
    minute 4: OPTIMIZE and VACUUM; the process dies before a decision, and the next one rewinds
    minute 5: the JVM is killed; OPTIMIZE and VACUUM while the job is dead
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass

from demo.process import Victim
from demo.rig import DELTA_SINK, KAFKA_SINK
from flinkish_spark.core.steps import Step
from flinkish_spark.testing.crash_points import KillPoint, Moment


class Disturbance(enum.Enum):
    """Something besides the kill at a minute's end."""

    PARTITION = "a partition more"
    BOUNCE = "the broker stopped and started"
    SAVEPOINT = "a savepoint"
    #: The kill leaves kept micro-batches, and the next start takes them for dead.
    REWIND = "a rewind"
    MAINTENANCE = "OPTIMIZE and VACUUM"
    #: A checkpoint may be committed without a receipt. Its files go; the recovery has to know it by its mark.
    MAINTENANCE_WHILE_DEAD = "OPTIMIZE and VACUUM while the job is dead"


@dataclass(frozen=True, slots=True)
class Shot:
    victim: Victim

    def __str__(self) -> str:
        return f"{self.victim.value} killed"


@dataclass(frozen=True, slots=True)
class Death:
    """The driver kills itself at a point that every checkpoint passes."""

    point: KillPoint

    def __str__(self) -> str:
        return f"killed at {self.point}"


Kill = Shot | Death


@dataclass(frozen=True, slots=True)
class Minute:
    number: int
    kill: Kill
    disturbances: tuple[Disturbance, ...]

    @property
    def rewinds(self) -> bool:
        return Disturbance.REWIND in self.disturbances


#: Each more makes more readers; a run is to look the same at its end as at its beginning.
MOST_PARTITIONS_ADDED = 4
#: From so many minutes on, there is a stretch of them through which the driver lives.
LEAST_FOR_A_LONG_LIFE = 10
_SHARE_OF_A_LONG_LIFE = 0.3

#: Before such a decision all sinks are staged and Spark has committed: what a rewind needs.
_LEAVES_KEPT_BATCHES = Death(KillPoint(Step.DECISION, Moment.BEFORE))
_POINTS = tuple(
    KillPoint(step, moment, 1, subject)
    for step, subjects in (
        (Step.STAGED_FILE, ("",)),
        (Step.SPARK_COMMIT, ("",)),
        (Step.DECISION, ("",)),
        (Step.SINK_COMMIT, (KAFKA_SINK, DELTA_SINK)),
        (Step.SINK_COMPLETE, ("",)),
        (Step.GROUP_OFFSETS, ("",)),
        (Step.RECEIPT, ("",)),
    )
    for subject in subjects
    for moment in Moment
)


def draw(minutes: int, seed: int) -> list[Minute]:
    """Return the minutes of a run; they depend on the two numbers only."""
    chance = random.Random(seed)
    kills, others = _kills(chance), _disturbances(chance)
    long_life = _long_life(minutes)
    return [
        _quiet_minute(number, chance) if number in long_life else _minute(number, next(others), next(kills))
        for number in range(1, minutes + 1)
    ]


def _long_life(minutes: int) -> range:
    """Return the minutes of a stretch in which only workers are killed, in the middle of the run."""
    if minutes < LEAST_FOR_A_LONG_LIFE:
        return range(0)
    length = round(minutes * _SHARE_OF_A_LONG_LIFE)
    first = 1 + (minutes - length) // 2
    return range(first, first + length)


def _minute(number: int, main: Disturbance, kill: Kill) -> Minute:
    beside = (Disturbance.MAINTENANCE,) if number % 2 == 0 else ()
    if main is Disturbance.REWIND:
        kill = _LEAVES_KEPT_BATCHES
    return Minute(number, kill, (*beside, main))


def _quiet_minute(number: int, chance: random.Random) -> Minute:
    other = chance.choice((Disturbance.SAVEPOINT, Disturbance.MAINTENANCE))
    return Minute(number, Shot(Victim.WORKER), (other,))


def _kills(chance: random.Random) -> Iterator[Kill]:
    """Yield kills: in each five all victims, and a point."""
    while True:
        five: list[Kill] = [*map(Shot, Victim), Death(chance.choice(_POINTS))]
        chance.shuffle(five)
        yield from five


def _disturbances(chance: random.Random) -> Iterator[Disturbance]:
    """Yield disturbances: in each five one of each kind, as long as partitions may be added."""
    added = 0
    while True:
        more = Disturbance.PARTITION if added < MOST_PARTITIONS_ADDED else Disturbance.SAVEPOINT
        added += 1
        five = [
            more,
            Disturbance.BOUNCE,
            Disturbance.SAVEPOINT,
            Disturbance.REWIND,
            Disturbance.MAINTENANCE_WHILE_DEAD,
        ]
        chance.shuffle(five)
        yield from five
