"""Calls of a window function without states, and what goes to side outputs, where windows are in one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flinkish_spark.operators.column_windows import SessionWindows
from flinkish_spark.operators.elements import OutputTag, tag_name
from flinkish_spark.operators.group_run import ElementFailed, Emitted, TimerFailed
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.looped_windows import LoopedWindows
from flinkish_spark.operators.open_windows import Folding, OpenWindow
from flinkish_spark.operators.window_contexts import FiringContext, FunctionStates, refuse_window_state
from flinkish_spark.runtime.arrow_rows import OutputError
from flinkish_spark.runtime.group_runners import OutRows
from flinkish_spark.runtime.taken_values import taken
from flinkish_spark.state import StateDescriptor
from flinkish_spark.windows.time_window import TimeWindow

#: From an error to what says which element, or which timer, is to blame for it.
Blame = Callable[[Exception], ElementFailed | TimerFailed]


class SideRows:
    """Rows that go to side outputs, in their order."""

    def __init__(self) -> None:
        self._emitted = Emitted()
        self._blame: dict[str, list[Blame]] = {}

    def put(self, tag: OutputTag, value: Any, time_ms: int | None, blame: Blame) -> None:
        """Add a row."""
        name = tag_name(tag)
        self._emitted.side.setdefault(name, []).append((taken(value), time_ms))
        self._blame.setdefault(name, []).append(blame)

    def divide(self) -> None:
        """Let what comes from now on be behind the watermark."""
        self._emitted.side_before = {name: len(rows) for name, rows in self._emitted.side.items()}

    def written(self, write: Callable[[Emitted], list[OutRows]]) -> list[OutRows]:
        """Return the rows as `write` makes them.

        Raises
        ------
        ElementFailed, TimerFailed
            One is not as it was declared.
        """
        try:
            return write(self._emitted)
        except OutputError:
            for name, rows in self._emitted.side.items():
                for row, blame in zip(rows, self._blame[name], strict=True):
                    try:
                        write(Emitted(side={name: [row]}))
                    except OutputError as error:
                        raise blame(error) from error
            raise


class WindowCalls:
    """Calls an opened window function, which has asked for no state.

    Parameters
    ----------
    states
        Of the operator.
    """

    def __init__(self, operator: LoopedWindows, states: KeyedStates) -> None:
        function = operator.function
        assert function is not None
        self._function, self._timers = function, Timers(states.scope)
        merges = isinstance(operator.windows, SessionWindows)
        of_function = FunctionStates(
            states.of_function(), states.of_function(), refuse_window_state if merges else _any_window_state
        )
        function.open(of_function)
        of_function.seal()
        context = FunctionContext(states.scope, self._timers, self._to_side, _no_rows, _no_count)
        self._firing = FiringContext(of_function, context, self._timers)

    def begin(self, watermark_ms: int, processing_time_ms: int, sides: SideRows) -> None:
        """Say at which times the next calls are, and where what they emit to side outputs goes."""
        self._timers.watermark_ms, self._timers.processing_time_ms = watermark_ms, processing_time_ms
        self._sides = sides

    def rows(self, folding: Folding, window: OpenWindow, key: Any, blame: Blame) -> Iterable[Any] | None:
        """Return what the function makes of a window; None if there is nothing to call it with."""
        self._blame = blame
        self._firing.window = TimeWindow(window.start_ms, window.end_ms)
        accumulator = window.accumulator
        result = None if accumulator is None else folding.result(accumulator)
        if result is None:
            return None
        elements: Sequence[Any] = folding.elements(result)
        return self._function.process(key, self._firing, elements)

    def end(self) -> None:
        """Let the function clear up behind the window."""
        self._function.clear(self._firing)

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._sides.put(tag, value, time_ms, self._blame)


def _any_window_state(descriptor: StateDescriptor) -> None:
    """Windows that do not merge may have states of their own."""


def _no_rows(rows: Iterable[Any], time_ms: int | None) -> None:
    raise AssertionError("a window function returns its rows")


def _no_count(name: str) -> None:
    raise AssertionError("a window function counts nothing")
