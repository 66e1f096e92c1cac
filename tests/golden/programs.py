"""Programs whose state is kept as it is stored, one for each form that there is; `README.md` says what for.

Each runs without Spark over the same elements. What it has stored in the middle is kept, and what it emits
behind that. Names of states and operators, and types, are stored: they must not change here.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from flinkish_spark import (
    AggregateColumn,
    AggregatingStateDescriptor,
    Emit,
    Fold,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    ReducingStateDescriptor,
    StateTtl,
    TimeDomain,
    TtlUpdate,
    ValueStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.joins import CoGroupFunction, JoinType
from flinkish_spark.operators.vectorized import greatest_by_key, sum_by_key
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.testing.program_harness import ProgramSnapshot
from flinkish_spark.testing.program_operator import OperatorSnapshot
from flinkish_spark.windows import (
    ContinuousEventTimeTrigger,
    CountEvictor,
    CountTrigger,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    ProcessingTimeSessionWindows,
    ProcessWindowFunction,
    PurgingTrigger,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)
from tests.golden.job import Largest, Spent

LEFT, RIGHT = "user STRING, amount LONG, price DOUBLE", "payer STRING, paid LONG"
#: Behind each element its event time. Micro-batches: left, right, watermark, processing time.
_USERS = ("ann", "ben", "eve", None)
Program = Callable[..., Any]


def _left(numbers: range) -> list[Any]:
    return [((_USERS[n % 4], n * 7 % 11 + 1, n / 4), n * 1_000) for n in numbers]


def _right(numbers: range) -> list[Any]:
    return [((_USERS[n % 4], n * 5 % 7 + 1), n * 1_000 + 1_500) for n in numbers]


BEFORE = [
    (_left(range(0, 10)), _right(range(0, 6)), 0, 1_000),
    (_left(range(10, 24)), _right(range(8, 20)), 9_000, 11_000),
]
#: The second ones are late.
BEHIND = [
    (_left(range(24, 34)), _right(range(21, 33)), 19_000, 12_000),
    (_left(range(18, 26)), _right(range(13, 14)), 31_000, 21_000),
    (_left(range(34, 37)), [], (1 << 62), 90_000),
]


def harness(program: Program, restore: ProgramSnapshot | None = None) -> ProgramHarness:
    """Return a harness for a program of one or two inputs."""
    inputs = (LEFT, RIGHT)[: program.__code__.co_argcount - len(program.__defaults__ or ())]
    return ProgramHarness(program, *inputs, parallelism=2, max_parallelism=8, restore=restore)


def run(running: ProgramHarness, steps: list[Any]) -> list[list[Any]]:
    """Run micro-batches; return what is emitted, in an order of its own, as JSON values."""
    inputs = len(running._sources)
    for left, right, watermark_ms, now_ms in steps:
        elements = (left, right)[:inputs]
        running.micro_batch(*elements, watermark_ms=watermark_ms, processing_time_ms=now_ms)
    output = running.take()
    return sorted(
        ([at_ms, *map(plain, row)] for row, at_ms in zip(output.rows, output.times_ms, strict=True)), key=str
    )


def kept(program: Program) -> dict[str, Any]:
    """Return what is kept of a program: what it has stored in the middle, and what comes out behind that."""
    running = harness(program)
    run(running, BEFORE)
    state, behind = as_json(running.snapshot()), run(running, BEHIND)
    assert run(harness(program), BEHIND) != behind, "what comes out does not depend on what was stored"
    return {"state": state, "behind": behind}


def plain(value: Any) -> Any:
    """Return a value of a row as JSON has it."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def as_json(snapshot: ProgramSnapshot) -> dict[str, Any]:
    """Return a snapshot as JSON."""

    def text(value: bytes | None) -> str | None:
        return None if value is None else base64.b64encode(value).decode()

    operators = {
        uid: {
            "groups": {str(group): text(value) for group, value in sorted(one.groups.items())},
            "partitions": [text(value) for value in one.partitions],
            "max_parallelism": one.max_parallelism,
        }
        for uid, one in snapshot.operators.items()
    }
    times = {"watermark_ms": snapshot.watermark_ms, "processing_time_ms": snapshot.processing_time_ms}
    return {"operators": operators, **times}


def from_json(value: Mapping[str, Any]) -> ProgramSnapshot:
    """Return the snapshot again."""

    def data(text: str | None) -> bytes | None:
        return None if text is None else base64.b64decode(text)

    operators = {
        uid: OperatorSnapshot(
            {int(group): data(text) for group, text in one["groups"].items()},
            tuple(map(data, one["partitions"])),
            one["max_parallelism"],
        )
        for uid, one in value["operators"].items()
    }
    return ProgramSnapshot(operators, value["watermark_ms"], value["processing_time_ms"])


# -- functions ------------------------------------------------------------------------------------------


class Kinds(KeyedProcessFunction):
    """All kinds of keyed state, with and without a time to live, and timers of both clocks."""

    def open(self, context: Any) -> None:
        ttl, read = StateTtl(10_000), StateTtl(10_000, TtlUpdate.ON_READ_AND_WRITE)
        self.last = context.get_state(ValueStateDescriptor("last", "amount LONG, price DOUBLE"))
        self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0, ttl=read))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))
        self.recent = context.get_list_state(ListStateDescriptor("recent", "LONG", ttl))
        self.prices = context.get_map_state(MapStateDescriptor("prices", "LONG", "ARRAY<DOUBLE>"))
        self.fresh = context.get_map_state(MapStateDescriptor("fresh", "STRING", "LONG", read))
        self.greatest = context.get_reducing_state(ReducingStateDescriptor("greatest", Largest(), "LONG"))
        spent = AggregatingStateDescriptor("spent", Spent(), "total LONG, n LONG")
        self.spent = context.get_aggregating_state(spent)

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        before = self.last.value()
        self.last.update((order.amount, order.price))
        self.count.update(self.count.value() + 1)
        self.seen.add(order.amount)
        self.recent.add(order.amount)
        self.prices[order.amount % 3] = [*self.prices.get(order.amount % 3, []), order.price]
        self.fresh[f"{order.amount % 4}"] = order.amount
        self.greatest.add(order.amount)
        self.spent.add(order)
        timers = ctx.timer_service()
        timers.register_event_time_timer(ctx.timestamp() + 6_000)
        timers.register_processing_time_timer(timers.current_processing_time() + 5_000 + order.amount)
        said = [before, self.count.value(), list(self.seen), list(self.recent), dict(self.prices)]
        yield "element", order.user, str([*said, dict(self.fresh), self.greatest.get(), self.spent.get()])

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        clock = "event" if ctx.time_domain() is TimeDomain.EVENT_TIME else "wall"
        yield clock, ctx.get_current_key(), str(time_ms)


class Owed(KeyedCoProcessFunction):
    def open(self, context: Any) -> None:
        self.owed = context.get_state(ValueStateDescriptor("owed", "LONG", default=0))

    def process_element1(self, order: Any, ctx: Any) -> None:
        self.owed.update(self.owed.value() + order.amount)
        ctx.timer_service().register_event_time_timer(ctx.timestamp() // 10_000 * 10_000 + 9_999)

    def process_element2(self, payment: Any, ctx: Any) -> None:
        self.owed.update(self.owed.value() - payment.paid)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), self.owed.value(), time_ms


class Above(KeyedBroadcastProcessFunction):
    LIMITS = MapStateDescriptor("limits", "STRING", "LONG")

    def open(self, context: Any) -> None:
        self.above = context.get_list_state(ListStateDescriptor("above", "LONG"))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        if order.amount > ctx.get_broadcast_state(self.LIMITS).get(order.user, 5):
            self.above.add(order.amount)
            yield order.user, order.amount, len(self.above)

    def process_broadcast_element(self, payment: Any, ctx: Any) -> None:
        if payment.payer is not None:
            ctx.get_broadcast_state(self.LIMITS)[payment.payer] = payment.paid


class Remembered(CheckpointedProcessFunction):
    def open(self, context: Any) -> None:
        descriptor = OperatorListDescriptor("last", "user STRING, amount LONG")
        self.last = context.get_operator_list_state(descriptor)

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        yield order.user, order.amount, sum(amount for _, amount in self.last.get())
        self.last.update([*self.last.get(), (order.user, order.amount)][-3:])


class Quiet(VectorizedProcessFunction):
    """Totals over columns, and once more when nothing has come for a while."""

    event_time = "at"

    def open(self, context: Any) -> None:
        context.get_state(ValueStateDescriptor("kept", "total LONG, last LONG"))

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        kept, last = ctx.state("kept"), greatest_by_key(ctx.index, ctx.times_ms)
        ctx.delete_event_time_timers(kept.numbers(1) + 4_000, kept.exists)
        ctx.register_event_time_timers(last + 4_000)
        totals = kept.numbers(0) + sum_by_key(ctx.index, batch.column("amount").to_numpy())
        kept.put([totals, last])
        yield self._rows(ctx, totals, last)

    def on_timers(self, domain: TimeDomain, ctx: Any) -> Iterator[pa.RecordBatch]:
        kept = ctx.state("kept")
        yield self._rows(ctx, kept.numbers(0), kept.numbers(1))

    def _rows(self, ctx: Any, totals: Any, last: Any) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [*ctx.index.keys, pa.array(totals), pa.array(last)], names=["user", "total", "at"]
        )


class Listed(ProcessWindowFunction):
    """A window and its amounts."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        yield key, *context.window, sorted(element.amount for element in elements)


class Counting(ProcessWindowFunction):
    """The same with states of its own: of the window, and of the key."""

    def open(self, context: Any) -> None:
        self.fired = ValueStateDescriptor("fired", "LONG", default=0)
        self.windows = ValueStateDescriptor("windows", "LONG", default=0)
        context.window_state.get_state(self.fired)
        context.global_state.get_state(self.windows)

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        fired = context.window_state.get_state(self.fired)
        windows = context.global_state.get_state(self.windows)
        fired.update(fired.value() + 1)
        windows.update(windows.value() + 1)
        yield key, fired.value(), windows.value(), [sum(element.amount for element in elements)]

    def clear(self, context: Any) -> None:
        context.window_state.get_state(self.fired).clear()


class Sides(CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Iterator[Any]:
        ordered, paid = sorted(one.amount for one in lefts), sorted(one.paid for one in rights)
        yield key, context.window.end_ms, ordered, paid


LISTED = "user STRING, since LONG, until LONG, amounts ARRAY<LONG>"
COUNTED = "user STRING, fired LONG, windows LONG, amounts ARRAY<LONG>"
LATE = OutputTag("late", LEFT)
TOTAL = AggregateColumn("total", Fold.SUM, "amount")
FOLDS = (
    TOTAL,
    AggregateColumn("n", Fold.COUNT),
    AggregateColumn("least", Fold.MIN, "price"),
    AggregateColumn("most", Fold.MAX, "amount"),
    AggregateColumn("first", Fold.FIRST, "amount"),
)

#: How windows are kept: with states and timers (they wait for late elements), or in one loop.
_ASSIGNERS = {
    "tumbling": TumblingEventTimeWindows(10_000),
    "sliding": SlidingEventTimeWindows(10_000, 5_000),
    "session": EventTimeSessionWindows(6_000),
    "tumbling-wall": TumblingProcessingTimeWindows(10_000),
    "sliding-wall": SlidingProcessingTimeWindows(20_000, 10_000),
    "session-wall": ProcessingTimeSessionWindows(9_000),
}


def _added(first: Any, second: Any) -> Any:
    return first.user, first.amount + second.amount, second.price


def _programs() -> Iterator[tuple[str, Program]]:
    yield (
        "kinds",
        lambda s: s.key_by("user").process(Kinds(), output="what STRING, user STRING, said STRING", uid="op"),
    )
    yield (
        "co-process",
        lambda s, t: (
            s.key_by("user")
            .connect(t.key_by("payer"))
            .process(Owed(), output="user STRING, owed LONG, due LONG", uid="op")
        ),
    )
    yield (
        "broadcast",
        lambda s, t: (
            s.key_by("user")
            .connect(t.broadcast(Above.LIMITS))
            .process(Above(), output="user STRING, amount LONG, above LONG", uid="op")
        ),
    )
    yield (
        "operator-list",
        lambda s: s.process_with_state(Remembered(), output="user STRING, amount LONG, last LONG", uid="op"),
    )
    yield (
        "vectorized",
        lambda s: s.key_by("user").process(Quiet(), output="user STRING, total LONG", uid="op"),
    )
    for emit in Emit:
        name = emit.value.lower().replace("_", "-")
        yield f"sum-{name}", lambda s, emit=emit: s.key_by("user").sum("amount", uid="op", emit=emit)
        yield f"min-by-{name}", lambda s, emit=emit: s.key_by("user").min_by("price", uid="op", emit=emit)
        yield (
            f"reduce-{name}",
            lambda s, emit=emit: s.key_by("user").reduce(_added, uid="op", emit=emit, ttl=StateTtl(50_000)),
        )
        yield (
            f"aggregate-{name}",
            lambda s, emit=emit: s.key_by("user").aggregate(
                Spent(), accumulator="total LONG, n LONG", output="total LONG, n LONG", uid="op", emit=emit
            ),
        )
    yield "fold", lambda s: s.key_by("user").fold(*FOLDS, uid="op")
    for join in JoinType:
        name = join.value.lower()
        if join in (JoinType.INNER, JoinType.LEFT):
            yield (
                f"temporal-{name}",
                lambda s, t, join=join: (
                    s.key_by("user").join(t.key_by("payer")).temporal(uid="op", join_type=join)
                ),
            )
        yield (
            f"interval-{name}",
            lambda s, t, join=join: (
                s.key_by("user")
                .join(t.key_by("payer"))
                .interval(lower_ms=-2_000, upper_ms=4_000, uid="op", join_type=join)
            ),
        )
        yield (
            f"window-join-{name}",
            lambda s, t, join=join: (
                s.key_by("user")
                .join(t.key_by("payer"))
                .window(_ASSIGNERS["sliding"], uid="op", join_type=join)
            ),
        )
    yield (
        "co-group",
        lambda s, t: (
            s.key_by("user")
            .join(t.key_by("payer"))
            .co_group(
                _ASSIGNERS["session"],
                Sides(),
                output="user STRING, until LONG, ordered ARRAY<LONG>, paid ARRAY<LONG>",
                uid="op",
            )
        ),
    )
    yield from _windows()


def _windows() -> Iterator[tuple[str, Program]]:
    for name, assigner in _ASSIGNERS.items():
        yield (
            f"{name}-looped-reduce",
            lambda s, a=assigner: s.key_by("user").window(a).reduce(_added, uid="op"),
        )
        yield (
            f"{name}-looped-aggregate",
            lambda s, a=assigner: (
                s.key_by("user")
                .window(a)
                .aggregate(Spent(), accumulator="total LONG, n LONG", output="total LONG, n LONG", uid="op")
            ),
        )
        yield (
            f"{name}-looped-process",
            lambda s, a=assigner: s.key_by("user").window(a).process(Listed(), output=LISTED, uid="op"),
        )
        yield f"{name}-fold", lambda s, a=assigner: s.key_by("user").window(a).fold(*FOLDS, uid="op")
        yield f"{name}-min-by", lambda s, a=assigner: s.key_by("user").window(a).min_by("price", uid="op")
        waiting = lambda s, a=assigner: s.key_by("user").window(a).allowed_lateness(8_000)  # noqa: E731
        yield f"{name}-waiting-reduce", lambda s, w=waiting: w(s).reduce(_added, uid="op")
        yield f"{name}-waiting-process", lambda s, w=waiting: w(s).process(Listed(), output=LISTED, uid="op")
        yield f"{name}-waiting-fold", lambda s, w=waiting: w(s).fold(TOTAL, uid="op")
        yield (
            f"{name}-late-fold",
            lambda s, a=assigner: (
                s.key_by("user").window(a).side_output_late_data(LATE).fold(TOTAL, uid="op")
            ),
        )
        yield f"{name}-retracting", lambda s, w=waiting: w(s).emit_retractions().sum("amount", uid="op")
        evictor = TimeEvictor(20_000 if "wall" in name else 3_000)
        yield (
            f"{name}-evicted",
            lambda s, w=waiting, e=evictor: w(s).evictor(e).process(Listed(), output=LISTED, uid="op"),
        )
        yield (
            f"{name}-counted",
            lambda s, a=assigner: (
                s.key_by("user").window(a).trigger(CountTrigger(3)).process(Listed(), output=LISTED, uid="op")
            ),
        )
        yield (
            f"{name}-purged",
            lambda s, a=assigner: (
                s.key_by("user").window(a).trigger(PurgingTrigger(CountTrigger(3))).reduce(_added, uid="op")
            ),
        )
        if "wall" not in name:
            yield (
                f"{name}-continuous",
                lambda s, a=assigner: (
                    s.key_by("user")
                    .window(a)
                    .trigger(ContinuousEventTimeTrigger(3_000))
                    .reduce(_added, uid="op")
                ),
            )
        if "session" not in name:
            yield (
                f"{name}-states",
                lambda s, a=assigner: (
                    s.key_by("user").window(a).process(Counting(), output=COUNTED, uid="op")
                ),
            )
    yield (
        "dynamic-session",
        lambda s: (
            s.key_by("user")
            .window(DynamicEventTimeSessionWindows(lambda order: 1_000 * order.amount))
            .process(Listed(), output=LISTED, uid="op")
        ),
    )
    yield "count", lambda s: s.key_by("user").count_window(4).reduce(_added, uid="op")
    yield (
        "sliding-count",
        lambda s: s.key_by("user").count_window(4, slide=2).process(Listed(), output=LISTED, uid="op"),
    )
    yield (
        "count-evicted",
        lambda s: (
            s.key_by("user")
            .window(_ASSIGNERS["tumbling"])
            .evictor(CountEvictor(2))
            .process(Listed(), output=LISTED, uid="op")
        ),
    )


#: By name.
PROGRAMS: Mapping[str, Program] = dict(_programs())
