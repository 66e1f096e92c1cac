"""map, flat_map and filter on keyed streams: functions of single records that may have state per key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flinkish_spark.functions import Context, KeyedProcessFunction, RichFunction, RuntimeContext


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
