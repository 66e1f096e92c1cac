"""The interval join, element by element, over keyed state.

Elements of both sides wait, sorted by time, until no partner can come any more. A key has at most one timer:
for the first of its elements for which that will be so.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from flinkish_spark.joins.interval import IntervalJoin
from flinkish_spark.joins.kinds import Side
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, TimeDomain, Timer
from flinkish_spark.operators.join_contexts import JoinNeedsTime, PairContext
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.timed_buffer import Entry, TimedBuffer, time_of
from flinkish_spark.operators.window_operator import LATE_RECORDS_DROPPED

#: What is known of a waiting element where it would come out alone: whether it has had a partner.
_FACTS = "__is_joined BOOLEAN"


class _Half:
    """One side: its buffer, and when a partner of its elements may come."""

    def __init__(
        self, side: Side, ddl: str, reach_ms: tuple[int, int], keeps: bool, late: OutputTag | None
    ) -> None:
        self.side, self.keeps, self.late = side, keeps, late
        self.from_ms, self.to_ms = reach_ms
        self.buffer = TimedBuffer(f"join/{side.name.lower()}", ElementType(ddl), _FACTS if keeps else "")

    def over_ms(self, time_ms: int) -> int:
        """Return the first watermark at which no partner of an element can come any more.

        An element is late if its time is before the watermark; so one at the watermark may still come.
        """
        return min(time_ms + max(self.to_ms, 0) + 1, MAX_WATERMARK_MS)


class IntervalJoinOperator(KeyedStreamOperator):
    """Runs an :class:`~flinkish_spark.joins.IntervalJoin`: input 0 is the left one, 1 the right one."""

    def __init__(self, join: IntervalJoin) -> None:
        self._join, self._function = join, join.actual_function
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
        self._function.open(states)

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element of the left and of the right input."""
        return self._process_left, self._process_right

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Let those go for which no partner can come any more."""
        halves = self._left, self._right
        gone = [(half.over_ms(time_of(entry)), half, entry) for half in halves for entry in self._cut(half)]
        for over_ms, half, entry in sorted(gone, key=itemgetter(0)):
            if half.keeps and not entry[-2]:
                alone, time_ms = half.buffer.element(entry), time_of(entry)
                if half.side is Side.LEFT:
                    self._emit(alone, None, time_ms, None, over_ms)
                else:
                    self._emit(None, alone, None, time_ms, over_ms)
        due_ms = self._due_ms()
        if due_ms is not None:
            self._timers.register_event_time_timer(due_ms)

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    # -- elements -------------------------------------------------------------------------------------
    def _process_left(self, value: Any, context: FunctionContext) -> None:
        time_ms = self._on_time(self._left, value, context)
        if time_ms is None:
            return
        partners = self._partners(self._right, time_ms + self._left.from_ms, time_ms + self._left.to_ms)
        self._keep(self._left, value, time_ms, bool(partners))
        for partner in partners:
            right_ms = time_of(partner)
            right = self._right.buffer.element(partner)
            self._emit(value, right, time_ms, right_ms, max(time_ms, right_ms))

    def _process_right(self, value: Any, context: FunctionContext) -> None:
        time_ms = self._on_time(self._right, value, context)
        if time_ms is None:
            return
        partners = self._partners(self._left, time_ms + self._right.from_ms, time_ms + self._right.to_ms)
        self._keep(self._right, value, time_ms, bool(partners))
        for partner in partners:
            left_ms = time_of(partner)
            left = self._left.buffer.element(partner)
            self._emit(left, value, left_ms, time_ms, max(left_ms, time_ms))

    def _on_time(self, half: _Half, value: Any, context: FunctionContext) -> int | None:
        """Return an element's time; None, and the element is dealt with, if it is late."""
        time_ms = context.timestamp_ms
        if time_ms is None or time_ms == MIN_WATERMARK_MS:
            raise JoinNeedsTime("an interval join")
        if time_ms >= self._timers.watermark_ms:
            return time_ms
        if half.late is None:
            context.count(LATE_RECORDS_DROPPED)
        else:
            context.output(half.late, value)
        return None

    def _partners(self, other: _Half, from_ms: int, to_ms: int) -> list[Entry]:
        """Return the other side's waiting elements of these times; they are not alone from now on."""
        first, behind = other.buffer.span(from_ms, to_ms)
        entries = other.buffer.entries()
        found = entries[first:behind]
        if other.keeps and not all(entry[-2] for entry in found):
            joined = [(*entry[:-2], True, entry[-1]) for entry in found]
            other.buffer.replace([*entries[:first], *joined, *entries[behind:]])
        return found

    def _keep(self, half: _Half, value: Any, time_ms: int, is_joined: bool) -> None:
        """Let an element wait for partners that come later."""
        before_ms = self._due_ms()
        half.buffer.add(value, time_ms, (is_joined,) if half.keeps else ())
        due_ms = half.over_ms(time_ms)
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

    # -- what is over ---------------------------------------------------------------------------------
    def _cut(self, half: _Half) -> list[Entry]:
        """Take the entries out of a buffer for which no partner can come any more."""
        entries, watermark_ms = half.buffer.entries(), self._timers.watermark_ms
        over = sum(1 for entry in entries if half.over_ms(time_of(entry)) <= watermark_ms)
        if over:
            half.buffer.replace(entries[over:])
        return entries[:over]

    def _due_ms(self) -> int | None:
        """Return when the next element of the current key is over; None if none waits."""
        first = [
            half.over_ms(time_of(entries[0]))
            for half in (self._left, self._right)
            if (entries := half.buffer.entries())
        ]
        return min(first, default=None)
