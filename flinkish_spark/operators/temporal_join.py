"""The temporal (as-of) join, element by element, over keyed state.

Left elements wait for the watermark. Of the versions that it has passed, the newest stays: it is valid until
another one comes. A key has at most one timer that counts: for what can be done first.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from flinkish_spark.joins.temporal import TemporalJoin
from flinkish_spark.operators.element_windows import LATE_RECORDS_DROPPED
from flinkish_spark.operators.elements import MIN_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.operators.join_contexts import JoinNeedsTime, PairContext
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.timed_buffer import Entry, TimedBuffer, time_of

#: What is known of a version: whether it only ends the one before it, and whether older ones are forgotten.
_FACTS = "__is_deletion BOOLEAN, __is_first_known BOOLEAN"
_IS_DELETION, _IS_FIRST_KNOWN = -3, -2


class TemporalJoinOperator(KeyedStreamOperator):
    """Runs a :class:`~flinkish_spark.joins.TemporalJoin`: input 0 is the left one, 1 has the versions."""

    def __init__(self, join: TemporalJoin) -> None:
        self._join, self._function = join, join.actual_function
        self._left = TimedBuffer("join/left", ElementType(join.left_type))
        self._right = TimedBuffer("join/right", ElementType(join.right_type), _FACTS, join.version_ttl)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Declare the buffers and open the function."""
        self._timers, self._context = timers, context
        self._pair = PairContext(context)
        self._left.open(states)
        self._right.open(states)
        self._function.open(states.of_function())

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles a left element, and a version."""
        return self._process_left, self._process_version

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Join the left elements that the watermark has reached, and forget versions that are over."""
        watermark_ms = self._timers.watermark_ms
        waiting, versions = self._left.entries(), self._right.entries()
        due = bisect_right(waiting, watermark_ms, key=time_of)
        for entry in waiting[:due]:
            time_ms = time_of(entry)
            self._join_one(self._left.element(entry), time_ms, _valid_at(versions, time_ms))
        if due:
            self._left.replace(waiting[due:])
        passed = bisect_right(versions, watermark_ms, key=time_of)
        if passed > 1:
            oldest = versions[passed - 1]
            self._right.drop_first(passed - 1, (*oldest[:_IS_FIRST_KNOWN], True, oldest[-1]))
        self._register(None)

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    # -- elements -------------------------------------------------------------------------------------
    def _process_left(self, value: Any, context: FunctionContext) -> None:
        time_ms = _time_of(context)
        if time_ms > self._timers.watermark_ms:
            before_ms = self._due_ms()
            self._left.add(value, time_ms)
            self._register(before_ms)
            return
        versions = self._right.entries()
        version = _valid_at(versions, time_ms)
        if version is not None or not versions or not versions[0][_IS_FIRST_KNOWN]:
            # It is late, but what was valid at its time is known still.
            self._join_one(value, time_ms, version)
        elif self._join.late_output is None:
            context.count(LATE_RECORDS_DROPPED)
        else:
            context.output(self._join.late_output, value)

    def _process_version(self, value: Any, context: FunctionContext) -> None:
        time_ms = _time_of(context)
        versions = self._right.entries()
        if versions and time_ms < time_of(versions[0]) and versions[0][_IS_FIRST_KNOWN]:
            # Nobody can ask for it any more: what is before the first is forgotten.
            return
        before_ms = self._due_ms()
        is_deletion = self._join.is_deletion is not None and bool(self._join.is_deletion(value))
        at = bisect_right(versions, time_ms, key=time_of) - 1
        is_again = at >= 0 and time_of(versions[at]) == time_ms
        is_first_known = is_again and versions[at][_IS_FIRST_KNOWN]
        if is_again:
            self._right.replace([*versions[:at], *versions[at + 1 :]])
        self._right.add(value, time_ms, (is_deletion, is_first_known))
        self._register(before_ms)

    def _join_one(self, left: Any, time_ms: int, version: Entry | None) -> None:
        pair, right = self._pair, None
        pair.left_ms = pair.result_ms = time_ms
        pair.right_ms = None
        if version is not None and not version[_IS_DELETION]:
            pair.right_ms, right = time_of(version), self._right.element(version)
        elif not self._join.join_type.keeps_left:
            return
        rows = self._function.process_element(left, right, pair)
        if rows is not None:
            self._context.emit(rows, time_ms)

    # -- time -----------------------------------------------------------------------------------------
    def _due_ms(self) -> int | None:
        """Return when something can be done for the current key; None if there is nothing to do."""
        waiting, versions = self._left.entries(), self._right.entries()
        due_ms = time_of(waiting[0]) if waiting else None
        if len(versions) < 2:
            return due_ms
        # The first version is over when the watermark reaches the second.
        over_ms = time_of(versions[1])
        return over_ms if due_ms is None else min(over_ms, due_ms)

    def _register(self, before_ms: int | None) -> None:
        """Register the timer for what can be done first, in place of the one before."""
        due_ms = self._due_ms()
        if before_ms is not None and before_ms != due_ms:
            self._timers.delete_event_time_timer(before_ms)
        if due_ms is not None:
            # Also where it should be there: versions may have expired in between.
            self._timers.register_event_time_timer(due_ms)


def _valid_at(versions: list[Entry], time_ms: int) -> Entry | None:
    """Return the newest version of that time or before it."""
    at = bisect_right(versions, time_ms, key=time_of)
    return versions[at - 1] if at else None


def _time_of(context: FunctionContext) -> int:
    time_ms = context.timestamp_ms
    if time_ms is None or time_ms == MIN_WATERMARK_MS:
        raise JoinNeedsTime("a temporal join")
    return time_ms
