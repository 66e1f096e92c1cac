"""The writer of a Delta sink: stages data files in their final place, or rows that the commit reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import FROM_THE_JVM
from flinkish_spark.bridge.settings import SETTINGS
from flinkish_spark.connectors.delta.files import FOLDER
from flinkish_spark.connectors.delta.rows import (
    VIOLATION_MARKER,
    align_columns,
    rule_conditions,
    translate_error,
    type_of,
)
from flinkish_spark.connectors.delta.sink_settings import DeltaSinkSettings, file_options
from flinkish_spark.connectors.delta.table import (
    DeltaRuleError,
    DeltaTableError,
    TableInfo,
    app_id,
    fit,
    list_stored_fields,
    nullable_within,
    physical_name,
    rename_fields,
    why_by_spark,
    why_not_made,
    why_not_merged,
    why_unfit,
)
from flinkish_spark.connectors.delta.tables import DeltaTables, info_of, metadata_of
from flinkish_spark.connectors.delta.writer import FilesToWrite, FilesWork, UpsertRows, stats_columns
from flinkish_spark.connectors.partition_values import partition_conditions
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.connectors.staged_rows import DELETED
from flinkish_spark.connectors.task_staging import JoiningWriter, StagePlan
from flinkish_spark.connectors.upserts import check_records, find_deletes, key_conditions
from flinkish_spark.connectors.write_modes import Upsert, WriteMode, list_stored_names
from flinkish_spark.contracts.sink import SinkContext, StageRequest, StageResult
from flinkish_spark.core.errors import BadRecordError, FlinkishError, SchemaError, raise_translated
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.json_columns import has_intervals, replace_months

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class DeltaStaging(JoiningWriter):
    """Stages micro-batches of one Delta sink, for one start of the query: one file per task and partition."""

    def __init__(self, sink: DeltaSinkSettings, context: SinkContext, spark: SparkSession) -> None:
        self._sink, self._context = sink, context
        self._tables = DeltaTables(sink.store_options)
        self._defaults = table_defaults(spark)

    def stage_alone(self, request: StageRequest, plan: StagePlan) -> StageResult:
        with self._translating_errors():
            return super().stage_alone(request, plan)

    def plan(self, request: StageRequest) -> StagePlan:
        """Plan by the table as it is now; Spark prepares rows that need casts, checks or an order."""
        with self._translating_errors():
            return self._plan(request)

    def _plan(self, request: StageRequest) -> StagePlan:
        sink, fields = self._sink, self._context.schema
        table = self._tables.open(sink.path)
        info = None if table is None else info_of(table)
        stream = fields.jsonValue()["fields"]
        if info is not None and (why := why_unfit(info, sink.mode, stream, sink.schema_evolution)):
            raise DeltaTableError(why)
        if isinstance(sink.mode, Upsert) or why_staged_as_rows(sink, info, stream, self._defaults):
            return self._plan_rows(request, fields, info)
        made = new_metadata(fields, sink.partition_by, self._defaults)
        return self._plan_files(fields, made if table is None else metadata_of(table))

    def _plan_files(self, fields: T.StructType, metadata: Mapping[str, Any]) -> StagePlan:
        table = TableInfo.from_log({"metaData": metadata})
        target = FilesToWrite(
            self._tables.files(self._sink.path),
            partition_by=tuple(map(table.physical_name, table.partition_by)),
            with_stats=stats_columns(table.fields, table.properties),
            **file_options(self._sink.options),
        )

        select = None if _takes_as_it_is(table, fields) else partial(_select_for_files, fields, table)
        form = {"form": "FILES", "metadata": {"metaData": dict(metadata)}}
        return StagePlan(FilesWork(target), partial(_finish, self._sink, fields, form), select)

    def _plan_rows(self, request: StageRequest, fields: T.StructType, table: TableInfo | None) -> StagePlan:
        """Stage rows below the table's folder, which the commit reads again."""
        sink, context = self._sink, self._context
        rules = {} if table is None else table.rules()
        partition_by = sink.partition_by if table is None else table.partition_by
        staged_id = StagedId.new(context.owner_epoch, request.block)
        folder = f"{FOLDER}/{app_id(context.job, context.uid)}/{staged_id}"
        kept = {*list_stored_names(sink.mode, fields.names)}
        if isinstance(sink.mode, Upsert) and sink.mode.sequence_by is not None:
            kept.add(sink.mode.sequence_by)
        own = [one for one in fields if one.name in kept]
        # pyarrow writes an interval of months to Parquet as a number.
        stored = T.StructType(
            [T.StructField(one.name, replace_months(one.dataType, T.IntegerType())) for one in own]
        )
        target = FilesToWrite(self._tables.files(sink.path), folder)

        form = {
            "form": "ROWS",
            "folder": f"{sink.path.rstrip('/')}/{folder}",
            "schema": stored.jsonValue(),
            "rules": rules,
            "table_partitions": list(partition_by),
        }
        finish, batch = partial(_finish, sink, fields, form), int(request.batch)
        is_plain = _needs_no_check(rules, partition_by, fields)
        if isinstance(sink.mode, Upsert) and sink.mode.delete_when is None and is_plain:
            mode = sink.mode
            upsert = UpsertRows(self._marker, fields, mode.keys, mode.row_kind, tuple(stored.names))
            return StagePlan(FilesWork(target, batch, upsert), finish, translate=self._find_refusal)
        select = partial(_select_for_rows, sink.mode, fields, stored, rules, partition_by)
        return StagePlan(FilesWork(target, batch), finish, select)

    @property
    def _marker(self) -> str:
        return f"{VIOLATION_MARKER} sink '{self._context.uid}':"

    def _find_refusal(self, error: Exception) -> FlinkishError | None:
        _, found, text = str(error).partition(self._marker)
        return self._to_user_error(DeltaRuleError(text.split("\n", 1)[0])) if found else None

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except FROM_THE_JVM as error:
            known = translate_error(error)
            if isinstance(known, DeltaTableError):
                raise self._to_user_error(known) from error
            raise_translated(known, error)
        except DeltaTableError as error:
            raise self._to_user_error(error) from error

    def _to_user_error(self, error: DeltaTableError) -> FlinkishError:
        uid, path = self._context.uid, self._sink.path
        if isinstance(error, DeltaRuleError):
            return BadRecordError(
                f"a record of sink '{uid}' breaks a rule of the Delta table {path}",
                why=" ".join(str(error).split()),
                what_to_do="correct or filter such records before the sink, or change the table; "
                "the job goes on from its last checkpoint",
                uid=uid,
            )
        return SchemaError(
            f"the Delta table {path} refuses the stream of sink '{uid}'",
            why=str(error).split("\n\n")[0].strip(),
            what_to_do="change the stream's fields, or the table with ALTER TABLE",
        )


def _finish(
    sink: DeltaSinkSettings,
    fields: T.StructType,
    form: Mapping[str, Any],
    reports: Sequence[Mapping[str, Any]],
) -> StageResult:
    acks = tuple(TaskAck.from_json(report) for report in reports)
    adds = [add for report in reports for add in report["adds"]]
    if not adds:
        return StageResult(acks, (), bytes=0)
    staged: dict[str, Any] = {"actions": [{"add": add} for add in adds]}
    size = sum(int(add["size"]) for add in adds)
    if form["form"] == "ROWS":
        staged = {"files": {add["path"].rpartition("/")[2]: add["size"] for add in adds}, "bytes": size}
    payload = {
        "path": sink.path,
        "mode": sink.mode.to_json(),
        "schema_evolution": sink.schema_evolution.value,
        "partition_by": list(sink.partition_by),
        "options": dict(sink.options),
        "rows": sum(ack.rows for ack in acks),
        "schema": fields.jsonValue(),
        **form,
        **staged,
    }
    return StageResult(acks, (payload,), bytes=size)


def table_defaults(spark: SparkSession) -> dict[str, str]:
    start = "spark.databricks.delta.properties.defaults."
    settings = SETTINGS.all(spark)
    return {f"delta.{n.removeprefix(start)}": text for n, text in settings.items() if n.startswith(start)}


def new_metadata(
    fields: T.StructType, partition_by: Sequence[str], defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return the log's metadata of a table that the first checkpoint creates."""
    loose = T.StructType.fromJson(nullable_within(fields.jsonValue()))
    return {
        "schemaString": T.StructType([T.StructField(f.name, f.dataType) for f in loose]).json(),
        "partitionColumns": list(partition_by),
        "configuration": dict(defaults),
    }


def why_staged_as_rows(
    sink: DeltaSinkSettings,
    table: TableInfo | None,
    stream: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, str],
) -> str:
    """Return why records must be staged as rows for Delta's own writer; empty if delta-rs can commit."""
    if table is None:
        made = TableInfo(tuple(list_stored_fields(sink.mode, stream)), tuple(sink.partition_by), defaults)
        return why_not_made(made, sink.mode)
    stored = list_stored_fields(sink.mode, stream)
    why = why_by_spark(table, sink.mode, fit(table, stored, sink.schema_evolution).changes)
    return why or (why_not_merged(table, stored) if isinstance(sink.mode, Upsert) else "")


def _takes_as_it_is(table: TableInfo, fields: T.StructType) -> bool:
    """Return whether a table takes records without a cast, a check, another name or an order."""
    stream = {str(one["name"]): one["type"] for one in fields.jsonValue()["fields"]}
    stored = {str(one["name"]): one["type"] for one in table.fields if str(one["name"]) in stream}
    return (
        table.mapping == "none"
        and stream.keys() == stored.keys()
        and all(nullable_within(kind) == nullable_within(stored[name]) for name, kind in stream.items())
        and _needs_no_check(table.rules(), table.partition_by, fields)
    )


def _needs_no_check(rules: Mapping[str, Any], partition_by: Sequence[str], fields: T.StructType) -> bool:
    """Return whether rows need neither a check nor a cast that only Spark can do."""
    return not (any(rules.values()) or partition_by or any(has_intervals(one.dataType) for one in fields))


def _select_for_files(fields: T.StructType, table: TableInfo, given: DataFrame) -> DataFrame:
    rows, names = _add_missing_columns(given, fields, table)
    checks = [*partition_conditions(rows, table.partition_by), *rule_conditions(rows, table.rules())]
    columns = [*map(F.col, C.SINK_CONTROL)]
    for column, name in zip(align_columns(rows, names, table), names, strict=True):
        one = next(f for f in table.fields if str(f["name"]).lower() == name.lower())
        if table.mapping != "none" and isinstance(one["type"], dict):
            # A cast maps fields by position.
            column = column.cast(type_of(rename_fields(one["type"])))
        columns.append(column.alias(physical_name(one)))
    checked = check_records(rows, fields.names, checks, VIOLATION_MARKER).select(*columns)
    together = _list_sort_columns(table, checked.columns)
    return checked.sortWithinPartitions(*together) if together else checked


def _select_for_rows(
    mode: WriteMode,
    fields: T.StructType,
    stored: T.StructType,
    rules: Mapping[str, Any],
    partition_by: Sequence[str],
    rows: DataFrame,
) -> DataFrame:
    deletes = find_deletes(mode)
    # Also for a record that deletes: with such a value it would not find its row.
    checks = [*key_conditions(mode), *partition_conditions(rows, partition_by)]
    plain = rows.select(*map(F.col, map(quote_name, fields.names)))
    checks += [(text, deletes | is_kept) for text, is_kept in rule_conditions(plain, rules)]
    columns = []
    for one in stored:
        column = F.col(quote_name(one.name))
        is_same = one.dataType == fields[one.name].dataType
        columns.append(column if is_same else column.cast(one.dataType).alias(one.name))
    checked = check_records(rows, fields.names, checks, VIOLATION_MARKER)
    return checked.select(*map(F.col, C.SINK_CONTROL), *columns, deletes.alias(DELETED))


def _add_missing_columns(
    rows: DataFrame, fields: T.StructType, table: TableInfo
) -> tuple[DataFrame, list[str]]:
    given = {name.lower() for name in fields.names}
    kinds = {str(one["name"]): type_of(one["type"]) for one in table.fields}
    lacking = {name: kind for name, kind in kinds.items() if name.lower() not in given}
    computed = {name: F.expr(table.generated[name]) for name in lacking if name in table.generated}
    # Generated columns may be computed from the others.
    for some in ({name: F.lit(None) for name in lacking if name not in computed}, computed):
        rows = rows.select("*", *(column.cast(lacking[name]).alias(name) for name, column in some.items()))
    return rows, [*fields.names, *computed]


def _list_sort_columns(table: TableInfo, names: Sequence[str]) -> list[Column]:
    """Return sort columns that bring the rows of each partition together."""
    kinds = {physical_name(one): one["type"] for one in table.fields}
    found = []
    for name in map(table.physical_name, table.partition_by):
        if name in names:
            column = F.col(quote_name(name))
            # As a text: 0.0 and -0.0 are equal in an order, and they are two partitions.
            found.append(column.cast("string") if kinds.get(name) in ("float", "double") else column)
    return found
