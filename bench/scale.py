"""What grows with a job: a model of a checkpoint's cost on the driver, beside measurements.

    python -m bench.scale                       predicted beside measured, at sizes that fit here
    python -m bench.scale --sinks 1 --tasks 4000 --partitions 10000 --batches 6

The coordinator and all behind it are real, in one process; sinks answer at once, and say of each task what a
Kafka sink says: a transaction. Bytes and requests are exact, CPU time is that of this process. The model is
that of docs/scale.md; `tests/unit/bench/test_scale.py` holds the two and the code together.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import Barrier, Committable, SinkAck, StagedBatch, TaskAck
from tests.support.coordinator_rig import MemoryStore, Rig, by_hand


@dataclass(frozen=True)
class Size:
    """A job, as far as its checkpoints follow from it.

    Parameters
    ----------
    sinks
        How many; each has a committable per task.
    tasks
        Of each sink in a micro-batch.
    partitions
        Of the topics that are read.
    batches
        Micro-batches of a checkpoint.
    """

    sinks: int = 1
    tasks: int = 1
    partitions: int = 1
    batches: int = 1

    @property
    def reports(self) -> int:
        """What tasks say to the driver for a checkpoint: one report of each task for each sink."""
        return self.sinks * self.tasks * self.batches

    def __str__(self) -> str:
        shape = f"{self.sinks} sinks, {self.tasks} tasks, {self.partitions} partitions"
        return f"{shape}, {self.batches} micro-batches"


#: What a cost consists of: so much for a checkpoint, for each of its micro-batches, for a sink, for a sink in
#: a micro-batch, for a report, and for a partition.
MODEL: Mapping[str, tuple[float, float, float, float, float, float]] = {
    "staged files, bytes": (0, 212, 11, 48, 352, 0),
    "decision, bytes": (400, 104, 25, 53, 350, 37),
    "receipt, bytes": (209, 0, 13, 0, 12, 0),
    "trigger, bytes": (184, 0, 0, 0, 0, 0),
    "writes": (4, 1, 0, 0, 0, 0),
    "deletes": (0, 1, 0, 0, 0, 0),
    "reads": (2, 0, 1, 0, 0, 0),
    "undecided in memory, bytes": (0, 0, 0, 0, 800, 0),
    "CPU, ms": (0.7, 0.3, 0.05, 0, 0.03, 0.001),
}


def predicted(size: Size) -> dict[str, float]:
    """Return what the model says of a checkpoint at a size.

    Examples
    --------
    >>> predicted(Size(sinks=500))["reads"], predicted(Size(batches=6))["writes"]
    (502, 10)
    """
    counts = (1, size.batches, size.sinks, size.sinks * size.batches, size.reports, size.partitions)
    return {name: sum(map(operator.mul, terms, counts)) for name, terms in MODEL.items()}


class CountingStore(MemoryStore):
    """Counts requests by kind, and the bytes of what is written by the object's name."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def read(self, key: str) -> bytes:
        self._count("reads", key)
        return super().read(key)

    def delete(self, key: str) -> None:
        self._count("deletes", key)
        super().delete(key)

    def put(self, key: str, data: bytes) -> None:
        self._note(key, data)
        super().put(key, data)

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        self._note(key, data)
        return super().create_if_absent(key, data)

    def _count(self, kind: str, key: str) -> None:
        # The log is Spark's; the coordinator looks into it every 20 ms.
        if not key.startswith("spark/"):
            self.requests[kind] += 1

    def _note(self, key: str, data: bytes) -> None:
        self._count("writes", key)
        kind = "staged files" if key.startswith("staged/") else key.rsplit("/", 1)[-1].removesuffix(".json")
        self.bytes[kind] += len(data)


class Job:
    """A job of a size, whose checkpoints are taken one after the other."""

    def __init__(self, size: Size) -> None:
        self.size, self.store = size, CountingStore()
        self.sinks = tuple(f"sink-{number:03}" for number in range(size.sinks))
        self.rig = Rig(by_hand(), store=self.store, sinks=self.sinks)  # type: ignore[arg-type]
        channels = frozenset(range(size.tasks))
        self.rig.parts.channels.update(dict.fromkeys(self.sinks, channels))  # type: ignore[attr-defined]
        offsets = json.dumps({"orders": {str(number): 1_000_000 for number in range(size.partitions)}})
        self.offsets = f'v1\n{{"batchTimestampMs":1700000000000}}\n{offsets}'
        self._batches = 0

    def checkpoint(self) -> float:
        """Take one; return its CPU time in milliseconds, without what Spark and tasks do."""
        rig, began_ns = self.rig, time.process_time_ns()
        rig.ask(CheckpointPurpose.USER)
        checkpoint = rig.control.offered[-1]
        for left in reversed(range(self.size.batches)):
            batch = BatchId(self._batches)
            self._batches += 1
            staged = self.staged(batch, None if left else checkpoint)
            rig.job_dir.write_staged(staged)
            for log in (OFFSETS, COMMITS):
                rig.log.restore(log, batch, self.offsets)
            rig.coordinator.on_staged(staged, 7)
            rig.coordinator.tick()
        rig.tick()
        assert rig.confirmed[-1] == checkpoint, rig.open
        # What a source does with it: the offsets for its consumer group.
        assert len(LoggedOffsets.parse(self.offsets).partitions()["orders"]) == self.size.partitions
        for committer in rig.committers.values():
            committer.calls.clear()
        rig.observer.steps.clear()
        return (time.process_time_ns() - began_ns) / 1e6

    def staged(self, batch: BatchId, checkpoint: int | None) -> StagedBatch:
        """Return what is staged of a micro-batch, with the barriers of a checkpoint."""
        tasks = range(self.size.tasks)
        acks, committables = [], []
        for uid in self.sinks:
            barriers = [
                () if checkpoint is None else (Barrier(CheckpointId(checkpoint), task),) for task in tasks
            ]
            seen = tuple(TaskAck(task, 1_000, 1 << 60, barriers[task]) for task in tasks)
            acks.append(SinkAck(uid, seen, bytes=100_000, sync_ms=120))
            committables += [Committable(uid, _transaction(uid, int(batch), task)) for task in tasks]
        return StagedBatch(
            Lineage(0),
            batch,
            self.rig.ownership.epoch,
            int(batch),
            tuple(acks),
            tuple(committables),
            (self.rig.blocks.lease(),),
        )


def _transaction(uid: str, batch: int, task: int) -> dict[str, object]:
    """Return what a Kafka sink says of the transaction of a task."""
    return {
        "batch": batch,
        "transactional_id": f"flinkish-{'b' * 32}-{uid}-{batch % 16:04}-{task:05}",
        "producer_id": 4_000 + task,
        "producer_epoch": 17,
        "evidence": {"topic": "totals", "partition": task % 16, "offset": 1_000_000},
        "records": 1_000,
    }


def measured(size: Size, rounds: int = 5) -> dict[str, float]:
    """Return what a checkpoint costs at a size, under the names of the :data:`MODEL`."""
    job = Job(size)
    job.checkpoint()
    before = Counter(job.store.bytes), Counter(job.store.requests)
    gc.collect()
    took = [job.checkpoint() for _ in range(rounds)]
    found = {f"{kind}, bytes": (n - before[0][kind]) / rounds for kind, n in job.store.bytes.items()}
    found |= {kind: (n - before[1][kind]) / rounds for kind, n in job.store.requests.items()}
    tracemalloc.start()
    kept = [job.staged(BatchId(number), None) for number in range(size.batches)]
    found |= {
        "undecided in memory, bytes": tracemalloc.get_traced_memory()[0],
        "CPU, ms": statistics.median(took),
    }
    tracemalloc.stop()
    assert len(kept) == size.batches
    return {name: found[name] for name in MODEL}


SIZES = (
    Size(),
    Size(sinks=8, tasks=2, partitions=100, batches=3),
    Size(sinks=500),
    Size(partitions=10_000),
    Size(tasks=4_000),
    Size(tasks=400, partitions=1_000, batches=6),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("sinks", "tasks", "partitions", "batches")
    for name in names:
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    given = {name: number for name in names if (number := getattr(args, name)) is not None}
    for size in (Size(**given),) if given else SIZES:
        print(f"\n{size}", flush=True)
        wanted, found = predicted(size), measured(size)
        for name in MODEL:
            print(f"  {name:<28} {wanted[name]:>14,.0f} predicted {found[name]:>14,.0f} measured")


if __name__ == "__main__":
    main()
