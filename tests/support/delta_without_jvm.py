"""Commits of a Delta sink by delta-rs, without a JVM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from flinkish_spark import CheckpointConfig, DeltaSink
from flinkish_spark.connectors.delta import committing
from flinkish_spark.connectors.delta.committing import DeltaCommits, DeltaCommitter
from flinkish_spark.connectors.delta.table import app_id, checkpoint_note
from flinkish_spark.connectors.delta.tables import Marker
from flinkish_spark.connectors.delta.writer import FilesToWrite
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.types.ddl import parse_ddl
from tests.support.sinks import sink_context_of

JOB, UID = JobUuid("a" * 32), "table"
OURS = app_id(JOB, UID)


class CommitRig:
    """A table of checkpoints, each of one row with its number, and a committer without a JVM."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(committing, "has_delta_format", lambda _: True)
        monkeypatch.setattr(committing, "table_defaults", lambda _: {})
        self.path, self.tables = str(path), DeltaCommits({}, None)  # type: ignore[arg-type]
        context = sink_context_of(JOB, OwnerEpoch(1), UID, None, CheckpointConfig())
        self.committer = DeltaCommitter(DeltaSink(self.path, **settings), self.tables, context)

    def checkpoint(self, number: int) -> None:
        mark = Mark(CheckpointId(number), "0123456789abcdef")
        marker = Marker(OURS, number, checkpoint_note(OURS, mark))
        adds = FilesToWrite(self.tables.files(self.path)).write(
            pa.table({"id": pa.array([number], pa.int64())}).to_batches(), 0
        )
        table = self.tables.open(self.path)
        if table is None:
            schema = parse_ddl("id BIGINT").json()
            self.tables.create(self.path, {"schemaString": schema, "partitionColumns": []}, adds, marker)
        else:
            self.tables.append(self.path, table, adds, marker)

    def strange(self) -> None:
        write_deltalake(self.path, pa.table({"id": pa.array([-1], pa.int64())}), mode="append")

    def back(self, target: int) -> Any:
        return self.committer.supersede(CheckpointId(target), Lineage(1))

    def ids(self) -> list[int]:
        return sorted(DeltaTable(self.path).to_pyarrow_table().column("id").to_pylist())
