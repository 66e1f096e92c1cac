"""Interval, temporal and window joins over keyed state, element by element."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, TimeDomain, Timer
from flinkish_spark.core.iterators import elements_of, guard_call, is_true
from flinkish_spark.joins.spec import (
    CoGroupFunction,
    IntervalJoin,
    JoinType,
    ProcessJoinFunction,
    Side,
    TemporalJoin,
    WindowCoGroup,
    WindowJoin,
)
from flinkish_spark.operators.context import FunctionContext, put_aside
from flinkish_spark.operators.process import KeyedStreamOperator, Processor
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.state.descriptors import ListStateDescriptor, StateTtl
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.tables import StateTable
from flinkish_spark.state.timers import Timers
from flinkish_spark.types.ddl import ddl_of
from flinkish_spark.types.rows import ElementType, Named
from flinkish_spark.types.to_python import Copier, as_it_is
from flinkish_spark.windows.functions import ProcessWindowFunction, WindowContext, WindowRuntimeContext
from flinkish_spark.windows.spec import ProcessWindow


class TaggedElement(tuple[Any, ...]):
    """An element of either input: the number of the input, the left fields, the right fields."""

    __slots__ = ()
    _value_of: Callable[[tuple[Any, ...]], Any]

    @property
    def side(self) -> Side:
        return Side(self[0])

    @property
    def value(self) -> Any:
        return type(self)._value_of(self)


class TaggedUnion(ElementType):
    def __init__(self, left: ElementType, right: ElementType) -> None:
        fields = [
            T.StructField(f"{side}_{field.name}", field.dataType)
            for side, element in (("left", left), ("right", right))
            for field in element.fields
        ]
        # As DDL that quotes all names of the inputs, such as `order id` or `größe`.
        super().__init__(ddl_of(T.StructType([T.StructField("side", T.IntegerType()), *fields])))
        # The dataclass is frozen.
        object.__setattr__(self, "_left", left)
        object.__setattr__(self, "_right", right)

    _left: ElementType
    _right: ElementType

    def naming(self) -> Named:
        tagged = self._class()
        return lambda value: tagged(value) if type(value) is tuple else value

    def tagging(self) -> tuple[Named, Named]:
        tagged, left, right = self._class(), self._left, self._right
        no_left, no_right = (None,) * len(left.fields), (None,) * len(right.fields)
        return (
            lambda value: tagged((0, *left.to_tuple(value), *no_right)),
            lambda value: tagged((1, *no_left, *right.to_tuple(value))),
        )

    def _class(self) -> type[TaggedElement]:
        behind = 1 + len(self._left.fields)
        left, right = self._left.gathering(), self._right.gathering()

        class UnionElement(TaggedElement):
            __slots__ = ()

            @staticmethod
            def _value_of(fields: tuple[Any, ...]) -> Any:
                return right(fields[behind:]) if fields[0] else left(fields[1:behind])

        return UnionElement


class WindowCoGroupOperator(KeyedStreamOperator):
    """Runs a window co-group or window join; input 0 is left, input 1 right."""

    def __init__(self, join: WindowCoGroup | WindowJoin) -> None:
        left, right = ElementType(join.left_type), ElementType(join.right_type)
        self._union = TaggedUnion(left, right)
        self._late = join.left_late, join.right_late
        if isinstance(join, WindowCoGroup):
            function: ProcessWindowFunction = _CoGroupSides(join.function)
        else:
            function = _JoinSides(join.actual_function, join.join_type, left, right)
        self._windows = window_operator(join.windows, ProcessWindow(function), self._union)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._windows.open(states, context, timers)
        self._windows.put_late = lambda value: put_aside(context, self._late[value[0]], value.value)

    def processors(self) -> tuple[Processor, ...]:
        tag_left, tag_right = self._union.tagging()
        process = self._windows.process_element
        return (
            lambda value, context: process(tag_left(value), context),
            lambda value, context: process(tag_right(value), context),
        )

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        self._windows.on_timer(timer, domain)

    def close(self) -> None:
        self._windows.close()


class _Sides(ProcessWindowFunction):
    """Calls the user's function with the elements of both sides of a window."""

    def __init__(self, function: CoGroupFunction | ProcessJoinFunction) -> None:
        self._function: Any = function

    def open(self, context: WindowRuntimeContext) -> None:
        self._function.open(context)

    def close(self) -> None:
        self._function.close()

    @staticmethod
    def _divide(elements: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        sides: tuple[list[Any], list[Any]] = ([], [])
        for element in elements:
            sides[element[0]].append(element.value)
        return sides


class _CoGroupSides(_Sides):
    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any] | None:
        return self._function.co_group(key, context, *self._divide(elements))  # type: ignore[no-any-return]

    def clear(self, context: WindowContext) -> None:
        self._function.clear(context)


class _JoinSides(_Sides):
    """Calls a join function for each pair of elements in a window."""

    def __init__(
        self, function: ProcessJoinFunction, join_type: JoinType, left: ElementType, right: ElementType
    ) -> None:
        super().__init__(function)
        self._type = join_type
        self._left, self._right = (one.take or as_it_is for one in (left, right))

    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any]:
        lefts, rights = self._divide(elements)
        # Windows do not store the times of single elements.
        pair = PairContext(lambda tag, value, _: context.output(tag, value))
        pair.result_ms = context.window.max_timestamp_ms
        join = guard_call(self._function.process_element)
        if not rights:
            lefts, rights = (lefts if self._type.keeps_left else ()), (None,)
        elif not lefts:
            lefts, rights = (None,), (rights if self._type.keeps_right else ())
        own_left, own_right = self._left, self._right
        for left in lefts:
            for right in rights:
                yield from elements_of(join(own_left(left), own_right(right), pair) or ())


#: A waiting element: its fields, then facts about it, then its time.
Entry = tuple[Any, ...]


time_of: Callable[[Entry], int] = itemgetter(-1)


class TimedBuffer:
    """Waiting elements of one input per key, sorted by time and then by arrival."""

    def __init__(self, name: str, element: ElementType, facts: str = "", ttl: StateTtl | None = None) -> None:
        self._width = len(element.fields)
        fields = [element.stored_fields, *([facts] if facts else []), "__time_ms LONG"]
        self._descriptor = ListStateDescriptor(name, ", ".join(fields), ttl)
        self._element = element
        #: Copies an element for one more owner.
        self.own: Copier = element.take or as_it_is

    def open(self, states: KeyedStates) -> None:
        states.get_list_state(self._descriptor)
        self._scope = states.scope
        self._table: StateTable = states.tables[self._descriptor.name]
        self._gather = self._element.gathering()

    def read(self) -> list[Entry]:
        """Return the current key's entries by time; the caller must not change the list."""
        found: list[Entry] | None = self._table.read(self._scope)
        return found or []

    def make_element(self, entry: Entry) -> Any:
        return self.own(self._gather(entry[: self._width]))

    def add(self, value: Any, time_ms: int, facts: Sequence[Any] = ()) -> None:
        entry = (*self._element.to_tuple(value), *facts, time_ms)
        entries = self._table.read(self._scope)
        if entries is None:
            entries = [entry]
        elif time_of(entries[-1]) <= time_ms:
            entries.append(entry)
        else:
            insort_right(entries, entry, key=time_of)
        self._table.write(self._scope, entries)

    def drop_first(self, count: int, now_first: Entry) -> None:
        """Replace the current key's first entries by one; the TTL of the rest is unchanged."""
        entries = self._table.entries[self._scope.slot]
        self._table.write_rest(self._scope, [now_first, *entries[count + 1 :]])

    def replace(self, entries: list[Entry]) -> None:
        """Set the current key's entries, which are sorted; an empty list removes the state."""
        if entries:
            self._table.write(self._scope, entries)
        else:
            self._table.remove(self._scope)


_NEEDS_TIME = "needs elements with a timestamp on both sides; assign timestamps and watermarks to both"


class PairContext:
    """Context of a join function; one object, updated for each pair."""

    __slots__ = ("_emit_to", "left_ms", "result_ms", "right_ms")

    def __init__(self, emit_to: Callable[[OutputTag, Any, int | None], None]) -> None:
        self._emit_to = emit_to
        self.left_ms: int | None = None
        self.right_ms: int | None = None
        self.result_ms: int | None = None

    def left_timestamp(self) -> int | None:
        return self.left_ms

    def right_timestamp(self) -> int | None:
        return self.right_ms

    def timestamp(self) -> int | None:
        return self.result_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        self._emit_to(tag, value, self.result_ms)


class _TimedJoin(KeyedStreamOperator):
    """A join by event time, whose elements wait in buffers."""

    def __init__(self, function: ProcessJoinFunction, *buffers: TimedBuffer) -> None:
        self._function, self._buffers = function, buffers

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        self._timers, self._context = timers, context
        self._pair = PairContext(context.emit_to)
        for buffer in self._buffers:
            buffer.open(states)
        self._settle = states.puts.settle
        self._function.open(states.view_for_function())

    def close(self) -> None:
        self._function.close()

    def _emit(self, left: Any, right: Any, left_ms: int | None, right_ms: int | None, result_ms: int) -> None:
        pair = self._pair
        pair.left_ms, pair.right_ms, pair.result_ms = left_ms, right_ms, result_ms
        rows = self._function.process_element(left, right, pair)
        if rows is not None:
            self._context.emit(rows, result_ms)
        self._settle()


#: For an outer join, whether a waiting element has had a partner. None: an inner join stored it, and the job
#: was restored as an outer join; the element is then not emitted without a partner.
_INTERVAL_FACTS, _IS_JOINED = "__is_joined BOOLEAN", -2


class _Half:
    """One side of an interval join: its buffer, and the times at which partners may arrive."""

    def __init__(
        self, side: Side, ddl: str, reach_ms: tuple[int, int], keeps: bool, late: OutputTag | None
    ) -> None:
        self.side, self.keeps, self.late = side, keeps, late
        self.from_ms, self.to_ms = reach_ms
        # An element at the watermark is not late, so it may still arrive.
        self._waits_ms = max(self.to_ms, 0) + 1
        self.buffer = TimedBuffer(
            f"join/{side.name.lower()}", ElementType(ddl), _INTERVAL_FACTS if keeps else ""
        )

    def expiry_ms(self, time_ms: int) -> int:
        return min(time_ms + self._waits_ms, MAX_WATERMARK_MS)

    def cut(self, watermark_ms: int) -> list[Entry]:
        """Remove and return the current key's entries for which no partner can arrive any more."""
        entries = self.buffer.read()
        over = len(entries)
        if watermark_ms < MAX_WATERMARK_MS:
            over = bisect_right(entries, watermark_ms - self._waits_ms, key=time_of)
        if not over:
            return []
        self.buffer.replace(entries[over:])
        return entries[:over]


class IntervalJoinOperator(_TimedJoin):
    """Runs an :class:`~flinkish_spark.joins.IntervalJoin`; input 0 is left, input 1 right.

    Elements of both sides wait, sorted by time, until no partner can arrive any more. A key has at most one
    timer, for its element that expires first.
    """

    def __init__(self, join: IntervalJoin) -> None:
        reach = join.least_ms, join.greatest_ms
        back = -join.greatest_ms, -join.least_ms
        kind = join.join_type
        self._left = _Half(Side.LEFT, join.left_type, reach, kind.keeps_left, join.left_late)
        self._right = _Half(Side.RIGHT, join.right_type, back, kind.keeps_right, join.right_late)
        super().__init__(join.actual_function, self._left.buffer, self._right.buffer)

    def processors(self) -> tuple[Processor, ...]:
        return self._make_processor(self._left, self._right), self._make_processor(self._right, self._left)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Remove elements for which no partner can arrive any more; emit them for an outer join."""
        watermark_ms = self._timers.watermark_ms
        alone = [
            (half.expiry_ms(time_of(entry)), half, entry)
            for half in (self._left, self._right)
            for entry in half.cut(watermark_ms)
            if half.keeps and entry[_IS_JOINED] is False
        ]
        for over_ms, half, entry in sorted(alone, key=itemgetter(0)):
            element, time_ms = half.buffer.make_element(entry), time_of(entry)
            if half.side is Side.LEFT:
                self._emit(element, None, time_ms, None, over_ms)
            else:
                self._emit(None, element, None, time_ms, over_ms)
        due_ms = self._due_ms(self._left, self._right)
        if due_ms is not None:
            self._timers.register_event_time_timer(due_ms)

    def _make_processor(self, own: _Half, other: _Half) -> Processor:
        timers, is_left, take = self._timers, own.side is Side.LEFT, own.buffer.own

        def process(value: Any, context: FunctionContext) -> None:
            time_ms = context.timestamp_ms
            if time_ms is None or time_ms == MIN_WATERMARK_MS:
                raise ValueError(f"an interval join {_NEEDS_TIME}")
            if time_ms < timers.watermark_ms:
                put_aside(context, own.late, value)
                return
            partners = self._find_partners(other, time_ms + own.from_ms, time_ms + own.to_ms)
            self._keep(own, other, value, time_ms, bool(partners))
            for entry in partners:
                partner, partner_ms = other.buffer.make_element(entry), time_of(entry)
                result_ms = max(time_ms, partner_ms)
                if is_left:
                    self._emit(take(value), partner, time_ms, partner_ms, result_ms)
                else:
                    self._emit(partner, take(value), partner_ms, time_ms, result_ms)

        return process

    @staticmethod
    def _find_partners(other: _Half, from_ms: int, to_ms: int) -> list[Entry]:
        """Return the other side's waiting elements in a time range; mark them as joined."""
        entries = other.buffer.read()
        if not entries:
            return []
        first = bisect_left(entries, from_ms, key=time_of)
        behind = bisect_right(entries, to_ms, lo=first, key=time_of)
        found = entries[first:behind]
        if other.keeps and not all(entry[_IS_JOINED] for entry in found):
            joined = [(*entry[:_IS_JOINED], True, entry[-1]) for entry in found]
            other.buffer.replace([*entries[:first], *joined, *entries[behind:]])
        return found

    def _keep(self, half: _Half, other: _Half, value: Any, time_ms: int, is_joined: bool) -> None:
        before_ms, due_ms = self._due_ms(half, other), half.expiry_ms(time_ms)
        half.buffer.add(value, time_ms, (is_joined,) if half.keeps else ())
        if before_ms is None or due_ms < before_ms:
            if before_ms is not None:
                self._timers.delete_event_time_timer(before_ms)
            self._timers.register_event_time_timer(due_ms)

    @staticmethod
    def _due_ms(one: _Half, other: _Half) -> int | None:
        here, there = one.buffer.read(), other.buffer.read()
        if not here:
            return other.expiry_ms(time_of(there[0])) if there else None
        due_ms = one.expiry_ms(time_of(here[0]))
        return min(due_ms, other.expiry_ms(time_of(there[0]))) if there else due_ms


#: Facts about a version: whether it is a deletion, and whether older versions have been dropped.
_TEMPORAL_FACTS = "__is_deletion BOOLEAN, __is_first_known BOOLEAN"
_IS_DELETION, _IS_FIRST_KNOWN = -3, -2


class TemporalJoinOperator(_TimedJoin):
    """Runs a :class:`~flinkish_spark.joins.TemporalJoin`; input 0 is left, input 1 has the versions.

    Left elements wait for the watermark. The newest version that the watermark has passed is kept: it is
    valid until the next one. A key has at most one timer: for its next left element or expired version.
    """

    def __init__(self, join: TemporalJoin) -> None:
        self._join = join
        self._left = TimedBuffer("join/left", ElementType(join.left_type))
        self._right = TimedBuffer(
            "join/right", ElementType(join.right_type), _TEMPORAL_FACTS, join.version_ttl
        )
        super().__init__(join.actual_function, self._left, self._right)

    def processors(self) -> tuple[Processor, ...]:
        return self._process_left, self._process_version

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Join the left elements that the watermark has reached, and drop versions that have expired."""
        watermark_ms = self._timers.watermark_ms
        waiting, versions = self._left.read(), self._right.read()
        due = bisect_right(waiting, watermark_ms, key=time_of)
        for entry in waiting[:due]:
            time_ms = time_of(entry)
            self._join_one(self._left.make_element(entry), time_ms, _find_valid(versions, time_ms))
        if due:
            self._left.replace(waiting[due:])
        passed = bisect_right(versions, watermark_ms, key=time_of)
        if passed > 1:
            oldest = versions[passed - 1]
            self._right.drop_first(passed - 1, (*oldest[:_IS_FIRST_KNOWN], True, oldest[-1]))
        self._register(None)

    def _process_left(self, value: Any, context: FunctionContext) -> None:
        time_ms = _require_time(context)
        if time_ms > self._timers.watermark_ms:
            before_ms = self._due_ms()
            self._left.add(value, time_ms)
            self._register(before_ms)
            return
        versions = self._right.read()
        version = _find_valid(versions, time_ms)
        if version is not None or not versions or not versions[0][_IS_FIRST_KNOWN]:
            # It is late, but the version valid at its time is still stored.
            self._join_one(value, time_ms, version)
        else:
            put_aside(context, self._join.late_output, value)

    def _process_version(self, value: Any, context: FunctionContext) -> None:
        time_ms = _require_time(context)
        versions = self._right.read()
        if versions and time_ms < time_of(versions[0]) and versions[0][_IS_FIRST_KNOWN]:
            # Versions before the first one have been dropped.
            return
        before_ms = self._due_ms()
        is_deletion = self._join.is_deletion is not None and is_true(
            self._join.is_deletion(self._right.own(value)), "is_deletion()"
        )
        at = bisect_right(versions, time_ms, key=time_of) - 1
        is_again = at >= 0 and time_of(versions[at]) == time_ms
        is_first_known = is_again and versions[at][_IS_FIRST_KNOWN]
        if is_again:
            self._right.replace([*versions[:at], *versions[at + 1 :]])
        self._right.add(value, time_ms, (is_deletion, is_first_known))
        self._register(before_ms)

    def _join_one(self, left: Any, time_ms: int, version: Entry | None) -> None:
        if version is not None and not version[_IS_DELETION]:
            self._emit(left, self._right.make_element(version), time_ms, time_of(version), time_ms)
        elif self._join.join_type.keeps_left:
            self._emit(left, None, time_ms, None, time_ms)

    def _due_ms(self) -> int | None:
        waiting, versions = self._left.read(), self._right.read()
        due_ms = time_of(waiting[0]) if waiting else None
        if len(versions) < 2:
            return due_ms
        # The first version expires when the watermark reaches the second.
        over_ms = time_of(versions[1])
        return over_ms if due_ms is None else min(over_ms, due_ms)

    def _register(self, before_ms: int | None) -> None:
        due_ms = self._due_ms()
        if before_ms is not None and before_ms != due_ms:
            self._timers.delete_event_time_timer(before_ms)
        if due_ms is not None:
            # Register it again in any case: versions may have expired in between.
            self._timers.register_event_time_timer(due_ms)


def _find_valid(versions: list[Entry], time_ms: int) -> Entry | None:
    at = bisect_right(versions, time_ms, key=time_of)
    return versions[at - 1] if at else None


def _require_time(context: FunctionContext) -> int:
    time_ms = context.timestamp_ms
    if time_ms is None or time_ms == MIN_WATERMARK_MS:
        raise ValueError(f"a temporal join {_NEEDS_TIME}")
    return time_ms
