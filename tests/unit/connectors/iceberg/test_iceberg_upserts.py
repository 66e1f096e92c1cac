"""Upserts of an Iceberg sink without a JVM: what is replaced, kept and refused; conflicts, leftovers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField, StringType, UUIDType

from flinkish_spark import OverwritePartitions, Upsert
from flinkish_spark.connectors.iceberg import tables as iceberg_tables
from flinkish_spark.connectors.iceberg.merging import find_places, why_no_change
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import Committable, Outcome
from flinkish_spark.protocol.timeline import Mark
from tests.support.iceberg_rig import APP, JOB, IcebergRig
from tests.unit.connectors.iceberg.test_iceberg_tables import ALL, ROW

BY_ID = Upsert(("id",))
ONE, TWO = [(1, "a"), (2, "b")], [(2, "c"), (3, "d")]


def rig_of(root: Path, ddl: str = "id LONG, name STRING", mode: Any = BY_ID, **settings: Any) -> IcebergRig:
    rig = IcebergRig(root, ddl, mode=mode, **settings)
    rig.create()
    return rig


@pytest.fixture
def rig(tmp_path: Path) -> IcebergRig:
    return rig_of(tmp_path)


def append(rig: IcebergRig, *rows: tuple[Any, ...]) -> None:
    """Commit as another writer."""
    names = rig.table.schema().column_names
    rig.table.append(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]))


def live_files(rig: IcebergRig) -> set[str]:
    return {task.file.file_path.rpartition("/")[2] for task in rig.table.scan().plan_files()}


def all_named(rig: IcebergRig) -> set[str]:
    """Names of the data files that any snapshot names."""
    return {path.rpartition("/")[2] for path in iceberg_tables.find_referenced(rig.table, lambda _: True)}


def test_a_checkpoint_replaces_inserts_and_deletes_rows_by_one_snapshot_with_the_mark(
    rig: IcebergRig,
) -> None:
    assert rig.commit(1, rig.stage(ONE)).outcome is Outcome.COMMITTED
    first, second = rig.stage([*TWO, (4, "e")]), rig.stage([(1, "x"), (4, "gone")], deleted=[1])
    answer = rig.commit(2, first, second)
    table = rig.table
    snapshot = table.current_snapshot()
    assert answer.outcome is Outcome.COMMITTED and snapshot is not None and snapshot.summary is not None
    assert answer.facts == {"snapshot": snapshot.snapshot_id, "rows": 5, "files": 2}
    assert rig.rows() == Counter([(1, "x"), (2, "c"), (3, "d")])
    assert len(table.metadata.snapshots) == 2 and snapshot.summary.operation.value == "overwrite"
    assert snapshot.summary.additional_properties["total-records"] == "3"
    text = Mark(CheckpointId(2)).to_text(JOB)
    assert table.properties[APP] == snapshot.summary.additional_properties[APP] == text
    # What was staged is gone; the files of the snapshot before stay until it expires.
    assert rig.files() == all_named(rig) and not rig.folders.list_open()


def test_the_last_record_of_a_key_wins_within_and_across_micro_batches(rig: IcebergRig) -> None:
    rig.commit(1, rig.stage([(1, "a"), (1, "b"), (2, "c"), (2, "d")], deleted=[3]))
    assert rig.rows() == Counter([(1, "b")])
    rig.commit(2, rig.stage([(1, "x"), (3, "y")], deleted=[0]), rig.stage([(1, "z"), (3, "y")], deleted=[1]))
    assert rig.rows() == Counter([(1, "z")])


@pytest.mark.parametrize("partition_by", [(), ("bucket(3, id)",), ("name",)])
def test_a_table_is_the_dict_that_the_records_make(tmp_path: Path, partition_by: tuple[str, ...]) -> None:
    rig, wanted, chance = rig_of(tmp_path, partition_by=partition_by), dict[int, str](), random.Random(7)
    for checkpoint in range(1, 13):
        staged = []
        for _ in range(chance.randint(1, 3)):
            rows = [(chance.randrange(40), chance.choice("abc")) for _ in range(chance.randint(1, 30))]
            deleted = {at for at in range(len(rows)) if chance.random() < 0.3}
            staged.append(rig.stage(rows, deleted=deleted))
            for at, (key, name) in enumerate(rows):
                wanted.pop(key, None)
                if at not in deleted:
                    wanted[key] = name
        assert rig.commit(checkpoint, *staged).outcome is Outcome.COMMITTED
        assert rig.rows() == Counter(wanted.items())
        if checkpoint % 3 == 0:
            append(rig, (100 + checkpoint, "of others"))
            wanted[100 + checkpoint] = "of others"
    assert rig.files() == all_named(rig)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("TINYINT", [1, -2, 3]),
        ("INT", [1, -2, 3]),
        ("BOOLEAN", [True, False]),
        ("STRING", ["", "x" * 30, "x" * 30 + "y", "ü", "\U0001f600", "\uffff"]),
        ("BINARY", [b"", b"\0", b"\xff" * 20, b"\xff" * 20 + b"\0"]),
        ("DECIMAL(9, 2)", [Decimal("-1.50"), Decimal("0.00"), Decimal("9999999.99")]),
        ("DECIMAL(38, 3)", [Decimal("-1.500"), Decimal("12345678901234567890.001")]),
        ("DATE", [date(1, 1, 1), date(1969, 12, 31), date(2026, 1, 1)]),
        ("TIMESTAMP", [datetime(1960, 1, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)]),
        ("TIMESTAMP_NTZ", [datetime(1960, 1, 1, 1), datetime(2026, 1, 1, 0, 0, 0, 1)]),
    ],
)
def test_keys_of_every_simple_type_find_their_rows(tmp_path: Path, kind: str, values: list[Any]) -> None:
    rig = rig_of(tmp_path, f"k {kind}, n INT", Upsert(("k",)))
    for checkpoint, value in enumerate(values, 1):
        rig.commit(checkpoint, rig.stage([(value, 0)]))
    assert rig.rows() == Counter((value, 0) for value in values)
    rig.commit(50, rig.stage([(value, 1) for value in values[1:]]))
    assert rig.rows() == Counter([(values[0], 0), *((value, 1) for value in values[1:])])
    rig.commit(51, rig.stage([(value, None) for value in values], deleted=range(len(values))))
    assert not rig.rows()


def test_several_columns_are_one_key_also_if_their_values_are_many() -> None:
    columns = [[1, 1, 2, None, 2], ["a", "b", "a", "a", None], [0, 0, 0, 0, 0]]
    keys = [[2, 1, 3], ["a", "b", "b"], [0, 0, 0]]
    found = find_places(*([pa.chunked_array([one]) for one in side] for side in (columns, keys)))
    assert found.tolist() == [-1, 1, 0, -1, -1]
    many = pa.chunked_array([pa.array(range(100_000))])
    assert find_places([many] * 6, [many] * 6).tolist() == list(range(100_000))


def refusal_of(rig: IcebergRig, spark: Any = None) -> str:
    with pytest.raises(SchemaError) as found:
        rig.sink.preflight(cast(Any, spark), rig.committer._context)
    return f"{found.value} {found.value.why}"


@pytest.mark.parametrize(
    ("ddl", "mode", "why"),
    [
        ("id DOUBLE, n INT", BY_ID, "the key id is double"),
        ("id FLOAT, n INT", BY_ID, "the key id is float"),
        ("id STRUCT<a: INT>, n INT", BY_ID, "must be simple values"),
        ("id ARRAY<INT>, n INT", BY_ID, "must be simple values"),
        ("key INT, n INT", BY_ID, "keys of sink 'table' is the column 'id', which its stream does not have"),
        ("id INT, at INTERVAL YEAR", Upsert(("id",), "at", not_stored=("at",)), "is interval year"),
        ("id INT, kind INT", Upsert(("id",), row_kind="kind"), "it must be string"),
        ("id INT, n INT", OverwritePartitions(), "it has no partitions that are overwritten"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_the_start(
    tmp_path: Path, ddl: str, mode: Any, why: str
) -> None:
    rig = IcebergRig(tmp_path, ddl, mode=mode)
    assert why in refusal_of(rig)
    assert not rig.catalog.table_exists("shop.orders")


def test_a_uuid_of_the_table_is_no_key_and_is_copied_with_its_row(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, mode=BY_ID, create_table=False)
    fields = (NestedField(1, "id", UUIDType()), NestedField(2, "name", StringType()))
    rig.catalog.create_table("shop.orders", Schema(*fields))
    assert "its field id is Iceberg's uuid" in refusal_of(rig)
    rig.catalog.drop_table("shop.orders")
    fields = (NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    rig.catalog.create_table("shop.orders", Schema(*fields, NestedField(3, "u", UUIDType())))
    names = pa.schema([("id", pa.int64()), ("name", pa.string()), ("u", pa.uuid())])
    given = pa.Table.from_pylist([{"id": n, "name": "old", "u": bytes([n]) * 16} for n in (1, 2)], names)
    rig.table.append(given)
    assert rig.commit(1, rig.stage([(2, "new"), (3, "new")])).outcome is Outcome.COMMITTED
    found = {row["id"]: (row["name"], row["u"]) for row in rig.table.scan().to_arrow().to_pylist()}
    assert {key: name for key, (name, _) in found.items()} == {1: "old", 2: "new", 3: "new"}
    assert [getattr(u, "bytes", u) for _, (_, u) in sorted(found.items())] == [b"\1" * 16, b"\2" * 16, None]


def test_rows_of_every_type_are_copied_as_they_were(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, f"id LONG, {ALL}")
    nothing = (None,) * len(ROW)
    rows = [(1, *ROW), (2, *nothing), (3, *ROW[:-3], None, [], [])]
    rig.commit(1, rig.stage([*rows, (4, *nothing)]))
    rig.commit(2, rig.stage([(4, *ROW)]))
    # Not by pyiceberg, which reads a null map, and a null list of structs, as an empty one.
    [task] = rig.table.scan().plan_files()
    found = pq.read_table(task.file.file_path.removeprefix("file://")).to_pylist()
    assert sorted((tuple(row.values()) for row in found), key=lambda row: row[0]) == [*rows, (4, *ROW)]
    assert task.file.lower_bounds[1] == (1).to_bytes(8, "little")


SEQUENCED = "id LONG, at INT, name STRING"


def test_a_record_that_is_older_than_the_row_changes_nothing(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, SEQUENCED, Upsert(("id",), sequence_by="at"))
    rig.commit(1, rig.stage([(1, 5, "a"), (1, 4, "late"), (2, None, "null"), (3, 5, "c"), (4, 5, "d")]))
    assert rig.rows() == Counter([(1, 5, "a"), (2, None, "null"), (3, 5, "c"), (4, 5, "d")])
    before = live_files(rig)
    older = [(1, 4, "x"), (3, 1, "x"), (4, None, "x")]
    assert rig.commit(2, rig.stage(older, deleted=[1])).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, 5, "a"), (2, None, "null"), (3, 5, "c"), (4, 5, "d")])
    assert live_files(rig) == before and len(rig.table.metadata.snapshots) == 2
    rig.commit(3, rig.stage([(1, 5, "same"), (2, None, "again"), (3, 9, "x"), (4, 6, "new")], deleted=[2]))
    assert rig.rows() == Counter([(1, 5, "same"), (2, None, "again"), (4, 6, "new")])


def test_a_sequence_that_is_not_stored_orders_the_records_of_a_checkpoint_only(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, SEQUENCED, Upsert(("id",), sequence_by="at", not_stored=("at",)))
    rig.commit(1, rig.stage([(1, 5, "a"), (1, 4, "late")]))
    assert rig.rows() == Counter([(1, "a")])
    rig.commit(2, rig.stage([(1, 1, "b")]))
    assert rig.rows() == Counter([(1, "b")])


def test_fields_that_the_stream_lacks_keep_their_values(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    with rig.table.update_schema() as schema:
        schema.add_column("more", LongType())
    append(rig, (1, "a", 10), (2, "b", 20), (3, "c", 30))
    append(rig, (4, "d", 40))
    rig.commit(1, rig.stage([(2, "x"), (4, "y"), (5, "z"), (3, None)], deleted=[3]))
    assert rig.rows() == Counter([(1, "a", 10), (2, "x", 20), (4, "y", 40), (5, "z", None)])


def test_only_files_that_hold_a_key_are_written_anew_and_a_row_moves_to_another_partition(
    tmp_path: Path,
) -> None:
    rig = rig_of(tmp_path, partition_by=("name",))
    rig.commit(1, rig.stage([(1, "a"), (2, "a"), (3, "b"), (4, "c")]))
    before = {task.file.partition[0]: task.file.file_path for task in rig.table.scan().plan_files()}
    rig.commit(2, rig.stage([(2, "b")]))
    after = {task.file.partition[0]: set[str]() for task in rig.table.scan().plan_files()}
    for task in rig.table.scan().plan_files():
        after[task.file.partition[0]].add(task.file.file_path)
    assert rig.rows() == Counter([(1, "a"), (2, "b"), (3, "b"), (4, "c")])
    assert before["c"] in after["c"] and before["b"] in after["b"] and before["a"] not in after["a"]


def test_rows_that_others_have_with_one_key_twice_become_one(rig: IcebergRig) -> None:
    append(rig, (1, "a"), (1, "b"), (2, "c"), (None, "no key"))
    append(rig, (1, "d"))
    rig.commit(1, rig.stage([(1, "x")]))
    assert rig.rows() == Counter([(1, "x"), (2, "c"), (None, "no key")])


def test_a_long_row_of_commits_leaves_few_manifests(rig: IcebergRig) -> None:
    for checkpoint in range(1, 8):
        rig.commit(checkpoint, rig.stage([(1, str(checkpoint)), (2, "same")]))
    snapshot = rig.table.current_snapshot()
    assert snapshot is not None and len(snapshot.manifests(rig.table.io)) <= 2
    assert rig.rows() == Counter([(1, "7"), (2, "same")])


# Others who commit.


def test_a_conflict_is_merged_again_with_what_the_other_writer_has_committed(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.commit(1, rig.stage(ONE))
    staged, commit = rig.stage(TWO), iceberg_tables.IcebergTables.commit

    def overtaken(self: Any, *given: Any) -> Table:
        append(rig, (3, "of others"), (9, "of others"))
        return commit(self, *given)

    with monkeypatch.context() as busy:
        busy.setattr(iceberg_tables.IcebergTables, "commit", overtaken)
        assert rig.commit(2, staged).outcome is Outcome.RETRY
    assert rig.rows() == Counter([*ONE, (3, "of others"), (9, "of others")])
    assert rig.commit(2, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, "a"), (2, "c"), (3, "d"), (9, "of others")])
    # What the first try wrote is gone.
    assert rig.files() == all_named(rig)


def test_two_processes_that_merge_one_checkpoint_into_the_same_version_commit_it_once(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, other, commit = rig.stage(ONE), rig.new_committer(), iceberg_tables.IcebergTables.commit

    def overtaken(self: Any, *given: Any) -> Any:
        monkeypatch.undo()
        assert rig.commit(1, staged, by=other).outcome is Outcome.COMMITTED
        return commit(self, *given)

    monkeypatch.setattr(iceberg_tables.IcebergTables, "commit", overtaken)
    assert rig.commit(1, staged).outcome is Outcome.RETRY
    assert rig.commit(1, staged).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter(ONE) and len(rig.table.metadata.snapshots) == 1
    assert rig.files() == all_named(rig)


@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_answer_is_lost_is_merged_once(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    rig.commit(1, rig.stage(ONE))
    staged, kind = rig.stage(TWO), type(rig.catalog)
    commit, late = kind.commit_table, list[Any]()

    def lose(self: Any, *given: Any) -> Any:
        late.append(given)
        if landed:
            commit(self, *given)
        raise CommitStateUnknownException("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(kind, "commit_table", lose)
        assert rig.commit(2, staged).outcome is Outcome.RETRY
    wanted = Outcome.ALREADY_COMMITTED if landed else Outcome.COMMITTED
    assert rig.commit(2, staged).outcome is wanted
    # The request arrives at last.
    with pytest.raises(Exception, match="branch main"):
        commit(rig.catalog, *late[0])
    assert rig.rows() == Counter([(1, "a"), (2, "c"), (3, "d")])
    assert rig.files() == all_named(rig)


def test_a_repeat_after_all_snapshots_have_expired_changes_nothing(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    rig.commit(1, staged)
    append(rig, (9, "x"))
    table = rig.table
    table.maintenance.expire_snapshots().by_id(table.metadata.snapshots[0].snapshot_id).commit()
    again = rig.commit(1, staged, by=rig.new_committer())
    assert again.outcome is Outcome.ALREADY_COMMITTED and "snapshot" not in again.facts
    assert rig.rows() == Counter([*ONE, (9, "x")])


def test_a_crash_between_commit_and_receipt_leaves_files_that_a_sweep_tells_apart(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.commit(1, rig.stage(ONE))
    staged = rig.stage(TWO)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr("flinkish_spark.connectors.iceberg.committing.make_durable", die)
        with pytest.raises(KeyboardInterrupt):
            rig.commit(2, staged)
    assert rig.files() > all_named(rig)
    newer = IcebergRig(rig.root, epoch=2, mode=BY_ID)
    assert newer.committer.sweep([], frozenset) == 1
    assert newer.rows() == Counter([(1, "a"), (2, "c"), (3, "d")])
    assert newer.files() == all_named(newer)


def test_a_sweep_keeps_what_a_copy_of_the_job_commits_meanwhile(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, newer = rig.stage(ONE), IcebergRig(rig.root, epoch=2, mode=BY_ID)
    leased = lambda: (rig.commit(1, staged), frozenset[int]())[1]  # noqa: E731
    newer.committer.sweep([], leased)
    assert rig.rows() == Counter(ONE)


def test_the_place_of_data_may_change_while_the_job_runs(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    old = rig.folders
    with rig.table.transaction() as change:
        change.set_properties({"write.data.path": f"file://{rig.root}/elsewhere"})
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    assert not old.list_open()
    rig.commit(2, rig.stage(TWO))
    assert (rig.root / "elsewhere").is_dir() and not rig.folders.list_open()
    assert rig.rows() == Counter([(1, "a"), (2, "c"), (3, "d")])


def test_a_mode_is_kept_with_the_rows_and_a_new_one_stages_them_again(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    staged = rig.stage(ONE)
    appending = IcebergRig(tmp_path, epoch=2)
    assert "under another mode" in appending.committer.why_dead([staged])[0]
    appended = appending.stage(TWO)
    assert "mode" not in appended.payload and "under another mode" in rig.committer.why_dead([appended])[0]
    # What is decided is committed as it was staged.
    assert rig.commit(1, appended).outcome is Outcome.COMMITTED
    assert appending.commit(2, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, "a"), (2, "b"), (3, "d")])


def test_staged_rows_that_are_gone_are_lost_unless_the_checkpoint_is_in_the_table(rig: IcebergRig) -> None:
    staged, other = rig.stage(ONE), rig.stage(TWO)
    rig.commit(1, staged)
    assert rig.commit(1, staged, by=rig.new_committer()).outcome is Outcome.ALREADY_COMMITTED
    [file] = other.payload["files"]
    Path(file["path"].removeprefix("file://")).unlink()
    answer = rig.commit(2, other)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted


# Tables that others change.


def test_a_table_may_be_partitioned_anew_and_its_fields_renamed_before_the_commit(rig: IcebergRig) -> None:
    rig.commit(1, rig.stage(ONE))
    staged = rig.stage(TWO)
    with rig.table.update_spec() as spec:
        spec.add_field("name", IdentityTransform(), "name")
    with rig.table.update_schema() as schema:
        schema.rename_column("id", "key")
        schema.add_column("more", StringType())
    assert rig.commit(2, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, "a", None), (2, "c", None), (3, "d", None)])
    assert {task.file.spec_id for task in rig.table.scan().plan_files()} == {1}


def test_a_field_that_was_dropped_before_the_commit_is_lost_with_proof(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    with rig.table.update_schema() as schema:
        schema.delete_column("name")
    answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted and "name was dropped" in answer.detail


def commit_deletes(rig: IcebergRig, content: DataFileContent, path: str, positions: Sequence[int]) -> None:
    """Commit a delete file as Spark and Flink write them."""
    table = rig.table
    location = f"{table.location()}/data/deletes-{content.name}.parquet"
    fields = [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
    ]
    rows = pa.Table.from_arrays([[path] * len(positions), list(positions)], schema=pa.schema(fields))
    pq.write_table(rows, location.removeprefix("file://"))
    file = DataFile.from_args(
        content=content,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(positions),
        file_size_in_bytes=len(PyArrowFileIO().new_input(location)),
        equality_ids=[1] if content is DataFileContent.EQUALITY_DELETES else None,
        spec_id=0,
    )
    file.spec_id = 0

    class Writer(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

    transaction = table.transaction()
    with transaction.update_snapshot().fast_append() as snapshot:
        existing = snapshot._existing_manifests()
        output = snapshot.new_manifest_output()
        with Writer(table.spec(), table.schema(), output, snapshot.snapshot_id, "gzip") as writer:
            entry = ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file)
            writer.add(entry)
        snapshot._existing_manifests = lambda: [*existing, writer.to_manifest_file()]  # type: ignore[method-assign]
    transaction.commit_transaction()


def test_rows_that_others_have_deleted_by_position_do_not_come_back(rig: IcebergRig) -> None:
    append(rig, (1, "a"), (2, "b"), (3, "c"))
    [task] = rig.table.scan().plan_files()
    commit_deletes(rig, DataFileContent.POSITION_DELETES, task.file.file_path, [1])
    assert rig.rows() == Counter([(1, "a"), (3, "c")])
    rig.commit(1, rig.stage([(2, "gone")], deleted=[0]))
    assert live_files(rig) == {task.file.file_path.rpartition("/")[2]}
    rig.commit(2, rig.stage([(2, "new"), (3, "x")]))
    assert rig.rows() == Counter([(1, "a"), (2, "new"), (3, "x")])


def test_equality_deletes_are_refused_before_the_start_and_at_a_commit(rig: IcebergRig) -> None:
    append(rig, (1, "a"))
    staged = rig.stage(ONE)
    [task] = rig.table.scan().plan_files()
    commit_deletes(rig, DataFileContent.EQUALITY_DELETES, task.file.file_path, [0])
    answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted
    assert "equality deletes, which pyiceberg does not read" in answer.detail
    table = rig.table
    snapshot = table.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    snapshot.summary.additional_properties["total-equality-deletes"] = "1"
    assert "equality deletes" in why_no_change(table, "main", BY_ID)


def test_a_file_without_field_ids_is_not_copied(rig: IcebergRig) -> None:
    path = rig.root / "warehouse" / "plain.parquet"
    pq.write_table(pa.table({"id": pa.array([1, 7]), "name": ["a", "b"]}), path)
    rig.table.add_files([f"file://{path}"])
    answer = rig.commit(1, rig.stage([(7, "x")]))
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted
    assert "plain.parquet has no field ids" in answer.detail
    assert rig.rows() == Counter([(1, "a"), (7, "b")])


# Partitions that are overwritten.


@pytest.mark.parametrize(
    "transform",
    [
        *("b", "n", "day", "at", "name", "raw", "yes", "bucket(3, n)", "truncate(2, name)"),
        *("truncate(10, n)", "month(local)", "hour(at)", "st.x"),
    ],
)
def test_a_checkpoint_replaces_the_partitions_that_it_has_records_of(tmp_path: Path, transform: str) -> None:
    rig = rig_of(tmp_path, f"id LONG, {ALL}", OverwritePartitions(), partition_by=(transform,))
    nothing = (None,) * len(ROW)
    rig.commit(1, rig.stage([(1, *ROW), (2, *nothing), (3, *ROW)]))
    rig.commit(2, rig.stage([(4, *ROW)]), rig.stage([(5, *ROW)]))
    found = rig.table.scan().to_arrow().column("id").to_pylist()
    assert sorted(found) == [2, 4, 5]
    rig.commit(3, rig.stage([(6, *nothing)]))
    assert sorted(rig.table.scan().to_arrow().column("id").to_pylist()) == [4, 5, 6]
    assert len(rig.table.metadata.snapshots) == 3 and not rig.folders.list_open()
    assert rig.files() == all_named(rig)


def test_values_that_equal_nothing_are_overwritten_too(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, "id LONG, d DOUBLE", OverwritePartitions(), partition_by=("d",))
    rig.commit(1, rig.stage([(1, float("nan")), (2, 1.0)]))
    rig.commit(2, rig.stage([(3, float("nan"))]))
    assert sorted(rig.table.scan().to_arrow().column("id").to_pylist()) == [2, 3]


def test_an_overwrite_meets_another_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(tmp_path, mode=OverwritePartitions(), partition_by=("name",))
    staged, commit = rig.stage([(1, "a")]), iceberg_tables.IcebergTables.commit

    def overtaken(self: Any, *given: Any) -> Table:
        append(rig, (8, "a"), (9, "b"))
        return commit(self, *given)

    with monkeypatch.context() as busy:
        busy.setattr(iceberg_tables.IcebergTables, "commit", overtaken)
        assert rig.commit(1, staged).outcome is Outcome.RETRY
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.commit(1, staged, by=rig.new_committer()).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter([(1, "a"), (9, "b")])


def test_files_of_an_older_partitioning_are_no_partitions_that_can_be_overwritten(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, mode=OverwritePartitions(), partition_by=("name",))
    rig.commit(1, rig.stage([(1, "a")]))
    with rig.table.update_spec() as spec:
        spec.add_field("id", IdentityTransform(), "id")
    staged = rig.stage([(1, "a")])
    answer = rig.commit(2, staged)
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted
    assert "files of an older partitioning" in answer.detail
    assert "files of an older partitioning" in refusal_of(rig)
    stale = Committable(staged.sink, {**staged.payload, "spec_id": 1})
    with rig.table.update_spec() as spec:
        spec.remove_field("id")
        spec.remove_field("name")
    answer = rig.commit(2, stale)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted
