"""An Iceberg table in a catalog over SQLite, a sink of it, and its staging without Spark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadataUtil
from pyspark.sql import types as T

from flinkish_spark import CheckpointConfig, IcebergSink
from flinkish_spark.connectors.iceberg.committing import IcebergCommitter
from flinkish_spark.connectors.iceberg.data_files import (
    SEQUENCE,
    DataFileWriter,
    RowFileWriter,
    metadata_for_tasks,
    store_of,
)
from flinkish_spark.connectors.iceberg.sink import check_table, make_payload
from flinkish_spark.connectors.iceberg.tables import IcebergTables, app_id, folders_of
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.connectors.staged_rows import BATCH, DELETED, ORDER
from flinkish_spark.connectors.upserts import select_stored
from flinkish_spark.connectors.write_modes import Upsert
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.ddl import parse_ddl
from tests.support.sinks import sink_context_of

JOB, UID = JobUuid("0123456789abcdef0123456789abcdef"), "table"
APP = app_id(JOB, UID)


def catalog_properties(root: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/warehouse"}


def catalog_of(root: Path) -> Catalog:
    catalog = load_catalog("lake", **catalog_properties(root))
    catalog.create_namespace_if_not_exists("shop")
    return catalog


def rows_in(table: Table, branch: str = "main") -> Counter[tuple[Any, ...]]:
    """What a reader sees."""
    found = table.scan().use_ref(branch) if branch in table.refs() else table.scan()
    return Counter(tuple(map(_plain, row.values())) for row in found.to_arrow().to_pylist())


def _plain(value: Any) -> Any:
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


class IcebergRig:
    """A sink in a process of its owner."""

    def __init__(
        self, root: Path, ddl: str = "id LONG, name STRING", epoch: int = 1, **settings: Any
    ) -> None:
        self.root, self.catalog = root, catalog_of(root)
        given = {"create_table": True, **settings}
        self.sink = IcebergSink("lake.shop.orders", catalog_properties(root), **given)
        fields = parse_ddl(ddl)
        assert isinstance(fields, T.StructType)
        self.fields, self.epoch = fields, OwnerEpoch(epoch)
        self.tables = IcebergTables(self.sink.name, self.sink.properties)
        self.committer = self.new_committer()
        self._blocks = 0

    def new_committer(self) -> IcebergCommitter:
        context = sink_context_of(JOB, self.epoch, UID, self.fields, CheckpointConfig())
        return IcebergCommitter(self.sink, context)

    def create(self) -> Table:
        fields = select_stored(self.sink.mode, self.fields)
        self.tables.create(self.sink.name, fields, self.sink.transforms, self.sink.table_properties)
        return self.table

    @property
    def table(self) -> Table:
        return self.catalog.load_table("shop.orders")

    @property
    def folders(self) -> Any:
        return folders_of(self.table, APP)

    def rows(self, branch: str = "main") -> Counter[tuple[Any, ...]]:
        return rows_in(self.table, branch)

    def stage(
        self,
        rows: Sequence[Sequence[Any]],
        block: int | None = None,
        *,
        deleted: Collection[int] = (),
    ) -> Committable:
        """Stage rows as one task does, and pass the committable through JSON as a staged file does.

        For a sink that upserts, those at the places `deleted` delete the row with their key.
        """
        self._blocks += 1
        mode = self.sink.mode
        stored = select_stored(mode, self.fields)
        table = check_table(self.sink, UID, self.tables.find(self.sink.name), stored)
        staged = str(StagedId.new(self.epoch, block or self._blocks))
        folder = self.folders.open(staged)
        told = TableMetadataUtil.parse_raw(metadata_for_tasks(table.metadata))
        names = self.fields.names
        given = pa.RecordBatch.from_pylist(
            [dict(zip(names, row, strict=True)) for row in rows], arrow_schema(self.fields)
        )
        batch, io = given.select(stored.names), store_of(table)
        writer: DataFileWriter | RowFileWriter = DataFileWriter(told, folder, io)
        if isinstance(mode, Upsert):
            writer = RowFileWriter(told, folder, io)
            if mode.sequence_by in mode.left_out:
                batch = batch.append_column(SEQUENCE, given.column(mode.sequence_by))
            control = {DELETED: [at in deleted for at in range(len(rows))]}
            control |= {BATCH: [self._blocks] * len(rows), ORDER: [*range(len(rows))]}
            for name, values in control.items():
                batch = batch.append_column(name, pa.array(values))
        writer.add(batch)
        payload = make_payload(self.sink, table, staged, stored, writer.finish())
        return Committable(UID, json.loads(json.dumps(payload, allow_nan=False)))

    def commit(
        self, checkpoint: int, *staged: Committable, by: IcebergCommitter | None = None
    ) -> CommitAnswer:
        answers = (by or self.committer).commit(CheckpointId(checkpoint), staged)
        assert len(answers) == len(staged) and len(set(map(repr, answers))) == 1
        return answers[0]

    def files(self) -> set[str]:
        """Names of all data files that are there."""
        return {path.name for path in (self.root / "warehouse").rglob("*.parquet")}
