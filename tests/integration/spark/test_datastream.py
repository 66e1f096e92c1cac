"""Keys by functions, redistributions and process without a key: in Spark's plans, and in running jobs."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark import TaskContext
from pyspark.sql import functions as F

from flinkish_spark import (
    KeyedProcessFunction,
    MemorySink,
    NoRestart,
    OutputTag,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.core.elements import MIN_WATERMARK_MS
from flinkish_spark.core.errors import GraphError, UserFunctionError
from flinkish_spark.functions.aggregates import Emit
from flinkish_spark.functions.stream import KeySelector, Partitioner, ProcessFunction
from flinkish_spark.planning.partitioning import Rebalance, Rescale, make_custom_partitioning
from flinkish_spark.transport import columns as C
from tests.support.jobs import ORDER, TOTAL, RunningTotal, environment, expected_totals, failure_of, run_until

pytestmark = pytest.mark.timeout(600)


# -- plans ------------------------------------------------------------------------------------------


def placed(spark: Any, records: int = 1_000, tasks: int = 4) -> Any:
    """Rows as a source and a flat_map make them: two of each record, in four channels."""
    half = F.expr("id div 2")
    return spark.range(0, 2 * records, 1, tasks).select(
        "id", F.pmod(half, F.lit(4)).alias(C.CHANNEL), half.alias(C.SEQUENCE)
    )


def found(frame: Any) -> list[list[int]]:
    """Return the ids of each task that has any, in the task's order."""
    tasks = defaultdict(list)
    for row in frame.withColumn("task", F.spark_partition_id()).collect():
        tasks[row["task"]].append(row["id"])
    return [tasks[task] for task in sorted(tasks)]


def test_records_are_spread_evenly_and_stand_in_their_order(spark: Any) -> None:
    once, again = (found(Rebalance(5)(placed(spark))) for _ in range(2))
    assert once == again and len(once) == 5
    assert sorted(chain.from_iterable(once)) == list(range(2_000))
    assert all(ids == sorted(ids) for ids in once)
    assert min(map(len, once)) > 300
    # What was made of a record stays together.
    assert all(ids[0::2] == [one - 1 for one in ids[1::2]] for ids in once)


def test_where_a_record_goes_does_not_depend_on_the_tasks_in_front(spark: Any) -> None:
    """As after a restart with other input partitions: the same place, the same task."""
    few, many = (found(Rebalance(5)(placed(spark, tasks=tasks))) for tasks in (1, 9))
    assert [set(ids) for ids in few] == [set(ids) for ids in many]


def test_rows_without_a_place_go_by_their_number_in_their_task(spark: Any) -> None:
    frame = placed(spark).drop(C.CHANNEL, C.SEQUENCE)
    once, again = (found(Rebalance(3)(frame)) for _ in range(2))
    assert once == again and len(once) == 3 and sorted(chain.from_iterable(once)) == list(range(2_000))
    assert found(Rebalance(1)(frame)) == [list(range(2_000))]


def test_fewer_tasks_take_what_more_would(spark: Any) -> None:
    narrow = Rescale(2)(placed(spark))
    assert narrow.rdd.getNumPartitions() == 2 and sorted(chain.from_iterable(found(narrow))) == list(
        range(2_000)
    )
    assert Rescale(9)(placed(spark)).rdd.getNumPartitions() == 4


def test_control_columns_travel(spark: Any) -> None:
    for move in (Rebalance(3), Rescale(3), make_custom_partitioning(lambda key, tasks: key % tasks, "id", 3)):
        moved = move(placed(spark))
        assert moved.columns == ["id", C.CHANNEL, C.SEQUENCE]
        assert moved.where(f"{C.SEQUENCE} != id div 2").count() == 0


def test_a_partitioner_says_the_task_itself(spark: Any) -> None:
    moved = make_custom_partitioning(lambda key, tasks: (key // 2) % 3 + 1, "id", 5)(placed(spark))
    rows = moved.withColumn("task", F.spark_partition_id()).collect()
    assert all(row["task"] == row["id"] // 2 % 3 + 1 for row in rows) and len(rows) == 2_000
    assert all(ids == sorted(ids) for ids in found(moved))


# -- keys -------------------------------------------------------------------------------------------

ORDERS = [(f"User{n % 7}", n % 11) for n in range(300)]
AMOUNTS: dict[str, list[int]] = defaultdict(list)
for _user, _amount in ORDERS:
    AMOUNTS[_user].append(_amount)


class Initial(KeySelector):
    def open(self, context: Any) -> None:
        self.length = len("UserN")

    def get_key(self, value: Any) -> str | None:
        return value.user[: self.length].lower()


class OddCount(KeyedProcessFunction):
    """Counts the elements of its key, which is a tuple."""

    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.count.update(self.count.value() + 1)
        user, is_odd = ctx.get_current_key()
        yield user, is_odd, self.count.value()


def keyed_totals(stream: Any, uid: str) -> Any:
    return stream.process(RunningTotal(), output=TOTAL, uid=uid)


def parity(total: Any) -> tuple[str, bool]:
    return total.user, total.total % 2 == 1


@pytest.mark.nightly
def test_keys_by_functions_in_a_job(spark: Any, tmp_path: Any) -> None:
    """Beside columns, with a selector, in front of an aggregate over columns, and behind a keyed operator."""
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection(ORDERS, ORDER, uid="orders")
    names = ("by-function", "by-selector", "folded", "odd")
    sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in names}
    by_function = keyed_totals(orders.key_by(lambda order: order.user, key="STRING"), "function")
    by_function.sink_to(sinks["by-function"], uid="by-function")
    keyed_totals(orders.key_by(Initial()), "selector").sink_to(sinks["by-selector"], uid="by-selector")
    folded = orders.key_by(Initial()).sum("amount", uid="sums", emit=Emit.PER_KEY)
    folded.sink_to(sinks["folded"], uid="folded")
    odd = by_function.rebalance().key_by(parity)
    counts = odd.process(OddCount(), output="user STRING, is_odd BOOLEAN, n LONG", uid="odd-counts")
    counts.sink_to(sinks["odd"], uid="odd")
    env.execute()
    got = {name: [tuple(row) for row in sink.rows()] for name, sink in sinks.items()}
    totals = expected_totals(AMOUNTS)  # type: ignore[arg-type]
    assert Counter(got["by-function"]) == Counter(got["by-selector"]) == totals
    last = {user: total for user, total in got["folded"]}
    assert last == {user: sum(amounts) for user, amounts in AMOUNTS.items()}
    wanted = Counter((user, total % 2 == 1) for user, total in totals.elements())
    most: dict[tuple[str, bool], int] = {}
    for user, is_odd, n in got["odd"]:
        most[user, is_odd] = max(n, most.get((user, is_odd), 0))
    assert most == dict(wanted) and len(got["odd"]) == len(ORDERS)


def _has(sink: MemorySink, wanted: set[tuple[Any, ...]], client: Any) -> bool:
    return {tuple(row) for row in sink.rows()} == wanted


@pytest.mark.nightly
def test_a_job_may_go_over_from_a_column_to_a_function(spark: Any, tmp_path: Any) -> None:
    """Values and types are the key, not where they come from: the state is found again."""
    sink = MemorySink(f"{tmp_path}/totals")
    folder = tmp_path / "in"
    folder.mkdir()
    keys: list[tuple[Any, dict[str, str]]] = [
        ("user", {}),
        (lambda order: order.user, {"key": "STRING"}),
    ]
    for number, (key, declared) in enumerate(keys):
        env = environment(spark, tmp_path / "job")
        frame = spark.readStream.schema(ORDER).json(str(folder))
        orders = env.from_dataframe(frame, uid="files")
        keyed_totals(orders.key_by(key, **declared), "totals").sink_to(sink, uid="out")
        lines = "".join(json.dumps({"user": user, "amount": 10**number}) + "\n" for user in AMOUNTS)
        (folder / f".{number}").write_text(lines)
        (folder / f".{number}").rename(folder / f"{number}.json")
        wanted = {(user, total) for user in AMOUNTS for total in (1, 11)[: number + 1]}
        run_until(env, partial(_has, sink, wanted))
    assert len(sink.rows()) == 2 * len(AMOUNTS)


def test_a_key_function_that_fails_names_the_record(spark: Any, tmp_path: Any) -> None:
    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    orders = env.from_collection([("ann", 1), (None, 2)], ORDER, uid="orders")
    totals = keyed_totals(orders.key_by(lambda order: order.user.lower(), key="STRING"), "totals")
    totals.sink_to(MemorySink(f"{tmp_path}/out"), uid="out")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError)
    assert "the key function of operator 'totals' failed on the record at channel 0, sequence 1" in str(error)
    assert "AttributeError" in str(error)


def test_a_lazy_result_that_fails_names_the_record(spark: Any, tmp_path: Any) -> None:
    """A `map` ends where its function raises StopIteration; of the second record [(1,)] would be left."""

    def amount(number: int) -> tuple[int]:
        return (next(one for one in (1, 3) if one == number),)

    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    orders = env.from_collection([("ann", 1), ("ben", 2)], ORDER, uid="orders")
    made = orders.flat_map(lambda order: map(amount, [1, order.amount]), output="n LONG", name="amounts")
    made.sink_to(MemorySink(f"{tmp_path}/out"), uid="out")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError)
    assert "'amounts' failed on the record at channel 0, sequence 1" in str(error)
    assert "StopIteration was raised by amount()" in str(error)


# -- tasks ------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    user: str
    amount: int
    task: int


def in_task(order: Any) -> Seen:
    context = TaskContext.get()
    assert context is not None
    return Seen(order.user, order.amount, context.partitionId())


class ByDigit(Partitioner):
    def partition(self, key: Any, num_partitions: int) -> int:
        return int(key) % num_partitions


class Places(KeyedProcessFunction):
    """Emits the amounts of a key as one text, so that their order is seen."""

    def open(self, context: Any) -> None:
        self.seen = context.get_state(ValueStateDescriptor("seen", "STRING", default=""))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.seen.update(f"{self.seen.value()}{value.amount},")
        yield value.user, self.seen.value()


@pytest.mark.nightly
def test_redistributions_in_a_job(spark: Any, tmp_path: Any) -> None:
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection(ORDERS, ORDER, uid="orders")
    sinks = {
        name: MemorySink(f"{tmp_path}/{name}") for name in ("spread", "own", "order", "set", "behind", "one")
    }
    orders.rebalance(3).map(in_task).sink_to(sinks["spread"], uid="spread")
    own = orders.partition_custom(ByDigit(), lambda order: order.user[-1], 3)
    own.map(in_task).sink_to(sinks["own"], uid="own")
    placed = orders.flat_map(lambda o: [o, o], output=ORDER).rebalance(3).key_by("user")
    places = placed.process(Places(), output="user STRING, amounts STRING", uid="places")
    places.sink_to(sinks["order"], uid="order")
    orders.map(in_task).set_parallelism(2).sink_to(sinks["set"], uid="set")
    totals = keyed_totals(orders.key_by("user"), "totals")
    totals.rebalance(3).map(lambda t: (t.user, t.total), output=TOTAL).sink_to(sinks["behind"], uid="behind")
    totals.partition_custom(ByDigit(), lambda t: t.user[-1]).global_().sink_to(sinks["one"], uid="one")
    env.execute()
    got = {name: [tuple(row) for row in sink.rows()] for name, sink in sinks.items()}
    for name, tasks in (("spread", 3), ("own", 3), ("set", 2)):
        assert Counter(row[:2] for row in got[name]) == Counter(ORDERS)
        assert len({row[2] for row in got[name]}) == tasks
    tasks_of = defaultdict(set)
    for user, _, task in got["own"]:
        tasks_of[int(user[-1]) % 3].add(task)
    assert all(len(tasks) == 1 for tasks in tasks_of.values())
    longest = {user: max((r[1] for r in got["order"] if r[0] == user), key=len) for user in AMOUNTS}
    assert longest == {
        user: "".join(f"{amount},{amount}," for amount in amounts) for user, amounts in AMOUNTS.items()
    }
    assert Counter(got["behind"]) == Counter(got["one"]) == expected_totals(AMOUNTS)  # type: ignore[arg-type]


def test_a_sort_over_all_tasks_is_still_refused(spark: Any, tmp_path: Any) -> None:
    """What a redistribution sorts stays within a task, and is no state."""
    env = environment(spark, tmp_path / "job", restart_strategy=NoRestart())
    orders = env.from_collection(ORDERS, ORDER, uid="orders").transform(lambda df: df.orderBy("user"))
    orders.sink_to(MemorySink(f"{tmp_path}/out"), uid="out")
    error = failure_of(env)
    assert isinstance(error, GraphError) and "Sorting is not supported" in str(error)


# -- process without a key --------------------------------------------------------------------------

REFUSED = OutputTag("refused", "user STRING, at LONG, watermark LONG, now LONG")
STARTED_MS = 1_700_000_000_000


class Checked(ProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        if value.amount == 0:
            ctx.output(
                REFUSED,
                (value.user, ctx.timestamp(), ctx.current_watermark(), ctx.current_processing_time()),
            )
        else:
            yield value.user, value.amount


class Last(KeyedProcessFunction):
    """Emits a key's sum when no more records come."""

    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> None:
        self.total.update(self.total.value() + value.amount)
        ctx.timer_service().register_event_time_timer(STARTED_MS + 1_000_000)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), self.total.value()


def test_process_without_a_key_in_front_of_a_keyed_operator(spark: Any, tmp_path: Any) -> None:
    """Times, side outputs, a strategy with the source, and all of it behind a redistribution."""
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(
        lambda order, known: STARTED_MS + order.amount
    )
    env = environment(spark, tmp_path / "job")
    orders = env.from_source(CollectionSource(ORDERS, ORDER, splits=2), strategy, uid="orders")
    checked = orders.rebalance(3).process(Checked(), output=ORDER).name("checked")
    sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in ("refused", "totals")}
    checked.get_side_output(REFUSED).sink_to(sinks["refused"], uid="refused")
    lasts = checked.key_by(lambda order: order.user, key="STRING")
    lasts.process(Last(), output=TOTAL, uid="last").sink_to(sinks["totals"], uid="out")
    env.execute()
    refused = [tuple(row) for row in sinks["refused"].rows()]
    assert Counter(row[:3] for row in refused) == Counter(
        (user, STARTED_MS, MIN_WATERMARK_MS) for user, amount in ORDERS if amount == 0
    )
    assert len({row[3] for row in refused}) == 1, "all tasks of a micro-batch see one time"
    totals = [tuple(row) for row in sinks["totals"].rows()]
    assert Counter(totals) == Counter((user, sum(amounts)) for user, amounts in AMOUNTS.items())


def test_the_program_of_the_page_runs(spark: Any, tmp_path: Any) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "datastream.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "docs/datastream.md", "exec"), scope)
    scope["run"](spark, str(tmp_path / "job"))
