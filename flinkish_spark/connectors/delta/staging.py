"""The staging half of a Delta sink: data files where they will stay, or rows that the commit reads."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import FROM_THE_JVM
from flinkish_spark.bridge.settings import SETTINGS
from flinkish_spark.connectors.delta.faults import (
    VIOLATION_MARKER,
    DeltaRefused,
    DeltaViolated,
    translated,
)
from flinkish_spark.connectors.delta.rows import (
    aligned_columns,
    key_conditions,
    nullable_within,
    rule_conditions,
)
from flinkish_spark.connectors.delta.sink_settings import DeltaSinkSettings, file_options
from flinkish_spark.connectors.delta.table import (
    OverwritePartitions,
    TableInfo,
    Upsert,
    WriteMode,
    app_id,
    fit,
    physical_name,
    physical_type,
    stored_fields,
    why_by_spark,
    why_not_made,
    why_not_merged,
)
from flinkish_spark.connectors.delta.tables import DeltaTables, info_of, metadata_of
from flinkish_spark.connectors.delta.writer import DELETED, FilesToWrite, StageFiles, stats_columns
from flinkish_spark.connectors.partition_values import partition_conditions
from flinkish_spark.connectors.row_count import reports
from flinkish_spark.contracts.sink import (
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.core.changelogs import RETRACTIONS
from flinkish_spark.core.errors import BadRecordError, FlinkishError, SchemaError, raise_translated
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.json_columns import replace_months

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


#: Below the table, where rows wait for their checkpoint: Delta and its VACUUM pass over folders whose names
#: begin with an underscore.
FOLDER = "_flinkish"
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class StagedFolder:
    """Name of the rows of one attempt: it says whose they are, so that a sweep knows a leftover."""

    owner_epoch: int
    lineage: int
    batch: int
    block: int
    #: Eight hexadecimal digits that no other attempt has.
    token: str

    @property
    def name(self) -> str:
        return f"{self.owner_epoch}-{self.lineage}-{self.batch}-{self.block}-{self.token}"

    @classmethod
    def parse(cls, name: str) -> StagedFolder | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), int(found[3]), int(found[4]), found[5])


#: What tasks report, and what makes the stored form of the files in it.
Staged = tuple[Sequence[Mapping[str, Any]], Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]]


class DeltaStaging(SinkWriter):
    """Stages micro-batches of one Delta sink, for one start of the query: one file per task and partition."""

    def __init__(self, sink: DeltaSinkSettings, context: SinkContext, spark: SparkSession) -> None:
        self._sink, self._context = sink, context
        self._tables = DeltaTables(sink.store_options)
        self._defaults = table_defaults(spark)

    def stage(self, request: StageRequest) -> StageResult:
        sink = self._sink
        fields = T.StructType([f for f in request.rows.schema if f.name not in C.SINK_CONTROL])
        try:
            found, staged = self._write(request, fields)
        except FROM_THE_JVM as error:
            known = translated(error)
            if isinstance(known, DeltaRefused):
                raise self._refused(known) from error
            raise_translated(known, error)
        except DeltaRefused as error:
            raise self._refused(error) from error
        acks = tuple(TaskAck.from_json(report) for report in found)
        adds = [add for report in found for add in report["adds"]]
        if not adds:
            return StageResult(acks, (), bytes=0)
        payload = {
            "path": sink.path,
            "mode": sink.mode.to_json(),
            "schema_evolution": sink.schema_evolution.value,
            "partition_by": list(sink.partition_by),
            "options": dict(sink.options),
            "rows": sum(ack.rows for ack in acks),
            "schema": fields.jsonValue(),
            **staged(adds),
        }
        return StageResult(acks, (payload,), bytes=sum(int(add["size"]) for add in adds))

    def _write(self, request: StageRequest, fields: T.StructType) -> Staged:
        sink = self._sink
        table = self._tables.open(sink.path)
        info = None if table is None else info_of(table)
        stream = fields.jsonValue()["fields"]
        if info is not None:
            if isinstance(sink.mode, OverwritePartitions) and not info.partition_by:
                raise DeltaRefused("it has no partitions any more, and would be overwritten as a whole")
            problems = fit(info, stored_of(sink.mode, stream), sink.schema_evolution).problems
            if problems:
                raise DeltaRefused(problems[0])
        if isinstance(sink.mode, Upsert) or why_staged_as_rows(sink, info, stream, self._defaults):
            return self._as_rows(request, fields, info)
        metadata = (
            new_metadata(fields, sink.partition_by, self._defaults) if table is None else metadata_of(table)
        )
        return self._as_files(request, fields, metadata, is_new=table is None)

    def _as_files(
        self, request: StageRequest, fields: T.StructType, metadata: Mapping[str, Any], *, is_new: bool
    ) -> Staged:
        """Stage data files where they will stay."""
        table = TableInfo.from_log({"metaData": metadata})
        rows, names = _whole(request.rows, fields, table)
        conditions = [*partition_conditions(rows, table.partition_by)]
        if not is_new:
            conditions += rule_conditions(rows, table.rules())
        columns = [
            _physical(column, table, name)
            for column, name in zip(aligned_columns(rows, names, table), names, strict=True)
        ]
        checked = _checked(
            rows, fields.names, columns, [(text, is_kept, F.lit(False)) for text, is_kept in conditions]
        )
        target = FilesToWrite(
            self._tables.files(self._sink.path),
            partition_by=tuple(map(table.physical_name, table.partition_by)),
            with_stats=stats_columns(table.fields, table.properties),
            **file_options(self._sink.options),
        )
        if together := _together(table, checked.columns):
            checked = checked.sortWithinPartitions(*together)
        found = reports(checked, StageFiles(target))
        return found, lambda adds: {
            "form": "FILES",
            "actions": [{"add": add} for add in adds],
            "metadata": {"metaData": dict(metadata)},
        }

    def _as_rows(self, request: StageRequest, fields: T.StructType, table: TableInfo | None) -> Staged:
        """Stage rows that the commit reads again, below the table's folder."""
        sink, context = self._sink, self._context
        rules = {} if table is None else table.rules()
        partition_by = sink.partition_by if table is None else table.partition_by
        attempt = StagedFolder(
            int(context.owner_epoch),
            int(request.lineage),
            int(request.batch),
            request.block,
            secrets.token_hex(4),
        )
        folder = f"{FOLDER}/{app_id(context.job, context.uid)}/{attempt.name}"
        rows = request.rows
        deletes = _deletes(sink.mode)
        # Also of a record that deletes: by such a value it would not find its row.
        always = [*key_conditions(sink.mode), *partition_conditions(rows, partition_by)]
        checks = [(text, is_kept, F.lit(False)) for text, is_kept in always]
        checks += [
            (text, is_kept, deletes)
            for text, is_kept in rule_conditions(rows.select(*map(F.col, map(quoted, fields.names))), rules)
        ]
        kept = {*stored_fields(sink.mode, fields.names)}
        if isinstance(sink.mode, Upsert) and sink.mode.sequence_by is not None:
            kept.add(sink.mode.sequence_by)
        stored = T.StructType([_storable(one) for one in fields if one.name in kept])
        columns = [
            F.col(quoted(one.name)).cast(one.dataType).alias(one.name)
            if one.dataType != fields[one.name].dataType
            else F.col(quoted(one.name))
            for one in stored
        ]
        checked = _checked(rows, fields.names, columns, checks, deletes, is_kept=True)
        target = FilesToWrite(self._tables.files(sink.path), folder)
        found = reports(checked, StageFiles(target, int(request.batch)))
        return found, lambda adds: {
            "form": "ROWS",
            "folder": f"{sink.path.rstrip('/')}/{folder}",
            "files": {add["path"].rpartition("/")[2]: add["size"] for add in adds},
            "schema": stored.jsonValue(),
            "rules": rules,
            "table_partitions": list(partition_by),
            "bytes": sum(add["size"] for add in adds),
        }

    def _refused(self, error: DeltaRefused) -> FlinkishError:
        uid, path = self._context.uid, self._sink.path
        if isinstance(error, DeltaViolated):
            return BadRecordError(
                f"a record of sink '{uid}' breaks a rule of the Delta table {path}",
                why=" ".join(str(error).split()),
                what_to_do="correct or filter such records in front of the sink, or change the table; "
                "the job goes on from its last checkpoint",
                uid=uid,
            )
        return SchemaError(
            f"the Delta table {path} refuses the stream of sink '{uid}'",
            why=str(error).split("\n\n")[0].strip(),
            what_to_do="change the stream's fields, or the table with ALTER TABLE",
            uid=uid,
        )


def table_defaults(spark: SparkSession) -> dict[str, str]:
    """Return the properties that the session gives to new tables."""
    start = "spark.databricks.delta.properties.defaults."
    settings = SETTINGS.all(spark)
    return {f"delta.{n.removeprefix(start)}": text for n, text in settings.items() if n.startswith(start)}


def new_metadata(
    fields: T.StructType, partition_by: Sequence[str], defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return what the log says of a table that the first checkpoint makes."""
    plain = T.StructType([T.StructField(f.name, f.dataType) for f in nullable_within(fields)])
    return {
        "schemaString": plain.json(),
        "partitionColumns": list(partition_by),
        "configuration": dict(defaults),
    }


def stored_of(mode: WriteMode, fields: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of a stream's fields that the table gets."""
    kept = stored_fields(mode, [str(one["name"]) for one in fields])
    return [one for one in fields if one["name"] in kept]


def why_staged_as_rows(
    sink: DeltaSinkSettings,
    table: TableInfo | None,
    stream: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, str],
) -> str:
    """Return why only Delta's own writer can put records into a table; empty if delta-rs can."""
    if table is None:
        made = TableInfo(tuple(stored_of(sink.mode, stream)), tuple(sink.partition_by), defaults)
        return why_not_made(made, sink.mode)
    stored = stored_of(sink.mode, stream)
    why = why_by_spark(table, sink.mode, fit(table, stored, sink.schema_evolution).changes)
    return why or (why_not_merged(table, stored) if isinstance(sink.mode, Upsert) else "")


def _deletes(mode: WriteMode) -> Column:
    if isinstance(mode, Upsert) and mode.delete_when is not None:
        return F.coalesce(F.expr(mode.delete_when), F.lit(False))
    if isinstance(mode, Upsert) and mode.row_kind is not None:
        return F.col(quoted(mode.row_kind)).isin(*RETRACTIONS)
    return F.lit(False)


def _whole(rows: DataFrame, fields: T.StructType, table: TableInfo) -> tuple[DataFrame, list[str]]:
    """Return rows with all columns of a table, and which of them files get: others are null by themselves."""
    given = {name.lower() for name in fields.names}
    names, more = list(fields.names), []
    lacking = [one for one in table.fields if str(one["name"]).lower() not in given]
    computed = {
        str(one["name"]): F.expr(sql) for one in lacking if (sql := table.generated.get(str(one["name"])))
    }
    for one in lacking:
        if str(one["name"]) not in computed:
            more.append(F.lit(None).cast(_type(one)).alias(str(one["name"])))
    rows = rows.select("*", *more) if more else rows
    if computed:
        kinds = {str(one["name"]): _type(one) for one in lacking}
        rows = rows.select("*", *(column.cast(kinds[name]).alias(name) for name, column in computed.items()))
    return rows, [*names, *computed]


def _type(field: Mapping[str, Any]) -> T.DataType:
    return T.StructField.fromJson({**field, "metadata": {}}).dataType


def _storable(field: T.StructField) -> T.StructField:
    """Return a field as Parquet by pyarrow has it: an interval of months is their number."""
    return T.StructField(field.name, replace_months(field.dataType, T.IntegerType()), True)


def _physical(column: Column, table: TableInfo, name: str) -> Column:
    """Return a column by the names that it has in files."""
    one = next(f for f in table.fields if str(f["name"]).lower() == name.lower())
    kind = physical_type(one["type"])
    if table.is_mapped and isinstance(kind, dict):
        # A cast goes by the places of fields.
        column = column.cast(_type({**one, "type": kind}))
    return column.alias(physical_name(one))


def _together(table: TableInfo, names: Sequence[str]) -> list[Column]:
    """Return what rows are sorted by, so that those of a partition come one behind the other."""
    kinds = {physical_name(one): one["type"] for one in table.fields}
    found = []
    for name in map(table.physical_name, table.partition_by):
        if name in names:
            column = F.col(quoted(name))
            # As a text: to an order the two zeros are one value, and they are two partitions.
            found.append(column.cast("string") if kinds.get(name) in ("float", "double") else column)
    return found


_MOST_OF_A_ROW = 1_000
Check = tuple[str, "Column", "Column"]


def _checked(
    rows: DataFrame,
    shown: Sequence[str],
    columns: Sequence[Column],
    checks: Sequence[Check],
    deletes: Column | None = None,
    *,
    is_kept: bool = False,
) -> DataFrame:
    """Return control columns and others; a record of which a condition is not true ends the task."""
    control = [F.col(name) for name in C.SINK_CONTROL]
    if not checks and not is_kept:
        return rows.select(*control, *columns)
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    row = F.substring(F.to_json(F.struct(*map(F.col, map(quoted, shown)))), 1, _MOST_OF_A_ROW)
    flag = F.lit(False) if deletes is None else deletes
    for name, is_true, exempt in reversed(checks):
        text = F.concat(F.lit(f"{VIOLATION_MARKER} {name} is violated by the record "), row)
        broken = is_record & ~exempt & ~F.coalesce(is_true, F.lit(False))
        # In a column that is handed over, so that no optimizer finds it unneeded.
        flag = F.when(broken, F.raise_error(text).cast("boolean")).otherwise(flag)
    return rows.select(*control, *columns, flag.alias(DELETED))
