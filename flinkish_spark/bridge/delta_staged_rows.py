"""Staged rows as DataFrames: writing them to a folder, and reading back what any writer staged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.delta_errors import FROM_THE_JVM, VIOLATION_MARKER, translated
from flinkish_spark.bridge.delta_files import escaped
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sinks.delta_modes import Upsert, WriteMode
from flinkish_spark.sinks.delta_table import TableInfo, physical_name, physical_type
from flinkish_spark.sinks.partition_values import partition_conditions

#: Beside the fields: the micro-batch, the place in it, and whether the row with that key is to go.
BATCH, ORDER, DELETED = "_fs_batch", "_fs_order", "_fs_deleted"
_CONTROL = (
    T.StructField(BATCH, T.LongType()),
    T.StructField(ORDER, T.LongType()),
    T.StructField(DELETED, T.BooleanType()),
)
_MOST_OF_A_ROW = 1_000


def write_rows(
    frame: DataFrame,
    folder: str,
    batch: int,
    mode: WriteMode,
    rules: Mapping[str, Any],
    partition_by: Sequence[str],
) -> None:
    """Write a micro-batch's records to a folder, in their order, checked against the table's rules.

    Parameters
    ----------
    rules
        See `TableInfo.rules`; empty if there is no table yet.
    partition_by
        Partition columns of the table.

    Raises
    ------
    DeltaViolated
        A record breaks a rule, has a null key, or a value that its partition would not keep.
    """
    deletes = F.lit(False)
    if isinstance(mode, Upsert) and mode.delete_when is not None:
        deletes = F.coalesce(F.expr(mode.delete_when), F.lit(False))
    row = F.substring(F.to_json(F.struct(*map(F.col, map(quoted, frame.columns)))), 1, _MOST_OF_A_ROW)
    flag = deletes
    # Also of a record that deletes: by such a value it would not find its row.
    always = [*_key_conditions(mode), *partition_conditions(frame, partition_by)]
    checks = [(name, is_kept, F.lit(False)) for name, is_kept in always]
    checks += [(name, is_kept, deletes) for name, is_kept in _conditions(frame, rules)]
    for name, is_kept, exempt in reversed(checks):
        text = F.concat(F.lit(f"{VIOLATION_MARKER} {name} is violated by the record "), row)
        broken = ~exempt & ~F.coalesce(is_kept, F.lit(False))
        # In a column that is written, so that no optimizer finds it unneeded.
        flag = F.when(broken, F.raise_error(text).cast("boolean")).otherwise(flag)
    marked = frame.select(
        *map(F.col, map(quoted, frame.columns)),
        F.lit(batch).cast("long").alias(BATCH),
        F.monotonically_increasing_id().alias(ORDER),
        flag.alias(DELETED),
    )
    try:
        marked.write.mode("error").parquet(folder)
    except FROM_THE_JVM as error:
        raise translated(error) from error


def _key_conditions(mode: WriteMode) -> Iterable[tuple[str, Column]]:
    for key in mode.keys if isinstance(mode, Upsert) else ():
        yield f"the key {key} IS NOT NULL", F.col(quoted(key)).isNotNull()


def _conditions(frame: DataFrame, rules: Mapping[str, Any]) -> Iterable[tuple[str, Column]]:
    """Yield what must be true of every record that becomes a row."""
    have = {name.lower() for name in frame.columns}
    for name in rules.get("not_null", ()):
        if name.lower() in have:
            yield f"the column {name} NOT NULL", F.col(quoted(name)).isNotNull()
    for name, sql in rules.get("checks", {}).items():
        yield f"CHECK constraint {name} ({sql})", F.expr(sql)
    for name, most in rules.get("lengths", {}).items():
        if name.lower() in have:
            column = F.col(quoted(name))
            yield f"the length {most} of column {name}", column.isNull() | (F.length(column) <= most)
    for name, sql in rules.get("generated", {}).items():
        if name.lower() in have:
            yield f"the generated column {name} = {sql}", F.col(quoted(name)).eqNullSafe(F.expr(sql))


def read_staged(spark: SparkSession, staged: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return the rows of staged sets: their fields, then the control columns above.

    Sets that were staged as data files have neither order nor deletions, and no mode that needs them.
    """
    frames = []
    for schema_text, alike in _grouped(staged):
        schema = T.StructType.fromJson(schema_text)
        as_rows = [one for one in alike if one.get("form") == "ROWS"]
        if as_rows:
            paths = [escaped(path) for one in as_rows for path in staged_files(one)]
            frames.append(_strict(spark).schema(T.StructType([*schema.fields, *_CONTROL])).parquet(*paths))
        frames += [_read_files(spark, one, schema) for one in alike if one.get("form") != "ROWS"]
    return reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), frames)


def _strict(spark: SparkSession) -> DataFrameReader:
    """Return a reader that fails where a session may be set to pass over what it cannot read."""
    return spark.read.option("ignoreCorruptFiles", "false").option("ignoreMissingFiles", "false")


def staged_files(staged: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the full paths of a staged set's files, and their sizes; older sets do not know all."""
    if staged.get("form") == "ROWS":
        given = staged["files"]
        sizes = given if isinstance(given, Mapping) else dict.fromkeys(given)
        return {f"{staged['folder']}/{name}": size for name, size in sizes.items()}
    root = str(staged["path"]).rstrip("/")
    added = [action["add"] for action in staged["actions"] if "add" in action]
    named = {unquote(str(add["path"])): int(add["size"]) for add in added}
    return {
        path if "://" in path or path.startswith(("/", "file:")) else f"{root}/{path}": size
        for path, size in named.items()
    }


def _grouped(
    staged: Sequence[Mapping[str, Any]],
) -> Iterable[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    groups: list[tuple[dict[str, Any], list[Mapping[str, Any]]]] = []
    for one in staged:
        schema = stored_schema(one)
        for known, alike in groups:
            if known == schema:
                alike.append(one)
                break
        else:
            groups.append((schema, [one]))
    return groups


def stored_schema(staged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a staged set; of older ones that of the table they were staged for."""
    if "schema" in staged:
        return dict(staged["schema"])
    fields = [{**f, "metadata": {}} for f in TableInfo.from_log(staged["metadata"]).fields]
    return {"type": "struct", "fields": fields}


def _read_files(spark: SparkSession, staged: Mapping[str, Any], schema: T.StructType) -> DataFrame:
    """Read data files as the table would: columns by their physical names, partition values from the log."""
    table = TableInfo.from_log(staged["metadata"])
    fields = {str(f["name"]).lower(): f for f in table.fields}
    ours = [fields[name.lower()] for name in schema.names]
    in_files = [f for f in ours if f["name"] not in table.partition_by]
    inner = [
        {**f, "name": physical_name(f), "type": physical_type(f["type"]), "metadata": {}} for f in in_files
    ]
    physical = T.StructType.fromJson({"type": "struct", "fields": inner})
    adds = [action["add"] for action in staged["actions"] if "add" in action]
    frames = []
    for values in {tuple(sorted(add["partitionValues"].items())): None for add in adds}:
        alike = {
            **staged,
            "actions": [{"add": a} for a in adds if tuple(sorted(a["partitionValues"].items())) == values],
        }
        read = _strict(spark).schema(physical).parquet(*[escaped(path) for path in staged_files(alike)])
        columns = [
            _column(one, dict(values), one["name"] in table.partition_by)
            .cast(wanted.dataType)
            .alias(wanted.name)
            for one, wanted in zip(ours, schema.fields, strict=True)
        ]
        control = [F.lit(None).cast("long").alias(name) for name in (BATCH, ORDER)]
        frames.append(read.select(*columns, *control, F.lit(False).alias(DELETED)))
    return reduce(DataFrame.unionByName, frames)


def _column(stored: Mapping[str, Any], values: Mapping[str, str | None], is_partition: bool) -> Column:
    name = physical_name(stored)
    return F.lit(values.get(name)) if is_partition else F.col(quoted(name))
