"""Event time of a running job, over a model of Spark's query."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.control import ControlFile, read_held, to_held_path
from flinkish_spark.checkpoint.event_time import TimeKeeper
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.connectors.control_source import ControlReader
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.control_offset import ControlOffset
from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    Alignment,
    AssignerRules,
    BoundedOutOfOrderness,
    NoWatermarkStrategy,
)
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.micro_batches import OFFSETS
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import Assigner, TimePlan, make_reporters
from flinkish_spark.protocol.watermark_alignment import NONE_HELD
from flinkish_spark.protocol.watermarks import EventTime
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import MemoryStore
from tests.support.effort import seeds

NEVER = MAX_WATERMARK_MS
OPERATOR, SOURCE = 0, 1


class Input(Source):
    """A source whose channels and end are in its offset."""

    def __init__(self, is_bounded: bool = False) -> None:
        self._is_bounded = is_bounded

    @property
    def is_bounded(self) -> bool:
        return self._is_bounded

    def load(self, spark: Any, control_path: str) -> Any:
        raise NotImplementedError

    def has_ended(self, position: LoggedOffsets) -> bool:
        return bool(position.sources[0]["has_ended"])

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        return frozenset(position.sources[0]["channels"])


def plan(rules: AssignerRules | None = None) -> TimePlan:
    given = {"orders": Assigner("orders", AssignerRules(NoWatermarkStrategy()))}
    if rules is not None:
        given = {"orders.sums": Assigner("orders", rules)}
    return TimePlan(make_reporters(["sums"], ["orders"]), {"out": ("sums",)}, {"sums": ("sums",)}, given)


TIMED = plan(AssignerRules(BoundedOutOfOrderness(0)))


class Query:
    """A job: Spark's log, the scans of the control source, and the keeper of one start after the other."""

    def __init__(
        self, folder: Path, given: TimePlan = TIMED, source: Input | None = None, scans: int = 1
    ) -> None:
        self.folder, self.plan, self.source = folder, given, source or Input()
        self.clock, self.store = ManualClock(1_000), MemoryStore()
        self.log = SparkLog(self.store, "spark/1", Path("/nowhere"))
        self.next, self.starts, self.scans = 0, 0, scans
        self.controls: list[dict[str, Any]] = [{"flinkish:checkpoint": 0}] * scans
        self.has_ended, self.channels = False, [0]
        self.staged: list[StagedBatch] = []
        self.stored: EventTime | None = None
        self.start()

    def start(self, kept: Sequence[StagedBatch] = ()) -> None:
        """Start the query, from what was stored and what is kept."""
        self.control = ControlFile.create_for_start(self.folder, OwnerEpoch(1), self.starts)
        self.starts += 1
        facts = (self.plan, [SourceNode("orders", self.source)], self.control, self.log, self.clock)
        self.keeper = TimeKeeper(*facts, self.stored, kept, BatchId(self.next))  # type: ignore[arg-type]
        self.keeper.begin()
        self.readers = [ControlReader(str(self.control.path)) for _ in range(self.scans)]

    def latest(self, scan: int = 0) -> dict[str, Any]:
        """Return what a scan answers when Spark asks."""
        return json.loads(json.dumps(self.readers[scan].latestOffset(self.controls[scan], None)))  # type: ignore[no-any-return]

    @property
    def is_wanted(self) -> bool:
        """Whether Spark would run a micro-batch although there is no record."""
        return any(self.latest(scan) != self.controls[scan] for scan in range(self.scans))

    def plan_next(self, lagging: Sequence[int] = ()) -> list[list[tuple[int, int]]]:
        """Log the next micro-batch; return, by scan, the reporters and key groups that it calls."""
        before = list(self.controls)
        for scan in range(self.scans):
            if scan not in lagging:
                self.controls[scan] = self.latest(scan)
        facts = json.dumps({"batchTimestampMs": self.clock.now_ms})
        source = json.dumps({"channels": self.channels, "has_ended": self.has_ended})
        text = "\n".join(["v1", facts, source, *map(json.dumps, self.controls)])
        self.store.put(f"spark/1/{OFFSETS}/{self.next}", text.encode())
        called = []
        for reader, start, end in zip(self.readers, before, self.controls, strict=True):
            rows = [row for part in reader.partitions(start, end) for row in reader.read(part)]
            called.append([(number, group) for kind, _, number, group in rows if kind == 2])
        return called

    def stage(self, *reports: TimeReport, also: str = "") -> StagedBatch:
        """Stage the micro-batch that was logged; two sinks may report the same."""
        acks = tuple(SinkAck(sink, (TaskAck(0, 0, 0, reports=reports),)) for sink in ("out", also) if sink)
        staged = StagedBatch(Lineage(0), BatchId(self.next), OwnerEpoch(1), 0, acks, ())
        staged = self.keeper.add_times(staged)
        self.staged.append(staged)
        self.keeper.on_staged(staged)
        self.next += 1
        return staged

    def run(self, *reports: TimeReport) -> list[tuple[int, int]]:
        """Run a micro-batch; return whom it called."""
        (called,) = self.plan_next()
        self.stage(*reports)
        return called

    def offer(self, checkpoint: int, purpose: CheckpointPurpose = CheckpointPurpose.FINAL) -> None:
        """Offer a barrier, as the coordinator does."""
        self.keeper.on_offer(purpose)
        self.control.offer(CheckpointId(checkpoint), purpose)

    @property
    def carried_ms(self) -> int:
        """The watermark of the last micro-batch."""
        return ControlOffset.find_newest(self.controls).time.watermark_ms


def seen(time_ms: int, channel: int = 0) -> TimeReport:
    """Records of a channel."""
    return TimeReport(SOURCE, channel, time_ms, 1)


def timers(group: int, event_ms: int = NEVER, processing_ms: int = NEVER) -> TimeReport:
    """The next timers of a key group."""
    return TimeReport(OPERATOR, group, event_ms, processing_ms)


# -- without time ----------------------------------------------------------------------------------------


def test_a_job_without_time_does_nothing(tmp_path: Path) -> None:
    query = Query(tmp_path, plan())
    query.store.objects.clear()
    staged = StagedBatch(Lineage(0), BatchId(0), OwnerEpoch(1), 0, (SinkAck("out", (TaskAck(0, 5, 6),)),), ())
    assert query.keeper.add_times(staged) is staged
    query.keeper.on_staged(staged)
    query.keeper.wake()
    assert (query.keeper.find_event_time(BatchId(0)), query.keeper.has_ended) == (None, False)
    assert not query.control.path.exists() and not query.is_wanted


def test_a_job_without_time_offers_checkpoints_as_before(tmp_path: Path) -> None:
    query = Query(tmp_path, plan())
    query.control.offer(CheckpointId(1))
    query.run()
    assert query.controls == [{"flinkish:checkpoint": 1}]


def test_timers_need_no_strategy(tmp_path: Path) -> None:
    query = Query(tmp_path, plan())
    query.run(timers(3, processing_ms=5_000))
    assert not query.is_wanted
    query.clock.now_ms = 4_999
    query.keeper.wake()
    assert not query.is_wanted
    query.clock.now_ms = 5_000
    query.keeper.wake()
    assert query.run(timers(3)) == [(OPERATOR, 3)]
    query.clock.now_ms = 90_000
    query.keeper.wake()
    assert not query.is_wanted


# -- watermarks ------------------------------------------------------------------------------------------


def test_the_next_micro_batch_carries_the_watermark(tmp_path: Path) -> None:
    query = Query(tmp_path)
    assert query.run(seen(60_000), timers(1, event_ms=90_000)) == []
    assert query.carried_ms == MIN_WATERMARK_MS
    query.run(seen(70_000))
    assert query.carried_ms == 59_999
    (last,) = query.staged[-1:]
    assert last.times is not None and last.times.carried_ms == 59_999
    assert last.acks[0].tasks[0].reports == ()
    assert query.keeper.find_event_time(BatchId(1)).watermark_ms == 69_999  # type: ignore[union-attr]


def test_an_idle_stream_is_woken_for_timers_that_the_watermark_has_reached(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.run(seen(60_000), timers(1, event_ms=59_999), timers(2, event_ms=60_000))
    assert query.is_wanted
    assert query.run(timers(1)) == [(OPERATOR, 1)]
    assert not query.is_wanted


def test_a_watermark_that_nobody_waits_for_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.run(seen(60_000))
    assert not query.is_wanted
    query.control.offer(CheckpointId(1))
    query.run()
    assert query.carried_ms == 59_999


def test_a_channel_without_records_is_waited_for(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.channels = [0, 1]
    query.run(seen(60_000), timers(1, event_ms=50_000))
    assert not query.is_wanted
    query.run(seen(40_000, channel=1))
    assert query.keeper.find_event_time(BatchId(1)).watermark_ms == 39_999  # type: ignore[union-attr]
    query.channels = [0]
    query.run()
    assert query.keeper.find_event_time(BatchId(2)).watermark_ms == 59_999  # type: ignore[union-attr]
    assert query.run(timers(1)) == [(OPERATOR, 1)]


def test_a_channel_that_becomes_idle_is_found_out_without_records(tmp_path: Path) -> None:
    query = Query(tmp_path, plan(AssignerRules(BoundedOutOfOrderness(0), idleness_ms=60_000)))
    query.channels = [0, 1]
    query.run(seen(60_000), timers(1, event_ms=50_000))
    query.clock.now_ms += 59_999
    query.keeper.wake()
    assert not query.is_wanted
    query.clock.now_ms += 1
    query.keeper.wake()
    assert query.run() == []
    assert query.run(timers(1)) == [(OPERATOR, 1)]


def test_channels_are_stored_when_they_change(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.run(seen(1))
    query.run(seen(2))
    query.channels = [0, 1]
    query.run(seen(3))
    found = [staged.times.inputs for staged in query.staged if staged.times is not None]
    assert [[sorted(one.channels or ()) for one in inputs] for inputs in found] == [[[0]], [], [[0, 1]]]


# -- offers ----------------------------------------------------------------------------------------------


def test_what_was_offered_while_a_micro_batch_ran_is_offered_no_more(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.run(timers(1, processing_ms=5_000))
    query.plan_next()
    query.clock.now_ms = 5_000
    query.keeper.wake()
    assert query.is_wanted
    # Records came for the key group, so the timer has fired all the same.
    query.stage(timers(1))
    assert not query.is_wanted


def test_more_that_becomes_due_is_offered_before_spark_has_asked(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.run(timers(1, processing_ms=5_000), timers(2, processing_ms=5_010))
    for now_ms in (5_000, 5_010):
        query.clock.now_ms = now_ms
        query.keeper.wake()
    assert query.run(timers(1), timers(2)) == [(OPERATOR, 1), (OPERATOR, 2)]


def test_many_processing_time_timers_make_one_micro_batch(tmp_path: Path) -> None:
    """Behaviour 162: one at the earliest of them; all that are due by then fire in it."""
    query = Query(tmp_path)
    query.run(*(timers(group, processing_ms=5_000 + group) for group in range(100)))
    for now_ms in range(1_000, 5_000, 50):
        query.clock.now_ms = now_ms
        query.keeper.wake()
        assert not query.is_wanted
    query.clock.now_ms = 6_000
    query.keeper.wake()
    assert query.is_wanted
    assert query.run(*map(timers, range(100))) == [(OPERATOR, group) for group in range(100)]
    assert not query.is_wanted


def test_an_earlier_timer_moves_the_call_and_a_deleted_one_moves_it_back(tmp_path: Path) -> None:
    """Behaviour 162."""
    query = Query(tmp_path)
    query.run(timers(1, processing_ms=9_000))
    query.run(timers(1, processing_ms=9_000), timers(2, processing_ms=5_000), timers(3, processing_ms=6_000))
    query.run(timers(3, processing_ms=9_000))
    for now_ms, called in ((5_000, [(OPERATOR, 2)]), (9_000, [(OPERATOR, 1), (OPERATOR, 3)])):
        query.clock.now_ms = now_ms - 1
        query.keeper.wake()
        assert not query.is_wanted
        query.clock.now_ms = now_ms
        query.keeper.wake()
        assert query.run(*(timers(group) for _, group in called)) == called
    assert not query.is_wanted


def test_a_scan_that_was_asked_too_early_calls_in_the_next_micro_batch(tmp_path: Path) -> None:
    given = TimePlan(
        make_reporters(["first"], ["orders"]),
        {"out": ("sums",), "other": ("tops",)},
        {"sums": ("first",), "tops": ("first",)},
    )
    query = Query(tmp_path, given, scans=2)
    query.plan_next()
    query.stage(timers(4, processing_ms=5_000), also="other")
    query.clock.now_ms = 5_000
    query.keeper.wake()
    assert query.plan_next(lagging=[1]) == [[(OPERATOR, 4)], []]
    # Only the instance of the first scan was called.
    query.stage(timers(4))
    assert query.plan_next() == [[(OPERATOR, 4)], [(OPERATOR, 4)]]
    query.stage(timers(4), also="other")
    assert not query.is_wanted


def test_a_key_group_that_says_nothing_when_it_is_called_has_no_timers(tmp_path: Path) -> None:
    """Its state may not have been restored; it would be called for ever."""
    query = Query(tmp_path)
    query.run(seen(60_000), timers(1, event_ms=5), timers(2, event_ms=70_000))
    assert query.run() == [(OPERATOR, 1)]
    assert not query.is_wanted
    query.run(seen(80_000))
    assert query.run() == [(OPERATOR, 2)]
    assert not query.is_wanted


def test_a_wall_clock_that_goes_back_makes_no_micro_batches(tmp_path: Path) -> None:
    """Operators go by the same clock: called now, they would not fire."""
    query = Query(tmp_path)
    query.clock.now_ms = 100_000
    query.run(timers(1, processing_ms=100_500))
    query.clock.now_ms = 50_000
    query.run(timers(2, processing_ms=100_000))
    query.keeper.wake()
    assert not query.is_wanted
    query.clock.now_ms = 100_500
    query.keeper.wake()
    assert query.run(timers(1), timers(2)) == [(OPERATOR, 1), (OPERATOR, 2)]


def test_a_watermark_waits_for_no_wall_clock(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.clock.now_ms = 100_000
    query.run(seen(60_000), timers(1, event_ms=70_000))
    query.clock.now_ms = 50_000
    query.run(seen(80_000))
    assert query.run(timers(1)) == [(OPERATOR, 1)]


def test_a_micro_batch_that_spark_has_not_logged_cannot_be_staged(tmp_path: Path) -> None:
    query = Query(tmp_path)
    with pytest.raises(InternalError, match="micro-batch 0"):
        query.stage(seen(1))


# -- restarts --------------------------------------------------------------------------------------------


def test_a_new_log_carries_at_once_what_its_state_has_seen(tmp_path: Path) -> None:
    """A job that begins with a savepoint: a record up to that watermark is late."""
    query = Query(tmp_path)
    query.run(seen(60_000))
    query.stored = query.keeper.find_event_time(BatchId(0))
    query.next, query.controls = 0, [{"flinkish:checkpoint": 0}]
    query.start()
    query.run()
    assert query.carried_ms == 59_999
    assert not query.is_wanted


def test_a_start_says_again_what_is_due(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.run(seen(60_000), timers(1, event_ms=59_999))
    query.start(kept=query.staged)
    assert query.run(timers(1)) == [(OPERATOR, 1)]


def test_behind_an_older_micro_batch_time_stood_elsewhere(tmp_path: Path) -> None:
    query = Query(tmp_path)
    for time_ms in (10, 20, 30):
        query.run(seen(time_ms))
    found = [query.keeper.find_event_time(BatchId(number)) for number in (0, 1, 2)]
    assert [one.watermark_ms for one in found if one is not None] == [9, 19, 29]
    assert query.keeper.find_event_time(BatchId(1)) is None, "it was decided and forgotten"


@pytest.mark.parametrize("seed", seeds(40))
def test_a_job_that_is_started_again_goes_on_exactly(tmp_path: Path, seed: int) -> None:
    """What micro-batches carry and whom they call depends on no restart."""
    runs = []
    for restarts in (0.0, 0.4):
        chance, cuts = random.Random(seed), random.Random(seed + 1_000)
        query = Query(tmp_path / str(restarts), plan(AssignerRules(BoundedOutOfOrderness(5), 300)))
        decided, history = -1, []
        for number in range(30):
            query.clock.now_ms += chance.randrange(200)
            query.keeper.wake()
            query.channels = list(range(chance.choice((1, 2, 2, 3))))
            reports = [seen(chance.randrange(1_000), chance.randrange(3)) for _ in range(chance.randrange(3))]
            now_ms = query.clock.now_ms
            due = [chance.choice((NEVER, chance.randrange(1_000), now_ms + 50)) for _ in range(4)]
            called = query.run(*reports, timers(1, due[0], due[1]), timers(2, due[2], due[3]))
            history.append((called, query.carried_ms, query.is_wanted))
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


# -- the end ---------------------------------------------------------------------------------------------


def ending(tmp_path: Path, *reports: TimeReport, scans: int = 1) -> Query:
    """Return a query behind the micro-batch with which its input was over."""
    query = Query(tmp_path, source=Input(is_bounded=True), scans=scans)
    query.plan_next()
    query.stage(seen(60_000), *reports)
    query.has_ended = True
    query.plan_next()
    query.stage(seen(61_000))
    return query


def test_behind_the_end_of_all_input_the_last_barrier_fires_everything(tmp_path: Path) -> None:
    """Behaviour 160: the last checkpoint comes behind it, in one micro-batch."""
    query = ending(tmp_path, timers(1, event_ms=90_000))
    assert query.keeper.can_end and not query.keeper.has_ended and not query.is_wanted
    query.offer(1)
    assert query.run(timers(1)) == [(OPERATOR, 1)]
    assert query.controls[0]["flinkish:watermark"] == MAX_WATERMARK_MS and query.controls[0]["flinkish:end"]
    assert query.controls[0]["flinkish:checkpoint"] == 1
    assert query.keeper.has_ended and query.keeper.can_end and not query.is_wanted


def test_the_end_of_all_input_goes_along_with_whichever_barrier_comes(tmp_path: Path) -> None:
    query = ending(tmp_path)
    query.offer(1, CheckpointPurpose.PERIODIC)
    query.run()
    assert query.carried_ms == MAX_WATERMARK_MS and query.keeper.has_ended


def test_a_barrier_that_was_on_offer_before_comes_through_alone(tmp_path: Path) -> None:
    query = Query(tmp_path, source=Input(is_bounded=True))
    query.run(seen(60_000), timers(1, event_ms=90_000))
    query.has_ended = True
    query.plan_next()
    query.offer(1, CheckpointPurpose.PERIODIC)
    query.stage(seen(61_000))
    assert query.keeper.can_end and query.run() == []
    assert query.carried_ms < 61_000 and query.keeper.can_end and not query.is_wanted
    query.offer(2)
    assert query.run(timers(1)) == [(OPERATOR, 1)] and query.keeper.has_ended


def test_behind_a_last_barrier_that_was_taken_back_the_end_comes_alone(tmp_path: Path) -> None:
    query = ending(tmp_path, timers(1, event_ms=90_000))
    query.offer(1)
    query.control.withdraw(CheckpointId(1))
    assert query.run(timers(1)) == [(OPERATOR, 1)]
    assert query.controls[0]["flinkish:checkpoint"] == 0
    assert query.keeper.has_ended and query.keeper.can_end and not query.is_wanted


def test_where_a_scan_draws_the_last_barrier_later_timers_are_called_with_the_others_too(
    tmp_path: Path,
) -> None:
    query = ending(tmp_path, timers(1, event_ms=90_000), scans=2)
    query.offer(1)
    assert query.plan_next(lagging=[1]) == [[(OPERATOR, 1)], []]
    query.stage(timers(1))
    assert query.is_wanted
    query.plan_next()
    query.stage()
    assert query.keeper.has_ended and not query.is_wanted


def test_a_drain_at_the_end_of_all_input_calls_whoever_has_a_timer(tmp_path: Path) -> None:
    query = ending(tmp_path, timers(1, event_ms=90_000))
    query.offer(1, CheckpointPurpose.DRAINED_SAVEPOINT)
    assert query.run(timers(1)) == [(OPERATOR, 1)] and query.keeper.has_ended


def test_timers_that_were_left_behind_the_end_are_waited_for(tmp_path: Path) -> None:
    """No operator leaves any; where one does, the job does not end without them."""
    query = ending(tmp_path, timers(1, event_ms=90_000))
    query.offer(1)
    query.run(timers(1, event_ms=95_000))
    assert not query.keeper.has_ended and not query.keeper.can_end
    query.start(kept=query.staged)
    assert query.is_wanted and query.run(timers(1)) == [(OPERATOR, 1)]
    assert query.keeper.has_ended and query.keeper.can_end


def test_a_processing_time_timer_that_is_due_while_the_end_waits_goes_along(tmp_path: Path) -> None:
    query = ending(tmp_path, timers(2, processing_ms=5_000))
    query.clock.now_ms = 6_000
    query.keeper.wake()
    assert not query.is_wanted
    query.offer(1)
    assert query.run(timers(2)) == [(OPERATOR, 2)] and query.keeper.has_ended


def test_a_job_that_was_over_is_over_when_it_is_started_again(tmp_path: Path) -> None:
    query = ending(tmp_path)
    query.start(kept=query.staged)
    assert query.keeper.can_end and not query.keeper.has_ended and not query.is_wanted
    query.offer(1)
    query.run()
    assert query.keeper.has_ended
    query.start(kept=query.staged)
    assert query.keeper.has_ended and query.keeper.can_end and not query.is_wanted


def test_a_new_log_begins_with_the_end_that_its_state_stands_at(tmp_path: Path) -> None:
    """Of a savepoint that was taken between the end of input and the end of the job."""
    before = ending(tmp_path / "before", timers(1, event_ms=90_000))
    query = Query(tmp_path / "after", source=Input(is_bounded=True))
    query.stored, query.has_ended = before.keeper.find_event_time(BatchId(1)), True
    query.start()
    # Whether its input goes on, the first micro-batch has to say.
    assert query.is_wanted and not query.keeper.can_end
    assert query.run(timers(1)) == [(OPERATOR, 1)] and query.carried_ms == MAX_WATERMARK_MS
    assert query.keeper.has_ended and query.keeper.can_end


def test_input_that_goes_on_in_a_new_log_is_not_over(tmp_path: Path) -> None:
    before = ending(tmp_path / "before")
    query = Query(tmp_path / "after", source=Input(is_bounded=True))
    query.stored = before.keeper.find_event_time(BatchId(1))
    query.start()
    query.run(seen(70_000))
    assert query.carried_ms == MAX_WATERMARK_MS and not query.keeper.can_end and not query.keeper.has_ended
    query.has_ended = True
    query.run()
    assert query.keeper.can_end


def test_input_that_goes_on_behind_a_job_s_end_is_waited_for(tmp_path: Path) -> None:
    before = ending(tmp_path / "before")
    before.offer(1)
    before.run()
    assert before.keeper.has_ended
    query = Query(tmp_path / "after", source=Input(is_bounded=True))
    query.stored = before.keeper.find_event_time(BatchId(2))
    query.start()
    assert query.is_wanted and not query.keeper.can_end
    query.run(seen(70_000))
    assert not query.keeper.can_end and not query.keeper.has_ended


def test_input_that_is_empty_ends_too(tmp_path: Path) -> None:
    """Without a micro-batch nobody would know, so one is asked for."""
    query = Query(tmp_path, plan(), Input(is_bounded=True))
    query.has_ended = True
    assert query.is_wanted and not query.keeper.can_end
    query.run()
    query.offer(1)
    query.run()
    assert query.keeper.has_ended


def test_input_that_goes_on_is_asked_once(tmp_path: Path) -> None:
    query = Query(tmp_path, plan(), Input(is_bounded=True))
    query.run()
    assert not query.is_wanted and query.staged[0].times is None
    query.run()
    query.has_ended = True
    query.run()
    assert query.keeper.can_end and not query.is_wanted
    query.offer(1)
    query.run()
    assert query.keeper.has_ended and not query.is_wanted


def test_of_a_scan_that_has_no_offset_yet_nothing_is_known(tmp_path: Path) -> None:
    query = Query(tmp_path, plan(), Input(is_bounded=True))
    query.plan_next()
    text = 'v1\n{"batchTimestampMs": 1000}\n{"channels": [0], "has_ended": true}\n-'
    query.store.put(f"spark/1/{OFFSETS}/0", text.encode())
    query.stage()
    assert query.keeper.find_event_time(BatchId(0)) is None


# -- alignment -------------------------------------------------------------------------------------------


def test_sources_are_told_what_is_ahead_before_the_next_micro_batch_and_again_after_a_restart(
    tmp_path: Path,
) -> None:
    aligned = AssignerRules(BoundedOutOfOrderness(0), alignment=Alignment("g", 1_000))
    query = Query(tmp_path, plan(aligned))
    query.channels = [0, 1]
    assert read_held(str(query.control.path), "orders") == NONE_HELD
    query.run(seen(60_000, channel=0), seen(10_000, channel=1))
    assert read_held(str(query.control.path), "orders").channels == frozenset({0})
    # By another process, which begins with what was stored; of the old one's file nothing is left.
    old = query.control.path
    query.start(kept=query.staged)
    assert not to_held_path(old).exists() and query.control.path != old
    assert read_held(str(query.control.path), "orders").channels == frozenset({0})
    query.run(seen(59_500, channel=1))
    assert not to_held_path(query.control.path).exists()


def test_a_channel_that_ends_lets_the_others_go_on(tmp_path: Path) -> None:
    aligned = AssignerRules(BoundedOutOfOrderness(0), alignment=Alignment("g", 1_000))
    query = Query(tmp_path, plan(aligned))
    query.channels = [0, 1]
    query.run(seen(60_000, channel=0), seen(10_000, channel=1))
    query.channels = [0]
    query.run()
    assert read_held(str(query.control.path), "orders") == NONE_HELD
