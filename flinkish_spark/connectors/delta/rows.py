"""Commits by Delta's own writer in Spark (append, overwrite, MERGE), for tables that delta-rs cannot write.

Every commit carries Delta's own marker (`txnAppId`, `txnVersion`), the same that `tables.py` writes:
Delta skips a write whose marker it has seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.window import Window

from flinkish_spark.bridge.session import FROM_THE_JVM
from flinkish_spark.bridge.settings import SETTINGS, settings_of
from flinkish_spark.connectors.delta.table import (
    DeltaConflict,
    DeltaRuleError,
    DeltaTableError,
    SchemaEvolution,
    TableInfo,
    is_wider,
    nullable_within,
    physical_name,
    rename_fields,
)
from flinkish_spark.connectors.staged_rows import BATCH, DELETED, ORDER
from flinkish_spark.connectors.write_modes import (
    Append,
    OverwritePartitions,
    Upsert,
    WriteMode,
    list_stored_names,
    mode_from_json,
)
from flinkish_spark.core.errors import raise_translated
from flinkish_spark.types.ddl import quote_name

_CONTROL = (
    T.StructField(BATCH, T.LongType()),
    T.StructField(ORDER, T.LongType()),
    T.StructField(DELETED, T.BooleanType()),
)
_GLOB = re.compile(r"([{}\[\]*?\\])")


def rule_conditions(frame: DataFrame, rules: Mapping[str, Any]) -> Iterable[tuple[str, Column]]:
    have = {field.name.lower(): field.dataType for field in frame.schema}
    for name, path in rules.get("not_null", {}).items():
        if path[0].lower() in have:
            yield f"the column {name} NOT NULL", F.col(".".join(map(quote_name, path))).isNotNull()
    for name, sql in rules.get("checks", {}).items():
        yield f"CHECK constraint {name} ({sql})", F.expr(sql)
    for name, kind in rules.get("lengths", {}).items():
        if name.lower() in have:
            limits = T.DataType.fromDDL(kind)
            most = limits.length if isinstance(limits, T.CharType | T.VarcharType) else f"in {kind}"
            fits = _fits(F.col(quote_name(name)), limits, have[name.lower()])
            yield f"the length {most} of column {name}", fits
    for name, sql in rules.get("generated", {}).items():
        if name.lower() in have:
            yield f"the generated column {name} = {sql}", F.col(quote_name(name)).eqNullSafe(F.expr(sql))


def _fits(column: Column, kind: T.DataType, given: Any) -> Column:
    if "char(" not in kind.simpleString():
        return F.lit(True)
    if isinstance(kind, T.StructType):
        there = {field.name.lower(): field.dataType for field in given.fields}
        known = [field for field in kind.fields if field.name.lower() in there]
        parts = [_fits(column.getField(f.name), f.dataType, there[f.name.lower()]) for f in known]
        return reduce(Column.__and__, parts, F.lit(True))
    if isinstance(kind, T.MapType):
        keys = _fits(F.map_keys(column), T.ArrayType(kind.keyType), T.ArrayType(given.keyType))
        values = _fits(F.map_values(column), T.ArrayType(kind.valueType), T.ArrayType(given.valueType))
        return keys & values
    if isinstance(kind, T.ArrayType):
        inner, of_given = kind.elementType, given.elementType
        return column.isNull() | F.forall(column, lambda item: _fits(item, inner, of_given))
    assert isinstance(kind, T.CharType | T.VarcharType)
    return column.isNull() | (F.length(column) <= kind.length)


def read_staged(spark: SparkSession, staged: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return the rows of staged sets: their fields, then the control columns."""
    # Data files have neither order nor deletions, and no mode that needs them.
    frames = []
    by_schema: dict[str, list[Mapping[str, Any]]] = {}
    for one in staged:
        by_schema.setdefault(json.dumps(one["schema"]), []).append(one)
    for text, group in by_schema.items():
        schema = T.StructType.fromJson(json.loads(text))
        if paths := [path for one in group if one["form"] == "ROWS" for path in _paths(one)]:
            frames.append(_strict(spark).schema(T.StructType([*schema.fields, *_CONTROL])).parquet(*paths))
        frames += [_read_files(spark, one, schema) for one in group if one["form"] != "ROWS"]
    return reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), frames)


def _strict(spark: SparkSession) -> DataFrameReader:
    # The session may be set to skip files that it cannot read.
    return spark.read.option("ignoreCorruptFiles", "false").option("ignoreMissingFiles", "false")


def list_staged_files(staged: Mapping[str, Any]) -> dict[str, int]:
    """Return the names of a staged set's files within the table, and their sizes in bytes."""
    if staged["form"] == "ROWS":
        folder = str(staged["folder"]).removeprefix(f"{str(staged['path']).rstrip('/')}/")
        return {f"{folder}/{name}": size for name, size in staged["files"].items()}
    added = [action["add"] for action in staged["actions"]]
    return {unquote(str(add["path"])): int(add["size"]) for add in added}


def _paths(staged: Mapping[str, Any]) -> list[str]:
    """Return the full paths of a staged set's files, escaped, so that Spark takes none for a glob pattern."""
    root = str(staged["path"]).rstrip("/")
    return [_GLOB.sub(r"\\\1", f"{root}/{name}") for name in list_staged_files(staged)]


def _read_files(spark: SparkSession, staged: Mapping[str, Any], schema: T.StructType) -> DataFrame:
    """Read staged data files: columns by their physical names, partition values from the add actions."""
    table = TableInfo.from_log(staged["metadata"])
    fields = {str(f["name"]).lower(): f for f in table.fields}
    ours = [fields[name.lower()] for name in schema.names]
    inner = rename_fields([f for f in ours if f["name"] not in table.partition_by])
    physical = T.StructType.fromJson({"type": "struct", "fields": inner})
    by_partition: dict[tuple[Any, ...], list[Any]] = {}
    for action in staged["actions"]:
        key = tuple(sorted(action["add"]["partitionValues"].items()))
        by_partition.setdefault(key, []).append(action)
    frames = []
    for values, actions in by_partition.items():
        read = _strict(spark).schema(physical).parquet(*_paths({**staged, "actions": actions}))
        columns = [
            (
                F.lit(dict(values).get(physical_name(one)))
                if one["name"] in table.partition_by
                else F.col(quote_name(physical_name(one)))
            )
            .cast(wanted.dataType)
            .alias(wanted.name)
            for one, wanted in zip(ours, schema.fields, strict=True)
        ]
        control = [F.lit(None).cast("long").alias(name) for name in (BATCH, ORDER)]
        frames.append(read.select(*columns, *control, F.lit(False).alias(DELETED)))
    return reduce(DataFrame.unionByName, frames)


Json = Any


def align_columns(rows: DataFrame, names: Sequence[str], info: TableInfo | None) -> list[Column]:
    # Narrower ones get the table's type. Structs get its fields in its order, null where the stream has none,
    # and after them those that only the stream has.
    wanted = {} if info is None else {str(f["name"]).lower(): f["type"] for f in info.fields}
    columns = []
    for name in names:
        have, want = rows.schema[name].dataType.jsonValue(), wanted.get(name.lower())
        column = F.col(quote_name(name))
        if isinstance(have, str) and isinstance(want, str) and is_wider(have, want):
            column = column.cast(type_of(want)).alias(name)
        elif want is not None and _differs(have, want):
            column = _fill_missing(column, have, want).alias(name)
        columns.append(column)
    return columns


def _differs(have: Json, want: Json) -> bool:
    """Compare the fields of structs at any depth, and their order, with the table's."""
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


def _fill_missing(column: Column, have: Json, want: Json) -> Column:
    if not _differs(have, want):
        return column
    if have["type"] == "array":
        return F.transform(column, lambda item: _fill_missing(item, have["elementType"], want["elementType"]))
    if have["type"] == "map":
        keyed = F.transform_keys(column, lambda key, _: _fill_missing(key, have["keyType"], want["keyType"]))
        return F.transform_values(
            keyed, lambda _, value: _fill_missing(value, have["valueType"], want["valueType"])
        )
    return F.when(column.isNotNull(), F.struct(*_fields(column, have, want)))


def _fields(column: Column, have: Json, want: Json) -> list[Column]:
    ours = {str(f["name"]).lower(): f for f in have["fields"]}
    fields = []
    for field in want["fields"]:
        name, known = str(field["name"]), ours.pop(str(field["name"]).lower(), None)
        if known is None:
            fields.append(F.lit(None).cast(type_of(field["type"])).alias(name))
        else:
            value = column.getField(str(known["name"]))
            fields.append(_fill_missing(value, known["type"], field["type"]).alias(name))
    return fields + [column.getField(str(f["name"])).alias(str(f["name"])) for f in ours.values()]


def type_of(kind: Json) -> T.DataType:
    holder: Mapping[str, Any] = {"name": "x", "type": kind, "nullable": True, "metadata": {}}
    return T.StructField.fromJson(dict(holder)).dataType


_CONFLICTS = (
    "ConcurrentTransactionException",
    "MetadataChangedException",
    "ProtocolChangedException",
    "ConcurrentAppendException",
    "ConcurrentWriteException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentModificationException",
)
#: Starts the message of our checks in tasks; the rest names the rule and the row.
VIOLATION_MARKER = "[FLINKISH_DELTA_RULE]"
_VIOLATIONS = ("DeltaInvariantViolationException", "InvariantViolationException")
#: Delta's errors that are no refusals, but failures of a file or a disk.
_FAILURES = ("DeltaIOException", "DeltaFileNotFoundException", "DeltaChecksumException")
_MOST_CAUSES = 12


def translate_error(error: Exception) -> Exception:
    """Return our exception for an exception of the JVM, or the same exception if none fits."""
    # Other errors, such as a full disk or a failed task, are returned unchanged.
    causes = _causes(error)
    for _, message in causes:
        if VIOLATION_MARKER in message:
            return DeltaRuleError(
                message.split(VIOLATION_MARKER, 1)[1].split("SQLSTATE", 1)[0].strip()[:2000]
            )
    for name, message in causes:
        if name in _VIOLATIONS:
            return DeltaRuleError(message[:2000].strip())
    for name, message in causes:
        if any(conflict in name for conflict in _CONFLICTS):
            return DeltaConflict(f"{name}: {message[:500]}")
    name, message = causes[0]
    if "AnalysisException" in name or (name.startswith("Delta") and name not in _FAILURES):
        return DeltaTableError(message[:2000])
    return error


def _causes(error: Exception) -> list[tuple[str, str]]:
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        return [(type(error).__name__, str(error).split("\n\tat ")[0])]
    found: list[tuple[str, str]] = []
    # A chain of causes in Java can be a circle.
    while java is not None and len(found) < _MOST_CAUSES:
        message = str(java.getMessage()).split("\n\tat ")[0]
        found.append((str(java.getClass().getSimpleName()), message))
        java = java.getCause()
    return found


_CONF = "spark.databricks.delta."
_VIEW = "flinkish_staged"
#: EXPLAIN's answer for a statement that cannot be run.
_NO_PLAN = "Error occurred during query planning"


class DeltaRows:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._own: SparkSession | None = None

    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        version: int,
        note: str,
        info: TableInfo | None,
    ) -> None:
        first, mode = staged[0], mode_from_json(staged[0]["mode"])
        evolution = SchemaEvolution(first["schema_evolution"])
        try:
            rows = read_staged(session := self._session(), staged)
            if isinstance(mode, Upsert):
                rows = _newest_per_key(rows, mode)
                if info is not None:
                    rows = _align(rows, mode, info, keep_control=True)
                    session.conf.set(f"{_CONF}write.txnAppId", app_id)
                    session.conf.set(f"{_CONF}write.txnVersion", str(version))
                    session.conf.set(f"{_CONF}commitInfo.userMetadata", note)
                    session.sql(merge_statement(path, info, rows, mode, evolution)).collect()
                    return
                rows = rows.where(~F.col(DELETED))
            writer = _align(rows, mode, info).write.format("delta").options(**first["options"])
            writer = writer.options(txnAppId=app_id, txnVersion=str(version), userMetadata=note)
            if info is None:
                if first["partition_by"]:
                    writer = writer.partitionBy(*first["partition_by"])
                # A table that somebody else creates meanwhile may hold rows that these should replace.
                how = "append" if isinstance(mode, Append) else "error"
            else:
                if evolution is not SchemaEvolution.NONE:
                    writer = writer.option("mergeSchema", "true")
                how = "append"
                if isinstance(mode, OverwritePartitions):
                    how, writer = "overwrite", writer.option("partitionOverwriteMode", "dynamic")
            writer.mode(how).save(path)
        except FROM_THE_JVM as error:
            condition = str(getattr(error, "getCondition", str)() or "")
            if "PATH_EXISTS" in condition or "ALREADY_EXISTS" in condition:
                raise DeltaConflict("somebody made the table at the same moment") from error
            raise_translated(translate_error(error), error)

    def interrupt(self) -> None:
        if self._own is not None:
            # The session is our own: only our commits run in it.
            self._own.interruptAll()

    def why_no_merge(
        self, path: str, info: TableInfo, schema: T.StructType, mode: Upsert, evolution: SchemaEvolution
    ) -> str:
        loose = T.StructType.fromJson(nullable_within(schema.jsonValue()))
        empty = self._session().createDataFrame([], T.StructType([*loose, *_CONTROL]))
        text = merge_statement(path, info, _align(empty, mode, info, keep_control=True), mode, evolution)
        # EXPLAIN returns one row for each line.
        first, *others = (str(row[0]) for row in self._session().sql(f"EXPLAIN {text}").collect())
        return (others or [first])[0] if first.startswith(_NO_PLAN) else ""

    def set_back(self, path: str, version: int | None, note: str) -> None:
        """Commit a version with the rows of `version` (None: no rows), with `note` in the table's history."""
        text = f"RESTORE TABLE {table_name(path)} TO VERSION AS OF {version}"
        if version is None:
            text = f"DELETE FROM {table_name(path)}"
        # In a new session: the note must not get into commits that others make meanwhile.
        session = self._spark.newSession()
        session.conf.set(f"{_CONF}commitInfo.userMetadata", note)
        try:
            session.sql(text).collect()
        except FROM_THE_JVM as error:
            raise_translated(translate_error(error), error)

    def _session(self) -> SparkSession:
        """Return a session of our own, so that a commit's settings do not apply to other writes."""
        if self._own is None:
            clone: Callable[[], SparkSession] | None = getattr(self._spark, "cloneSession", None)
            self._own = clone() if clone is not None else self._spark.newSession()
        # A new session has the settings with which Spark was started, not later ones.
        wanted, there = SETTINGS.all(self._spark), settings_of(self._own)
        for name in wanted.keys() | there.keys():
            if wanted.get(name) == there.get(name) or not self._own.conf.isModifiable(name):
                continue
            if name in wanted:
                self._own.conf.set(name, wanted[name])
            else:
                self._own.conf.unset(name)
        return self._own


def table_name(path: str) -> str:
    return f"delta.{quote_name(path)}"


def merge_statement(
    path: str, info: TableInfo, rows: DataFrame, mode: Upsert, evolution: SchemaEvolution
) -> str:
    rows.createOrReplaceTempView(_VIEW)
    names = _list_stored_columns(rows, mode)
    keys = [quote_name(key) for key in mode.keys]
    others = [quote_name(name) for name in names if name not in mode.keys]
    newer = ""
    # A table without the column has no sequence to compare; the MERGE adds it.
    if mode.sequence_by in names and info.has_column(str(mode.sequence_by)):
        at = quote_name(str(mode.sequence_by))
        newer = f" AND (t.{at} IS NULL OR s.{at} >= t.{at})"
    every = [quote_name(name) for name in names]
    evolving = "" if evolution is SchemaEvolution.NONE else " WITH SCHEMA EVOLUTION"
    changed = ", ".join(f"{name} = s.{name}" for name in others or keys)
    lines = [
        f"MERGE{evolving} INTO {table_name(path)} AS t USING {_VIEW} AS s "
        f"ON {' AND '.join(f't.{key} = s.{key}' for key in keys)}",
        f"WHEN MATCHED AND s.{quote_name(DELETED)}{newer} THEN DELETE",
        f"WHEN MATCHED{newer} THEN UPDATE SET {changed}",
        f"WHEN NOT MATCHED AND NOT s.{quote_name(DELETED)} THEN INSERT ({', '.join(every)}) "
        f"VALUES ({', '.join(f's.{name}' for name in every)})",
    ]
    return "\n".join(lines)


def _newest_per_key(rows: DataFrame, mode: Upsert) -> DataFrame:
    order = [F.col(BATCH).desc(), F.col(ORDER).desc()]
    if mode.sequence_by is not None:
        order.insert(0, F.col(quote_name(mode.sequence_by)).desc_nulls_last())
    window = Window.partitionBy(*[F.col(quote_name(key)) for key in mode.keys]).orderBy(*order)
    place = "_fs_place"
    return rows.withColumn(place, F.row_number().over(window)).where(F.col(place) == 1).drop(place)


def _align(
    rows: DataFrame, mode: WriteMode, info: TableInfo | None, *, keep_control: bool = False
) -> DataFrame:
    control = [F.col(DELETED)] if keep_control else []
    return rows.select(*align_columns(rows, _list_stored_columns(rows, mode), info), *control)


def _list_stored_columns(rows: DataFrame, mode: WriteMode) -> tuple[str, ...]:
    return list_stored_names(mode, [n for n in rows.columns if n not in (BATCH, ORDER, DELETED)])
