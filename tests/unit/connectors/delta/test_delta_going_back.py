"""A table is set back from the version that was looked at: commits of others in between stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from flinkish_spark import CheckpointConfig, DeltaSink
from flinkish_spark.connectors.delta import committing
from flinkish_spark.connectors.delta.committing import DeltaCommits, DeltaCommitter, DeltaHistory
from flinkish_spark.connectors.delta.rows import DeltaRows
from flinkish_spark.connectors.delta.table import app_id, checkpoint_note
from flinkish_spark.connectors.delta.tables import DeltaTables, Marker
from flinkish_spark.connectors.delta.writer import FilesToWrite
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.types.ddl import parse_ddl
from tests.support.sinks import sink_context_of

JOB, UID = JobUuid("a" * 32), "table"
OURS = app_id(JOB, UID)


class Rig:
    """A table of checkpoints, each of one row with its number, and a committer without a JVM."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(committing, "has_delta_format", lambda _: True)
        monkeypatch.setattr(committing, "table_defaults", lambda _: {})
        self.path, self.tables, spark = str(path), DeltaTables(), None
        self.history = DeltaHistory(self.tables, spark)  # type: ignore[arg-type]
        context = sink_context_of(JOB, OwnerEpoch(1), UID, None, CheckpointConfig())
        commits = DeltaCommits(self.tables, spark)  # type: ignore[arg-type]
        self.committer = DeltaCommitter(DeltaSink(self.path), commits, self.history, context)

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


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path / "t", monkeypatch)


def once_before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, first: Callable[[], object]) -> None:
    """Let something happen right before the first call of a method."""
    original, waiting = getattr(owner, name), [first]

    def method(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.pop()()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("target", [1, 0])
def test_a_table_goes_back_once(rig: Rig, target: int) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    assert rig.back(target).outcome is Outcome.COMMITTED
    assert rig.ids() == [1][:target]
    assert rig.back(target).outcome is Outcome.ALREADY_COMMITTED


@pytest.mark.parametrize("target", [1, 0])
def test_a_commit_between_the_look_and_the_restore_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, target: int
) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    once_before(monkeypatch, DeltaHistory, "restore", rig.strange)
    assert rig.back(target).outcome is Outcome.RETRY
    assert rig.ids() == [-1, 1, 2, 3]
    refused = rig.back(target)
    assert refused.outcome is Outcome.LOST and "version 3 (WRITE)" in str(refused.detail)
    assert rig.ids() == [-1, 1, 2, 3]


def test_a_commit_while_the_history_is_read_shifts_no_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs numbers what it lists down from the version that it opened."""
    for number in (1, 2, 3):
        rig.checkpoint(number)
    before = rig.tables.open(rig.path)
    assert before is not None
    rig.strange()
    assert [row["version"] for row in before.history()] != [3, 2, 1, 0], "if mended there, look here again"
    once_before(monkeypatch, DeltaTable, "history", rig.strange)
    found = rig.tables.history(rig.path, 3)
    assert [(row["version"], row["operation"]) for row in found][:2] == [(4, "WRITE"), (3, "WRITE")]
    assert found[2]["version"] == 2 and found[2]["userMetadata"].startswith(f"flinkish-commit {OURS} 3 ")


def test_a_plan_is_of_one_version(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    once_before(monkeypatch, DeltaTable, "history", rig.strange)
    refused = rig.back(1)
    assert refused.outcome is Outcome.LOST and "version 3 (WRITE)" in str(refused.detail)
    assert rig.ids() == [-1, 1, 2, 3]


def test_deltas_own_statement_is_not_begun_behind_another_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    monkeypatch.setattr(committing, "why_by_spark", lambda *_: "deletion vectors")
    asked: list[str] = []
    monkeypatch.setattr(DeltaRows, "restore", lambda *_: asked.append("restore"))
    once_before(monkeypatch, DeltaHistory, "restore", rig.strange)
    assert rig.back(1).outcome is Outcome.RETRY and not asked
