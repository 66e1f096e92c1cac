"""Programs in which an operator is read on several ways that meet again, for harnesses and for jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flinkish_spark import (
    AggregateColumn,
    DataStream,
    Emit,
    Fold,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.functions.keyed import (
    FilterFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
)
from flinkish_spark.functions.stream import ProcessFunction
from flinkish_spark.joins import CoGroupFunction, JoinType, LookupTable
from flinkish_spark.windows import TumblingEventTimeWindows

ORDERS, TOTALS = "user STRING, amount LONG, at LONG", "user STRING, total LONG"
BY_AT = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
ODD = OutputTag("odd", "who STRING, amount LONG")
SMALL = OutputTag("small", TOTALS)
LIMITS = MapStateDescriptor("limits", "STRING", "LONG")


class Totals(KeyedProcessFunction):
    """The running total of a user; odd amounts go to a side output, too."""

    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.total.update(self.total.value() + value.amount)
        if value.amount % 2:
            ctx.output(ODD, (value.user, value.amount))
        yield value.user, self.total.value()


class Listed(KeyedProcessFunction):
    """The totals of a key so far, in their order."""

    def open(self, context: Any) -> None:
        self.seen = context.get_state(ValueStateDescriptor("seen", "STRING", default=""))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.seen.update(f"{self.seen.value()} {value.total}")
        yield ctx.get_current_key(), self.seen.value()


class Both(KeyedCoProcessFunction):
    """How many totals and how many odd amounts a user has had, at the end of time."""

    def open(self, context: Any) -> None:
        self.counts = context.get_state(ValueStateDescriptor("counts", "totals INT, odd INT", default=(0, 0)))

    def process_element1(self, total: Any, ctx: Any) -> Iterator[Any]:
        totals, odd = self.counts.value()
        self.counts.update((totals + 1, odd))
        ctx.timer_service().register_event_time_timer(1_000_000)
        yield from ()

    def process_element2(self, odd: Any, ctx: Any) -> Iterator[Any]:
        totals, count = self.counts.value()
        self.counts.update((totals, count + 1))
        yield from ()

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), *self.counts.value()


class Counted(KeyedCoProcessFunction):
    """The same by element."""

    def open(self, context: Any) -> None:
        self.counts = context.get_state(ValueStateDescriptor("counts", "totals INT, odd INT", default=(0, 0)))

    def process_element1(self, total: Any, ctx: Any) -> Iterator[Any]:
        totals, odd = self.counts.value()
        self.counts.update((totals + 1, odd))
        yield total.user, totals + 1, odd

    def process_element2(self, odd: Any, ctx: Any) -> Iterator[Any]:
        totals, count = self.counts.value()
        self.counts.update((totals, count + 1))
        yield odd.who, totals, count + 1


class Big(FilterFunction):
    def open(self, context: Any) -> None:
        self.least = 10

    def filter(self, value: Any) -> bool:
        return bool(value.total >= self.least)


class Sorted(ProcessFunction):
    """Small totals go to a side output; others carry the time that they have."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        if value.total < 10:
            ctx.output(SMALL, value)
        else:
            yield f"{value.user} {ctx.timestamp()}", value.total


class Sizes(CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Iterator[Any]:
        yield key, len(lefts), len(rights), context.window.end_ms


class Above(KeyedBroadcastProcessFunction):
    """Totals of users who have never had an odd amount so far."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        if ctx.get_broadcast_state(LIMITS).get(value.user) is None:
            yield value.user, value.total

    def process_broadcast_element(self, odd: Any, ctx: Any) -> None:
        ctx.get_broadcast_state(LIMITS)[odd.who] = odd.amount


class Countries(LookupTable):
    def lookup(self, keys: Any) -> Any:
        return {"ann": [("Germany",)]}


def totals_of(orders: DataStream, uid: str) -> DataStream:
    return orders.key_by("user").process(Totals(), output=TOTALS, uid=uid)


def connected_with_its_side(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-1")
    both = totals.connect(totals.get_side_output(ODD)).key_by("user", "who")
    return both.process(Both(), output="user STRING, totals INT, odd INT", uid="both")


def counted_by_name(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-9")
    both = totals.connect(totals.get_side_output(ODD)).key_by("user", "who")
    return both.process(Counted(), output="user STRING, totals INT, odd INT", uid="counted")


def joined_with_itself(orders: DataStream) -> DataStream:
    by_user = totals_of(orders, "totals-2").key_by("user")
    return by_user.interval_join(by_user, lower_ms=1, upper_ms=4, uid="pairs")


def united_branches(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-3")
    big = totals.filter(Big()).map(lambda row: (row.user, -row.total), output=TOTALS)
    twice = totals.flat_map(lambda row: [row, row] if row.total % 2 else [], output=TOTALS)
    by_name = big.union(twice, totals.rebalance(3)).key_by(lambda row: row.user.upper(), key="STRING")
    return by_name.process(Listed(), output="user STRING, seen STRING", uid="listed")


def united_with_its_side(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-4")
    odd = totals.get_side_output(ODD).map(lambda row: (row.who, row.amount), output=TOTALS)
    united = totals.union(odd, totals).key_by("user")
    return united.sum("total", uid="sums", emit=Emit.PER_ELEMENT)


def mapped_between(orders: DataStream) -> DataStream:
    sorted_ = totals_of(orders, "totals-5").process(Sorted(), output=TOTALS)
    both = sorted_.union(sorted_.get_side_output(SMALL))
    return both.key_by("user").process(Listed(), output="user STRING, seen STRING", uid="sorted")


def grouped_with_its_filter(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-6")
    groups = totals.key_by("user").join(totals.filter(Big()).key_by("user"))
    return groups.co_group(
        TumblingEventTimeWindows(10), Sizes(), output="user STRING, all INT, big INT, end LONG", uid="groups"
    )


def broadcast_to_itself(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-7")
    limits = totals.get_side_output(ODD).broadcast(LIMITS)
    return totals.key_by("user").connect(limits).process(Above(), output=TOTALS, uid="above")


def looked_up_between(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-8")
    found = totals.lookup_join(
        Countries(), "country STRING", key=lambda row: row.user, join_type=JoinType.LEFT
    )
    return found.key_by("country").fold(AggregateColumn("most", Fold.MAX, "total"), uid="countries")


def operator_on_one_way(orders: DataStream) -> DataStream:
    """What is read directly passes the operator on the other way."""
    totals = totals_of(orders, "totals-20")
    sums = totals.key_by("user").sum("total", uid="sums-20", emit=Emit.PER_ELEMENT)
    both = totals.connect(sums).key_by("user", "user")
    return both.process(Both(), output="user STRING, totals INT, odd INT", uid="both-20")


def listed_behind_another(orders: DataStream) -> DataStream:
    """Rows that have passed an operator come in their order, with functions on their way."""
    totals = totals_of(orders, "totals-21")
    small = totals.process(Sorted(), output=TOTALS).get_side_output(SMALL)
    windows = small.key_by("user").window(TumblingEventTimeWindows(5))
    windowed = windows.reduce(lambda a, b: (a.user, a.total + b.total), uid="windows-21")
    marked = windowed.map(lambda row: (row.user, -row.total), output=TOTALS)
    named = totals.union(marked).key_by(lambda row: row.user.upper(), key="STRING")
    return named.process(Listed(), output="user STRING, seen STRING", uid="listed-21")


def diamond_of_operators(orders: DataStream) -> DataStream:
    """Both ways have an operator, side outputs pass, and one of them is read twice more further on."""
    totals = totals_of(orders, "totals-22")
    odd = totals.get_side_output(ODD)
    left = totals.key_by("user").sum("total", uid="left-22", emit=Emit.PER_ELEMENT)
    right = odd.key_by("who").sum("amount", uid="right-22", emit=Emit.PER_ELEMENT)
    counted = left.connect(right).key_by("user", "who")
    sizes = counted.process(Both(), output="user STRING, totals INT, odd INT", uid="sizes-22")
    groups = totals.key_by("user").join(odd.filter(lambda row: row.amount < 9).key_by("who"))
    grouped = groups.co_group(
        TumblingEventTimeWindows(10),
        Sizes(),
        output="user STRING, all INT, big INT, end LONG",
        uid="groups-22",
    )
    ended = grouped.map(lambda row: (row.user, row.all, row.big), output="user STRING, totals INT, odd INT")
    last = sizes.union(ended, odd.map(lambda row: (row.who, 0, row.amount), output=LAST)).key_by("user")
    return last.fold(
        AggregateColumn("all", Fold.SUM, "totals"), AggregateColumn("most", Fold.SUM, "odd"), uid="last-22"
    )


LAST = "user STRING, totals INT, odd INT"


def broadcast_past_an_operator(orders: DataStream) -> DataStream:
    totals = totals_of(orders, "totals-23")
    sums = totals.key_by("user").sum("total", uid="sums-23", emit=Emit.PER_ELEMENT)
    limits = totals.get_side_output(ODD).broadcast(LIMITS)
    return sums.key_by("user").connect(limits).process(Above(), output=TOTALS, uid="above-23")


PROGRAMS = (
    connected_with_its_side,
    joined_with_itself,
    united_branches,
    united_with_its_side,
    mapped_between,
    grouped_with_its_filter,
    broadcast_to_itself,
    looked_up_between,
    operator_on_one_way,
    listed_behind_another,
    diamond_of_operators,
    broadcast_past_an_operator,
)
ROWS = [
    (user, amount, at)
    for at, (user, amount) in enumerate(
        [("ann", 3), ("ben", 4), ("ann", 8), ("cid", 1), ("ben", 9), ("ann", 2), ("dan", 20), ("cid", 30)], 1
    )
]
#: Those in which another operator lies on one of the ways.
OVER_OPERATORS = PROGRAMS[-4:]
