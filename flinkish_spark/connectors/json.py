"""JSON values of a Kafka source: what counts as bad, and what each policy makes of it.

Spark's parser alone is too kind: an empty value becomes a record of nulls, and bytes that are no UTF-8 are
replaced. So the outside of a value is checked first. What is inside, and behind it, is checked where it is
parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.shim import from_json
from flinkish_spark.core.errors import UNREADABLE_MARKER, SchemaError
from flinkish_spark.core.formats import Json, OnBadRecord
from flinkish_spark.types.ddl import DdlError, parse_ddl, quoted
from flinkish_spark.types.exact_text import unfit_for_json
from flinkish_spark.types.hints import first_required, holds_nothing

#: Of parsed fields, whether they are of no use.
Misfit = Callable[[Column], Column]
#: Name of the observed metric that counts dropped records; the source's topics follow.
DROPPED_METRIC = "flinkish_dropped_"
_CORRUPT = "_fs_corrupt"
_PARSED = "_fs_parsed"
_WHITESPACE = " \t\r\n"
#: JSON has no single quotes; Spark allows them unless told otherwise.
_STRICT = {"allowSingleQuotes": "false"}


def json_schema(value: Json) -> T.StructType:
    """Return the declared fields.

    Raises
    ------
    SchemaError
        The declaration is no list of fields.
    """
    try:
        schema = parse_ddl(value.schema)
    except DdlError as error:
        raise SchemaError("the JSON schema cannot be read", why=str(error)) from None
    if not isinstance(schema, T.StructType):
        raise SchemaError(
            f"the JSON schema {value.schema!r} is not a list of fields",
            what_to_do='write it like Json("user STRING, amount LONG")',
        )
    if (name := first_required(schema)) is not None:
        raise SchemaError(
            f"the JSON schema says that {name!r} is NOT NULL",
            why="a record may leave any field out, and Spark reads null then",
            what_to_do="leave NOT NULL away, and filter the stream",
        )
    unfit = "void: it holds nothing" if holds_nothing(schema) else unfit_for_json(schema)
    if unfit is not None:
        raise SchemaError(
            "the JSON schema has a type that JSON cannot hold",
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
    misfit: Misfit | None = None,
) -> DataFrame:
    """Return the fields of each good record and the columns `kept`, under the value's policy.

    Parameters
    ----------
    raw
        Has at least `key`, `value`, `topic`, `partition`, `offset` and the columns `kept`.
    counted_as
        What is read, told apart from what every other scan of a job reads; see :func:`dropped_metric`.
    is_barrier
        Which rows are no records: they pass, whatever the policy.
    misfit
        What else makes a record a bad one, of its parsed fields. Under FAIL whoever uses them raises.
    """
    passes = F.lit(False) if is_barrier is None else is_barrier
    if value.on_bad_record is OnBadRecord.FAIL:
        # FAILFAST raises wherever a field is used; a second look for the check would parse every
        # record twice. What it lets through is refused by the look at the outside.
        place = F.to_json(F.struct("topic", "partition", "offset"))
        message = F.concat(F.lit(UNREADABLE_MARKER), place)
        checked = F.when(passes | _is_object(), F.lit(True)).otherwise(F.raise_error(message).cast("boolean"))
        parsed = from_json(raw.sparkSession, _text(), json_schema(value), {"mode": "FAILFAST", **_STRICT})
        return raw.where(checked).select(parsed.alias(_PARSED), *kept).select(f"{_PARSED}.*", *kept)
    counted = raw.withColumn(_PARSED, _parsed(raw.sparkSession, value))
    is_bad = ~passes & _is_bad(F.col(_PARSED), misfit=misfit)
    if value.on_bad_record is OnBadRecord.DROP:
        counted = counted.observe(dropped_metric(counted_as), F.count(F.when(is_bad, 1)).alias("dropped"))
    names = [F.col(f"{_PARSED}.{quoted(name)}") for name in json_schema(value).names]
    return counted.where(~is_bad).select(*names, *kept)


def dropped_metric(counted_as: Sequence[str]) -> str:
    """Return the name under which Spark counts the records that a scan drops; others have other names.

    Examples
    --------
    >>> dropped_metric(["topics", "a_b"]) == dropped_metric(["topics", "a", "b"])
    False
    """
    return DROPPED_METRIC + json.dumps(list(counted_as))


def is_bad(spark: SparkSession, value: Json, column: str, misfit: Misfit | None = None) -> Column:
    """Return whether a column's bytes are no JSON object of the declared schema, or one that does not fit."""
    return _is_bad(_parsed(spark, value, column), column, misfit)


def _text(column: str = "value") -> Column:
    return F.col(column).cast("string")


def _is_object(column: str = "value") -> Column:
    """Whether a value looks like one JSON object from outside; false for null."""
    text = _text(column)
    trimmed = F.trim(text, F.lit(_WHITESPACE))
    is_braced = text.startswith("{") & text.endswith("}")
    # Trimming looks for each character in a set, which is slow, so it is only for values that need it. In an
    # `or` Spark would do it for all: it is asked for twice, and what is asked for twice it computes before.
    braced = F.when(is_braced, F.lit(True)).otherwise(trimmed.startswith("{") & trimmed.endswith("}"))
    return F.coalesce(braced & F.is_valid_utf8(text), F.lit(False))


def _parsed(spark: SparkSession, value: Json, column: str = "value") -> Column:
    schema = T.StructType([*json_schema(value), T.StructField(_CORRUPT, T.StringType())])
    settings = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, **_STRICT}
    return from_json(spark, _text(column), schema, settings)


def _is_bad(parsed: Column, column: str = "value", misfit: Misfit | None = None) -> Column:
    is_none = ~_is_object(column) | parsed.isNull() | parsed[_CORRUPT].isNotNull()
    return is_none if misfit is None else is_none | F.coalesce(misfit(parsed), F.lit(True))
