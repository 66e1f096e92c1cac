"""What goes wrong, and when: drawn from the seed."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping


class FaultKind(enum.Enum):
    """Every kind of fault; the value is its name in reports."""

    # A process.
    DRIVER_CRASH = "driver crash"
    JVM_CRASH = "jvm crash"
    MACHINE_CRASH = "machine crash"
    CRASH_AT_STEP = "crash at a step"
    SUSPENDED = "suspended"
    #: Suspended, its lock given to another driver, and awake again later.
    ZOMBIE = "zombie"
    STALLED_THREAD = "stalled thread"
    WALL_CLOCK_STEP = "wall clock step"
    # The job directory as a whole.
    OLDER_DIRECTORY = "older job directory"
    COPY_COMMITS = "copy commits elsewhere"
    # The store.
    TORN_WRITE = "torn write"
    TORN_OBJECT = "torn object"
    LOST_REPLY = "lost reply"
    REFUSED_WRITE = "refused write"
    DELAYED_RENAME = "delayed rename"
    FAILED_LIST = "failed list"
    FAILED_READ = "failed read"
    # The store, if it is a bucket.
    AMBIGUOUS_CREATE = "ambiguous create"
    CONFLICT = "conflict without effect"
    LATE_TRY = "late try"
    SLOW_LIST = "slow list"
    STORE_AWAY = "store out of reach"
    # Spark.
    QUERY_FAILURE = "query failure"
    TASK_RETRY = "task retry"
    SPECULATIVE_LOSER = "speculative loser"
    STRAGGLER = "straggling task"
    ROWS_DIFFER = "rows differ"
    LATE_CLEANING = "late cleaning"
    DOUBLED_BARRIER = "doubled barrier"
    LOST_BARRIER = "lost barrier"
    # Sinks, sources, hooks, savepoints.
    SINK_UNAVAILABLE = "sink unavailable"
    LOST_SINK_REPLY = "lost sink reply"
    TRANSACTION_EXPIRED = "transaction expired"
    STAGED_FILE_GONE = "staged file gone"
    SOURCE_UNAVAILABLE = "source unavailable"
    HOOK_FAILURE = "hook failure"
    SAVEPOINT_FAILURE = "savepoint failure"
    LISTENER_FAILURE = "listener failure"
    # What is decided is destroyed, so that it has to be replayed; and what keeps that from working.
    DECIDED_EXPIRED = "decided transaction expired"
    DECIDED_FILE_GONE = "decided file vacuumed"
    EVIDENCE_GONE = "evidence gone"
    DECIDED_INPUT_GONE = "decided input deleted"
    OTHER_ORDER = "input in another order"


#: Done to a process wherever it is; all others wait for an operation that they fit.
PROCESS_FAULTS = frozenset(
    {
        FaultKind.DRIVER_CRASH,
        FaultKind.JVM_CRASH,
        FaultKind.MACHINE_CRASH,
        FaultKind.SUSPENDED,
        FaultKind.ZOMBIE,
        FaultKind.STALLED_THREAD,
        FaultKind.WALL_CLOCK_STEP,
        FaultKind.OLDER_DIRECTORY,
        FaultKind.COPY_COMMITS,
    }
)


#: Armed from the beginning, since the operation that they fit does not come in every run.
RARE_FAULTS = frozenset({FaultKind.SAVEPOINT_FAILURE})


class FaultPlan:
    """Draws faults; most are *armed* and strike at the next operation that they fit.

    Parameters
    ----------
    chance
        Of this plan alone.
    weights
        How often each kind is drawn, relative to the others.
    mean_gap
        Steps between two faults, on the average.
    """

    def __init__(self, chance: random.Random, weights: Mapping[FaultKind, float], mean_gap: int) -> None:
        self._chance, self._mean_gap = chance, mean_gap
        self._kinds, self._weights = list(weights), list(weights.values())
        self._armed = {kind for kind in RARE_FAULTS if kind in weights}
        self.counts: Counter[FaultKind] = Counter()
        self.is_on = bool(self._kinds)
        self._left = self._gap()

    def _gap(self) -> int:
        return 1 + int(self._chance.expovariate(1 / self._mean_gap))

    def step(self) -> FaultKind | None:
        """Count a step; return a fault that has to be done to a process now."""
        self._left -= 1
        if self._left > 0 or not self.is_on:
            return None
        self._left = self._gap()
        kind = self._chance.choices(self._kinds, self._weights)[0]
        if kind in PROCESS_FAULTS:
            return kind
        self._armed.add(kind)
        return None

    def strikes(self, kind: FaultKind) -> bool:
        """Whether an armed fault strikes here; it does so once, and is counted."""
        if kind not in self._armed:
            return False
        self._armed.discard(kind)
        self.counts[kind] += 1
        return True

    def any_of(self, *kinds: FaultKind) -> FaultKind | None:
        """Return the first of these kinds that is armed; it strikes."""
        if self._armed:
            for kind in kinds:
                if self.strikes(kind):
                    return kind
        return None

    def arm(self, kind: FaultKind) -> None:
        """Let a fault strike at the next operation that it fits."""
        self._armed.add(kind)

    def arm_if_drawn(self, kind: FaultKind) -> None:
        """Arm a fault, if this plan has such faults and is not over."""
        if self.is_on and kind in self._kinds:
            self.arm(kind)

    def hurry(self, within: int) -> None:
        """Draw the next fault after this many steps, unless it is due before."""
        self._left = min(self._left, within)

    def end(self) -> None:
        """No faults from now on, not even armed ones."""
        self.is_on = False
        self._armed.clear()
