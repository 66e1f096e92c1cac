"""What one seed is about: the job, its surroundings, and what is done to them. Drawn, never chosen."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.core.config import CheckpointConfig, CheckpointingMode
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)
from tests.simulation.faults import FaultKind as K


class SinkKind(enum.Enum):
    """What a simulated sink behaves like."""

    #: Transactions with ids and epochs, like Kafka.
    TRANSACTIONS = "transactions"
    #: Files and a version per application, like Delta.
    TABLE = "table"


class StoreKind(enum.Enum):
    """What the job directory lies on."""

    #: A disk: a file appears under its name at once, and whoever made it knows.
    DISK = "disk"
    #: A bucket: answers get lost, and nothing is torn.
    BUCKET = "bucket"


class Tearing(enum.Enum):
    """What a crash in the middle of a write leaves behind."""

    #: A hidden temporary object or nothing, as on the disks that the product supports.
    HIDDEN = "hidden"
    #: Half an object under its name: the checksum must notice.
    VISIBLE = "visible"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's settings; times in virtual milliseconds.

    Parameters
    ----------
    sinks
        Kind by position; the uid is made of both.
    scans
        How many branches read the control source on their own.
    records
        Per input partition.
    record_gap_ms
        Between two records of a partition.
    batches_to_retain, versions_to_retain
        As Spark's minBatchesToRetain, and the same for state.
    transaction_timeout_ms
        After this long a broker aborts an undecided transaction.
    chaos_steps
        Faults end after this many steps.
    barrier_records
        Whether sinks with transactions write barrier records for jobs that are chained behind them.
    destruction
        How often what is decided is destroyed, in which way; empty in most runs.
    mean_destruction_gap
        Steps between two such faults, on the average.
    store, store_patience_ms
        What the job directory lies on, and how long a create in a bucket is tried.
    """

    seed: int
    checkpoint: CheckpointConfig
    restart: RestartStrategy
    sinks: tuple[SinkKind, ...]
    scans: int
    tasks: int
    partitions: int
    keys: int
    records: int
    record_gap_ms: int
    trigger_ms: int
    batches_to_retain: int
    versions_to_retain: int
    transaction_timeout_ms: int
    mean_fault_gap: int
    chaos_steps: int
    tearing: Tearing
    barrier_records: BarrierRecords
    weights: tuple[tuple[K, float], ...]
    destruction: tuple[tuple[K, float], ...]
    mean_destruction_gap: int
    store: StoreKind
    store_patience_ms: int

    @property
    def sink_uids(self) -> tuple[str, ...]:
        """Return the uids of the sinks, in the order in which they commit."""
        return tuple(f"{kind.value}-{number}" for number, kind in enumerate(self.sinks))


#: How often each kind of fault is drawn, relative to the others.
WEIGHTS: dict[K, float] = {
    K.DRIVER_CRASH: 3,
    K.JVM_CRASH: 2,
    K.MACHINE_CRASH: 1.5,
    K.CRASH_AT_STEP: 4,
    K.SUSPENDED: 1,
    K.ZOMBIE: 2.5,
    K.STALLED_THREAD: 2,
    K.WALL_CLOCK_STEP: 1,
    K.TORN_WRITE: 2,
    K.LOST_REPLY: 2.5,
    K.REFUSED_WRITE: 2,
    K.DELAYED_RENAME: 2,
    K.FAILED_LIST: 1.5,
    K.FAILED_READ: 1.5,
    K.QUERY_FAILURE: 2,
    K.TASK_RETRY: 2,
    K.SPECULATIVE_LOSER: 2,
    K.STRAGGLER: 1.5,
    K.ROWS_DIFFER: 1.5,
    K.LATE_CLEANING: 1.5,
    K.DOUBLED_BARRIER: 2,
    K.LOST_BARRIER: 1.5,
    K.SINK_UNAVAILABLE: 2,
    K.LOST_SINK_REPLY: 2,
    K.TRANSACTION_EXPIRED: 2,
    K.STAGED_FILE_GONE: 1.5,
    K.SOURCE_UNAVAILABLE: 1.5,
    K.HOOK_FAILURE: 1.5,
    K.SAVEPOINT_FAILURE: 4,
    K.LISTENER_FAILURE: 1,
}
#: The same of faults that destroy what is decided, or the directory as a whole: drawn on their own, so that
#: runs without them stay.
DESTRUCTION: dict[K, float] = {
    K.DECIDED_EXPIRED: 4,
    K.DECIDED_FILE_GONE: 3,
    K.EVIDENCE_GONE: 1,
    K.DECIDED_INPUT_GONE: 1,
    K.OTHER_ORDER: 1,
    K.OLDER_DIRECTORY: 4,
    K.COPY_COMMITS: 4,
}
#: The same of a bucket, beside those of a disk.
BUCKET: dict[K, float] = {
    K.AMBIGUOUS_CREATE: 6,
    K.CONFLICT: 3,
    K.LATE_TRY: 4,
    K.SLOW_LIST: 4,
    K.STORE_AWAY: 4,
}


def draw_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    chance = random.Random(f"{seed}/scenario")
    interval_ms = chance.choice((60, 120, 250))
    checkpoint = CheckpointConfig(
        interval_ms=interval_ms,
        timeout_ms=chance.choice((400, 1_500, 6_000)),
        min_pause_ms=chance.choice((0, 0, 40)),
        max_concurrent=chance.choice((1, 1, 2, 3)),
        tolerable_failures=chance.choice((0, 1, 3, UNLIMITED)),
        restart_budget_ms=2_000,
        retained=chance.choice((1, 1, 2, 3)),
        mode=chance.choice((CheckpointingMode.EXACTLY_ONCE,) * 3 + (CheckpointingMode.AT_LEAST_ONCE,)),
    )
    restart: RestartStrategy = chance.choice(
        (
            ExponentialDelay(10, 200),
            FixedDelay(UNLIMITED, 20),
            FixedDelay(2, 10),
            FailureRate(3, 2_000, 20),
            NoRestart(),
        )
    )
    sinks = chance.choice(
        (
            (SinkKind.TRANSACTIONS,),
            (SinkKind.TRANSACTIONS, SinkKind.TABLE),
            (SinkKind.TRANSACTIONS, SinkKind.TABLE),
            (SinkKind.TABLE, SinkKind.TRANSACTIONS),
            (SinkKind.TRANSACTIONS, SinkKind.TRANSACTIONS),
        )
    )
    tearing = Tearing.VISIBLE if chance.random() < 0.06 else Tearing.HIDDEN
    weights = _weights(chance, tearing)
    destruction, gap = _destruction(random.Random(f"{seed}/destruction"))
    store, bucket_weights, patience_ms = _store(random.Random(f"{seed}/store"))
    if store is StoreKind.BUCKET:
        tearing = Tearing.HIDDEN
        weights = (
            *((kind, weight) for kind, weight in weights if kind is not K.TORN_OBJECT),
            *bucket_weights,
        )
    return Scenario(
        seed=seed,
        checkpoint=checkpoint,
        restart=restart,
        sinks=sinks,
        scans=chance.choice((1, 1, 2)) if len(sinks) > 1 else 1,
        tasks=chance.choice((1, 2, 2)),
        partitions=chance.choice((1, 2, 3)),
        keys=chance.choice((2, 3, 5)),
        records=chance.choice((15, 25, 40)),
        record_gap_ms=chance.choice((10, 30, 60)),
        trigger_ms=chance.choice((15, 30, 60)),
        batches_to_retain=20,
        versions_to_retain=10,
        transaction_timeout_ms=chance.choice((800, 2_500, 8_000)),
        mean_fault_gap=chance.choice((25, 45, 80)),
        chaos_steps=chance.choice((350, 500, 650)),
        tearing=tearing,
        barrier_records=chance.choice((BarrierRecords.NONE, BarrierRecords.EACH_CHECKPOINT)),
        weights=weights,
        destruction=destruction,
        mean_destruction_gap=gap,
        store=store,
        store_patience_ms=patience_ms,
    )


def _weights(chance: random.Random, tearing: Tearing) -> tuple[tuple[K, float], ...]:
    """Every seed leaves some kinds out, so that the others meet each other."""
    kept = {kind: weight for kind, weight in WEIGHTS.items() if chance.random() < 0.6}
    if tearing is Tearing.VISIBLE:
        kept[K.TORN_OBJECT] = 6
    return tuple(kept.items() if kept else WEIGHTS.items())


def _store(chance: random.Random) -> tuple[StoreKind, tuple[tuple[K, float], ...], int]:
    """Return what the job directory lies on, and what it does: drawn on their own, so that others stay."""
    if chance.random() < 0.6:
        return StoreKind.DISK, (), 0
    kept = tuple((kind, weight) for kind, weight in BUCKET.items() if chance.random() < 0.8)
    return StoreKind.BUCKET, kept, chance.choice((300, 1_000, 5_000))


def _destruction(chance: random.Random) -> tuple[tuple[tuple[K, float], ...], int]:
    """Return how what is decided is destroyed: not at all in every other run."""
    gap = chance.choice((40, 90))
    if chance.random() < 0.5:
        return (), gap
    # Most replays must succeed, since a job that cannot replay has seen its end.
    kept = {K.EVIDENCE_GONE: 0.2, K.DECIDED_INPUT_GONE: 0.2, K.OTHER_ORDER: 0.5}
    return tuple((k, w) for k, w in DESTRUCTION.items() if chance.random() < kept.get(k, 1)), gap
