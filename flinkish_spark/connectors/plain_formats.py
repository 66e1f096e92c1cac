"""JSON, text and bytes as formats of records.

A record of JSON must be exactly one object of the declared fields, or it is bad, with a reason;
`types/json_columns` has the rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.bad_records import MOST_REASON, make_reasons
from flinkish_spark.contracts.format import EncodedColumn, Format, PartReader, PartWriter
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord
from flinkish_spark.types.ddl import DdlError, parse_ddl
from flinkish_spark.types.exact_text import JsonWriter, exact_text, unfit_for_json, unfit_for_text
from flinkish_spark.types.hints import first_required, holds_nothing
from flinkish_spark.types.json_columns import JsonReader


@dataclass(frozen=True, slots=True)
class Json(Format):
    """JSON objects, one per record.

    Parameters
    ----------
    schema
        Fields as DDL (``"user STRING, amount LONG"``). Needed to read. A sink writes the fields that are
        named here, all fields of its stream if none is.
    on_bad_record
        What to do with a value that is not a JSON object of this schema; a null value counts as
        one.

    Examples
    --------
    >>> Json("user STRING, amount LONG").on_bad_record
    <OnBadRecord.FAIL: 'fail'>
    """

    schema: str = ""
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_fields(self)

    def make_reader(self, part: str) -> PartReader:
        return _ObjectReader(part, parse_fields(self.schema))

    def check_fields(self, schema: T.StructType, whose: str) -> None:
        check_exact(choose_fields(schema, self.schema, whose), unfit_for_json, whose)

    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        return _ObjectWriter(choose_fields(schema, self.schema, part))


class _ObjectReader(PartReader):
    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        return read_json(values, self.fields, f"the {self.name}", time_zone)


class _ObjectWriter(PartWriter):
    @cached_property
    def _json(self) -> JsonWriter:
        return JsonWriter(self.fields)

    def write(self, records: pa.RecordBatch) -> EncodedColumn:
        return EncodedColumn(self._json.write(self.columns(records), records.num_rows).cast(pa.binary()))


class _Column(Format):
    __slots__ = ()
    column: str

    def check_fields(self, schema: T.StructType, whose: str) -> None:
        check_exact([find_field(schema, self.column, whose)], unfit_for_text, whose)

    def make_writer(self, schema: T.StructType, topics: Sequence[str], part: str) -> PartWriter:
        return _TextWriter(T.StructType([schema[self.column]]))


@dataclass(frozen=True, slots=True)
class Raw(_Column):
    """Bytes as they are.

    A source gives the columns `key`, `value`, `topic`, `partition`, `offset` and `timestamp`.

    Parameters
    ----------
    column
        For a sink: the column that is the value.
    """

    column: str = "value"
    on_bad_record = None

    def make_reader(self, part: str) -> PartReader:
        return _BytesReader(part, T.StructType([T.StructField(self.column, T.BinaryType())]))


@dataclass(frozen=True, slots=True)
class String(_Column):
    """Text in UTF-8, one value per record.

    Parameters
    ----------
    column
        The column with it: STRING of a source, of a sink one whose values have a text that says all of them.
    on_bad_record
        What a source does with bytes that are no UTF-8; a null value counts as such.
    """

    column: str = "value"
    on_bad_record: BadRecordPolicy = OnBadRecord.FAIL

    def __post_init__(self) -> None:
        check_fields(self)

    def make_reader(self, part: str) -> PartReader:
        return _TextReader(part, T.StructType([T.StructField(self.column, T.StringType())]))


class _BytesReader(PartReader):
    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        return pa.StructArray.from_arrays([values], self.fields.names), pa.nulls(len(values), pa.string())


class _TextReader(PartReader):
    def read(self, values: pa.Array, time_zone: str) -> tuple[pa.Array, pa.Array]:
        try:
            found, reasons = values.cast(pa.string()), pa.nulls(len(values), pa.string())
        except pa.ArrowInvalid:
            texts = [None if value is None else _decode_text(value) for value in values.to_pylist()]
            found = pa.array(texts, pa.string())
            bad = pc.and_(values.is_valid(), found.is_null())
            reasons = make_reasons(bad, f"the {self.name} is not UTF-8")
        return pa.StructArray.from_arrays([found], self.fields.names), reasons


def _decode_text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


class _TextWriter(PartWriter):
    def write(self, records: pa.RecordBatch) -> EncodedColumn:
        (column,), kind = self.columns(records), self.fields[0].dataType
        is_binary = isinstance(kind, T.BinaryType)
        return EncodedColumn(column if is_binary else exact_text(kind)(column).cast(pa.binary()))


def find_field(schema: T.StructType, name: str, whose: str, kinds: Sequence[str] = ()) -> T.StructField:
    if name not in schema.names:
        raise SchemaError(
            f"{whose} is the column '{name}', which its stream does not have",
            what_to_do=f"choose from {', '.join(schema.names)}",
        )
    kind = schema[name].dataType.simpleString()
    if kinds and kind.partition(" collate ")[0] not in kinds:
        what = f"{whose} is the column '{name}' of type {kind}, and it must be {' or '.join(kinds)}"
        raise SchemaError(what, what_to_do="cast it in a transform")
    return schema[name]


def choose_fields(schema: T.StructType, ddl: str, whose: str) -> T.StructType:
    names = parse_fields(ddl).names if ddl else schema.names
    return T.StructType([find_field(schema, name, whose) for name in names])


def check_exact(
    fields: Iterable[T.StructField], find_unfit: Callable[[T.DataType], str | None], whose: str
) -> None:
    for one in fields:
        if (why := find_unfit(one.dataType)) is not None:
            raise SchemaError(
                f"{whose} has the field '{one.name}', which cannot be written exactly",
                why=why,
                what_to_do="convert it in a transform, for example by a cast to STRING",
            )


def parse_fields(ddl: str, called: str = "JSON") -> T.StructType:
    try:
        schema = parse_ddl(ddl)
    except DdlError as error:
        raise SchemaError(
            f"the {called} schema cannot be read",
            why=str(error),
            what_to_do='write names with types of Spark, as in "user STRING, amount LONG"',
        ) from None
    if not isinstance(schema, T.StructType):
        raise SchemaError(
            f"the {called} schema {ddl!r} is not a list of fields",
            what_to_do=f'write it like {called.title()}("user STRING, amount LONG")',
        )
    if (name := first_required(schema)) is not None:
        raise SchemaError(
            f"the {called} schema says that {name!r} is NOT NULL",
            why="a record may leave any field out, and Spark reads null then",
            what_to_do="leave NOT NULL out, and filter the stream",
        )
    unfit = "void: it holds nothing" if holds_nothing(schema) else unfit_for_json(schema)
    if unfit is not None:
        raise SchemaError(
            f"the {called} schema has a type that {called} cannot hold",
            why=unfit,
            what_to_do="declare STRING, and convert it in a transform",
        )
    return schema


def read_json(
    values: pa.Array, fields: T.StructType, whose: str, time_zone: str
) -> tuple[pa.Array, pa.Array]:
    """Return a struct for each JSON object, and the reasons of bad values; both are null for a null."""
    reader = _reader_of(fields.json(), time_zone)
    rows = reader.read(values)
    bad = pc.and_(values.is_valid(), rows.is_null())
    reasons = pa.nulls(len(values), pa.string())
    if bad.true_count:
        told = [f"{whose} {reader.why_bad(one)}"[:MOST_REASON] for one in values.filter(bad).to_pylist()]
        reasons = pc.replace_with_mask(reasons, bad, pa.array(told, pa.string()))
    return rows, reasons


@lru_cache(maxsize=64)
def _reader_of(fields: str, time_zone: str) -> JsonReader:
    return JsonReader(T.StructType.fromJson(json.loads(fields)), time_zone)
