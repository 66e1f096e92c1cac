"""The Iceberg sink: its settings, its checks before the start, and the staging half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.connectors.iceberg.settings import IcebergSinkSettings
from flinkish_spark.connectors.row_count import collect_reports
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.errors import EnvironmentFault, SchemaError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class IcebergSink(IcebergSinkSettings, Sink):
    """Write to an Iceberg table, exactly once, by pyiceberg: no JAR is needed.

    Each checkpoint becomes one snapshot that appends its records.

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

    Raises
    ------
    ConfigError
        A table without a namespace, a transform that Iceberg has not.

    Examples
    --------
    >>> IcebergSink("lake.shop.orders", create_table=True, partition_by=("day(at)",)).table
    'lake.shop.orders'
    """

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the table."""
        name = self.name
        return (Dataset(f"iceberg://{name.catalog}", ".".join(name.path)),)

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
        from flinkish_spark.connectors.iceberg.schemas import why_no_type
        from flinkish_spark.connectors.iceberg.tables import IcebergTables

        tables = IcebergTables(self.name, self.properties)
        table = tables.find(self.name)
        if table is None and self.create_table:
            for field in context.schema:
                if why := why_no_type(field.name, field.dataType):
                    raise _make_refusal(self, context.uid, why)
            tables.create(self.name, context.schema, self.transforms, self.table_properties)
            table = tables.find(self.name)
        check_table(self, context.uid, table, context.schema)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        return IcebergStaging(self, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        from flinkish_spark.connectors.iceberg.committing import IcebergCommitter

        return IcebergCommitter(self, context)


def check_table(sink: IcebergSinkSettings, uid: str, table: Table | None, stream: T.StructType) -> Table:
    """Return the table if it takes a stream."""
    from flinkish_spark.connectors.iceberg.schemas import why_no_match, why_not_written

    if table is None:
        raise SchemaError(
            f"there is no Iceberg table {sink.table} for sink '{uid}'",
            what_to_do="create it, or give IcebergSink create_table=True",
        )
    why = why_not_written(table.metadata, sink.branch) or why_no_match(stream, table.schema())
    if why:
        raise _make_refusal(sink, uid, why)
    return table


def _make_refusal(sink: IcebergSinkSettings, uid: str, why: str) -> SchemaError:
    return SchemaError(
        f"the Iceberg table {sink.table} refuses the stream of sink '{uid}'",
        why=why,
        what_to_do="change the stream's fields before the sink, or the table",
    )


class IcebergStaging(SinkWriter):
    """Stages micro-batches of one Iceberg sink: data files in their final place, which no snapshot names."""

    def __init__(self, sink: IcebergSinkSettings, context: SinkContext) -> None:
        from flinkish_spark.connectors.iceberg.tables import IcebergTables, app_id

        self._sink, self._context = sink, context
        self._tables, self._app = IcebergTables(sink.name, sink.properties), app_id(context.job, context.uid)

    def stage(self, request: StageRequest) -> StageResult:
        from flinkish_spark.connectors.iceberg.data_files import StageDataFiles, metadata_for_tasks
        from flinkish_spark.connectors.iceberg.tables import folders_of, store_of

        sink, context = self._sink, self._context
        fields = T.StructType([one for one in request.rows.schema if one.name not in C.SINK_CONTROL])
        table = check_table(sink, context.uid, self._tables.find(sink.name), fields)
        staged = StagedId.new(context.owner_epoch, request.block)
        folders = folders_of(table, self._app)
        # This order matters: a sweep finds only folders that were noted before a file was written.
        folder = folders.open(str(staged))
        metadata, store = metadata_for_tasks(table.metadata), store_of(table).properties
        work = StageDataFiles(context.uid, fields, metadata, folder, store)
        found: Sequence[dict[str, Any]] = collect_reports(request.source, work)
        acks = tuple(TaskAck.from_json(report) for report in found)
        files = [file for report in found for file in report["files"]]
        if not files:
            folders.close(str(staged))
            return StageResult(acks, (), bytes=0)
        payload = make_payload(sink, table, str(staged), fields.names, files)
        return StageResult(acks, (payload,), bytes=sum(int(one["bytes"]) for one in files))


def make_payload(
    sink: IcebergSinkSettings,
    table: Table,
    folder: str,
    names: Sequence[str],
    files: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the committable of files in a folder, by which any process commits them."""
    return {
        "table": sink.table,
        "branch": sink.branch,
        "table_uuid": str(table.metadata.table_uuid),
        "schema_id": table.metadata.current_schema_id,
        "spec_id": table.metadata.default_spec_id,
        "columns": [table.schema().find_field(name).field_id for name in names],
        "folder": folder,
        "rows": sum(int(one["rows"]) for one in files),
        "files": list(files),
    }
