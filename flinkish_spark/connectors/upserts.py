"""Records of a sink that upserts, on Spark's side: which are refused, which delete the row with their key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.partition_values import check_conditions
from flinkish_spark.connectors.plain_formats import find_field
from flinkish_spark.connectors.write_modes import Upsert, WriteMode, list_stored_names
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.changelogs import RETRACTIONS, RowKind
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def select_stored(mode: WriteMode, schema: T.StructType) -> T.StructType:
    return T.StructType([schema[name] for name in list_stored_names(mode, schema.names)])


def check_columns(mode: WriteMode, context: SinkContext, partition_by: Sequence[str] = ()) -> None:
    schema, stored = context.schema, select_stored(mode, context.schema)
    wanted = [("partition_by", partition_by, stored)]
    if isinstance(mode, Upsert):
        wanted += [("not_stored", mode.not_stored, schema), ("keys", mode.keys, stored)]
        wanted += [("sequence_by", (mode.sequence_by,) if mode.sequence_by else (), schema)]
        if mode.row_kind is not None:
            find_field(schema, mode.row_kind, f"row_kind of sink '{context.uid}'", ("string",))
    for role, columns, have in wanted:
        for name in columns:
            find_field(have, name, f"{role} of sink '{context.uid}'")


def check_upsert(mode: Upsert, spark: SparkSession, context: SinkContext) -> None:
    ordered = mode.keys if mode.sequence_by is None else (*mode.keys, mode.sequence_by)
    simple = T.StringType | T.BinaryType | T.BooleanType | T.NumericType | T.DatetimeType
    for name in ordered:
        kind, why, role = context.schema[name].dataType, "", "column"
        if name in mode.keys and isinstance(kind, T.StringType) and not kind.isUTF8BinaryCollation():
            why, role = "under its collation different texts are one key", "key"
        elif not isinstance(kind, simple | T.AnsiIntervalType):
            why = "keys and sequences must be simple values, which can be compared"
        if why:
            raise SchemaError(
                f"the {role} '{name}' of sink '{context.uid}' is {kind.simpleString()}",
                why=why,
                what_to_do="add a column of a simple type before the sink, such as lower(...)",
            )
    if mode.delete_when is not None:
        try:
            empty = spark.createDataFrame([], context.schema)
            # Together with all columns, so that an aggregate is refused: it is no condition on one record.
            found = empty.select("*", F.expr(mode.delete_when)).schema.fields[-1].dataType
            why = "" if isinstance(found, T.BooleanType) else f"it is of type {found.simpleString()}"
        except Exception as error:
            why = str(error).split("\n")[0]
        if why:
            raise SchemaError(
                f"delete_when of sink '{context.uid}' is no condition on its records: {mode.delete_when}",
                why=why,
                what_to_do="give a SQL condition on the stream's fields, such as \"op = 'D'\"",
            )


def key_conditions(mode: WriteMode) -> Iterable[tuple[str, Column]]:
    if not isinstance(mode, Upsert):
        return
    for key in mode.keys:
        yield f"the key {key} IS NOT NULL", F.col(quote_name(key)).isNotNull()
    if mode.row_kind is not None:
        kinds = [kind.value for kind in RowKind]
        yield (
            f"the row kind {mode.row_kind} IN {', '.join(kinds)}",
            F.col(quote_name(mode.row_kind)).isin(*kinds),
        )


def find_deletes(mode: WriteMode) -> Column:
    if isinstance(mode, Upsert) and mode.delete_when is not None:
        return F.coalesce(F.expr(mode.delete_when), F.lit(False))
    if isinstance(mode, Upsert) and mode.row_kind is not None:
        return F.col(quote_name(mode.row_kind)).isin(*RETRACTIONS)
    return F.lit(False)


def check_records(
    rows: DataFrame, shown: Sequence[str], checks: Iterable[tuple[str, Column]], marker: str
) -> DataFrame:
    """Return the same rows; a record that does not meet a condition fails the task."""
    is_control = F.col(C.KIND) != int(C.Kind.RECORD)
    guarded = [(text, is_control | is_kept) for text, is_kept in checks]
    return check_conditions(rows, guarded, marker, shown)
