"""Results of windows that a function of the user's has folded, as rows that go out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.group_run import TimerFailed
from flinkish_spark.operators.key_index import Array
from flinkish_spark.operators.open_windows import OpenWindow
from flinkish_spark.operators.vectorized_windows import timestamps
from flinkish_spark.operators.window_pool import last_of
from flinkish_spark.runtime.arrow_rows import OutputError, RowWriter
from flinkish_spark.runtime.taken_values import Take, is_flat, taken, taking
from flinkish_spark.windows.functions import WithKeyAndWindow, WithWindow
from flinkish_spark.windows.time_window import TimeWindow


@dataclass
class Fired:
    """Windows that have fired with a result, in their order.

    Parameters
    ----------
    windows, results
        As long as each other.
    before
        How many of them fired before the watermark.
    """

    windows: list[OpenWindow] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    before: int = 0


class _Firing(NamedTuple):
    """What of a window's context the functions that are known look at."""

    window: TimeWindow


class ResultWriter:
    """Makes columns of results, checked as rows of any function are.

    Parameters
    ----------
    then
        What is put around results; None: they are the rows.
    output
        The declared fields.
    clock
        By which windows fire.
    """

    def __init__(
        self, then: WithKeyAndWindow | WithWindow | None, output: T.StructType, clock: TimeDomain
    ) -> None:
        self._then, self._clock, self._writer = then, clock, RowWriter.of(output)
        #: Makes a result that does not change behind the call that has made it; None: it does not anyway.
        self.take: Take | None = taken
        if then is None:
            self.take = taking(output)
        elif is_flat(output):
            self.take = None

    def write(self, fired: Fired, key_columns: Sequence[pa.Array], keys: Sequence[Any]) -> list[pa.Array]:
        """Return the time of each row, and the columns of the output.

        Parameters
        ----------
        key_columns, keys
            All keys at hand, by their numbers: as columns, and as functions see them.

        Raises
        ------
        TimerFailed
            A result is not as it was declared; says of which window.
        """
        end_ms = np.array([one.end_ms for one in fired.windows], dtype=np.int64)
        return [pa.array(last_of(end_ms)), *self._columns(fired, end_ms, key_columns, keys)]

    def _columns(
        self, fired: Fired, end_ms: Array, key_columns: Sequence[pa.Array], keys: Sequence[Any]
    ) -> list[pa.Array]:
        try:
            if self._then is None:
                return self._writer.write(fired.results)
            columns = _spread(fired.results)
            if columns is not None:
                given = self._with_bounds(columns, fired.windows, end_ms, key_columns)
                return self._writer.write_columns(given)
        except OutputError:
            pass  # Below it is said of which window.
        return self._row_by_row(fired, keys)

    def _with_bounds(
        self,
        results: list[Sequence[Any]],
        windows: Sequence[OpenWindow],
        end_ms: Array,
        key_columns: Sequence[pa.Array],
    ) -> list[Sequence[Any] | pa.Array]:
        start_ms = np.array([one.start_ms for one in windows], dtype=np.int64)
        key = pa.array([one.key for one in windows], pa.int64())
        own = [column.take(key) for column in key_columns] if type(self._then) is WithKeyAndWindow else []
        return [*own, *results, timestamps(start_ms), timestamps(end_ms)]

    def _row_by_row(self, fired: Fired, keys: Sequence[Any]) -> list[pa.Array]:
        rows = []
        for window, result in zip(fired.windows, fired.results, strict=True):
            own = self._rows(window, result, keys)
            try:
                self._writer.write(own)
            except OutputError as error:
                raise TimerFailed(timer_of(window, keys), self._clock, error) from error
            rows += own
        return self._writer.write(rows)

    def _rows(self, window: OpenWindow, result: Any, keys: Sequence[Any]) -> list[Any]:
        if self._then is None:
            return [result]
        firing: Any = _Firing(TimeWindow(window.start_ms, window.end_ms))
        return list(self._then.process(keys[window.key], firing, (result,)))


def timer_of(window: OpenWindow, keys: Sequence[Any]) -> Timer:
    """Return the timer that an operator with timers would have had for a window."""
    own = TimeWindow(window.start_ms, window.end_ms)
    return Timer(own.max_timestamp_ms, keys[window.key], own)


def _spread(results: Sequence[Any]) -> list[Sequence[Any]] | None:
    """Return columns of results: of the fields of tuples, or one; None for a mixture."""
    kinds = set(map(type, results))
    are_rows = {issubclass(kind, tuple) for kind in kinds}
    if are_rows == {False}:
        return [results]
    if are_rows == {True} and len(set(map(len, results))) == 1:
        return list(zip(*results, strict=True))
    return None
