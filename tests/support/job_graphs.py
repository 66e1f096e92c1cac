"""Twelve programs whose job graphs are known; run as a module it prints those graphs, for a second process.

What is expected stands beside the test, as data: tests/unit/planning/job_graphs.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from pyspark.sql import functions as F

from flinkish_spark import (
    BroadcastProcessFunction,
    KeyedCoProcessFunction,
    MapStateDescriptor,
    OutputTag,
    StreamExecutionEnvironment,
    WatermarkStrategy,
)
from flinkish_spark.cep import CEP, Pattern
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.planning.job_graph import describe_job
from flinkish_spark.protocol.job_graph import JobGraph
from flinkish_spark.sinks import MemorySink
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.support.jobs import ORDER, TOTAL, RunningTotal

LATE = OutputTag("late", ORDER)
RULES = MapStateDescriptor("rules", "STRING", "LONG")
ROWS = [("ann", 1), ("bob", 2), ("ann", 3)]


def parsed(order: Any) -> Any:
    return order.user, order.amount


def is_large(order: Any) -> bool:
    return order.amount > 1


def doubled(frame: Any) -> Any:
    return frame.withColumn("amount", F.col("amount") * 2)


class Both(KeyedCoProcessFunction):
    def process_element1(self, order, ctx):
        yield order.user, order.amount

    def process_element2(self, order, ctx):
        yield order.user, -order.amount


class Ruled(BroadcastProcessFunction):
    def process_element(self, order, ctx):
        yield order.user, order.amount

    def process_broadcast_element(self, rule, ctx):
        ctx.get_broadcast_state(RULES).put(rule.user, rule.amount)


def orders(env: StreamExecutionEnvironment, uid: str = "orders") -> DataStream:
    return env.from_collection(ROWS, ORDER, uid=uid)


def total(stream: DataStream, uid: str | None = "totals") -> DataStream:
    return stream.key_by("user").process(RunningTotal(), output=TOTAL, uid=uid)


def out(stream: DataStream, uid: str | None = "out") -> DataStream:
    return stream.sink_to(MemorySink("out"), uid=uid)


def straight(env: StreamExecutionEnvironment) -> None:
    out(orders(env))


def functions_in_front(env: StreamExecutionEnvironment) -> None:
    out(total(orders(env).transform(doubled).map(parsed, output=ORDER).filter(is_large)))


def functions_behind(env: StreamExecutionEnvironment) -> None:
    made = total(orders(env)).map(lambda row: row, output=TOTAL, name="same")
    out(made.filter(lambda row: True, name="all").transform(lambda frame: frame.where("total > 0")))


def two_operators(env: StreamExecutionEnvironment) -> None:
    first = total(orders(env), "first").map(lambda row: row, output=ORDER, name="renamed")
    out(total(first.filter(is_large), "second").name("all totals"))


def moved(env: StreamExecutionEnvironment) -> None:
    spread = orders(env).rebalance(3).map(parsed, output=ORDER)
    narrowed = spread.rescale(1).filter(is_large)
    out(total(narrowed.map(parsed, output=ORDER, name="slow").set_parallelism(2)).global_())


def set_apart(env: StreamExecutionEnvironment) -> None:
    alone = orders(env).map(parsed, output=ORDER, name="cheap")
    alone = alone.map(parsed, output=ORDER, name="slow").disable_chaining()
    last = alone.filter(is_large).map(parsed, output=ORDER, name="head").start_new_chain()
    out(total(last))


def united(env: StreamExecutionEnvironment) -> None:
    both = orders(env, "web").union(orders(env, "shop").filter(is_large))
    out(total(both.map(parsed, output=ORDER)))


def connected(env: StreamExecutionEnvironment) -> None:
    left, right = (
        orders(env, "left").key_by("user"),
        total(orders(env, "right"), "inner").map(parsed_total, output=ORDER, name="as an order"),
    )
    out(left.connect(right.key_by("user")).process(Both(), output=TOTAL, uid="both"))


def parsed_total(row: Any) -> Any:
    return row.user, row.total


def ruled(env: StreamExecutionEnvironment) -> None:
    rules = orders(env, "rules").broadcast(RULES)
    made = orders(env).connect(rules).process(Ruled(), output=TOTAL, uid="ruled")
    out(made)


def branches(env: StreamExecutionEnvironment) -> None:
    source = orders(env).map(parsed, output=ORDER)
    out(total(source), "totals-out")
    out(source.filter(is_large), "large-out")
    out(total(source, "again"), "again-out")


def branches_with_functions(env: StreamExecutionEnvironment) -> None:
    """A stem whose function runs once, and branches of functions, of frames, and of nothing."""
    source = orders(env).map(parsed, output=ORDER)
    out(total(source), "totals-out")
    large = source.filter(is_large)
    out(total(large, "large"), "large-out")
    out(total(large.map(parsed, output=ORDER), "larger"), "larger-out")
    out(total(source.transform(lambda df: df.where("amount > 1")), "framed"), "framed-out")


def windows_and_patterns(env: StreamExecutionEnvironment) -> None:
    timed = orders(env).assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda order, _: order.amount)
    )
    windows = timed.key_by("user").window(TumblingEventTimeWindows(10)).side_output_late_data(LATE)
    sums = windows.sum("amount", uid="sums")
    out(sums)
    out(sums.get_side_output(LATE), "late-out")
    pattern = Pattern.begin("one").where(lambda order: order.amount > 1)
    found = CEP.pattern(timed.key_by("user"), pattern)
    out(found.select(lambda match: (match["one"][0].user, 1), output=TOTAL, uid="found"), "found-out")


def without_uids(env: StreamExecutionEnvironment) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        source = env.from_collection(ROWS, ORDER)
        out(total(source, None), None)
        out(total(source, None).key_by("user").max("total"), None)


PROGRAMS: tuple[Callable[[StreamExecutionEnvironment], None], ...] = (
    straight,
    functions_in_front,
    functions_behind,
    two_operators,
    moved,
    set_apart,
    united,
    connected,
    ruled,
    branches,
    windows_and_patterns,
    without_uids,
    branches_with_functions,
)


class Session:
    """Stands for a Spark session: it has settings."""

    readStream = None  # noqa: N815 - by this the environment knows a session

    def __init__(self) -> None:
        self.conf = {"spark.sql.shuffle.partitions": "4"}


def graph_of(program: Callable[[StreamExecutionEnvironment], None]) -> JobGraph:
    """The job graph of a program, without Spark."""
    session: Any = Session()
    env = StreamExecutionEnvironment(session, program.__name__.replace("_", "-"), "/jobs/any")
    program(env)
    return describe_job(env.job, env.graph, 4)


if __name__ == "__main__":
    json.dump({one.__name__: graph_of(one).to_json() for one in PROGRAMS}, sys.stdout)
