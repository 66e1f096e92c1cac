"""Programs without Spark: every kind of operator, step by step, with snapshots, crashes and errors."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from flinkish_spark import (
    AggregateColumn,
    AggregateFunction,
    Emit,
    Fold,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    ValueStateDescriptor,
    VectorizedProcessFunction,
    WatermarkStrategy,
)
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.errors import ConfigError, FlinkishError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.functions.keyed import (
    BroadcastProcessFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
)
from flinkish_spark.functions.stream import (
    CheckpointedProcessFunction,
    CoProcessFunction,
    KeySelector,
    Partitioner,
    ProcessFunction,
)
from flinkish_spark.joins import CoGroupFunction, JoinType, SqliteTable
from flinkish_spark.operators.columnar_aggregates import AggregateOverflow
from flinkish_spark.operators.vectorized import sum_by_key
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import (
    CountEvictor,
    CountTrigger,
    EventTimeSessionWindows,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)

ORDERS = "user STRING, amount LONG"
LATE = OutputTag("late", ORDERS)
RULES = MapStateDescriptor("rules", "STRING", "LONG")


class Counting(KeyedProcessFunction):
    """Counts, and says when its timer fires; refuses bad elements."""

    def open(self, context: Any) -> None:
        self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))

    def process_element(self, value, ctx):
        if value.amount < 0:
            raise ValueError(f"a negative amount: {value.amount}")
        self.n.update(self.n.value() + 1)
        if ctx.timestamp() is not None:
            ctx.timer_service().register_event_time_timer(ctx.timestamp() + 10)
            ctx.timer_service().register_processing_time_timer(1_000)
        yield value.user, self.n.value()

    def on_timer(self, time_ms, ctx):
        yield ctx.get_current_key(), -time_ms


def counting(**settings: Any) -> ProgramHarness:
    given = {"key": "user", "output": "user STRING, n LONG", "uid": "counts"} | settings
    return ProgramHarness.of(Counting(), ORDERS, **given)


def rows(harness: ProgramHarness) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in harness.take().rows)


# -- functions by themselves ------------------------------------------------------------------------------


def test_a_keyed_function_has_state_and_timers_of_both_clocks() -> None:
    harness = counting()
    harness.push(("ann", 1), 5)
    harness.push({"user": "ann", "amount": 2}, 7)
    output = harness.take()
    assert [tuple(row) for row in output.rows] == [("ann", 1), ("ann", 2)] and output.times_ms == [5, 7]
    assert harness.timer_count() == 3 and harness.next_timer_ms(TimeDomain.EVENT_TIME) == 15
    harness.watermark(16)
    assert rows(harness) == [("ann", -15)]
    harness.processing_time(1_000)
    assert rows(harness) == [("ann", -1_000)]
    harness.end_of_input()
    assert rows(harness) == [("ann", -17)] and harness.timer_count() == 0


def test_a_snapshot_is_restored_with_another_number_of_subtasks() -> None:
    first = counting(parallelism=3)
    users = [f"user {number}" for number in range(20)]
    first.push_all([((user, 1), 5) for user in users])
    stored = first.snapshot()
    for parallelism in (1, 2, 5):
        second = counting(parallelism=parallelism, restore=stored)
        second.push_all([((user, 1), None) for user in users])
        assert rows(second) == sorted((user, 2) for user in users)
        second.watermark(15)
        assert rows(second) == sorted((user, -15) for user in users)
    assert first.entries("n") == {user: 1 for user in users}


def test_a_crash_loses_what_came_behind_the_last_snapshot() -> None:
    harness = counting()
    harness.push(("ann", 1), 5)
    harness.crash()
    harness.push(("ann", 1), 5)
    assert rows(harness) == [("ann", 1)], "without a snapshot it begins anew"
    harness.snapshot()
    harness.push(("ann", 1), 6)
    harness.watermark(15)
    harness.crash()
    assert harness.take().rows == [] and harness.watermark_ms < 0
    harness.push(("ann", 1), 6)
    assert rows(harness) == [("ann", 2)]
    harness.watermark(16)
    assert rows(harness) == [("ann", -16), ("ann", -15)]


def test_a_micro_batch_that_raises_has_done_nothing() -> None:
    harness = counting()
    with pytest.raises(ValueError, match="a negative amount: -1") as raised:
        harness.push_all([(("ann", 1), 5), (("ann", -1), 6)])
    assert raised.value.__notes__ == ["in the operator 'counts'"]
    assert harness.take().rows == [] and harness.entries("n") == {} and harness.timer_count() == 0
    harness.push(("ann", 1))
    assert rows(harness) == [("ann", 1)]


def test_elements_and_results_are_of_the_declared_types() -> None:
    with pytest.raises(ConfigError, match="amount"):
        counting().push(("ann", "much"))
    with pytest.raises(ConfigError, match="It is 'ann', which is no row"):
        counting().push("ann")
    with pytest.raises(ConfigError, match="there is no input 3"):
        counting().push(("ann", 1), source=3)
    with pytest.raises(ConfigError, match="there are 0 states 'm'"):
        counting().entries("m")
    with pytest.raises(UserFunctionError, match=r"operator 'counts'.*'n'"):
        counting(output="user STRING, n STRING").push(("ann", 1))
    with pytest.raises(SchemaError, match="not known"):
        counting(output=None)


def test_a_snapshot_must_fit_the_program() -> None:
    harness = counting()
    harness.push(("ann", 1))
    with pytest.raises(GraphError, match="counts"):
        counting(uid="others", restore=harness.snapshot())
    with pytest.raises(ConfigError, match="16"):
        counting(max_parallelism=8, restore=harness.snapshot())


def test_time_does_not_go_back() -> None:
    harness = counting()
    harness.watermark(10)
    harness.watermark(5)
    assert harness.watermark_ms == 10
    harness.processing_time(10)
    with pytest.raises(ValueError, match="cannot go back"):
        harness.processing_time(9)


class Owed(KeyedCoProcessFunction):
    def open(self, context):
        self.owed = context.get_state(ValueStateDescriptor("owed", "LONG", default=0))

    def process_element1(self, order, ctx):
        self.owed.update(self.owed.value() + order.amount)

    def process_element2(self, payment, ctx):
        self.owed.update(self.owed.value() - payment.paid)
        yield payment.payer, self.owed.value()


def test_a_function_with_two_keyed_inputs() -> None:
    given = {"key": ("user", "payer"), "output": "user STRING, owed LONG"}
    harness = ProgramHarness.of(Owed(), ORDERS, "payer STRING, paid LONG", **given)
    harness.push(("ann", 7))
    harness.push(("ann", 3), source=1)
    harness.micro_batch([(("ben", 1), None)], [(("ben", 1), None)])
    assert rows(harness) == [("ann", 4), ("ben", 0)]


class Sorted(CoProcessFunction):
    def process_element1(self, order, ctx):
        yield (f"{order.user} at {ctx.current_watermark()}, {ctx.current_processing_time()}",)

    def process_element2(self, refund, ctx):
        if refund.paid < 0:
            ctx.output(OutputTag("odd", "text STRING"), (refund.payer,))
        else:
            yield (refund.payer,)


def test_a_function_with_two_inputs_and_no_key() -> None:
    harness = ProgramHarness.of(
        Sorted(),
        ORDERS,
        "payer STRING, paid LONG",
        output="text STRING",
        side_outputs=[OutputTag("odd", "text STRING")],
    )
    harness.micro_batch([(("ann", 1), None)], watermark_ms=7, processing_time_ms=9)
    harness.push_all([(("ben", 1), None), (("cid", -1), None)], source=1)
    output = harness.take()
    assert [row.text for row in output.rows] == ["ann at 7, 9", "ben"]
    assert output.side == {"odd": [("cid",)]}


class Doubled(FlatMapFunction):
    def flat_map(self, value):
        return [value, value]


class Even(FilterFunction):
    def open(self, context):
        self.least = 2

    def filter(self, value):
        return value.n >= self.least and value.n % 2 == 0


class Split(ProcessFunction):
    def process_element(self, value, ctx):
        if value.n < 0:
            ctx.output(OutputTag("odd", "n LONG"), value)
        else:
            yield value


def test_functions_of_single_records() -> None:
    harness = ProgramHarness.of(Doubled(), "n LONG", output="n LONG")
    harness.push(1)
    assert rows(harness) == [(1,), (1,)]

    class Numbered(FlatMapFunction):
        number = 0

        def flat_map(self, value):
            self.number += 1
            yield (self.number,)

    harness = ProgramHarness.of(Numbered(), "n LONG", output="n LONG")
    harness.push_all([(7, None), (7, None)])
    harness.push(7)
    assert rows(harness) == [(1,), (1,), (2,)], "what it keeps to itself is gone with the task"
    harness = ProgramHarness.of(Even(), "n LONG")
    harness.push_all([(n, None) for n in range(5)])
    assert rows(harness) == [(2,), (4,)]
    odd = OutputTag("odd", "n LONG")
    harness = ProgramHarness.of(Split(), "n LONG", output="n LONG", side_outputs=[odd])
    harness.push_all([(1, 5), (-1, 6)])
    output = harness.take()
    assert output.rows == [(1,)] and output.times_ms == [5] and output.side == {"odd": [(-1,)]}


class Limits(BroadcastProcessFunction):
    def process_element(self, value, ctx):
        limit = ctx.get_broadcast_state(RULES).get(value.user)
        if limit is None or value.amount <= limit:
            yield value.user, value.amount

    def process_broadcast_element(self, rule, ctx):
        ctx.get_broadcast_state(RULES)[rule.user] = rule.most


class KeyedLimits(KeyedBroadcastProcessFunction):
    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", "LONG"))

    def process_element(self, value, ctx):
        self.last.update(value.amount)
        yield value.user, min(value.amount, ctx.get_broadcast_state(RULES).get(value.user, 1_000))

    def process_broadcast_element(self, rule, ctx):
        ctx.get_broadcast_state(RULES)[rule.user] = rule.most
        ctx.apply_to_keyed_state(
            ValueStateDescriptor("last", "LONG"), lambda key, state: state.update(state.value() + 100)
        )


@pytest.mark.parametrize("function", [Limits(), KeyedLimits()], ids=["plain", "keyed"])
def test_broadcast_state_is_in_every_subtask_and_is_restored_in_any_number(function: Any) -> None:
    key = {"key": "user"} if isinstance(function, KeyedLimits) else {}
    settings = {"output": ORDERS, "broadcast": [RULES], **key}
    types = (ORDERS, "user STRING, most LONG")
    harness = ProgramHarness.of(function, *types, parallelism=3, **settings)
    harness.micro_batch([(("ann", 5), None)], [(("ann", 7), None), (("ben", 2), None)])
    assert rows(harness) == [("ann", 5)]
    again = ProgramHarness.of(function, *types, parallelism=2, restore=harness.snapshot(), **settings)
    for channel in (0, 1):
        again.push_all([(("ben", 2), None)], channel=channel)
    assert rows(again) == [("ben", 2), ("ben", 2)]


@pytest.mark.parametrize("function", [Limits(), KeyedLimits()], ids=["plain", "keyed"])
def test_the_copies_of_a_broadcast_state_are_shown_subtask_by_subtask(function: Any) -> None:
    key = {"key": "user"} if isinstance(function, KeyedLimits) else {}
    settings = {"output": ORDERS, "broadcast": [RULES], **key}
    types = (ORDERS, "user STRING, most LONG")
    harness = ProgramHarness.of(function, *types, parallelism=2, **settings)
    assert harness.copies("rules") == [{}, {}], "nothing is stored yet"
    harness.push_all([(("ann", 7), None), (("ben", 2), None)], source=1)
    assert harness.copies("rules", "operator") == [{"ann": 7, "ben": 2}] * 2
    again = ProgramHarness.of(function, *types, parallelism=3, restore=harness.snapshot(), **settings)
    assert again.copies("rules") == [{"ann": 7, "ben": 2}] * 3


def test_copies_are_of_broadcast_states_that_are_there() -> None:
    harness = ProgramHarness.of(
        KeyedLimits(), ORDERS, "user STRING, most LONG", key="user", output=ORDERS, broadcast=[RULES]
    )
    with pytest.raises(ConfigError, match=r"there are 0 states 'last'\. There is operator/rules"):
        harness.copies("last")
    with pytest.raises(ConfigError, match=r"there are 0 states 'rules'\. There is operator/rules"):
        harness.copies("rules", "another")
    with pytest.raises(ConfigError, match="There is no broadcast state"):
        counting().copies("rules")

    def twice(orders, rules):
        users, copied = orders.key_by("user"), rules.broadcast(RULES)
        first = users.connect(copied).process(KeyedLimits(), output=ORDERS, uid="first")
        return first.key_by("user").connect(copied).process(KeyedLimits(), output=ORDERS, uid="second")

    both = ProgramHarness(twice, ORDERS, "user STRING, most LONG")
    both.push(("ann", 7), source=1)
    with pytest.raises(ConfigError, match=r"there are 2 states 'rules'\. There is first/rules, second/rules"):
        both.copies("rules")
    assert both.copies("rules", "second") == [{"ann": 7}]


def test_keyed_state_is_reached_from_the_broadcast_side() -> None:
    settings: dict[str, Any] = {"key": "user", "output": ORDERS, "broadcast": [RULES]}
    harness = ProgramHarness.of(KeyedLimits(), ORDERS, "user STRING, most LONG", parallelism=2, **settings)
    harness.push_all([(("ann", 5), None), (("ben", 6), None)])
    harness.push(("ann", 9), source=1)
    assert harness.entries("last") == {"ann": 105, "ben": 106}


class Repeated(CheckpointedProcessFunction):
    def open(self, context):
        self.last = context.get_operator_list_state(OperatorListDescriptor("last", "STRING"))

    def process_element(self, value, ctx):
        if value.user in self.last.get():
            yield value.user, value.amount
        self.last.add(value.user)


def test_operator_list_state_is_dealt_out_anew() -> None:
    harness = ProgramHarness.of(Repeated(), ORDERS, output=ORDERS, parallelism=2)
    harness.push_all([(("ann", 1), None)], channel=0)
    harness.push_all([(("ann", 2), None), (("ben", 2), None)], channel=1)
    assert harness.take().rows == [], "each subtask has its own"
    one = ProgramHarness.of(Repeated(), ORDERS, output=ORDERS, restore=harness.snapshot())
    one.push_all([(("ann", 3), None), (("ben", 3), None)], channel=5)
    assert rows(one) == [("ann", 3), ("ben", 3)]


class Sums(VectorizedProcessFunction):
    def open(self, context):
        context.get_state(ValueStateDescriptor("total", "LONG"))

    def process_batch(self, batch, ctx):
        total = ctx.state("total")
        sums = total.numbers() + sum_by_key(ctx.index, batch.column("amount").to_numpy())
        total.put([sums])
        yield pa.RecordBatch.from_arrays([*ctx.index.keys, pa.array(sums)], names=["user", "total"])


def test_a_vectorized_function() -> None:
    harness = ProgramHarness.of(Sums(), ORDERS, key="user", output="user STRING, total LONG")
    harness.push_all([(("ann", 1), None), (("ben", 5), None), (("ann", 2), None)])
    harness.push(("ann", 4))
    assert rows(harness) == [("ann", 3), ("ann", 7), ("ben", 5)]


# -- programs ---------------------------------------------------------------------------------------------


class Bounds(ProcessWindowFunction):
    def process(self, key, context, elements):
        yield key, *context.window, sum(element.amount for element in elements)


class Average(AggregateFunction):
    def create_accumulator(self):
        return 0, 0

    def add(self, value, accumulator):
        return accumulator[0] + value.amount, accumulator[1] + 1

    def get_result(self, accumulator):
        return (accumulator[0] // accumulator[1],)

    def merge(self, first, second):
        return first[0] + second[0], first[1] + second[1]


BOUNDS = "user STRING, start LONG, end LONG, total LONG"


def test_windows_as_they_are_declared_with_lateness_and_a_side_output() -> None:
    def program(orders):
        windows = orders.key_by("user").window(TumblingEventTimeWindows(10)).allowed_lateness(5)
        return windows.side_output_late_data(LATE).process(Bounds(), output=BOUNDS, uid="windows")

    harness = ProgramHarness(program, ORDERS, side_outputs=[LATE])
    harness.push_all([(("ann", 1), 3), (("ann", 2), 9)])
    harness.watermark(9)
    harness.push(("ann", 4), 5)
    harness.watermark(14)
    harness.push(("ann", 8), 5)
    output = harness.take()
    assert output.rows == [("ann", 0, 10, 3), ("ann", 0, 10, 7)] and output.times_ms == [9, 9]
    assert output.side == {"late": [("ann", 8)]}


def test_late_elements_that_go_nowhere_are_counted() -> None:
    def program(orders):
        return (
            orders.key_by("user")
            .window(TumblingEventTimeWindows(10))
            .process(Bounds(), output=BOUNDS, uid="windows")
        )

    harness = ProgramHarness(program, ORDERS)
    harness.watermark(20)
    harness.push(("ann", 1), 3)
    assert harness.take().counts == {"late_records_dropped": 1}


def test_sessions_merge_and_survive_a_crash_in_between() -> None:
    def program(orders):
        windows = orders.key_by("user").window(EventTimeSessionWindows(10))
        return windows.aggregate(Average(), accumulator="total LONG, n LONG", output="mean LONG", uid="means")

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", 1), 0), (("ann", 5), 15)])
    harness.snapshot()
    harness.push(("ann", 300), 8)
    harness.crash()
    harness.push(("ann", 3), 8)
    harness.end_of_input()
    assert rows(harness) == [(3,)]


def test_triggers_and_evictors() -> None:
    def program(orders):
        windows = orders.key_by("user").window(SlidingEventTimeWindows(20, 20)).trigger(CountTrigger(2))
        return windows.evictor(CountEvictor(1)).process(Bounds(), output=BOUNDS, uid="last")

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", 1), 3), (("ann", 2), 4), (("ann", 4), 5), (("ann", 8), 6)])
    assert [row.total for row in harness.take().rows] == [2, 8]


def test_windows_by_processing_time() -> None:
    def program(orders):
        windows = orders.key_by("user").window(TumblingProcessingTimeWindows(10))
        return windows.process(Bounds(), output=BOUNDS, uid="windows")

    harness = ProgramHarness(program, ORDERS)
    harness.processing_time(5)
    harness.push(("ann", 1))
    harness.processing_time(10)
    assert rows(harness) == [("ann", 0, 10, 1)]


def test_folds_over_columns_windows_of_windows_and_computed_keys() -> None:
    def program(orders):
        by_user = orders.key_by(lambda order: order.user.lower(), key="STRING")
        small = by_user.window(TumblingEventTimeWindows(10)).reduce(
            lambda a, b: (a.user, a.amount + b.amount), uid="small"
        )
        total = AggregateColumn("total", Fold.SUM, "amount")
        return small.key_by("user").window(TumblingEventTimeWindows(20)).fold(total, uid="large")

    harness = ProgramHarness(program, ORDERS, parallelism=2)
    harness.push_all([(("ann", 1), 1), (("ann", 2), 11), (("ANN", 4), 12), (("ben", 8), 21)])
    harness.watermark(19)
    (row,) = harness.take().rows
    start = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert row == ("ann", 7, start, start + datetime.timedelta(milliseconds=20))
    harness.end_of_input()
    assert [row[:2] for row in harness.take().rows] == [("ben", 8)]


def test_running_aggregates_of_both_kinds() -> None:
    def program(orders):
        sums = orders.key_by("user").sum("amount", uid="sums", emit=Emit.PER_KEY)
        return sums.union(
            orders.key_by("user").reduce(lambda a, b: (a.user, a.amount * b.amount), uid="products")
        )

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", 2), None), (("ann", 5), None)])
    assert rows(harness) == [("ann", 2), ("ann", 7), ("ann", 10)]


class Counts(CoGroupFunction):
    def co_group(self, key, context, lefts, rights):
        yield key, len(lefts), len(rights)


def test_joins_of_all_kinds() -> None:
    def joined(how: Any) -> ProgramHarness:
        return ProgramHarness(
            lambda orders, others: how(orders.key_by("user").join(others.key_by("payer"))),
            ORDERS,
            "payer STRING, paid LONG",
        )

    windows = TumblingEventTimeWindows(10)
    near = joined(lambda both: both.interval(lower_ms=0, upper_ms=5, join_type=JoinType.LEFT, uid="near"))
    same = joined(lambda both: both.window(windows, uid="same"))
    grouped = joined(
        lambda both: both.co_group(windows, Counts(), output="user STRING, l LONG, r LONG", uid="groups")
    )
    rated = joined(lambda both: both.temporal(uid="rated"))
    for harness in (near, same, grouped, rated):
        harness.push(("ann", 9), 1, source=1)
        harness.push_all([(("ann", 1), 1), (("ben", 2), 3)])
        harness.end_of_input()
    assert rows(near) == [("ann", 1, "ann", 9), ("ben", 2, None, None)]
    assert rows(same) == [("ann", 1, "ann", 9)]
    assert rows(grouped) == [("ann", 1, 1), ("ben", 1, 0)]
    assert rows(rated) == [("ann", 1, "ann", 9)]
    assert near.output_type.names == ["user", "amount", "payer", "paid"]


def test_steps_between_operators_run_too(tmp_path: Any) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "table") as made:
        made.execute("CREATE TABLE countries (user TEXT, country TEXT)")
        made.execute("INSERT INTO countries VALUES ('ann', 'FR')")
    made.close()

    class First(KeySelector):
        def get_key(self, value) -> str:
            return value.value

    class ToOne(Partitioner):
        def partition(self, key, num_partitions):
            return 0

    def program(orders):
        table = SqliteTable(tmp_path / "table", "countries", ["user"], ["country"])
        by_amount = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("amount")
        timed = orders.rebalance(2).assign_timestamps_and_watermarks(by_amount)
        found = timed.lookup_join(table, "STRING", key=lambda order: order.user)
        windows = found.partition_custom(ToOne(), "user").key_by(First()).window(TumblingEventTimeWindows(10))
        return windows.process(Bounds(), output=BOUNDS, uid="windows").filter(lambda row: row.total > 1)

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", 1), None), (("ann", 2), None), (("ann", 12), None), (("ann", 21), None)])
    harness.watermark(19)
    assert rows(harness) == [("FR", 0, 10, 3), ("FR", 10, 20, 12)]


class Total(NamedTuple):
    user: str
    total: int


def test_timestamp_functions_and_hints() -> None:
    class Last(KeyedProcessFunction):
        def process_element(self, value, ctx) -> Iterator[Total]:
            yield Total(value.user, ctx.timestamp())

    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(
        lambda order, known_ms: order.amount + (known_ms or 0)
    )
    harness = ProgramHarness(
        lambda orders: (
            orders.assign_timestamps_and_watermarks(strategy).key_by("user").process(Last(), uid="last")
        ),
        ORDERS,
    )
    harness.push(("ann", 3), 4)
    assert harness.take().rows == [("ann", 7)]


def test_ways_that_a_job_could_not_take_are_refused() -> None:
    def between(orders):
        sums = orders.key_by("user").sum("amount", uid="sums").transform(lambda frame: frame)
        return sums.key_by("user").sum("amount", uid="again")

    with pytest.raises(GraphError, match=r"transform\(\) cannot be run"):
        ProgramHarness(between, ORDERS)

    def unlike(orders):
        return orders.union(orders.map(lambda order: (order.user,), output="user STRING"))

    with pytest.raises(SchemaError, match="unites a stream of"):
        ProgramHarness(unlike, ORDERS)


def test_a_process_function_behind_an_operator_is_told_no_times() -> None:
    class Times(ProcessFunction):
        def process_element(self, value, ctx):
            yield (str(ctx.timestamp()),)

    harness = ProgramHarness(
        lambda stream: stream.key_by("user").sum("amount", uid="s").process(Times(), output="t STRING"),
        ORDERS,
    )
    harness.push(("ann", 1), 5)
    assert harness.take().rows == [("None",)], "as in a job"


STEPS: list[Any] = [
    [(("ann", 1), 1), (("ben", 2), 4)],
    3,
    [(("ann", 3), 8), (("ann", 4), 2)],
    9,
    [(("ben", 5), 10), (("cid", 6), 21)],
    14,
    [(("ann", 7), 30), (("ben", 8), 12)],
    40,
]


def apply(harness: ProgramHarness, step: Any) -> list[tuple[Any, ...]]:
    if isinstance(step, int):
        harness.watermark(step)
    else:
        harness.push_all(step)
    return rows(harness)


@pytest.mark.parametrize("kind", ["fold", "session", "sum", "interval", "chain"])
def test_a_crash_behind_any_step_changes_nothing(kind: str) -> None:
    total = AggregateColumn("total", Fold.SUM, "amount")
    tumbling = TumblingEventTimeWindows(10)

    def add(a: Any, b: Any) -> Any:
        return a.user, a.amount + b.amount

    programs: dict[str, Any] = {
        "fold": lambda s: s.key_by("user").window(tumbling).allowed_lateness(5).fold(total, uid="one"),
        "session": lambda s: s.key_by("user").window(EventTimeSessionWindows(5)).reduce(add, uid="one"),
        "sum": lambda s: s.key_by("user").sum("amount", uid="one", emit=Emit.PER_KEY),
        "interval": lambda s: s.key_by("user").interval_join(
            s.key_by("user"), lower_ms=0, upper_ms=9, join_type=JoinType.LEFT, uid="one"
        ),
        "chain": lambda s: (
            s.key_by("user")
            .window(tumbling)
            .reduce(add, uid="one")
            .key_by("user")
            .window(TumblingEventTimeWindows(20))
            .fold(total, uid="two")
        ),
    }
    whole = ProgramHarness(programs[kind], ORDERS)
    wanted = [apply(whole, step) for step in STEPS]
    assert any(wanted)
    stumbling, moving = (ProgramHarness(programs[kind], ORDERS, parallelism=2) for _ in range(2))
    for number, step in enumerate(STEPS):
        stumbling.snapshot()
        apply(stumbling, step)
        stumbling.crash()
        assert apply(stumbling, step) == wanted[number]
        moving = ProgramHarness(programs[kind], ORDERS, parallelism=1 + number % 3, restore=moving.snapshot())
        assert apply(moving, step) == wanted[number]


def test_side_outputs_lead_into_operators_and_unions_have_ways_from_all_sides() -> None:
    big = OutputTag("big", ORDERS)

    class Parted(KeyedProcessFunction):
        def process_element(self, value, ctx):
            if value.amount > 5:
                ctx.output(big, value)
            else:
                yield value

    def program(orders):
        parted = orders.key_by("user").process(Parted(), output=ORDERS, uid="parted")
        pairs = parted.get_side_output(big).key_by("user").count_window(2)
        summed = pairs.reduce(lambda a, b: (a.user, a.amount + b.amount), uid="pairs")
        return parted.union(summed, orders.filter(lambda order: order.amount == 0))

    harness = ProgramHarness(program, ORDERS)
    harness.push_all([(("ann", amount), None) for amount in (0, 1, 6, 7, 8)])
    assert rows(harness) == [("ann", 0), ("ann", 0), ("ann", 1), ("ann", 13)]


def test_values_of_all_types_go_through_unchanged() -> None:
    types = (
        "user STRING, price DECIMAL(12, 3), at TIMESTAMP, day DATE, tags ARRAY<STRING>, "
        "counts MAP<STRING, LONG>, place STRUCT<x: INT, y: STRING>, raw BINARY"
    )

    class Echo(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield value

    at = datetime.datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=datetime.UTC)
    full = (None, decimal.Decimal("1.125"), at, at.date(), ["a", None], {"k": 1}, {"x": 1, "y": None}, b"x")
    harness = ProgramHarness.of(Echo(), types, key=("user", "day"), output=types)
    harness.push(full)
    assert harness.take().rows == [full]


def test_what_needs_spark_or_is_no_program_is_refused_with_what_to_do() -> None:
    for what, program in {
        "transform": lambda orders: orders.transform(lambda frame: frame),
        "which its records do not have": lambda orders: orders.key_by("id").sum("amount", uid="sums"),
        "returned a NoneType": lambda orders: None,
        "returned a KeyedStream": lambda orders: orders.key_by("user"),
    }.items():
        with pytest.raises(FlinkishError, match=what) as refused:
            ProgramHarness(program, ORDERS)
        assert refused.value.what_to_do
    for settings in ({}, {"key": "user", "inputs": 2}, {"key": "user", "broadcast": [RULES]}):
        inputs = [ORDERS] * settings.pop("inputs", 1)
        function = Limits() if "broadcast" in settings else Counting()
        with pytest.raises(ConfigError) as refused:
            ProgramHarness.of(function, *inputs, output=ORDERS, **settings)
        assert refused.value.what_to_do
    with pytest.raises(ConfigError, match="object"):
        ProgramHarness.of(object(), ORDERS)
    with pytest.raises(ConfigError, match="no input"):
        ProgramHarness(lambda: None)


def test_functions_that_run_are_copies_that_are_opened_and_closed() -> None:
    happened: list[str] = []

    class Noted(KeyedProcessFunction):
        def open(self, context):
            happened.append(f"open {context.get_task_name_with_subtasks()}")
            self.seen = 0

        def process_element(self, value, ctx):
            self.seen += 1
            yield value.user, self.seen

        def close(self):
            happened.append("close")

    given = Noted()
    harness = ProgramHarness.of(
        given, ORDERS, key="user", output="user STRING, n LONG", uid="noted", parallelism=2
    )
    harness.push(("ann", 1))
    assert happened[-2:] == ["open noted (1/2)", "open noted (2/2)"] and not hasattr(given, "seen")
    harness.crash()
    harness.push(("ann", 1))
    assert rows(harness) == [("ann", 1)], "what is no state is gone"
    harness.close()
    assert happened.count("close") == 2


def _fails(first, second):
    raise LookupError("no rate")


@pytest.mark.parametrize(
    ("program", "raised", "says"),
    [
        (lambda s: s.reduce(_fails, uid="folded", emit=Emit.PER_KEY), LookupError, "no rate"),
        (lambda s: s.sum("amount", uid="folded", emit=Emit.PER_KEY), AggregateOverflow, "leaves its type"),
    ],
)
@pytest.mark.parametrize("is_one", [True, False], ids=["one micro-batch", "two"])
def test_what_fails_over_columns_is_noted_with_its_operator(program, raised, says, is_one) -> None:
    harness = ProgramHarness(lambda orders: program(orders.key_by("user")), "user STRING, amount INT")
    orders = [(("ann", 2**31 - 1), None), (("ann", 1), None)]
    with pytest.raises(raised, match=says) as caught:
        for some in [orders] if is_one else [orders[:1], orders[1:]]:
            harness.push_all(some)
    assert caught.value.__notes__ == ["in the operator 'folded'"]


def test_a_wrong_row_of_a_function_over_columns_is_told_with_its_operator() -> None:
    def program(orders):
        return orders.key_by("user").reduce(lambda a, b: (a.user, "many"), uid="folded", emit=Emit.PER_KEY)

    harness = ProgramHarness(program, "user STRING, amount INT")
    with pytest.raises(UserFunctionError, match=r"operator 'folded': .*cannot hold 'many'"):
        harness.push_all([(("ann", 1), None), (("ann", 2), None)])


def test_a_field_to_partition_by_that_is_not_there_is_refused_as_in_a_job() -> None:
    def program(key):
        return lambda orders: orders.partition_custom(lambda key, tasks: 0, key, 3).map(
            lambda o: o, output=ORDERS
        )

    assert ProgramHarness(program("user"), ORDERS)
    with pytest.raises(
        GraphError, match=r"partition_custom\(\) has the key 'usr', which the records do not have"
    ):
        ProgramHarness(program("usr"), ORDERS)
