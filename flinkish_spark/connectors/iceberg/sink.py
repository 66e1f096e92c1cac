"""The Iceberg sink: its settings, its checks before the start, and the staging half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.iceberg.settings import IcebergSinkSettings
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.connectors.staged_rows import DELETED
from flinkish_spark.connectors.task_staging import JoiningWriter, StagePlan
from flinkish_spark.connectors.upserts import (
    check_columns,
    check_records,
    check_upsert,
    find_deletes,
    key_conditions,
    select_stored,
)
from flinkish_spark.connectors.write_modes import Append, OverwritePartitions, Upsert, list_stored_names
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.errors import BAD_RECORD_MARKER, EnvironmentFault, SchemaError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

_NO_PARTITIONS = "it has no partitions that are overwritten"


@dataclass(frozen=True)
class IcebergSink(IcebergSinkSettings, Sink):
    """Write to an Iceberg table, exactly once, by pyiceberg: no JAR is needed.

    Each checkpoint becomes one snapshot, which appends its records, or replaces rows by them.

    Parameters
    ----------
    table
        ``catalog.schema.table``: the catalog's name, one namespace or several, the table.
    properties
        Of the catalog, as pyiceberg names them, such as ``{"type": "rest", "uri": "https://catalog"}``. They
        are added to what pyiceberg's own configuration has for the catalog's name. Give a secret as
        ``"env:NAME"``, the driver's environment variable that holds it. Values are never shown or stored.
    branch
        The branch that gets the snapshots; it has to exist.
    create_table
        If the table is created when it is missing, with the fields of the stream. The namespace has to exist.
    partition_by
        Partition fields of a table that is created: columns, or transforms of them: ``"day(at)"``,
        ``"bucket(16, user)"``.
    table_properties
        Properties of a table that is created.
    mode
        ``Append()``, ``Upsert(keys=...)`` or ``OverwritePartitions()``. An upsert is copy on write: files
        with rows of the keys are written anew, in the driver. A key is no FLOAT and no DOUBLE.

    Raises
    ------
    ConfigError
        A table without a namespace, a transform that Iceberg has not, a value of another type.

    Examples
    --------
    >>> IcebergSink("lake.shop.orders", create_table=True, partition_by=("day(at)",)).table
    'lake.shop.orders'
    >>> IcebergSink("lake.shop.users", mode=Upsert(keys=("id",), sequence_by="at")).mode.sequence_by
    'at'
    """

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the table."""
        name = self.name
        return (Dataset(f"iceberg://{name.catalog}", ".".join(name.path)),)

    def why_needs_session(self) -> str:
        """Return why an upsert does."""
        return "Spark prepares the rows of an upsert" if isinstance(self.mode, Upsert) else ""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Compare stream and table, which is created if that is asked for."""
        try:
            import pyiceberg_core  # noqa: F401
            from pyiceberg.io import pyarrow  # noqa: F401
        except ImportError as error:
            raise EnvironmentFault(
                f"sink '{context.uid}' needs the package {error.name}",
                what_to_do=f"{how_to_install('iceberg')}, on every machine that runs tasks",
            ) from error
        from flinkish_spark.connectors.iceberg.merging import why_no_change
        from flinkish_spark.connectors.iceberg.schemas import why_no_type
        from flinkish_spark.connectors.iceberg.tables import IcebergTables

        check_columns(self.mode, context)
        fields = select_stored(self.mode, context.schema)
        if isinstance(self.mode, Upsert):
            check_upsert(self.mode, spark, context)
            _check_order(self, self.mode, context)
        tables = IcebergTables(self.name, self.properties)
        table = tables.find(self.name)
        if table is None and self.create_table:
            if isinstance(self.mode, OverwritePartitions) and not self.partition_by:
                raise _make_refusal(self, context.uid, _NO_PARTITIONS)
            for field in fields:
                if why := why_no_type(field.name, field.dataType):
                    raise _make_refusal(self, context.uid, why)
            tables.create(self.name, fields, self.transforms, self.table_properties)
            table = tables.find(self.name)
        table = check_table(self, context.uid, table, fields)
        if why := why_no_change(table, self.branch, self.mode):
            raise _make_refusal(self, context.uid, why)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        return IcebergStaging(self, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        from flinkish_spark.connectors.iceberg.committing import IcebergCommitter

        return IcebergCommitter(self, context)


def _check_order(sink: IcebergSinkSettings, mode: Upsert, context: SinkContext) -> None:
    from flinkish_spark.connectors.iceberg.schemas import why_no_type

    schema = context.schema
    for key in mode.keys:
        if isinstance(schema[key].dataType, T.FloatType | T.DoubleType):
            why = (
                f"the key {key} is {schema[key].dataType.simpleString()}: Iceberg's row identifiers are never"
            )
            raise _make_refusal(sink, context.uid, why)
    if mode.sequence_by and (why := why_no_type(mode.sequence_by, schema[mode.sequence_by].dataType)):
        raise _make_refusal(sink, context.uid, why)


def check_table(sink: IcebergSinkSettings, uid: str, table: Table | None, stream: T.StructType) -> Table:
    from flinkish_spark.connectors.iceberg.schemas import is_partitioned, why_no_match, why_not_written

    if table is None:
        raise SchemaError(
            f"there is no Iceberg table {sink.table} for sink '{uid}'",
            what_to_do="create it, or give IcebergSink create_table=True",
        )
    why = why_not_written(table.metadata, sink.branch) or why_no_match(stream, table.schema())
    if isinstance(sink.mode, OverwritePartitions) and not is_partitioned(table.spec()):
        why = why or _NO_PARTITIONS
    if why:
        raise _make_refusal(sink, uid, why)
    return table


def _make_refusal(sink: IcebergSinkSettings, uid: str, why: str) -> SchemaError:
    return SchemaError(
        f"the Iceberg table {sink.table} refuses the stream of sink '{uid}'",
        why=why,
        what_to_do="change the stream's fields before the sink, or the table",
    )


class IcebergStaging(JoiningWriter):
    """Stages micro-batches of one Iceberg sink: data files in their final place, which no snapshot names."""

    def __init__(self, sink: IcebergSinkSettings, context: SinkContext) -> None:
        from flinkish_spark.connectors.iceberg.tables import IcebergTables, app_id

        self._sink, self._context = sink, context
        self._tables, self._app = IcebergTables(sink.name, sink.properties), app_id(context.job, context.uid)

    def plan(self, request: StageRequest) -> StagePlan:
        """Plan by the table as it is now; Spark prepares the rows of an upsert."""
        from flinkish_spark.connectors.iceberg.data_files import FilesWork, metadata_for_tasks, store_of
        from flinkish_spark.connectors.iceberg.tables import detach_catalog, folders_of

        sink, context = self._sink, self._context
        fields = select_stored(sink.mode, context.schema)
        table = check_table(sink, context.uid, self._tables.find(sink.name), fields)
        staged = StagedId.new(context.owner_epoch, request.block)
        # This order matters: a sweep finds only folders that were noted before a file was written.
        folder = folders_of(table, self._app).open(str(staged))
        metadata, store = metadata_for_tasks(table.metadata), store_of(table).properties
        work = FilesWork(context.uid, fields, metadata, folder, store)
        finish = partial(_finish, sink, self._app, detach_catalog(table), str(staged), fields)
        if not isinstance(sink.mode, Upsert):
            return StagePlan(work, finish)
        staged_as = _list_staged_fields(context.schema, sink.mode)
        work = replace(work, fields=staged_as, batch=int(request.batch))
        return StagePlan(work, finish, partial(_select_rows, context.schema.names, sink.mode, context.uid))


def _finish(
    sink: IcebergSinkSettings,
    app: str,
    table: Table,
    folder: str,
    fields: T.StructType,
    reports: Sequence[Mapping[str, Any]],
) -> StageResult:
    from flinkish_spark.connectors.iceberg.tables import folders_of

    acks = tuple(TaskAck.from_json(report) for report in reports)
    files = [file for report in reports for file in report["files"]]
    if not files:
        folders_of(table, app).close(folder)
        return StageResult(acks, (), bytes=0)
    payload = make_payload(sink, table, folder, fields, files)
    return StageResult(acks, (payload,), bytes=sum(int(one["bytes"]) for one in files))


def _list_staged_fields(stream: T.StructType, mode: Upsert) -> T.StructType:
    """Return the fields of rows that are staged for a merge, as :func:`_select_rows` makes them."""
    from flinkish_spark.connectors.iceberg.data_files import SEQUENCE

    fields = [*select_stored(mode, stream)]
    if mode.sequence_by in mode.left_out:
        fields.append(T.StructField(SEQUENCE, stream[str(mode.sequence_by)].dataType))
    return T.StructType([*fields, T.StructField(DELETED, T.BooleanType())])


def _select_rows(names: Sequence[str], mode: Upsert, uid: str, rows: DataFrame) -> DataFrame:
    """Return records as they are staged for a merge; one without a key or a known kind fails its task."""
    from flinkish_spark.connectors.iceberg.data_files import SEQUENCE

    marker = f"{BAD_RECORD_MARKER} in sink '{uid}',"
    checked = check_records(rows, names, key_conditions(mode), marker)
    columns = [*map(F.col, C.SINK_CONTROL), *map(F.col, map(quote_name, list_stored_names(mode, names)))]
    if mode.sequence_by in mode.left_out:
        columns.append(F.col(quote_name(str(mode.sequence_by))).alias(SEQUENCE))
    return checked.select(*columns, find_deletes(mode).alias(DELETED))


def make_payload(
    sink: IcebergSinkSettings,
    table: Table,
    folder: str,
    fields: T.StructType,
    files: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the committable of files in a folder, by which any process commits them."""
    from flinkish_spark.connectors.iceberg.schemas import list_field_ids

    mode, schema = sink.mode, table.schema()
    more: dict[str, Any] = {} if isinstance(mode, Append) else {"mode": mode.to_json()}
    if isinstance(mode, Upsert):
        more["keys"] = [schema.find_field(name).field_id for name in mode.keys]
        is_stored = mode.sequence_by is not None and mode.sequence_by not in mode.left_out
        more["sequence"] = schema.find_field(str(mode.sequence_by)).field_id if is_stored else None
    return {
        **more,
        "table": sink.table,
        "branch": sink.branch,
        "table_uuid": str(table.metadata.table_uuid),
        "schema_id": table.metadata.current_schema_id,
        "spec_id": table.metadata.default_spec_id,
        "columns": [*list_field_ids(fields, schema.as_struct())],
        "folder": folder,
        "rows": sum(int(one["rows"]) for one in files),
        "files": list(files),
    }
