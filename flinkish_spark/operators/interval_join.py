"""The interval join, element by element, over keyed state.

Elements of both sides wait, sorted by time, until no partner can come any more. A key has at most one timer:
for the first of its elements for which that will be so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any

from flinkish_spark.joins.interval import IntervalJoin
from flinkish_spark.joins.kinds import Side
from flinkish_spark.operators.element_windows import LATE_RECORDS_DROPPED
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, TimeDomain, Timer
from flinkish_spark.operators.join_contexts import JoinNeedsTime, PairContext
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.timed_buffer import Entry, TimedBuffer, time_of

#: What is known of a waiting element where it would come out alone: whether it has had a partner. None: it
#: came to a join that did not ask, before this one went on behind its savepoint; it does not come out alone.
_FACTS, _IS_JOINED = "__is_joined BOOLEAN", -2


class _Half:
    """One side: its buffer, and when a partner of its elements may come."""

    def __init__(
        self, side: Side, ddl: str, reach_ms: tuple[int, int], keeps: bool, late: OutputTag | None
    ) -> None:
        self.side, self.keeps, self.late = side, keeps, late
        self.from_ms, self.to_ms = reach_ms
        # An element is late if its time is before the watermark; so one at the watermark may still come.
        self._waits_ms = max(self.to_ms, 0) + 1
        self.buffer = TimedBuffer(f"join/{side.name.lower()}", ElementType(ddl), _FACTS if keeps else "")

    def over_ms(self, time_ms: int) -> int:
        """Return the first watermark at which no partner of an element can come any more."""
        return min(time_ms + self._waits_ms, MAX_WATERMARK_MS)

    def cut(self, watermark_ms: int) -> list[Entry]:
        """Take the current key's entries out of the buffer for which no partner can come any more."""
        entries = self.buffer.entries()
        over = len(entries)
        if watermark_ms < MAX_WATERMARK_MS:
            over = bisect_right(entries, watermark_ms - self._waits_ms, key=time_of)
        if not over:
            return []
        self.buffer.replace(entries[over:])
        return entries[:over]


class IntervalJoinOperator(KeyedStreamOperator):
    """Runs an :class:`~flinkish_spark.joins.IntervalJoin`: input 0 is the left one, 1 the right one."""

    def __init__(self, join: IntervalJoin) -> None:
        self._function = join.actual_function
        reach = join.least_ms, join.greatest_ms
        back = -join.greatest_ms, -join.least_ms
        kind = join.join_type
        self._left = _Half(Side.LEFT, join.left_type, reach, kind.keeps_left, join.left_late)
        self._right = _Half(Side.RIGHT, join.right_type, back, kind.keeps_right, join.right_late)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare the buffers and open the function."""
        self._timers, self._context = timers, context
        self._pair = PairContext(context)
        for half in (self._left, self._right):
            half.buffer.open(states)
        self._function.open(states.of_function())

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element of the left and of the right input."""
        return self._processor(self._left, self._right), self._processor(self._right, self._left)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Let those go for which no partner can come any more."""
        watermark_ms = self._timers.watermark_ms
        alone = [
            (half.over_ms(time_of(entry)), half, entry)
            for half in (self._left, self._right)
            for entry in half.cut(watermark_ms)
            if half.keeps and entry[_IS_JOINED] is False
        ]
        for over_ms, half, entry in sorted(alone, key=itemgetter(0)):
            element, time_ms = half.buffer.element(entry), time_of(entry)
            if half.side is Side.LEFT:
                self._emit(element, None, time_ms, None, over_ms)
            else:
                self._emit(None, element, None, time_ms, over_ms)
        due_ms = self._due_ms(self._left, self._right)
        if due_ms is not None:
            self._timers.register_event_time_timer(due_ms)

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    # -- elements -------------------------------------------------------------------------------------
    def _processor(self, own: _Half, other: _Half) -> Processor:
        """Return what handles an element of one side."""
        timers, is_left = self._timers, own.side is Side.LEFT

        def process(value: Any, context: FunctionContext) -> None:
            time_ms = context.timestamp_ms
            if time_ms is None or time_ms == MIN_WATERMARK_MS:
                raise JoinNeedsTime("an interval join")
            if time_ms < timers.watermark_ms:
                self._put_aside(own, value, context)
                return
            partners = self._partners(other, time_ms + own.from_ms, time_ms + own.to_ms)
            self._keep(own, other, value, time_ms, bool(partners))
            for entry in partners:
                partner, partner_ms = other.buffer.element(entry), time_of(entry)
                result_ms = max(time_ms, partner_ms)
                if is_left:
                    self._emit(value, partner, time_ms, partner_ms, result_ms)
                else:
                    self._emit(partner, value, partner_ms, time_ms, result_ms)

        return process

    @staticmethod
    def _put_aside(half: _Half, value: Any, context: FunctionContext) -> None:
        """Do what is done with an element that is late."""
        if half.late is None:
            context.count(LATE_RECORDS_DROPPED)
        else:
            context.output(half.late, value)

    @staticmethod
    def _partners(other: _Half, from_ms: int, to_ms: int) -> list[Entry]:
        """Return the other side's waiting elements of these times; they are not alone from now on."""
        entries = other.buffer.entries()
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
        """Let an element wait for partners that come later."""
        before_ms, due_ms = self._due_ms(half, other), half.over_ms(time_ms)
        half.buffer.add(value, time_ms, (is_joined,) if half.keeps else ())
        if before_ms is None or due_ms < before_ms:
            if before_ms is not None:
                self._timers.delete_event_time_timer(before_ms)
            self._timers.register_event_time_timer(due_ms)

    def _emit(self, left: Any, right: Any, left_ms: int | None, right_ms: int | None, result_ms: int) -> None:
        pair = self._pair
        pair.left_ms, pair.right_ms, pair.result_ms = left_ms, right_ms, result_ms
        rows = self._function.process_element(left, right, pair)
        if rows is not None:
            self._context.emit(rows, result_ms)

    @staticmethod
    def _due_ms(one: _Half, other: _Half) -> int | None:
        """Return when the next element of the current key is over; None if none waits."""
        here, there = one.buffer.entries(), other.buffer.entries()
        if not here:
            return other.over_ms(time_of(there[0])) if there else None
        due_ms = one.over_ms(time_of(here[0]))
        return min(due_ms, other.over_ms(time_of(there[0]))) if there else due_ms
