"""Columns of a stream as a table has them: narrower types cast, structs with all of the table's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sinks.delta_table import TableInfo, is_wider

Json = Any


def aligned_columns(rows: DataFrame, names: Sequence[str], info: TableInfo | None) -> list[Column]:
    """Return columns of a frame as a table takes them, by every way of writing.

    Those that are narrower than the table's get its type. Structs get its fields in its order, null where
    the stream has none, and behind them those that only the stream has.
    """
    wanted = {} if info is None else {str(f["name"]).lower(): f["type"] for f in info.fields}
    return [_aligned(rows, name, wanted.get(name.lower())) for name in names]


def _aligned(rows: DataFrame, name: str, want: Json) -> Column:
    have, column = rows.schema[name].dataType.jsonValue(), F.col(quoted(name))
    if isinstance(have, str):
        fits = not (isinstance(want, str) and is_wider(have, want))
        return column if fits else column.cast(_type(want)).alias(name)
    return column if want is None or not _differs(have, want) else _filled(column, have, want).alias(name)


def _differs(have: Json, want: Json) -> bool:
    """Whether a struct somewhere in a type has other fields than the table's, or in another order."""
    if isinstance(have, str) or isinstance(want, str) or have["type"] != want["type"]:
        return False
    if have["type"] == "struct":
        ours, theirs = ([str(f["name"]).lower() for f in kind["fields"]] for kind in (have, want))
        if ours != theirs:
            return True
        pairs = zip(have["fields"], want["fields"], strict=True)
        return any(_differs(one["type"], other["type"]) for one, other in pairs)
    return any(_differs(have[part], want[part]) for part in _PARTS if part in have)


_PARTS = ("elementType", "keyType", "valueType")


def _filled(column: Column, have: Json, want: Json) -> Column:
    if not _differs(have, want):
        return column
    if have["type"] == "array":
        return F.transform(column, lambda item: _filled(item, have["elementType"], want["elementType"]))
    if have["type"] == "map":
        keyed = F.transform_keys(column, lambda key, _: _filled(key, have["keyType"], want["keyType"]))
        return F.transform_values(
            keyed, lambda _, value: _filled(value, have["valueType"], want["valueType"])
        )
    return F.when(column.isNotNull(), F.struct(*_fields(column, have, want)))


def _fields(column: Column, have: Json, want: Json) -> list[Column]:
    ours = {str(f["name"]).lower(): f for f in have["fields"]}
    fields = []
    for field in want["fields"]:
        name, known = str(field["name"]), ours.pop(str(field["name"]).lower(), None)
        if known is None:
            fields.append(F.lit(None).cast(_type(field["type"])).alias(name))
        else:
            value = column.getField(str(known["name"]))
            fields.append(_filled(value, known["type"], field["type"]).alias(name))
    return fields + [column.getField(str(f["name"])).alias(str(f["name"])) for f in ours.values()]


def _type(kind: Json) -> T.DataType:
    """Return a type from its stored form."""
    holder: Mapping[str, Any] = {"name": "x", "type": kind, "nullable": True, "metadata": {}}
    return T.StructField.fromJson(dict(holder)).dataType


__all__ = ["aligned_columns"]
