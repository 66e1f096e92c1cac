"""Aligned sources of a whole job without Spark: readers, the time keeper and the files between them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.connectors import splits as module
from flinkish_spark.connectors.control_source import ControlReader
from flinkish_spark.connectors.splits import SplitStreamReader, read_piece
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.protocol.event_time import Alignment, AssignerRules, BoundedOutOfOrderness
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import Assigner, TimePlan, make_reporters
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.sources import CollectionSource, RateLimit
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import MemoryStore
from tests.support.effort import seeds

DRIFT_MS, UIDS = 1_000, ("fast", "slow")
RULES = AssignerRules(BoundedOutOfOrderness(0), 5_000, Alignment("g", DRIFT_MS))
#: What each record is later than the one before it.
STEP_MS = {"fast": 700, "slow": 30}
RECORDS = {"fast": 40, "slow": 900}


class Job:
    """Runs micro-batches; the process may die at any point, and a new one goes on from the log."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        chains = {f"{uid}-out": (uid,) for uid in UIDS}
        operators = {uid: (f"{uid}-sums",) for uid in UIDS}
        assigners = {f"{uid}.{uid}": Assigner(uid, RULES) for uid in UIDS}
        reporters = make_reporters([f"{uid}-sums" for uid in UIDS], UIDS)
        self.plan = TimePlan(reporters, chains, operators, assigners)
        self.sources = {
            uid: CollectionSource([(n * STEP_MS[uid],) for n in range(RECORDS[uid])], "at LONG")
            .limit_rate(RateLimit(records_per_batch=30))
            .bind(uid)
            for uid in UIDS
        }
        self.store, self.clock = MemoryStore(), ManualClock(1_000)
        self.log = SparkLog(self.store, "spark/1", Path("/nowhere"))
        self.ends: list[dict[str, Any]] = []
        self.staged: list[StagedBatch] = []
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the query in a new process; who runs on from before hears nothing that is new."""
        self.control = ControlFile.create_for_start(self.folder / "control", OwnerEpoch(1), self.starts)
        self.starts += 1
        nodes = [SourceNode(uid, source) for uid, source in self.sources.items()]
        # Nothing was decided yet: all that was staged counts.
        self.keeper = TimeKeeper(
            self.plan, nodes, self.control, self.log, self.clock, None, self.staged, BatchId(len(self.staged))
        )  # fmt: skip
        self.keeper.begin()
        path = str(self.control.path)
        self.readers: dict[str, Any] = {
            uid: SplitStreamReader(source, str(self.folder), path) for uid, source in self.sources.items()
        }
        self.readers["control"] = ControlReader(path)

    def run(self) -> None:
        for _ in range(1_000):
            if self.keeper.has_ended:
                return
            if self.keeper.can_end:
                # The last checkpoint is asked for.
                self.keeper.on_offer(CheckpointPurpose.FINAL)
                self.control.offer(CheckpointId(1), CheckpointPurpose.FINAL)
            self.clock.now_ms += self.chance.randint(1, 200)
            self.keeper.wake()
            if len(self.ends) == len(self.staged) and not self.plan_next():
                continue
            if self.chance.random() < 0.1:
                # Died behind the log entry: the micro-batch runs again, and asks nobody where it ends.
                self.start()
            self.stage()
            if self.chance.random() < 0.1:
                self.start()
        raise AssertionError("the job does not end")

    def plan_next(self) -> bool:
        """Log where the next micro-batch ends, if anything wants one."""
        before = self.ends[-1] if self.ends else {n: one.initialOffset() for n, one in self.readers.items()}
        end = {name: one.latestOffset(before[name], None) for name, one in self.readers.items()}
        if json.dumps(end) == json.dumps(before):
            return False
        facts = json.dumps({"batchTimestampMs": self.clock.now_ms})
        text = "\n".join(["v1", facts, *(json.dumps(end[name]) for name in self.readers)])
        self.store.put(f"spark/1/{OFFSETS}/{len(self.ends)}", text.encode())
        self.ends.append(json.loads(json.dumps(end)))
        return True

    def stage(self) -> None:
        """Read the micro-batch, report its times, and stage it."""
        number = len(self.staged)
        acks = []
        for at, uid in enumerate(UIDS):
            reader = self.readers[uid]
            before = self.ends[number - 1][uid] if number else reader.initialOffset()
            rows = [
                row
                for piece in reader.partitions(before, self.ends[number][uid])
                for row in read_piece(reader.source, piece)
            ]
            times = [row[0] for batch in rows for row in _rows(batch)]
            reports = (TimeReport(len(UIDS) + at, 0, max(times), len(times)),) if times else ()
            acks.append(SinkAck(f"{uid}-out", (TaskAck(0, 0, 0, reports=reports),)))
        staged = StagedBatch(Lineage(0), BatchId(number), OwnerEpoch(1), 0, tuple(acks), ())
        staged = self.keeper.add_times(staged)
        self.staged.append(staged)
        self.keeper.on_staged(staged)

    def read_of(self, uid: str) -> list[int]:
        """Return how many records of a source each micro-batch had read by its end."""
        return [sum(at for _, at in end[uid]["flinkish:splits"]) for end in self.ends]


def _rows(batch: Any) -> list[tuple[Any, ...]]:
    return [batch] if isinstance(batch, tuple) else [tuple(row.values()) for row in batch.to_pylist()]


@pytest.mark.parametrize("seed", seeds(15))
def test_the_fast_one_waits_all_is_read_and_the_job_ends_whatever_dies(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ASK_EVERY_S", 0)
    job = Job(tmp_path, seed)
    job.run()
    fast, slow = job.read_of("fast"), job.read_of("slow")
    assert (fast[-1], slow[-1]) == (40, 900)
    assert sum(now == before < 40 for before, now in itertools.pairwise(fast)) >= 15, "it never waited"
    for number in range(1, len(fast)):
        # Where the fast one went on, it was not ahead of where the slow one stood; or that had ended.
        if fast[number] > fast[number - 1] and slow[number - 1] < 900:
            slow_ms = max(0, slow[number - 1] - 1) * STEP_MS["slow"]
            ahead_ms = (fast[number - 1] - 1) * STEP_MS["fast"] - slow_ms
            assert ahead_ms <= DRIFT_MS
    assert isinstance(job.keeper.find_event_time(BatchId(len(fast) - 1)), EventTime)
