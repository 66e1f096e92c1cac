"""JSON values of a Kafka source: what counts as bad, and what each policy makes of it.

Spark's parser alone is too kind: an empty value becomes a record of nulls, and bytes that are no UTF-8 are
replaced. So the outside of a value is checked first. What is inside, and behind it, is checked where it is
parsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import session_time_zone
from flinkish_spark.bridge.shim import from_json, has_json_parser
from flinkish_spark.core.errors import UNREADABLE_MARKER, SchemaError
from flinkish_spark.core.formats import Json, OnBadRecord
from flinkish_spark.types.ddl import DdlError, parse_ddl, quoted
from flinkish_spark.types.exact_text import unfit_for_json
from flinkish_spark.types.hints import first_required, holds_nothing
from flinkish_spark.types.json_columns import JsonReader

#: Name of the observed metric that counts dropped records; the source's topics follow.
DROPPED_METRIC = "flinkish_dropped_"
_CORRUPT = "_fs_corrupt"
_PARSED = "_fs_parsed"
_WHITESPACE = " \t\r\n"
_MOST_DETAIL = 1_000
#: Longest part of a value that a message shows.
_MOST_SHOWN = 60
#: JSON has no single quotes; Spark allows them unless told otherwise.
_STRICT = {"allowSingleQuotes": "false"}


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
            what_to_do="leave NOT NULL away, and filter the stream",
        )
    unfit = "void: it holds nothing" if holds_nothing(schema) else unfit_for_json(schema)
    if unfit is not None:
        raise SchemaError(
            f"the {called} schema has a type that {called} cannot hold",
            why=unfit,
            what_to_do="declare STRING, and convert it in a transform",
        )
    return schema


def decoded(
    raw: DataFrame,
    value: Json,
    counted_as: Sequence[str],
    kept: Sequence[str],
    is_barrier: Column | None = None,
) -> DataFrame:
    """Return the fields of each good record and the columns `kept`, under the value's policy."""
    spark = raw.sparkSession
    passes = F.lit(False) if is_barrier is None else is_barrier
    if value.on_bad_record is OnBadRecord.FAIL and has_json_parser(spark):
        # FAILFAST raises wherever a field is used; a second look for the check would parse every
        # record twice. What it lets through is refused by the look at the outside.
        checked = F.when(passes | _is_object(), F.lit(True)).otherwise(_unreadable())
        fields = from_json(spark, _text(), json_schema(value), {"mode": "FAILFAST", **_STRICT})
        return raw.where(checked).select(fields.alias(_PARSED), *kept).select(f"{_PARSED}.*", *kept)
    counted = raw.withColumn(_PARSED, parsed(spark, value))
    wrong = ~passes & is_bad(F.col(_PARSED))
    is_good = ~wrong
    if value.on_bad_record is OnBadRecord.FAIL:
        is_good = F.when(is_good, F.lit(True)).otherwise(_unreadable())
    elif value.on_bad_record is OnBadRecord.DROP:
        counted = counted.observe(dropped_metric(counted_as), F.count(F.when(wrong, 1)).alias("dropped"))
    names = [F.col(f"{_PARSED}.{quoted(name)}") for name in json_schema(value).names]
    return counted.where(is_good).select(*names, *kept)


def _unreadable() -> Column:
    place = F.to_json(F.struct("topic", "partition", "offset"))
    return F.raise_error(F.concat(F.lit(UNREADABLE_MARKER), place)).cast("boolean")


def dropped_metric(counted_as: Sequence[str]) -> str:
    """Return the name under which Spark counts the records that a scan drops; others have other names."""
    return DROPPED_METRIC + json.dumps(list(counted_as))


def _text(data: Column | None = None) -> Column:
    return (F.col("value") if data is None else data).cast("string")


def _is_object(data: Column | None = None) -> Column:
    """Look at a value from outside: one JSON object; false for null."""
    text = _text(data)
    trimmed = F.trim(text, F.lit(_WHITESPACE))
    is_braced = text.startswith("{") & text.endswith("}")
    # Trimming looks for each character in a set, which is slow, so it is only for values that need it. In an
    # `or` Spark would do it for all: it is asked for twice, and what is asked for twice it computes before.
    braced = F.when(is_braced, F.lit(True)).otherwise(trimmed.startswith("{") & trimmed.endswith("}"))
    return F.coalesce(braced & F.is_valid_utf8(text), F.lit(False))


def parsed(spark: SparkSession, value: Json, data: Column | None = None) -> Column:
    schema = T.StructType([*json_schema(value), T.StructField(_CORRUPT, T.StringType())])
    settings = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, **_STRICT}
    return from_json(spark, _text(data), schema, settings)


def is_bad(found: Column, data: Column | None = None) -> Column:
    return ~_is_object(data) | found.isNull() | found[_CORRUPT].isNotNull()


def why_no_record(spark: SparkSession, value: Json, data: bytes | None) -> str:
    """Return why a value is no record of the declared fields: by which field, or as a whole."""
    if data is None:
        return "it has no value"
    try:
        found = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        return "its value is not UTF-8"
    except ValueError as error:
        return f"its value is no JSON: {error}"
    if not isinstance(found, dict):
        return f"its value is {_shown(found)}, which is no JSON object"
    time_zone = session_time_zone(spark)
    for one in json_schema(value):
        if JsonReader(T.StructType([one]), time_zone).record(data) is None:
            kind = one.dataType.simpleString()
            return f"its field '{one.name}' is {_shown(found.get(one.name))}, which is no {kind}"
    return ""


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def why_bad(part: str, what: str, data: Column) -> Column:
    """Return why bytes are not what they should be, if they are not."""
    told = f"the {part} is no {what}"[:_MOST_DETAIL]
    not_text = ~F.is_valid_utf8(data.cast("string"))
    return F.when(not_text, F.lit(f"the {part} is not UTF-8")).otherwise(F.lit(told))
