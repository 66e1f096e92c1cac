"""What a Delta sink refuses before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.delta import DeltaTables
from flinkish_spark.bridge.delta_alignment import aligned_columns
from flinkish_spark.bridge.delta_errors import DeltaRefused
from flinkish_spark.bridge.delta_probe import has_native_delta
from flinkish_spark.bridge.delta_rows import DeltaRows
from flinkish_spark.errors import ConfigError, SchemaError
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sinks.base import SinkContext
from flinkish_spark.sinks.delta_modes import (
    Append,
    OverwritePartitions,
    SchemaEvolution,
    Upsert,
    stored_fields,
)
from flinkish_spark.sinks.delta_retention import FILES, MARKERS, check_retention
from flinkish_spark.sinks.delta_sink_settings import DeltaSinkSettings
from flinkish_spark.sinks.delta_table import TableInfo, fit
from flinkish_spark.sinks.partition_values import why_no_partition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_DEFAULTS = "spark.databricks.delta.properties.defaults."


def check_sink(
    sink: DeltaSinkSettings, spark: SparkSession, context: SinkContext, native: DeltaTables | None
) -> None:
    """Refuse a sink that its stream or its table does not allow.

    Raises
    ------
    SchemaError
        Columns, keys, conditions or types do not fit.
    ConfigError
        The mode or a retention of the table does not.
    """
    _check_columns(sink, context)
    if isinstance(sink.mode, Upsert):
        _check_upsert(sink.mode, spark, context)
    stages_files = native is not None and not isinstance(sink.mode, Upsert)
    table = DeltaRows(spark).info(sink.path) if native is None else native.info(sink.path)
    _check_partition_types(sink, context, sink.partition_by if table is None else table.partition_by)
    if table is None:
        _check_new(sink, context)
    else:
        _check_table(sink, spark, context, table, stages_files=stages_files)
    if stages_files:
        _ask_delta(sink, spark, context, native, table)
    elif table is None and has_native_delta(spark):
        # The commit makes the table. That Delta takes its columns must be known before something is decided.
        _ask_delta(sink, spark, context, DeltaTables(spark), None)
    properties = {} if table is None else table.properties
    defaults = {name: spark.conf.get(_DEFAULTS + name, None) for name in (FILES, MARKERS)}
    known = {name: value for name, value in defaults.items() if value is not None}
    for name in (FILES, MARKERS) if stages_files else (MARKERS,):
        # A table without properties has Delta's defaults, not the session's.
        check_retention(name, properties, known if table is None else {}, sink.path, context)


def _check_columns(sink: DeltaSinkSettings, context: SinkContext) -> None:
    stored = stored_fields(sink.mode, context.schema.names)
    wanted = [("partitioned by", name) for name in sink.partition_by]
    if isinstance(sink.mode, Upsert):
        wanted += [("keyed by", name) for name in sink.mode.keys]
        _require("leaves out", sink.mode.not_stored, context.schema.names, context)
        if sink.mode.sequence_by is not None:
            _require("ordered by", (sink.mode.sequence_by,), context.schema.names, context)
    for role, name in wanted:
        _require(role, (name,), stored, context)


def _require(role: str, names: tuple[str, ...], have: Any, context: SinkContext) -> None:
    for name in names:
        if name not in have:
            raise SchemaError(
                f"sink '{context.uid}' is {role} '{name}', which its stream does not have"
                if role != "leaves out"
                else f"sink '{context.uid}' leaves out '{name}', which its stream does not have",
                what_to_do=f"choose from {', '.join(have)}",
            )


def _check_partition_types(
    sink: DeltaSinkSettings, context: SinkContext, partition_by: Sequence[str]
) -> None:
    wanted = {name.lower() for name in partition_by}
    for field in context.schema.fields:
        why = why_no_partition(field.dataType) if field.name.lower() in wanted else ""
        if why:
            raise SchemaError(
                f"the partition column '{field.name}' of sink '{context.uid}' is "
                f"{field.dataType.simpleString()}",
                why=why,
                what_to_do=f"partition {sink.path} by another column, such as hex({field.name})",
                uid=context.uid,
            )


def _check_upsert(mode: Upsert, spark: SparkSession, context: SinkContext) -> None:
    ordered = mode.keys if mode.sequence_by is None else (*mode.keys, mode.sequence_by)
    for name in ordered:
        kind = context.schema[name].dataType
        if name in mode.keys and isinstance(kind, T.StringType) and not kind.isUTF8BinaryCollation():
            raise SchemaError(
                f"the key '{name}' of sink '{context.uid}' is {kind.simpleString()}",
                why="under its collation different texts are one key",
                what_to_do="make a column of type STRING in front of the sink, such as lower(...)",
                uid=context.uid,
            )
        if isinstance(kind, T.ArrayType | T.MapType | T.StructType | T.VariantType):
            raise SchemaError(
                f"the column '{name}' of sink '{context.uid}' is {kind.simpleString()}",
                why="keys and sequences must be simple values, which can be compared",
                what_to_do="make a column of a simple type in front of the sink",
            )
    if mode.delete_when is not None:
        try:
            empty = spark.createDataFrame([], context.schema)
            # Beside the columns: an aggregate is no condition on one record.
            found = empty.select("*", F.expr(mode.delete_when)).schema.fields[-1].dataType
        except Exception as error:
            raise _bad_condition(mode.delete_when, context, str(error).split("\n")[0]) from error
        if not isinstance(found, T.BooleanType):
            raise _bad_condition(mode.delete_when, context, f"it is of type {found.simpleString()}")


def _bad_condition(text: str, context: SinkContext, why: str) -> SchemaError:
    return SchemaError(
        f"delete_when of sink '{context.uid}' is no condition on its records: {text}",
        why=why,
        what_to_do="give a SQL condition on the stream's fields, such as \"op = 'D'\"",
    )


def _check_new(sink: DeltaSinkSettings, context: SinkContext) -> None:
    if isinstance(sink.mode, OverwritePartitions) and not sink.partition_by:
        raise ConfigError(
            f"sink '{context.uid}' overwrites partitions of {sink.path}, which would have none",
            what_to_do="give DeltaSink partition_by",
        )


def _check_table(
    sink: DeltaSinkSettings,
    spark: SparkSession,
    context: SinkContext,
    table: TableInfo,
    *,
    stages_files: bool,
) -> None:
    if table.is_append_only and not isinstance(sink.mode, Append):
        raise ConfigError(
            f"the table {sink.path} of sink '{context.uid}' has delta.appendOnly",
            why=f"{type(sink.mode).__name__} changes and deletes rows",
            what_to_do="ALTER TABLE ... UNSET TBLPROPERTIES ('delta.appendOnly'), or use Append()",
        )
    padded = [name for name in table.padded if name in table.partition_by]
    if isinstance(sink.mode, OverwritePartitions) and padded:
        raise ConfigError(
            f"sink '{context.uid}' overwrites partitions of {sink.path} by {padded[0]}, which is a CHAR",
            why="a text is one partition with the blanks that fill it up, and another one without",
            what_to_do="make the column a VARCHAR or STRING: CREATE OR REPLACE TABLE ... AS SELECT ...",
            uid=context.uid,
        )
    if isinstance(sink.mode, OverwritePartitions) and not table.partition_by:
        raise ConfigError(
            f"sink '{context.uid}' overwrites partitions of {sink.path}, which has none",
            what_to_do="use a partitioned table",
        )
    if sink.partition_by and tuple(sink.partition_by) != table.partition_by:
        raise _refused(sink, context, f"its partition columns are {', '.join(table.partition_by) or 'none'}")
    names = stored_fields(sink.mode, context.schema.names)
    fields = json.loads(T.StructType([context.schema[name] for name in names]).json())["fields"]
    problems = fit(table, fields, sink.schema_evolution).problems
    if problems:
        raise _refused(sink, context, problems[0])
    if isinstance(sink.mode, Upsert):
        missing = [key for key in sink.mode.keys if not table.has_column(key)]
        if missing:
            raise _refused(sink, context, f"it has no column {missing[0]}, which is a key")
        if table.padded:
            # Delta cannot put a MERGE into such a table, whatever the column is for.
            raise ConfigError(
                f"sink '{context.uid}' upserts into {sink.path}, whose column {table.padded[0]} is a CHAR",
                why="Delta refuses every MERGE into a table that has one: it fills texts up with blanks",
                what_to_do="make the column a VARCHAR or STRING: CREATE OR REPLACE TABLE ... AS SELECT ...",
                uid=context.uid,
            )
        folding = [key for key in sink.mode.keys if table.is_collated(key)]
        if folding:
            raise _refused(
                sink, context, f"the collation of its column {folding[0]} takes different keys for one"
            )
    if not stages_files or table.has_identity or sink.schema_evolution is not SchemaEvolution.NONE:
        _check_constraints(sink, spark, context, table)


def _check_constraints(
    sink: DeltaSinkSettings, spark: SparkSession, context: SinkContext, table: TableInfo
) -> None:
    """Refuse rules on columns that the stream lacks: they cannot be checked while rows are staged."""
    empty, given = spark.createDataFrame([], context.schema), {n.lower() for n in context.schema.names}
    rules = [("constraint", name, sql) for name, sql in table.checks.items()]
    rules += [("generated column", n, sql) for n, sql in table.generated.items() if n.lower() in given]
    for kind, name, sql in rules:
        try:
            empty.select(F.expr(sql))
        except Exception as error:
            raise _refused(
                sink, context, f"its {kind} {name} ({sql}) is about columns that the stream lacks"
            ) from error


def _ask_delta(
    sink: DeltaSinkSettings,
    spark: SparkSession,
    context: SinkContext,
    native: DeltaTables | None,
    table: TableInfo | None,
) -> None:
    """Let Delta itself compare the schema, by staging no rows."""
    if native is None:
        return
    stored = map(F.col, map(quoted, stored_fields(sink.mode, context.schema.names)))
    empty = spark.createDataFrame([], context.schema).select(*stored)
    options = dict(sink.options)
    if table is not None:
        empty = empty.select(*aligned_columns(empty, empty.columns, table))
        fields = json.loads(context.schema.json())["fields"]
        if fit(table, fields, sink.schema_evolution).changes:
            options["mergeSchema"] = "true"
    try:
        native.check_schema(empty.schema, sink.path, sink.partition_by, options)
    except DeltaRefused as error:
        raise _refused(sink, context, str(error).split("\n\n")[0].strip()) from error


def _refused(sink: DeltaSinkSettings, context: SinkContext, why: str) -> SchemaError:
    return SchemaError(
        f"the Delta table {sink.path} refuses the stream of sink '{context.uid}'",
        why=why,
        what_to_do="change the stream's fields, or the table with ALTER TABLE"
        + ("" if sink.schema_evolution.value != "NONE" else ", or allow it with schema_evolution"),
        uid=context.uid,
    )
