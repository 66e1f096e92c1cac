"""A key group's state out of rows: runs a bootstrap function where a job runs its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.operators.decoded_values import StateValueError
from flinkish_spark.operators.elements import MIN_WATERMARK_MS, TimeDomain, Timer
from flinkish_spark.operators.group_run import ElementFailed, Elements, GroupRun, Progress
from flinkish_spark.operators.group_state import GroupLayout, GroupState, NoBases
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.table_codec import HASH
from flinkish_spark.runtime.arrow_rows import RowReader
from flinkish_spark.runtime.keyed_operator import USER_FUNCTION_MARKER
from flinkish_spark.runtime.row_blocks import from_block
from flinkish_spark.savepoints.bootstrap_function import KeyedStateBootstrapFunction
from flinkish_spark.savepoints.group_writers import WriterRefused

#: The column with the time of a row, if rows have one.
ROW_TIME = "time"


@dataclass(frozen=True)
class FilledRows:
    """How rows by key come to a function.

    Parameters
    ----------
    schema
        Of the blocks: the key's hash, the time if there is one, the fields, then the keys.
    fields, key_columns
        Names of the fields for the function; names of the columns of the key.
    key_types
        Of the key.
    """

    schema: pa.Schema
    fields: tuple[str, ...]
    field_columns: tuple[str, ...]
    key_columns: tuple[str, ...]
    key_types: tuple[T.DataType, ...]


class FillGroup:
    """A :class:`Change`: state and timers of a key group by a function of the user's.

    Parameters
    ----------
    now_ms
        Processing time for the function, and when its entries were touched.
    """

    def __init__(
        self,
        uid: str,
        max_parallelism: int,
        function: KeyedStateBootstrapFunction,
        rows: FilledRows,
        now_ms: int,
    ) -> None:
        self._uid, self._groups, self._function = uid, max_parallelism, function
        self._rows, self._now_ms = rows, now_ms
        self._opened: tuple[GroupRun, GroupLayout, RowReader] | None = None

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        """Return the value."""
        run, layout, reader = self._open()
        (blocks,) = parts.values()
        rows = pa.concat_batches([from_block(block, self._rows.schema) for block in blocks])
        times: list[int | None] | None = None
        if ROW_TIME in rows.schema.names:
            order = np.argsort(rows.column(ROW_TIME).fill_null(MIN_WATERMARK_MS).to_numpy(), kind="stable")
            rows = rows.take(pa.array(order))
            times = rows.column(ROW_TIME).to_pylist()
        keys, values = reader.read(rows)
        state = GroupState(layout, None, NoBases())
        progress = Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, self._now_ms)
        hash_of = dict(zip(keys, rows.column(HASH).to_pylist(), strict=True))
        state.load(run.states, run.timers, hash_of, progress)
        try:
            emitted = run.run([], progress, [Elements(keys, values, times)])
        except ElementFailed as failure:
            raise self._blame(f"{failure} (at a row of the key {keys[failure.at]!r:.200})") from failure.error
        if emitted.rows or emitted.side:
            raise self._blame("it emits, and a bootstrap has no output")
        try:
            return state.dump_whole() if state.store(run.states, run.timers) else None
        except StateValueError as error:
            raise self._blame(str(error)) from error

    def _open(self) -> tuple[GroupRun, GroupLayout, RowReader]:
        if self._opened is None:
            run = GroupRun(_BootstrapOperator(self._function), self._uid, self._groups)
            rows = self._rows
            reader = RowReader(rows.fields, rows.field_columns, rows.key_columns)
            self._opened = run, GroupLayout.of(run.states, rows.key_types), reader
        return self._opened

    def _blame(self, says: str) -> WriterRefused:
        told = {"uid": self._uid, "error": says}
        return WriterRefused(f"{USER_FUNCTION_MARKER} {json.dumps(told)}")


class _BootstrapOperator(KeyedStreamOperator):
    """Runs a bootstrap function where a job runs its own."""

    def __init__(self, function: KeyedStateBootstrapFunction) -> None:
        self._function = function

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Open the function."""
        self._function.open(states.of_function())

    def processors(self) -> tuple[Processor, ...]:
        """Return the function's `process_element`."""
        return (self._process,)

    def _process(self, value: Any, context: FunctionContext) -> None:
        result: Any = self._function.process_element(value, context)
        if result is not None:
            raise WriterRefused("process_element returned something, and a bootstrap has no output")

    def on_timer(self, timer: Timer, domain: TimeDomain) -> None:
        """Never called: the watermark stands at its beginning, and elements come behind all timers."""
        raise AssertionError("timers of a bootstrap fire in the job")

    def close(self) -> None:
        """Close the function."""
        self._function.close()
