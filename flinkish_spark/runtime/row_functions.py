"""Functions without state over single rows, as mapInArrow runs them: map, flat_map, filter.

Control columns that stand beside a row (channel, sequence, time) go along with what is made of it, so a
record's place in its channel stays what it was. The objects here are pickled into the plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.functions import RichFunction
from flinkish_spark.operators.subtask import Subtask, SubtaskFacts
from flinkish_spark.runtime.arrow_rows import OutputError, RowReader, RowWriter
from flinkish_spark.runtime.closing import Closes, close_operator
from flinkish_spark.runtime.columns import CHANNEL, PREFIX, SEQUENCE
from flinkish_spark.runtime.keyed_operator import USER_FUNCTION_MARKER, OperatorFailed, Origins
from flinkish_spark.runtime.row_blocks import arrow_schema, as_schema
from flinkish_spark.runtime.taken_values import taking
from flinkish_spark.runtime.worker_gc import freeze_modules
from flinkish_spark.user_iterators import USER_ERRORS, elements_of


class StatelessContext(SubtaskFacts):
    """What `open` of a function without state is given."""

    def __init__(self, uid: str, parallelism: int | None = None) -> None:
        self.uid, self._parallelism = uid, parallelism
        self.max_parallelism = 1

    def _subtask(self) -> Subtask:
        found = super()._subtask()
        return found if self._parallelism is None else replace(found, parallelism=self._parallelism)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            raise RuntimeError(
                f"'{self.uid}' asks for state ({name}), which only functions on a keyed stream have; "
                "call key_by() first"
            )
        raise AttributeError(name)


@dataclass(frozen=True)
class RowFunction:
    """A function over one row, and what it is called in errors.

    Parameters
    ----------
    name
        Of the operator, or of what it does.
    call
        From a record to what comes of it; a process function gets its context, too.
    rich
        Opened and closed once per task, if it wants to be.
    origins
        Where records come from.
    what
        What errors call it, if it is not the function of an operator of that name.
    parallelism
        In how many tasks it runs; None where that is not known.
    """

    name: str
    call: Callable[..., Any]
    rich: RichFunction | None = None
    origins: Origins = field(default_factory=Origins)
    what: str = ""
    parallelism: int | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open it in a worker for as long as a task lasts; it is closed, too, if it fails, even in `open`."""
        if self.rich is None:
            freeze_modules()
            yield
            return
        with self.closing(self.rich):
            with self.called("open"):
                self.rich.open(StatelessContext(self.name, self.parallelism))
            freeze_modules()
            yield

    @contextmanager
    def closing(self, rich: Closes) -> Iterator[None]:
        """Close what is opened in a worker at the end of a task, and also if that fails."""
        try:
            yield
        except BaseException:
            # What failed first is what is told.
            close_operator(rich, self.name)
            raise
        with self.called("close"):
            rich.close()

    @contextmanager
    def called(self, method: str) -> Iterator[None]:
        """Have what `open` or `close` raises stop the job, with the operator's name."""
        try:
            yield
        except USER_ERRORS as error:
            what, says = f"{method}() of operator '{self.name}'", f"{type(error).__name__}: {error}"
            told = json.dumps({"uid": self.name, "what": what, "error": says})
            raise OperatorFailed(f"{USER_FUNCTION_MARKER} {told}") from error

    def blamed(self, batch: pa.RecordBatch, at: int, error: BaseException, says: str = "") -> OperatorFailed:
        """Return the error that stops the job, with the record's place if it has one."""
        places: dict[str, Any] = {}
        if CHANNEL in batch.schema.names and SEQUENCE in batch.schema.names:
            channel, sequence = (int(batch.column(name)[at].as_py()) for name in (CHANNEL, SEQUENCE))
            places = self.origins.describe(channel, sequence)
        facts = {"uid": self.name, **places, "error": says or f"{type(error).__name__}: {error}"}
        if self.what:
            facts["what"] = self.what
        return OperatorFailed(f"{USER_FUNCTION_MARKER} {json.dumps(facts)}")


def records_of(batch: pa.RecordBatch) -> Iterator[Any]:
    """Return the rows of a batch as a function of the user's gets them: without control columns."""
    names = [name for name in batch.schema.names if not name.startswith(PREFIX)]
    return RowReader(names, names, ()).read(batch)[1]


@dataclass(frozen=True)
class FilterRows:
    """Keeps the rows for which a function says so."""

    function: RowFunction

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task, for mapInArrow."""
        with self.function.opened():
            for batch in batches:
                yield batch.filter(pa.array(self._kept(batch)))

    def _kept(self, batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
        kept = np.zeros(batch.num_rows, dtype=bool)
        at = -1
        try:
            for at, record in enumerate(records_of(batch)):
                kept[at] = bool(self.function.call(record))
        except USER_ERRORS as error:
            raise self.function.blamed(batch, max(at, 0), error) from error
        return kept


@dataclass(frozen=True)
class ExpandRows:
    """Makes rows of each row: one, none or several.

    Parameters
    ----------
    output
        Fields of the rows that are made.
    carried
        Control columns that go along.
    """

    function: RowFunction
    output: T.StructType
    carried: tuple[T.StructField, ...]

    @property
    def columns(self) -> T.StructType:
        """Columns that come out."""
        return T.StructType([*self.output, *self.carried])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task, for mapInArrow."""
        writer, schema = RowWriter.of(self.output), arrow_schema(self.columns)
        with self.function.opened():
            for batch in batches:
                rows, of_row = self._made(batch)
                try:
                    arrays = writer.write(rows)
                except OutputError as error:
                    at = int(of_row[error.row]) if error.row is not None else 0
                    raise self.function.blamed(batch, at, error, f"the function {error}") from error
                taken = pa.array(of_row)
                carried = [batch.column(one.name).take(taken) for one in self.carried]
                made = pa.RecordBatch.from_arrays([*arrays, *carried], names=schema.names)
                yield as_schema(made, schema)

    def _made(self, batch: pa.RecordBatch) -> tuple[list[Any], np.ndarray[Any, Any]]:
        """Return what is made, and of which row each is."""
        made: list[Any] = []
        counts = np.zeros(batch.num_rows, dtype=np.int64)
        call, at = self._call(batch), -1
        take = taking(self.output)
        try:
            for at, record in enumerate(records_of(batch)):
                before = len(made)
                made.extend(map(take, elements_of(call(at, record) or ())))
                counts[at] = len(made) - before
        except USER_ERRORS as error:
            raise self.function.blamed(batch, max(at, 0), error) from error
        return made, np.repeat(np.arange(batch.num_rows), counts)

    def _call(self, batch: pa.RecordBatch) -> Callable[[int, Any], Iterable[Any] | None]:
        """Return what makes the rows of a record, by its number in the batch and itself."""
        return lambda at, record: self.function.call(record)


@dataclass(frozen=True)
class One:
    """Makes a function that returns one row one that returns rows; travels in the plan."""

    function: Callable[[Any], Any]

    def __call__(self, record: Any) -> tuple[Any]:
        """Call it."""
        return (self.function(record),)
