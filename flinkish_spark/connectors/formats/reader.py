"""What a format gives Spark's tasks: a function from the bytes of a record to a row or to text, and back.

A reader is a value that is pickled into the plan. What it needs beside its settings (a parsed schema, the
registry's client) is made once in a process, by :meth:`Reader.opened`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import ArrowUDFType, arrow_udf

from flinkish_spark.types.arrow_types import arrow_type

#: Names within what comes of a record: its row or its text, and why it has none.
READ, REASON = "read", "reason"
#: Longest reason that is told; it stands in a header of a dead letter.
MOST_REASON = 1_000


class Unreadable(ValueError):
    """The bytes of a record are not what its format says, or a row cannot be written; says why."""


class Reader(ABC):
    """Reads one part of records, their keys or their values. Compared and hashed by its settings."""

    #: What :meth:`opened` returns values of: the fields, or STRING for JSON text of these.
    kind: T.DataType

    @abstractmethod
    def opened(self) -> Callable[[bytes], Any]:
        """Return the function that reads; called once per process.

        It returns a tuple with a value for each field as Arrow takes it (a time is microseconds, a map a
        list of pairs), or a text. It raises Unreadable with the reason; anything else that it raises ends
        the task, and is about no record.
        """


class Writer(ABC):
    """Writes one part of records. Compared and hashed by its settings."""

    @abstractmethod
    def opened(self) -> Callable[[Any], bytes]:
        """Return the function that writes a row, a dict as Arrow makes it; raises Unreadable, with why."""


def read_column(reader: Reader, data: Column) -> Column:
    """Return a struct with what was read, and why it was not; both are null where `data` is."""
    kind = T.StructType([T.StructField(READ, reader.kind), T.StructField(REASON, T.StringType())])
    udf = arrow_udf(_Read(reader, kind), kind, ArrowUDFType.SCALAR)
    # Otherwise a filter by the reason would be put in front, and everything would be read twice.
    column: Column = udf.asNondeterministic()(data)
    return column


def written_column(writer: Writer, row: Column) -> Column:
    """Return a struct with the bytes of each row, and why it has none."""
    kind = T.StructType([T.StructField(READ, T.BinaryType()), T.StructField(REASON, T.StringType())])
    column: Column = arrow_udf(_Write(writer), kind, ArrowUDFType.SCALAR)(row)
    return column


@functools.lru_cache(maxsize=64)
def _opened(part: Reader | Writer) -> Callable[[Any], Any]:
    return part.opened()


@dataclass(frozen=True)
class _Read:
    reader: Reader
    kind: T.StructType

    def __call__(self, values: pa.Array) -> pa.Array:
        read = _opened(self.reader)
        found, reasons = _each(read, values.to_pylist())
        parts = [
            pa.array(found, arrow_type(self.reader.kind)),
            pa.array(reasons, pa.string()),
        ]
        return pa.StructArray.from_arrays(parts, [READ, REASON])


@dataclass(frozen=True)
class _Write:
    writer: Writer

    def __call__(self, rows: pa.Array) -> pa.Array:
        written, reasons = _each(_opened(self.writer), rows.to_pylist())
        parts = [pa.array(written, pa.binary()), pa.array(reasons, pa.string())]
        return pa.StructArray.from_arrays(parts, [READ, REASON])


def _each(do: Callable[[Any], Any], values: list[Any]) -> tuple[list[Any], list[str | None]]:
    found: list[Any] = []
    reasons: list[str | None] = []
    for value in values:
        made = reason = None
        if value is not None:
            try:
                made = do(value)
            except Unreadable as error:
                reason = str(error)[:MOST_REASON]
        found.append(made)
        reasons.append(reason)
    return found, reasons


def reason_of(read: Column) -> Column:
    """Return why :func:`read_column` or :func:`written_column` made nothing of a value."""
    return read[REASON]


def made_of(read: Column) -> Column:
    """Return what they made."""
    return read[READ]
