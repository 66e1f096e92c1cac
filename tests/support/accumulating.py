"""A program whose functions add to accumulators, with and without state, on one way and on several."""

from __future__ import annotations

from typing import Any

from flinkish_spark import (
    AggregateFunction,
    AverageAccumulator,
    DoubleCounter,
    Emit,
    FilterFunction,
    KeyedProcessFunction,
    KeySelector,
    LongCounter,
    LongMaximum,
    MapFunction,
    OutputTag,
    ValueStateDescriptor,
)
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.functions.stream import ProcessFunction
from flinkish_spark.joins import JoinType, LookupTable, ProcessJoinFunction
from flinkish_spark.sinks import MemorySink

ORDER = "user STRING, amount LONG"
TOTAL = "user STRING, total LONG"
ODD = OutputTag("odd", ORDER)
SINKS = ("total", "odd", "large", "united", "again", "averages")
BIG = OutputTag("big", TOTAL)
BIG_FROM = 20


class Counted(MapFunction):
    """Counts each record under a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, context):
        self.seen = context.get_long_counter(self.name)

    def map(self, value):
        self.seen.add(1)
        return value


class Lengths(LookupTable):
    """Has a row for each user but one."""

    def lookup(self, keys):
        return {key: [(len(key),)] for key in keys if key != "user3"}


class Looked(ProcessJoinFunction):
    """Passes orders on, and counts those that the table knows."""

    def open(self, context):
        self.known = context.get_long_counter("known")
        self.looked = context.get_long_counter("looked up")

    def process_element(self, left, right, ctx):
        self.looked.add(1)
        if right is not None:
            self.known.add(1)
        yield left.user, left.amount


class ByUser(KeySelector):
    """Counts the records whose key it makes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, context):
        self.seen = context.get_long_counter(self.name)

    def get_key(self, value) -> str:
        self.seen.add(1)
        return value.user


def by_length(key: str, partitions: int) -> int:
    return len(key) % partitions


class Large(FilterFunction):
    def open(self, context):
        self.dropped = context.add_accumulator("dropped", LongCounter())
        self.amounts = context.add_accumulator("average", AverageAccumulator())

    def filter(self, order):
        self.amounts.add(order.amount)
        if order.amount < 2:
            self.dropped.add(1)
        return order.amount >= 2


class Split(ProcessFunction):
    """Has two outputs, so it runs twice; its records count once."""

    def open(self, context):
        self.seen = context.get_histogram("by parity")

    def process_element(self, order, ctx):
        self.seen.add(order.amount % 2)
        if order.amount % 2:
            ctx.output(ODD, (order.user, order.amount))
        else:
            yield order.user, order.amount


class Total(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG"))
        self.users = context.add_accumulator("users", LongCounter())
        self.most = context.add_accumulator("most", LongMaximum())
        self.sum = context.add_accumulator("sum", DoubleCounter())

    def process_element(self, order, ctx):
        if self.total.value() is None:
            self.users.add(1)
        self.total.update((self.total.value() or 0) + order.amount)
        self.most.add(self.total.value())
        self.sum.add(order.amount / 4)
        if self.total.value() >= BIG_FROM:
            ctx.output(BIG, (order.user, self.total.value()))
        yield order.user, self.total.value()


class Average(AggregateFunction):
    """Runs in part before the shuffle: `add` there, `get_result` behind it."""

    def open(self, context):
        self.added = context.get_long_counter("added")
        self.most = context.add_accumulator("most added", LongMaximum())

    def create_accumulator(self):
        return 0, 0

    def add(self, value, accumulator):
        self.added.add(1)
        self.most.add(value.amount)
        return accumulator[0] + value.amount, accumulator[1] + 1

    def get_result(self, accumulator):
        return accumulator[0], accumulator[1]

    def merge(self, first, second):
        return first[0] + second[0], first[1] + second[1]


class Again(KeyedProcessFunction):
    """Reads an operator on two ways that meet."""

    def open(self, context):
        self.seen = context.get_long_counter("again")

    def process_element(self, total, ctx):
        self.seen.add(1)
        yield total.user, total.total


def _user(order: Any) -> Any:
    return order.user


def accumulating(given: DataStream, **sinks: Any) -> None:
    """Declare it behind orders; its sinks are those in SINKS, by default in memory."""
    orders = given.map(Counted("read"), output=ORDER)
    orders = orders.lookup_join(
        Lengths(), "length LONG", key=_user, join_type=JoinType.LEFT, function=Looked(), output=ORDER
    )
    large = orders.filter(Large())
    split = large.process(Split(), output=ORDER)
    totals = split.key_by(ByUser("keyed")).process(Total(), output=TOTAL, uid="totals")
    both = totals.union(totals.get_side_output(BIG))
    both.map(Counted("united"), output=TOTAL).sink_to(sinks.get("united", MemorySink("united")), uid="united")
    again = both.map(Counted("between"), output=TOTAL).key_by(ByUser("keyed again"))
    again = again.process(Again(), output=TOTAL, uid="second")
    again.sink_to(sinks.get("again", MemorySink("again")), uid="again")
    averages = large.key_by("user").aggregate(
        Average(),
        accumulator="sum LONG, n LONG",
        output="sum LONG, n LONG",
        emit=Emit.PER_KEY,
        uid="averages",
    )
    averages.sink_to(sinks.get("averages", MemorySink("averages")), uid="averaged")
    totals = totals.map(Counted("behind"), output=TOTAL)
    totals.sink_to(sinks.get("total", MemorySink("total")), uid="total")
    split.get_side_output(ODD).sink_to(sinks.get("odd", MemorySink("odd")), uid="odd")
    placed = large.partition_custom(by_length, ByUser("placed")).union(orders)
    placed.map(Counted("both"), output=ORDER).sink_to(sinks.get("large", MemorySink("large")), uid="large")


def expected(orders: list[tuple[str, int]]) -> dict[str, Any]:
    """What it counts over all of some orders."""
    large = [(user, amount) for user, amount in orders if amount >= 2]
    even = [(user, amount) for user, amount in large if amount % 2 == 0]
    totals: dict[str, int] = {}
    read = len(even)
    for user, amount in even:
        totals[user] = totals.get(user, 0) + amount
        read += totals[user] >= BIG_FROM
    parity: dict[int, int] = {}
    for _, amount in large:
        parity[amount % 2] = parity.get(amount % 2, 0) + 1
    return {
        "added": len(large),
        "again": read,
        "average": sum(amount for _, amount in orders) / len(orders),
        "behind": len(even),
        "between": read,
        "both": len(large) + len(orders),
        "by parity": dict(sorted(parity.items())),
        "keyed": len(even),
        "keyed again": read,
        "known": sum(user != "user3" for user, _ in orders),
        "looked up": len(orders),
        "placed": len(large),
        "dropped": len(orders) - len(large),
        "most": max(totals.values()),
        "most added": max(amount for _, amount in large),
        "read": len(orders),
        "sum": sum(amount for _, amount in even) / 4,
        "united": read,
        "users": len(totals),
    }
