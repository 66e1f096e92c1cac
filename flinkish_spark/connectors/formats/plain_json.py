"""JSON of sources: the declared schema, and decoding of objects into columns.

A record must be exactly one object of the declared fields, or it is bad, with a reason; `types/json_columns`
has the rules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import Json
from flinkish_spark.types.ddl import DdlError, parse_ddl
from flinkish_spark.types.exact_text import unfit_for_json
from flinkish_spark.types.hints import first_required, holds_nothing
from flinkish_spark.types.json_columns import JsonReader

#: Longest reason of a bad record; it becomes a header of the dead letter.
MOST_REASON = 1_000
#: Name of the observed metric that counts dropped records; the source's topics follow.
DROPPED_METRIC = "flinkish_dropped_"


def json_schema(value: Json, called: str = "JSON") -> T.StructType:
    try:
        schema = parse_ddl(value.schema)
    except DdlError as error:
        raise SchemaError(
            f"the {called} schema cannot be read",
            why=str(error),
            what_to_do='write names with types of Spark, as in "user STRING, amount LONG"',
        ) from None
    if not isinstance(schema, T.StructType):
        raise SchemaError(
            f"the {called} schema {value.schema!r} is not a list of fields",
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


def name_drop_metric(counted_as: Sequence[str]) -> str:
    """Return the name of the observed metric that counts dropped records; unique per `counted_as`."""
    return DROPPED_METRIC + json.dumps(list(counted_as))


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
