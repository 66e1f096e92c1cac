"""A commit whose receipt is written outlives a power cut: all that it needs was synced, as it is, before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from flinkish_spark import Append, DeltaManifest, OverwritePartitions, Upsert
from flinkish_spark.connectors.delta.files import TableFiles
from flinkish_spark.connectors.delta.table import WriteMode
from flinkish_spark.connectors.delta.tables import metadata_of, vector_name
from flinkish_spark.connectors.delta.writer import FilesToWrite
from flinkish_spark.connectors.staged_rows import BATCH, DELETED, ORDER
from flinkish_spark.contracts.manifest import ManifestContext
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import CheckpointPurpose, ManifestRecord
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, Outcome
from flinkish_spark.types.ddl import parse_ddl
from tests.support.delta_without_jvm import UID, CommitRig

SCHEMA = parse_ddl("id BIGINT, p STRING").jsonValue()


class Disk:
    """Knows what was synced, and as what."""

    def __init__(self, root: Path) -> None:
        self.root, self.synced, self.fails = root, dict[str, tuple[int, int]](), False

    def sync(self, handle: int) -> None:
        if self.fails:
            raise OSError("the disk fails")
        found = os.fstat(handle)
        self.synced[os.readlink(f"/proc/self/fd/{handle}")] = (found.st_size, found.st_mtime_ns)

    def unsynced(self) -> list[str]:
        """Return what a power cut could take: files and names in folders that changed since."""
        found = []
        for path in (self.root.parent, self.root, *self.root.rglob("*")):
            stat = path.stat()
            if self.synced.get(str(path)) != (stat.st_size, stat.st_mtime_ns):
                found.append(str(path))
        return found


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "lake" / "t")
    monkeypatch.setattr(os, "fsync", disk.sync)
    yield disk


def staged(rig: CommitRig, mode: WriteMode, rows: list[tuple[int, str]]) -> list[Committable]:
    """Stage rows as a task does."""
    files, table = rig.tables.files(rig.path), rig.tables.open(rig.path)
    columns = {"id": pa.array([n for n, _ in rows], pa.int64()), "p": [p for _, p in rows]}
    payload: dict[str, Any] = {
        **{"path": rig.path, "mode": mode.to_json(), "schema_evolution": "NONE", "partition_by": ["p"]},
        **{"options": {}, "rows": len(rows), "schema": SCHEMA},
    }
    if isinstance(mode, Upsert):
        control = {DELETED: [False] * len(rows), BATCH: [0] * len(rows), ORDER: list(range(len(rows)))}
        adds = FilesToWrite(files, "_flinkish/x/1").write(pa.table({**columns, **control}).to_batches(), 0)
        names = {add["path"].rpartition("/")[2]: add["size"] for add in adds}
        more: dict[str, Any] = {"form": "ROWS", "folder": f"{rig.path}/_flinkish/x/1", "files": names}
        return [Committable(UID, {**payload, **more, "rules": {}, "table_partitions": ["p"]})]
    adds = FilesToWrite(files, partition_by=("p",)).write(pa.table(columns).to_batches(), 0)
    told = {"schemaString": parse_ddl("id BIGINT, p STRING").json(), "partitionColumns": ["p"]}
    metadata = {"configuration": {}, **told} if table is None else metadata_of(table)
    actions = [{"add": add} for add in adds]
    return [
        Committable(UID, {**payload, "form": "FILES", "actions": actions, "metadata": {"metaData": metadata}})
    ]


def test_what_is_staged_outlives_a_power_cut(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CommitRig(disk.root, monkeypatch)
    for mode in (Append(), Upsert(("id",))):
        staged(rig, mode, [(1, "a"), (2, "b c")])
        assert disk.unsynced() == []


@pytest.mark.parametrize("mode", [Append(), OverwritePartitions(), Upsert(("id",))])
@pytest.mark.parametrize("there", [False, True])
def test_a_commit_that_is_answered_outlives_a_power_cut(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, mode: WriteMode, there: bool
) -> None:
    """With all the versions before it, whoever made them."""
    rig = CommitRig(disk.root, monkeypatch, mode=mode)
    if there:
        disk.root.parent.mkdir()
        old = pa.table({"id": pa.array([1, 9], pa.int64()), "p": ["a", "z"]})
        feed = {"delta.enableChangeDataFeed": "true"}
        write_deltalake(rig.path, old, partition_by=["p"], configuration=feed)
        write_deltalake(rig.path, old.slice(2), mode="append")
        for path in (disk.root.parent, disk.root, *disk.root.glob("p=*"), *disk.root.glob("p=*/*")):
            disk.sync(os.open(path, os.O_RDONLY))
    for checkpoint in (1, 2):
        given = staged(rig, mode, [(1, "a"), (checkpoint, "b c")])
        [answer] = rig.committer.commit(CheckpointId(checkpoint), given)
        assert answer.outcome is Outcome.COMMITTED and disk.unsynced() == []
        DeltaTable(rig.path).create_checkpoint()
        [answer] = rig.committer.commit(CheckpointId(checkpoint), given)
        assert answer.outcome is Outcome.ALREADY_COMMITTED and disk.unsynced() == []


def test_a_commit_of_a_process_that_died_is_synced_by_whoever_answers(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = CommitRig(disk.root, monkeypatch, mode=Upsert(("id",)))
    rig.committer.commit(CheckpointId(1), staged(rig, Upsert(("id",)), [(1, "a")]))
    given = staged(rig, Upsert(("id",)), [(1, "a"), (2, "b")])
    disk.fails = True
    with pytest.raises(StoreError, match="could not be made durable"):
        rig.committer.commit(CheckpointId(2), given)
    assert disk.unsynced()
    disk.fails = False
    for number in range(30):
        write_deltalake(
            rig.path, pa.table({"id": pa.array([100 + number], pa.int64()), "p": ["q"]}), mode="append"
        )
    strange = {str(path) for path in disk.root.glob("p=q/*")}
    [answer] = rig.committer.commit(CheckpointId(2), given)
    assert answer.outcome is Outcome.ALREADY_COMMITTED and "version" not in answer.facts
    # Files of others are theirs.
    assert set(disk.unsynced()) <= {*strange, str(disk.root / "p=q")}


def test_a_rewind_that_is_answered_outlives_a_power_cut(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CommitRig(disk.root, monkeypatch)
    for number in (1, 2):
        rig.checkpoint(number)
    assert rig.back(1).outcome is Outcome.COMMITTED and disk.unsynced() == []
    disk.synced.clear()
    assert rig.back(1).outcome is Outcome.ALREADY_COMMITTED
    assert {str(one) for one in (disk.root / "_delta_log").iterdir()} <= disk.synced.keys()


def test_a_file_that_is_cleaned_up_meanwhile_is_not_needed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = CommitRig(disk.root, monkeypatch, mode=OverwritePartitions())
    for checkpoint in (1, 2):
        rig.committer.commit(CheckpointId(checkpoint), staged(rig, OverwritePartitions(), [(1, "a")]))
    DeltaTable(rig.path).vacuum(0, dry_run=False, enforce_retention_duration=False)
    rig.tables.make_durable(rig.path, rig.committer._app_id, 1)


def test_a_row_of_a_manifest_outlives_a_power_cut(disk: Disk) -> None:
    context = ManifestContext(JobUuid("a" * 32), OwnerEpoch(1), "a job", LocalStore(disk.root.parent / "job"))
    writer = DeltaManifest(str(disk.root)).create_writer(None, context)  # type: ignore[arg-type]
    for number in (1, 2):
        checkpoint, batch = CheckpointId(number), BatchId(number)
        record = ManifestRecord(checkpoint, Lineage(0), batch, batch, 0, CheckpointPurpose.PERIODIC, {}, {})
        assert writer.write(record).outcome is Outcome.COMMITTED and disk.unsynced() == []
        disk.synced.clear()
        assert writer.write(record).outcome is Outcome.ALREADY_COMMITTED
        assert {str(one) for one in (disk.root / "_delta_log").iterdir()} <= disk.synced.keys()
        for path in (disk.root.parent, *disk.root.glob("*.parquet")):
            disk.sync(os.open(path, os.O_RDONLY))


def test_the_file_of_a_deletion_vector() -> None:
    """The example of Delta's protocol."""
    name = "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert vector_name("ab^-aqEH.-t@S}K{vb[*k^") == f"ab/{name}"
    assert vector_name("^-aqEH.-t@S}K{vb[*k^") == name


def test_in_a_bucket_there_is_nothing_to_do(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CommitRig(disk.root, monkeypatch)
    rig.tables.make_durable("s3://bucket/t", "app", 1)
    TableFiles.of("s3://bucket/t", {}).sync_names("x")
    assert not disk.synced
