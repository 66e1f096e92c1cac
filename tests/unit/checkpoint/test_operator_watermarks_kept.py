"""Two pipelines in one job: what the keeper offers, what Spark logs, and what a worker reads there."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.staging import micro_batch_in
from flinkish_spark.connectors.control_source import ControlReader
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.core.micro_batch import MicroBatch
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AssignerRules,
    BoundedOutOfOrderness,
)
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import Assigner, TimePlan, make_reporters
from flinkish_spark.protocol.watermarks import EventTime
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import MemoryStore
from tests.support.effort import seeds

NEVER = MAX_WATERMARK_MS
OPERATORS, SOURCES = ["left", "right"], ["orders", "clicks"]


class Input(Source):
    """A source with one channel, whose end is in its place of the log."""

    def __init__(self, at: int) -> None:
        self._at = at

    @property
    def is_bounded(self) -> bool:
        return True

    def load(self, spark: Any, control_path: str) -> Any:
        raise NotImplementedError

    def has_ended(self, position: LoggedOffsets) -> bool:
        return bool(position.sources[self._at]["has_ended"])

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        return frozenset({0})


def plan(idleness_ms: int | None = None) -> TimePlan:
    rules = AssignerRules(BoundedOutOfOrderness(0), idleness_ms)
    pairs = list(zip(SOURCES, OPERATORS, strict=True))
    return TimePlan(
        make_reporters(OPERATORS, SOURCES),
        {f"{operator}-out": (operator,) for operator in OPERATORS},
        {operator: (operator,) for operator in OPERATORS},
        {f"{source}.{operator}": Assigner(source, rules) for source, operator in pairs},
        {operator: frozenset({f"{source}.{operator}"}) for source, operator in pairs},
    )


class Query:
    """Both pipelines: each has a scan of the control source, which is asked on its own."""

    def __init__(self, folder: Path, given: TimePlan) -> None:
        self.folder, self.plan = folder, given
        self.clock, self.store = ManualClock(1_000), MemoryStore()
        self.log = SparkLog(self.store, "spark/1", Path("/nowhere"))
        self.controls: list[dict[str, Any]] = [{"flinkish:checkpoint": 0}] * 2
        self.ended = set[str]()
        self.next, self.starts = 0, 0
        self.staged: list[StagedBatch] = []
        self.stored: EventTime | None = None
        self.start()

    def start(self, kept: Sequence[StagedBatch] = ()) -> None:
        self.control = ControlFile.create_for_start(self.folder / "control", OwnerEpoch(1), self.starts)
        self.starts += 1
        nodes = [SourceNode(uid, Input(at)) for at, uid in enumerate(SOURCES)]
        facts = (self.plan, nodes, self.control, self.log, self.clock)
        self.keeper = TimeKeeper(*facts, self.stored, kept, BatchId(self.next))  # type: ignore[arg-type]
        self.keeper.begin()
        self.readers = [ControlReader(str(self.control.path)) for _ in self.controls]

    def latest(self) -> list[dict[str, Any]]:
        pairs = zip(self.readers, self.controls, strict=True)
        return [json.loads(json.dumps(reader.latestOffset(at, None))) for reader, at in pairs]

    @property
    def is_wanted(self) -> bool:
        return self.latest() != self.controls

    def run(self, *reports: tuple[str, TimeReport], lagging: int | None = None) -> set[tuple[int, int]]:
        """Run a micro-batch; return the operators' numbers and key groups that it calls."""
        before, offered = self.controls, self.latest()
        self.controls = [at if scan == lagging else offered[scan] for scan, at in enumerate(before)]
        sources = [json.dumps({"has_ended": uid in self.ended}) for uid in SOURCES]
        facts = json.dumps({"batchTimestampMs": self.clock.now_ms})
        text = "\n".join(["v1", facts, *sources, *map(json.dumps, self.controls)])
        self.store.put(f"spark/1/{OFFSETS}/{self.next}", text.encode())
        called = set()
        for reader, start, end in zip(self.readers, before, self.controls, strict=True):
            rows = [row for part in reader.partitions(start, end) for row in reader.read(part)]
            called |= {(number, group) for kind, _, number, group in rows if kind == 2}
        acks = tuple(
            SinkAck(f"{uid}-out", (TaskAck(0, 0, 0, reports=tuple(r for at, r in reports if at == uid)),))
            for uid in OPERATORS
        )
        staged = StagedBatch(Lineage(0), BatchId(self.next), OwnerEpoch(1), 0, acks, ())
        staged = self.keeper.add_times(staged)
        self.staged.append(staged)
        self.keeper.on_staged(staged)
        self.next += 1
        return called

    def micro_batch(self, number: int) -> MicroBatch:
        """Return what tasks are told of a micro-batch."""
        told = micro_batch_in(self.log, BatchId(number))
        assert MicroBatch.from_json(json.loads(json.dumps(told.to_json()))) == told
        return told

    @property
    def seen(self) -> list[int]:
        """What the tasks of the last micro-batch were told, by operator."""
        here = self.micro_batch(self.next - 1)
        return [here.progress(uid).watermark_ms for uid in OPERATORS]


def record(operator: str, time_ms: int) -> tuple[str, TimeReport]:
    return operator, TimeReport(2 + OPERATORS.index(operator), 0, time_ms, 1)


def timer(operator: str, group: int, event_ms: int = NEVER) -> tuple[str, TimeReport]:
    return operator, TimeReport(OPERATORS.index(operator), group, event_ms, NEVER)


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path, plan())


def test_a_source_that_stands_still_holds_back_no_window_of_the_other(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000))
    query.run(record("left", 95_000))
    assert query.seen == [59_999, 4_999]
    assert query.is_wanted
    assert query.run(timer("left", 1)) == {(0, 1)}
    assert query.seen == [94_999, 4_999]
    assert not query.is_wanted


def test_what_spark_logs_says_little_where_there_is_little_to_say(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000))
    query.run()
    assert query.controls[0]["flinkish:watermark"] == 4_999
    assert query.controls[0]["flinkish:watermarks"] == {"left": 59_999}
    query.run(record("right", 60_000), timer("right", 1, 90_000))
    query.run()
    assert query.controls[0]["flinkish:watermark"] == 59_999
    assert "flinkish:watermarks" not in query.controls[0]


def test_a_task_knows_what_its_operator_saw_before(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000))
    query.run(record("left", 70_000))
    query.run()
    here = query.micro_batch(2)
    left, right, unknown = (here.progress(uid) for uid in ("left", "right", "of another plan"))
    assert (left.watermark_before_ms, left.watermark_ms) == (59_999, 69_999)
    assert (right.watermark_before_ms, right.watermark_ms) == (4_999, 4_999)
    assert unknown.watermark_ms == 4_999 and left.processing_time_ms == 1_000
    first = query.micro_batch(0).progress("left")
    assert (first.watermark_before_ms, first.watermark_ms) == (MIN_WATERMARK_MS, MIN_WATERMARK_MS)


def test_a_log_of_a_version_that_knew_one_watermark_is_read(query: Query) -> None:
    old = 'v1\n{"batchTimestampMs": 7}\n{"flinkish:checkpoint": 3, "flinkish:watermark": 60000}'
    query.store.put(f"spark/1/{OFFSETS}/4", old.encode())
    here = query.micro_batch(4)
    assert [here.progress(uid).watermark_ms for uid in OPERATORS] == [60_000, 60_000]


def test_a_watermark_that_none_of_its_own_timers_waits_for_wakes_nobody(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("right", 1, 90_000))
    query.run()
    query.run(record("left", 70_000))
    assert not query.is_wanted
    query.control.offer(CheckpointId(1))
    query.run()
    assert query.seen == [69_999, 4_999]


def test_all_tasks_see_what_the_furthest_scan_was_told(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 50_000))
    query.run(lagging=0)
    assert query.seen == [59_999, 4_999]
    assert query.run(timer("left", 1)) == {(0, 1)}


def test_a_pipeline_ends_and_the_other_goes_on_until_the_job_ends(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000))
    query.ended = {"orders"}
    query.run()
    assert query.is_wanted
    assert query.run(timer("left", 1)) == {(0, 1)}
    assert query.seen == [MAX_WATERMARK_MS, 4_999] and not query.keeper.has_ended
    query.run(record("right", 7_000), timer("right", 1, 90_000))
    query.ended = set(SOURCES)
    query.run()
    query.start(kept=query.staged)
    assert not query.keeper.has_ended and query.keeper.can_end and not query.is_wanted
    query.keeper.on_offer(CheckpointPurpose.FINAL)
    query.control.offer(CheckpointId(1), CheckpointPurpose.FINAL)
    assert query.run(timer("right", 1)) == {(1, 1)}
    assert query.seen == [MAX_WATERMARK_MS] * 2
    assert query.keeper.has_ended and not query.is_wanted


def test_a_new_log_begins_where_each_operator_stood(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000))
    query.stored = query.keeper.find_event_time(BatchId(0))
    query.next, query.controls = 0, [{"flinkish:checkpoint": 0}] * 2
    query.start()
    query.run()
    assert query.seen == [59_999, 4_999]
    assert not query.is_wanted


# -- draining --------------------------------------------------------------------------------------------


def drain(query: Query, checkpoint: int) -> None:
    """Do what the coordinator does when it stops a job with `--drain`."""
    query.keeper.on_offer(CheckpointPurpose.DRAINED_SAVEPOINT)
    query.control.offer(CheckpointId(checkpoint), CheckpointPurpose.DRAINED_SAVEPOINT)


def drains(query: Query) -> bool:
    """Whether event time comes to its end behind the records of the last micro-batch, for everybody."""
    here = query.micro_batch(query.next - 1)
    found = {here.progress(uid).drained_to_ms == MAX_WATERMARK_MS for uid in [*OPERATORS, "any"]}
    return found == {True}


def test_the_micro_batch_that_drains_calls_whoever_has_a_timer(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000), timer("right", 4, 9))
    query.run(timer("right", 4, 9_000))
    assert not query.is_wanted and not drains(query)
    drain(query, 1)
    assert query.run(record("left", 70_000), timer("left", 1), timer("right", 4)) == {(0, 1), (1, 4)}
    # Watermarks are what they were: the records of this micro-batch come before the end.
    assert query.seen == [59_999, 4_999] and drains(query)
    assert [0 if one.times is None else one.times.drained for one in query.staged] == [0, 0, 1]
    stored = query.keeper.find_event_time(BatchId(2))
    assert stored is not None and not stored.agenda.groups
    assert not query.is_wanted


def test_timers_that_came_while_the_stop_was_asked_for_are_called_too(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000))
    query.control.offer(CheckpointId(1))
    query.keeper.on_offer(CheckpointPurpose.DRAINED_SAVEPOINT)
    query.run(timer("left", 7, 90_000))
    assert not drains(query)
    drain(query, 2)
    assert query.run(timer("left", 7)) == {(0, 7)}
    assert drains(query)


def test_where_a_scan_draws_the_barrier_later_its_micro_batch_drains_everybody(query: Query) -> None:
    query.run(
        record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000), timer("right", 4, 95_000)
    )
    drain(query, 1)
    query.run(timer("left", 1, 90_000), timer("right", 4, 95_000), lagging=0)
    assert not drains(query)
    assert query.run(timer("left", 1), timer("right", 4)) == {(0, 1), (1, 4)}
    assert drains(query)


def test_a_job_that_is_started_again_behind_its_drain_goes_on_where_time_stood(query: Query) -> None:
    query.run(record("left", 60_000), record("right", 5_000), timer("left", 1, 90_000))
    drain(query, 1)
    query.run(timer("left", 1))
    query.stored = query.keeper.find_event_time(BatchId(1))
    query.start()
    query.run(record("left", 61_000), timer("left", 1, 99_000))
    assert not drains(query) and query.seen == [59_999, 4_999]
    query.control.offer(CheckpointId(2))
    query.run()
    assert not drains(query)


def test_a_job_that_has_said_nothing_stores_nothing_about_its_operators(tmp_path: Path) -> None:
    untimed = TimePlan(make_reporters(OPERATORS, SOURCES), plan().chains, plan().operators)
    query = Query(tmp_path, untimed)
    query.run()
    assert (query.staged[0].times, query.keeper.find_event_time(BatchId(0))) == (None, None)


@pytest.mark.parametrize("seed", seeds(30))
def test_a_job_of_two_pipelines_that_is_started_again_goes_on_exactly(tmp_path: Path, seed: int) -> None:
    """What micro-batches carry, for whom, and whom they call depends on no restart."""
    runs = []
    for restarts in (0.0, 0.4):
        chance, cuts = random.Random(seed), random.Random(seed + 1_000)
        query = Query(tmp_path / str(restarts), plan(chance.choice([None, 300])))
        decided, history, reached = -1, [], [MIN_WATERMARK_MS] * 2
        for number in range(30):
            query.clock.now_ms += chance.randrange(200)
            query.keeper.wake()
            if chance.random() < 0.05:
                query.ended.add(chance.choice(SOURCES))
            going = [uid for at, uid in enumerate(OPERATORS) if SOURCES[at] not in query.ended]
            reports = [
                record(uid, chance.randrange(1_000) + 10 * number) for uid in going if chance.random() < 0.6
            ]
            due = [(uid, chance.choice((NEVER, chance.randrange(1_500)))) for uid in OPERATORS]
            lagging = chance.choice([None, None, None, 0, 1])
            called = query.run(*reports, *(timer(uid, 1, at_ms) for uid, at_ms in due), lagging=lagging)
            history.append((called, query.seen, query.is_wanted))
            assert all(now >= before for now, before in zip(query.seen, reached, strict=True))
            reached = query.seen
            if cuts.random() < restarts:
                if cuts.random() < 0.5:
                    stored = query.keeper.find_event_time(BatchId(number))
                    assert stored is not None
                    query.stored = EventTime.from_json(json.loads(json.dumps(stored.to_json())))
                    decided = number
                kept = [one for one in query.staged if one.batch.value > decided]
                query.start([StagedBatch.from_json(json.loads(json.dumps(one.to_json()))) for one in kept])
        runs.append(history)
    assert runs[0] == runs[1]


def test_functions_see_the_wall_clock_as_it_is_logged_also_where_it_was_set_back() -> None:
    """As in Flink. What idleness is measured by never goes back: `EventTime.next_processing_time_ms`."""

    def logged(now_ms: int) -> LoggedOffsets:
        return LoggedOffsets.parse(f'v1\n{{"batchTimestampMs":{now_ms}}}\n{{"orders":{{"0":5}}}}')

    told = MicroBatch.from_log(8, logged(6_400_000), logged(10_000_000))
    assert told.processing_time_ms == 6_400_000
