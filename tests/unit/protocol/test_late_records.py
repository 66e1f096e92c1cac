"""How many late records operators have dropped: from a key group to what is stored, each once."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.core.elements import (
    CLOSED,
    DISCARDED,
    LATE_RECORDS_DROPPED,
    MATCHES,
    OPENED,
    RESTORED,
    TIMED_OUT,
)
from flinkish_spark.operators.process import KeyedStreamOperator
from flinkish_spark.protocol.event_time import BatchTimes
from flinkish_spark.protocol.ids import BatchId, Lineage, OwnerEpoch
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.latency import FIRST_LATE_REPORTER, SINK_REPORTER, is_latency
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck, TimeReport
from flinkish_spark.protocol.time_plan import (
    COUNTERS,
    TimePlan,
    count_late_records,
    find_counts,
    find_reports,
    make_reporters,
    sum_counts,
    sum_late_records,
    update_levels,
)
from flinkish_spark.protocol.watermarks import EventTime, step
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BlockPacker
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker.keyed_operator import KeyedOperator, KeyedOperatorSpec
from flinkish_spark.worker.runners import InputShape, RowShape

INPUT = T.StructType(
    [
        *[T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE)],
        T.StructField("c0", T.StringType()),
        T.StructField("c1", T.LongType()),
    ]
)


class Strict(KeyedStreamOperator):
    """Takes every number below ten for late."""

    def open(self, states: Any, context: Any, timers: Any) -> None:
        self._context = context

    def processors(self) -> Any:
        return (self._process,)

    def _process(self, value: Any, context: Any) -> None:
        if value.n < 10:
            self._context.count(LATE_RECORDS_DROPPED)

    def on_timer(self, timer: Any, domain: Any) -> None:
        raise AssertionError("there are none")


class State:
    """A key group's state in Spark."""

    exists, get = False, ()

    def update(self, value: Any) -> None:
        pass


def reports_of(*numbers: int) -> list[tuple[int, int, int]]:
    """Return kind, channel and first number of the control rows that a key group emits."""
    came = InputShape(arrow_schema(INPUT), ("user", "n"), ("c0", "c1"), ("c0",))
    shape = RowShape((came,), (T.StringType(),), (T.StructType([T.StructField("n", T.LongType())]),))
    operator = KeyedOperator(
        KeyedOperatorSpec(
            "hours",
            Bundling(8, 1, 8),
            Strict(),
            shape,
            (frozenset({0}),),
            {7: 5},
            {99: 0},
            (Origins(),),
            reporter=3,
        )
    )
    count = len(numbers)
    rows = pa.RecordBatch.from_pydict(
        {
            C.ROUTE: pa.array([7] * count, pa.int32()),
            C.KEY_HASH: pa.array([1] * count),
            C.CHANNEL: pa.array([0] * count),
            C.SEQUENCE: pa.array(range(count)),
            "c0": pa.array(["a"] * count),
            "c1": pa.array(numbers, pa.int64()),
        }
    )
    (packed,) = BlockPacker(arrow_schema(INPUT))(iter([rows]))
    out = list(operator((7,), [packed.to_pandas()], State()))  # type: ignore[arg-type]
    frame = pd.concat(out) if out else pd.DataFrame(columns=[C.KIND, C.CHANNEL, C.CHECKPOINT])
    return [tuple(map(int, row)) for row in frame[[C.KIND, C.CHANNEL, C.CHECKPOINT]].to_numpy()]  # type: ignore[misc]


def test_a_key_group_says_how_many_it_dropped() -> None:
    assert reports_of(1, 2, 30) == [(C.FIRST_LATE + 3, 5, 2)]
    assert reports_of(30) == []


#: Two operators and a source; the second operator reads the first, which a sink reads, too.
PLAN = TimePlan(
    make_reporters(["hours", "days"], ["orders"]),
    {"out": ("hours",), "both": ("days", "hours")},
    {"hours": ("hours",), "days": ("hours", "days")},
)


def late(number: int, group: int, count: int, part: int = 0) -> TimeReport:
    return TimeReport(FIRST_LATE_REPORTER + part * len(PLAN.reporters) + number, group, count, 0)


def ack(sink: str, *reports: TimeReport) -> SinkAck:
    return SinkAck(sink, (TaskAck(0, 5, 0, reports=reports[:1]), TaskAck(1, 5, 0, reports=reports[1:])))


def test_an_operator_counts_once_whoever_shows_it_and_wherever_it_runs() -> None:
    # In the chain of 'days' the first operator runs once more, over the same records.
    shown = [
        ack("out", late(0, 1, 4), late(0, 2, 1)),
        ack("both", late(0, 1, 4), late(1, 6, 2), late(0, 1, 4, part=1), late(0, 2, 1, part=1)),
    ]
    assert count_late_records(PLAN, shown) == {"hours": 4, "days": 2}
    only_direct = TimePlan(PLAN.reporters, {"out": ("hours",)}, {"hours": ("hours",)})
    assert count_late_records(only_direct, shown[:1]) == {"hours": 5}


def counted(number: int, group: int, count: int, name: str) -> TimeReport:
    return TimeReport(FIRST_LATE_REPORTER + number, group, count, COUNTERS.index(name))


def test_what_else_is_counted_is_told_apart_by_its_name() -> None:
    own = (late(0, 1, 4), counted(0, 1, 3, "matches"), counted(0, 2, 5, "matches"))
    shown = [ack("out", *own), ack("both", *own, counted(1, 6, 2, "partial_matches_timed_out"))]
    assert count_late_records(PLAN, shown) == {"hours": 4}
    assert find_counts(PLAN, shown) == {"hours": {"matches": 8}, "days": {"partial_matches_timed_out": 2}}


def test_names_of_counters_keep_their_places() -> None:
    assert COUNTERS[:3] == ("late_records_dropped", "matches", "partial_matches_timed_out")
    assert set(COUNTERS) == {LATE_RECORDS_DROPPED, MATCHES, TIMED_OUT, DISCARDED, OPENED, CLOSED, RESTORED}


def test_a_level_is_what_has_come_less_what_has_gone() -> None:
    """As it is stored with checkpoints and savepoints, so a restart goes on from it."""
    batches = [
        StagedBatch(Lineage(0), BatchId(at), OwnerEpoch(1), 0, (), (), counts={"days": own})
        for at, own in enumerate(
            [
                {"partial_matches_opened": 5, "matches": 1},
                {"matches": 2},
                {"partial_matches_closed": 4, "partial_matches_opened": 2},
            ]
        )
    ]
    state = EventTime()
    for batch in batches:
        state = update_levels(state, batch.counts)
    assert state.levels == {"days": {"partial_matches_open": 3}}
    assert EventTime.from_json(json.loads(json.dumps(state.to_json()))) == state
    own = {"partial_matches_opened": 7, "partial_matches_closed": 4, "matches": 3, "partial_matches_open": 3}
    assert sum_counts(batches, state) == {"days": own}
    # An operator that is no more has none.
    assert PLAN.adapt_to_plan(state).levels == state.levels
    assert TimePlan(make_reporters(["hours"], []), {}, {}).adapt_to_plan(state).levels == {}
    assert update_levels(state, {"days": {"matches": 1}}) is state
    assert step({}, state, BatchTimes(5)).levels == state.levels


def test_counts_are_no_latencies_and_say_nothing_about_time() -> None:
    assert not is_latency(late(0, 1, 4)) and is_latency(TimeReport(SINK_REPORTER, 0, 0, 0))
    assert find_reports(PLAN, [ack("out", late(0, 1, 4))]) == ((), ())


def test_they_are_stored_with_what_was_staged() -> None:
    staged = StagedBatch(
        *(Lineage(0), BatchId(3), OwnerEpoch(1), 1, (), ()),
        late_dropped={"hours": 4, "days": 2},
        counts={"hours": {"matches": 3}},
    )
    stored = json.loads(json.dumps(staged.to_json()))
    assert StagedBatch.from_json(stored) == staged
    assert sum_late_records([staged, staged]) == {"hours": 8, "days": 4}
    assert sum_counts([staged, staged]) == {"hours": {"matches": 6}}
    del stored["late_dropped"], stored["counts"]
    assert StagedBatch.from_json(stored).late_dropped == StagedBatch.from_json(stored).counts == {}
    for wrong in ({"../x": 1}, {"hours": -1}):
        with pytest.raises(ValueError):
            StagedBatch.from_json({**stored, "late_dropped": wrong})
