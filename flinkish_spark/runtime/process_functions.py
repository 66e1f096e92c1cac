"""Process functions without state, as mapInArrow runs them: one output of such a function at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from flinkish_spark.operators.elements import OutputTag, tag_name
from flinkish_spark.runtime.columns import TIME
from flinkish_spark.runtime.micro_batch_time import MicroBatch, micro_batch_of_task
from flinkish_spark.runtime.row_functions import ExpandRows
from flinkish_spark.runtime.taken_values import taken
from flinkish_spark.user_iterators import elements_of


@dataclass(frozen=True)
class ProcessRows(ExpandRows):
    """Makes rows of each row, those of one output.

    The function is called with the record and its context.

    Parameters
    ----------
    side
        Name of the side output; None for the main output.
    """

    side: str | None = None

    def _call(self, batch: pa.RecordBatch) -> Callable[[int, Any], Iterable[Any] | None]:
        context = _Context(batch.column(TIME).to_pylist() if TIME in batch.schema.names else None)

        def rows(at: int, record: Any) -> Iterable[Any]:
            context.begin(at)
            # Whatever is read, the function runs to its end: what it emits where may depend on it.
            main = list(map(taken, elements_of(self.function.call(record, context) or ())))
            return main if self.side is None else context.emitted.get(self.side, ())

        return rows


class _Context:
    """See :class:`~flinkish_spark.stream_functions.ProcessContext`."""

    def __init__(self, times_ms: list[int | None] | None) -> None:
        self._times_ms, self._at = times_ms, 0
        self.emitted: dict[str, list[Any]] = {}

    def begin(self, at: int) -> None:
        """Make a row of the batch the current one."""
        self._at = at
        self.emitted = {}

    def timestamp(self) -> int | None:
        """Return the event time of the current record."""
        return None if self._times_ms is None else self._times_ms[self._at]

    def current_watermark(self) -> int:
        """Return the least watermark of the job's operators."""
        return self._micro_batch.watermarks.least_ms

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time."""
        return self._micro_batch.processing_time_ms

    @cached_property
    def _micro_batch(self) -> MicroBatch:
        # Read only if somebody asks, once for each batch of rows.
        return micro_batch_of_task()

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output."""
        self.emitted.setdefault(tag_name(tag), []).append(taken(value))
