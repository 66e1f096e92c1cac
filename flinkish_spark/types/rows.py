"""Exact conversion between rows of Arrow batches and Python objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import OutputTag
from flinkish_spark.core.iterators import NOT_RUN, NotRun, refuse_not_run
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import ddl_of, is_field_list, parse_ddl
from flinkish_spark.types.row_form import NoRowError, RowError, RowForm, element_class
from flinkish_spark.types.to_arrow import ValueMismatch, first_missing, has_required, strict_array
from flinkish_spark.types.to_python import Copier, as_it_is, copy_if_mutable, is_flat, to_values

#: Advice for the most common errors: a row was returned instead of yielded, or a value instead of a row.
_ROWS = " (of one field `(value,)`); what makes several rows yields each, or returns a list of them"


class RowReader:
    def __init__(
        self, fields: Sequence[str], field_columns: Sequence[str], key_columns: Sequence[str]
    ) -> None:
        self._fields, self._keys = list(field_columns), list(key_columns)
        # Like `_make`, but without a Python call per record.
        self._make = functools.partial(tuple.__new__, element_class(fields))

    def read(self, rows: pa.RecordBatch) -> tuple[list[Any], Iterator[Any]]:
        """Return the keys (scalars for one column, else tuples) and the records, in row order."""
        columns = {name: to_values(rows.column(name)) for name in dict.fromkeys(self._fields + self._keys)}
        keys = [columns[name] for name in self._keys]
        records = map(self._make, zip(*[columns[name] for name in self._fields], strict=True))
        return keys[0] if len(keys) == 1 else list(zip(*keys, strict=True)), records

    def records(self, rows: pa.RecordBatch) -> Iterator[Any]:
        columns = [to_values(rows.column(name)) for name in self._fields]
        return map(self._make, zip(*columns, strict=True))


class OutputError(ValueError):
    """A function emitted a row that does not fit the declared output type."""

    def __init__(self, says: str, row: int | None = None) -> None:
        super().__init__(says)
        self.row = row


def as_row(row: Any, names: Sequence[str]) -> tuple[Any, ...]:
    try:
        return _form_of(tuple(names)).tuple_of(row)
    except RowError as error:
        raise OutputError(f"emitted {error}") from None


_form_of = functools.lru_cache(maxsize=64)(RowForm)


class RowWriter:
    """Converts emitted rows to columns, and checks the type of every value."""

    def __init__(self, schema: pa.Schema, required: Collection[T.StructField] = ()) -> None:
        self._schema, self._names = schema, schema.names
        self._required = {field.name: field for field in required}
        self._form = RowForm(schema.names, [field.name for field in required if not field.nullable])

    @classmethod
    def of(cls, fields: T.StructType) -> RowWriter:
        required = [field for field in fields if not field.nullable or has_required(field.dataType)]
        return cls(arrow_schema(fields), required)

    def write(self, rows: list[Any]) -> list[pa.Array]:
        width = len(self._names)
        try:
            rows = self._form.tuples(rows)
        except RowError:
            raise self._first_refused(rows) from None
        if rows and set(map(len, rows)) != {width}:
            at, wrong = next((at, row) for at, row in enumerate(rows) if len(row) != width)
            names = ", ".join(self._names)
            raise OutputError(f"emitted {len(wrong)} fields, but {width} are declared: {names}", at)
        columns = list(zip(*rows, strict=True)) if rows else [()] * width
        return [self._array(field, column) for field, column in zip(self._schema, columns, strict=True)]

    def write_columns(self, columns: Sequence[Sequence[Any] | pa.Array]) -> list[pa.Array]:
        if len(columns) != len(self._names):
            raise OutputError(f"emitted {len(columns)} fields, but {len(self._names)} are declared")
        return [self._array(field, column) for field, column in zip(self._schema, columns, strict=True)]

    def _first_refused(self, rows: list[Any]) -> OutputError:
        for at, row in enumerate(rows):
            try:
                self._form.tuple_of(row)
            except NoRowError as error:
                return OutputError(f"emitted {error}{_why_not_run(row, rows) or _ROWS}", at)
            except RowError as error:
                return OutputError(f"emitted {error}", at)
        raise AssertionError("a row was refused, and none is")

    def _array(self, field: pa.Field, column: Sequence[Any] | pa.Array) -> pa.Array:
        if isinstance(column, pa.Array) and column.type != field.type:
            column = to_values(column)
        try:
            array = column if isinstance(column, pa.Array) else strict_array(column, field.type)
        except ValueMismatch as error:
            at = next((at for at, value in enumerate(column) if value is error.value), None)
            says = f"emitted a wrong value: field {field.name!r} of {error}"
            says += _why_not_run(error.value, column)
            if isinstance(error.value, OutputTag):
                # PyFlink's way of emitting to a side output.
                says += "; a side output is emitted to by ctx.output(tag, row)"
            raise OutputError(says, at) from error
        required = self._required.get(field.name)
        missing = None if required is None else first_missing(required, array)
        if missing is not None:
            raise OutputError(f"emitted a wrong value: {missing}", missing.row)
        return array


def _why_not_run(value: Any, beside: Iterable[Any]) -> str:
    """Return an error text for a coroutine or generator that never ran; close all in the column."""
    said = ""
    for one in (*beside, value):
        try:
            refuse_not_run(one, "the function")
        except NotRun as error:
            said = f"; {error}"
    return said if type(value) in NOT_RUN else ""


Named = Callable[[Any], Any]


@dataclass(frozen=True)
class ElementType:
    #: A list of fields for elements that are tuples, or a single type.
    ddl: str

    @cached_property
    def has_fields(self) -> bool:
        return is_field_list(self.ddl)

    @cached_property
    def fields(self) -> tuple[T.StructField, ...]:
        parsed = parse_ddl(self.ddl)
        if self.has_fields and isinstance(parsed, T.StructType):
            return tuple(parsed.fields)
        return (T.StructField("value", parsed),)

    @property
    def stored_fields(self) -> str:
        return ddl_of(T.StructType(list(self.fields)))

    @cached_property
    def take(self) -> Copier | None:
        return None if is_flat(T.StructType(list(self.fields))) else copy_if_mutable

    def to_tuple(self, value: Any) -> tuple[Any, ...]:
        return tuple(value) if self.has_fields else (value,)

    def naming(self) -> Named:
        """Return a function that converts plain tuples to named tuples and keeps other values."""
        if not self.has_fields:
            return as_it_is
        make: Named = element_class([field.name for field in self.fields])._make
        return lambda value: make(value) if type(value) is tuple else value

    def gathering(self) -> Named:
        if not self.has_fields:
            return itemgetter(0)
        # Like `_make`, but without a Python call per element.
        return functools.partial(tuple.__new__, element_class([field.name for field in self.fields]))


def arrow_schema(fields: Iterable[T.StructField]) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in fields])
