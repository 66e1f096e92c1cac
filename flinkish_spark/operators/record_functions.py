"""map, flat_map and filter on keyed streams, one or two: functions of single records with state per key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flinkish_spark.functions import (
    Context,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    RichFunction,
    RuntimeContext,
)


class RecordFunction(KeyedProcessFunction):
    """Calls a function of one record; it has no timers, since nothing that it is given registers any.

    Parameters
    ----------
    call
        From a record to what comes of it.
    rich
        Whose method that is, opened with the states of the operator; None for a plain function.
    """

    def __init__(self, call: Callable[[Any], Any], rich: RichFunction | None) -> None:
        self._call, self._rich = call, rich

    def open(self, context: RuntimeContext) -> None:
        """Open the function, if it wants to be."""
        if self._rich is not None:
            self._rich.open(context)

    def close(self) -> None:
        """Close it."""
        if self._rich is not None:
            self._rich.close()


class MapRecords(RecordFunction):
    """Emits one row for each record."""

    def process_element(self, value: Any, ctx: Context) -> Iterable[Any]:
        """Emit what the function returns."""
        return (self._call(value),)


class FlatMapRecords(RecordFunction):
    """Emits any number of rows for each record."""

    def process_element(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        """Emit what the function returns or yields."""
        rows: Iterable[Any] | None = self._call(value)
        return rows


class FilterRecords(RecordFunction):
    """Emits those records again for which the function says so."""

    def process_element(self, value: Any, ctx: Context) -> Iterable[Any]:
        """Emit the record, or nothing."""
        return (value,) if self._call(value) else ()


class CoFlatMapRecords(KeyedCoProcessFunction):
    """Calls a function of one record for each of two inputs: any number of rows of each record.

    Parameters
    ----------
    calls
        From a record of each input to what comes of it.
    rich
        What they are methods of, opened with the states of the operator: one or two objects, or none.
    """

    def __init__(
        self, calls: tuple[Callable[[Any], Any], Callable[[Any], Any]], rich: tuple[RichFunction, ...]
    ) -> None:
        self._first, self._second = calls
        self._rich = rich

    def open(self, context: RuntimeContext) -> None:
        """Open the functions that want to be."""
        for one in self._rich:
            one.open(context)

    def process_element1(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        """Emit what comes of a record of the first input."""
        return self._rows(self._first(value))

    def process_element2(self, value: Any, ctx: Context) -> Iterable[Any] | None:
        """Emit what comes of a record of the second input."""
        return self._rows(self._second(value))

    def close(self) -> None:
        """Close them."""
        for one in self._rich:
            one.close()

    def _rows(self, result: Any) -> Iterable[Any] | None:
        rows: Iterable[Any] | None = result
        return rows


class CoMapRecords(CoFlatMapRecords):
    """The same, one row of each record."""

    def _rows(self, result: Any) -> Iterable[Any]:
        return (result,)
