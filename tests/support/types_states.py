"""Each kind of state, as a way for values of a type: put, looked at, stored, restored, looked at again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flinkish_spark import (
    AggregatingStateDescriptor,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.functions.keyed import KeyedBroadcastProcessFunction
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import ProcessWindowFunction, TumblingEventTimeWindows

#: From a declaration and values to what is read of them in the same micro-batch, and behind a restore.
Way = Callable[[str, list[Any]], list[list[Any]]]
#: One key group has all keys: each costs as much as all of them.
_ONE: dict[str, Any] = {"max_parallelism": 1}


class Newest:
    """A reduction and an aggregate: of two values the one that came last."""

    def reduce(self, before: Any, added: Any) -> Any:
        return added

    def create_accumulator(self) -> Any:
        return None

    def add(self, value: Any, accumulator: Any) -> Any:
        return value

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        return second


class _Keeping(KeyedProcessFunction):
    """Puts an element's value if it is told to, and emits what the state has."""

    def __init__(self, ddl: str) -> None:
        self.ddl = ddl

    def process_element(self, element: Any, ctx: Any) -> Iterator[Any]:
        if element.puts:
            self.put(element.v)
        yield element.n, False, self.found()

    def put(self, value: Any) -> None:
        raise NotImplementedError

    def found(self) -> Any:
        raise NotImplementedError


class KeepsValue(_Keeping):
    def open(self, context: Any) -> None:
        self.state = context.get_state(ValueStateDescriptor("s", self.ddl))

    def put(self, value: Any) -> None:
        self.state.update(value)

    def found(self) -> Any:
        return self.state.value()


class KeepsList(_Keeping):
    def open(self, context: Any) -> None:
        self.state = context.get_list_state(ListStateDescriptor("s", self.ddl))

    def put(self, value: Any) -> None:
        self.state.add(value)

    def found(self) -> Any:
        return self.state[-1]


class KeepsMapValue(_Keeping):
    def open(self, context: Any) -> None:
        self.state = context.get_map_state(MapStateDescriptor("s", "STRING", self.ddl))

    def put(self, value: Any) -> None:
        self.state["k"] = value

    def found(self) -> Any:
        return self.state["k"]


class KeepsMapKey(_Keeping):
    def open(self, context: Any) -> None:
        self.state = context.get_map_state(MapStateDescriptor("s", self.ddl, "LONG"))

    def put(self, value: Any) -> None:
        self.state[value] = 1

    def found(self) -> Any:
        return next(iter(self.state), None)


class KeepsReduced(_Keeping):
    def open(self, context: Any) -> None:
        self.state = context.get_reducing_state(ReducingStateDescriptor("s", Newest(), self.ddl))

    def put(self, value: Any) -> None:
        self.state.add(value)

    def found(self) -> Any:
        return self.state.get()


class KeepsAggregated(KeepsReduced):
    def open(self, context: Any) -> None:
        newest: Any = Newest()
        self.state = context.get_aggregating_state(AggregatingStateDescriptor("s", newest, self.ddl))


class KeepsItems(CheckpointedProcessFunction):
    """Operator list state: all items of the one partition."""

    def __init__(self, ddl: str) -> None:
        self.ddl = ddl

    def open(self, context: Any) -> None:
        self.state = context.get_operator_list_state(OperatorListDescriptor("s", f"n LONG, v {self.ddl}"))

    def process_element(self, element: Any, ctx: Any) -> Iterator[Any]:
        if element.puts:
            self.state.add((element.n, element.v))
        yield element.n, False, next(item.v for item in self.state.get() if item.n == element.n)


class KeepsBroadcast(KeyedBroadcastProcessFunction):
    """Broadcast state; elements of the keyed side look."""

    def __init__(self, descriptor: MapStateDescriptor) -> None:
        self.descriptor = descriptor

    def process_element(self, element: Any, ctx: Any) -> Iterator[Any]:
        yield element.n, False, ctx.get_broadcast_state(self.descriptor)[element.n]

    def process_broadcast_element(self, element: Any, ctx: Any) -> None:
        ctx.get_broadcast_state(self.descriptor)[element.n] = element.v


class Fires(KeyedProcessFunction):
    """A timer for each key, which is what it emits."""

    def process_element(self, element: Any, ctx: Any) -> None:
        ctx.timer_service().register_event_time_timer(10 + element.n)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield time_ms - 10, False, ctx.get_current_key()


class Contents(ProcessWindowFunction):
    """Emits a window's elements as it has them."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        for element in elements:
            yield element.n, False, element.v


def _record(ddl: str) -> str:
    return f"n LONG, puts BOOLEAN, v {ddl}"


def _read(harness: ProgramHarness) -> list[Any]:
    return [row.v for row in sorted(harness.take().rows, key=lambda row: row.n)]


def keyed(keeping: type[_Keeping]) -> Way:
    """Return the way through a state of one key."""

    def way(ddl: str, values: list[Any]) -> list[list[Any]]:
        def made(**settings: Any) -> ProgramHarness:
            return ProgramHarness.of(
                keeping(ddl), _record(ddl), key="n", output=_record(ddl), **_ONE, **settings
            )

        first = made()
        first.push_all([((n, True, value), None) for n, value in enumerate(values)])
        return [_read(first), _looked(made(restore=first.snapshot()), len(values))]

    return way


def _looked(harness: ProgramHarness, count: int) -> list[Any]:
    harness.push_all([((n, False, None), None) for n in range(count)])
    return _read(harness)


def operator_list(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way through operator list state."""

    def made(**settings: Any) -> ProgramHarness:
        return ProgramHarness.of(KeepsItems(ddl), _record(ddl), output=_record(ddl), **_ONE, **settings)

    first = made()
    first.push_all([((n, True, value), None) for n, value in enumerate(values)])
    return [_read(first), _looked(made(restore=first.snapshot()), len(values))]


def broadcast(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way through broadcast state."""
    descriptor = MapStateDescriptor("s", "LONG", ddl)

    def made(**settings: Any) -> ProgramHarness:
        function = KeepsBroadcast(descriptor)
        given = {"key": "n", "broadcast": [descriptor], "output": _record(ddl)} | _ONE | settings
        return ProgramHarness.of(function, _record(ddl), _record(ddl), **given)

    first = made()
    first.push_all([((n, True, value), None) for n, value in enumerate(values)], source=1)
    first.take()
    return [_looked(first, len(values)), _looked(made(restore=first.snapshot()), len(values))]


def timer_keys(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way of a key, which is nowhere but beside its timer."""

    def made(**settings: Any) -> ProgramHarness:
        return ProgramHarness.of(Fires(), _record(ddl), key="v", output=_record(ddl), **_ONE, **settings)

    first = made()
    first.push_all([((n, True, value), 0) for n, value in enumerate(values)])
    second = made(restore=first.snapshot())
    for one in (first, second):
        one.watermark(10 + len(values))
    return [_read(first), _read(second)]


def window_contents(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way through what a window keeps of its elements."""

    def program(stream: Any) -> Any:
        windows = stream.key_by("n").window(TumblingEventTimeWindows(10))
        return windows.process(Contents(), output=_record(ddl), uid="w")

    first = ProgramHarness(program, _record(ddl), **_ONE)
    first.push_all([((n, True, value), 5) for n, value in enumerate(values)])
    second = ProgramHarness(program, _record(ddl), **_ONE, restore=first.snapshot())
    for one in (first, second):
        one.watermark(9)
    return [_read(first), _read(second)]


def interval_join(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way through an interval join's buffer."""

    def program(left: Any, right: Any) -> Any:
        joined = left.key_by("n").join(right.key_by("m"))
        return joined.interval(lower_ms=0, upper_ms=10, uid="j")

    return _joined(program, ddl, values)


def window_join(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way through what a window join keeps."""

    def program(left: Any, right: Any) -> Any:
        return left.key_by("n").join(right.key_by("m")).window(TumblingEventTimeWindows(10), uid="j")

    return _joined(program, ddl, values)


def temporal_join(ddl: str, values: list[Any]) -> list[list[Any]]:
    """The way through a temporal join's versions."""

    def program(left: Any, right: Any) -> Any:
        return right.key_by("m").join(left.key_by("n")).temporal(uid="j")

    return _joined(program, ddl, values)


def _joined(program: Any, ddl: str, values: list[Any]) -> list[list[Any]]:
    first = ProgramHarness(program, _record(ddl), "m LONG", **_ONE)
    first.push_all([((n, True, value), 5) for n, value in enumerate(values)])
    second = ProgramHarness(program, _record(ddl), "m LONG", **_ONE, restore=first.snapshot())
    for one in (first, second):
        one.push_all([((n,), 6) for n in range(len(values))], source=1)
        one.watermark(100)
    return [_read(first), _read(second)]


STATE_WAYS: dict[str, Way] = {
    "value state": keyed(KeepsValue),
    "list state": keyed(KeepsList),
    "map state": keyed(KeepsMapValue),
    "key of map state": keyed(KeepsMapKey),
    "reducing state": keyed(KeepsReduced),
    "aggregating state": keyed(KeepsAggregated),
    "operator list state": operator_list,
    "broadcast state": broadcast,
    "key with a timer": timer_keys,
    "window": window_contents,
    "interval join": interval_join,
    "window join": window_join,
    "temporal join": temporal_join,
}
