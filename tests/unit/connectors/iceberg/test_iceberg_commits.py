"""Commits of an Iceberg sink without a JVM: who wins, what is repeated, what is lost, what is swept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, StructType

from flinkish_spark.connectors.iceberg import tables as iceberg_tables
from flinkish_spark.connectors.write_modes import Append, Upsert, WriteMode
from flinkish_spark.core.errors import AnotherTimelineError, EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import Committable, Outcome
from flinkish_spark.protocol.timeline import Mark, Stretch, Timeline
from tests.support.iceberg_rig import APP, JOB, IcebergRig

ONE, TWO = [(1, "a"), (2, None)], [(3, "c")]


@pytest.fixture
def rig(tmp_path: Path) -> IcebergRig:
    rig = IcebergRig(tmp_path)
    rig.create()
    return rig


def append(table: Table, *names: str) -> None:
    """Commit as another writer."""
    rows = {"id": pa.array([100] * len(names), pa.int64()), "name": list(names)}
    table.append(pa.table(rows))


def test_a_checkpoint_is_one_snapshot_with_the_mark_in_it_and_in_a_property(rig: IcebergRig) -> None:
    first, second = rig.stage(ONE), rig.stage(TWO)
    assert not rig.rows() and not rig.committer.why_dead([first, second])
    answer = rig.commit(7, first, second)
    table = rig.table
    snapshot = table.current_snapshot()
    assert answer.outcome is Outcome.COMMITTED and snapshot is not None and snapshot.summary is not None
    assert answer.facts == {"snapshot": snapshot.snapshot_id, "rows": 3, "files": 2}
    assert rig.rows() == Counter([*ONE, *TWO])
    assert len(table.metadata.snapshots) == 1
    text = Mark(CheckpointId(7)).to_text(JOB)
    assert table.properties[APP] == snapshot.summary.additional_properties[APP] == text
    assert [mark.checkpoint for mark in rig.committer.newest_marks()] == [CheckpointId(7)]
    assert "commit.retry.num-retries" not in table.properties
    # Statistics of the files are in the manifest, with the table's field ids.
    [file, *_] = [task.file for task in table.scan().plan_files()]
    assert file.value_counts and file.lower_bounds and set(file.column_sizes) == {1, 2}


def test_a_repeat_by_anybody_changes_nothing_even_if_all_snapshots_have_expired(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    first = rig.commit(1, staged)
    again = rig.commit(1, staged, by=rig.new_committer())
    assert (again.outcome, again.facts) == (Outcome.ALREADY_COMMITTED, first.facts)
    table = rig.table
    append(table, "x")
    table.maintenance.expire_snapshots().by_id(table.metadata.snapshots[0].snapshot_id).commit()
    assert [one.summary and one.summary.additional_properties.get(APP) for one in rig.table.snapshots()] == [
        None
    ]
    late = rig.commit(1, staged, by=rig.new_committer())
    assert late.outcome is Outcome.ALREADY_COMMITTED and "snapshot" not in late.facts
    # The property is gone, too: the snapshots' summaries tell.
    later = rig.stage(TWO)
    rig.commit(2, later)
    with rig.table.transaction() as change:
        change.remove_properties(APP)
    assert rig.commit(2, later, by=rig.new_committer()).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter([*ONE, *TWO, (100, "x")])


def test_another_writer_that_commits_between_is_a_conflict_and_both_stay(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, load = rig.stage(ONE), iceberg_tables.IcebergTables.find

    def find_and_wait(self: Any, name: Any) -> Table | None:
        found = load(self, name)
        append(rig.table, "x")
        return found

    with monkeypatch.context() as busy:
        busy.setattr(iceberg_tables.IcebergTables, "find", find_and_wait)
        answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.RETRY and "was created concurrently" in answer.detail
    assert rig.rows() == Counter([(100, "x")])
    manifests = set((rig.root / "warehouse").rglob("*.avro"))
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([*ONE, (100, "x")])
    assert len(set((rig.root / "warehouse").rglob("*.avro")) - manifests) == 2


def test_two_processes_that_commit_one_checkpoint_from_the_same_version_commit_it_once(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, other = rig.stage(ONE), rig.new_committer()
    commit = iceberg_tables.IcebergTables.commit

    def overtaken(self: Any, *given: Any) -> Any:
        monkeypatch.undo()
        assert rig.commit(1, staged, by=other).outcome is Outcome.COMMITTED
        return commit(self, *given)

    monkeypatch.setattr(iceberg_tables.IcebergTables, "commit", overtaken)
    assert rig.commit(1, staged).outcome is Outcome.RETRY
    assert rig.commit(1, staged).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter(ONE) and len(rig.table.metadata.snapshots) == 1


@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_answer_is_lost_is_asked_for_again(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    staged, kind = rig.stage(ONE), type(rig.catalog)
    commit = kind.commit_table

    def lose(self: Any, *given: Any) -> Any:
        if landed:
            commit(self, *given)
        raise CommitStateUnknownException("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(kind, "commit_table", lose)
        answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.RETRY and "no answer" in answer.detail
    wanted = Outcome.ALREADY_COMMITTED if landed else Outcome.COMMITTED
    assert rig.commit(1, staged).outcome is wanted
    assert rig.rows() == Counter(ONE)


def test_a_commit_that_is_taken_and_then_refused_stays(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a client that sends a request again whose answer was lost: the second one finds the first."""
    staged, kind = rig.stage(ONE), type(rig.catalog)
    commit = kind.commit_table

    def refuse(self: Any, *given: Any) -> Any:
        commit(self, *given)
        raise CommitFailedException("somebody was faster")

    with monkeypatch.context() as broken:
        broken.setattr(kind, "commit_table", refuse)
        assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter(ONE)
    assert rig.commit(1, staged, by=rig.new_committer()).outcome is Outcome.ALREADY_COMMITTED


def test_a_conflict_of_the_catalog_deletes_no_staged_file(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = rig.stage(ONE)

    def refuse(self: Any, *given: Any) -> Any:
        raise CommitFailedException("somebody was faster")

    with monkeypatch.context() as busy:
        busy.setattr(type(rig.catalog), "commit_table", refuse)
        assert rig.commit(1, staged).outcome is Outcome.RETRY
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED


def test_files_that_are_gone_are_lost_unless_the_checkpoint_is_in_the_table(
    rig: IcebergRig,
) -> None:
    staged, other = rig.stage(ONE), rig.stage(TWO)
    rig.commit(1, staged)
    for one in (*staged.payload["files"], *other.payload["files"]):
        Path(one["path"].removeprefix("file://")).unlink()
    # As after a compaction whose snapshots have expired.
    assert rig.commit(1, staged, by=rig.new_committer()).outcome is Outcome.ALREADY_COMMITTED
    answer = rig.commit(2, other)
    assert (
        answer.outcome is Outcome.LOST and answer.is_proven_aborted and "is gone or damaged" in answer.detail
    )
    assert "is gone or damaged" in rig.committer.why_dead([other])[0]


def test_rows_for_a_table_that_was_changed_meanwhile_are_staged_again(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    with rig.table.update_schema() as schema:
        schema.add_column("more", StringType())
    # A new field that may be null is no reason.
    assert not rig.committer.why_dead([staged])
    other = rig.stage(TWO)
    with rig.table.update_spec() as spec:
        spec.add_field("name", IdentityTransform(), "name")
    for one in (staged, other):
        answer = rig.commit(1, one)
        assert answer.outcome is Outcome.LOST and answer.is_proven_aborted
        assert "partitioned anew" in answer.detail
    rig.commit(1, rig.stage(ONE))
    dropped = rig.stage(TWO)
    with rig.table.update_spec() as spec:
        spec.remove_field("name")
    renamed = rig.stage(TWO)
    with rig.table.update_schema(allow_incompatible_changes=True) as schema:
        schema.update_column("id", required=True)
    assert "became required" in rig.committer.why_dead([dropped, renamed])[1]
    with rig.table.update_schema() as schema:
        schema.delete_column("name")
    assert "name was dropped" in rig.committer.why_dead([renamed])[0]
    assert {row[:2] for row in rig.rows()} == {(1,), (2,)} or rig.table.schema().column_names == [
        "id",
        "more",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "path"),
    [
        ("STRUCT<a: STRING, b: INT>", {"a": "x", "b": 1}, ("v", "a")),
        ("ARRAY<STRUCT<a: STRING, b: INT>>", [{"a": "x", "b": 1}], ("v", "element", "a")),
        ("MAP<STRING, STRUCT<a: STRING, b: INT>>", [("k", {"a": "x", "b": 1})], ("v", "value", "a")),
        ("STRUCT<s: STRUCT<a: STRING, b: INT>>", {"s": {"a": "x", "b": 1}}, ("v", "s", "a")),
    ],
)
@pytest.mark.parametrize("mode", [Append(), Upsert(("id",))])
def test_a_field_at_any_depth_that_was_dropped_and_added_again_is_another_one(
    tmp_path: Path, mode: WriteMode, kind: str, value: Any, path: tuple[str, ...]
) -> None:
    rig = IcebergRig(tmp_path, f"id LONG, v {kind}", mode=mode)
    rig.create()
    staged = rig.stage([(1, value)])
    with rig.table.update_schema() as schema:
        schema.delete_column(path)
    with rig.table.update_schema() as schema:
        schema.add_column(path, StringType())
    dotted = ".".join(path)
    assert f"its field {dotted} was dropped" in rig.committer.why_dead([staged])[0]
    answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted and "was dropped" in answer.detail
    assert rig.commit(1, rig.stage([(1, value)])).outcome is Outcome.COMMITTED


def test_a_field_within_a_struct_that_the_stream_lacks_may_be_dropped(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, "id LONG, v STRUCT<a: STRING>")
    rig.create()
    with rig.table.update_schema() as schema:
        schema.add_column(("v", "more"), StringType())
    staged = rig.stage([(1, {"a": "x"})])
    with rig.table.update_schema() as schema:
        schema.delete_column(("v", "more"))
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, '{"a": "x"}')])


def test_a_table_that_was_made_anew_is_another_one_and_a_missing_one_is_no_proof(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    rig.catalog.rename_table("shop.orders", "shop.older")
    answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted and "is gone" in answer.detail
    assert "is gone" in rig.committer.why_dead([staged])[0]
    rig.create()
    answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted and "another table" in answer.detail


def test_a_commit_of_another_timeline_is_not_built_upon(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    rig.commit(5, staged)
    strange = rig.new_committer()
    timeline = Timeline((Stretch(CheckpointId(1), "0" * 16),))
    object.__setattr__(strange._context, "timeline", timeline)
    with pytest.raises(AnotherTimelineError, match="holds checkpoint 5"):
        rig.commit(2, rig.stage(TWO), by=strange)


def test_a_branch_gets_the_snapshots_and_main_none(tmp_path: Path) -> None:
    rig = IcebergRig(tmp_path, branch="staging")
    table = rig.create()
    append(table, "x")
    table.refresh()
    table.manage_snapshots().create_branch(table.metadata.snapshots[0].snapshot_id, "staging").commit()
    assert rig.commit(1, rig.stage(ONE)).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(100, "x")])
    assert rig.rows("staging") == Counter([*ONE, (100, "x")])
    later = rig.stage(TWO)
    rig.table.manage_snapshots().remove_branch("staging").commit()
    answer = rig.commit(2, later)
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted and "no branch" in answer.detail


def test_an_abort_keeps_the_files_and_a_sweep_of_the_next_owner_deletes_them(rig: IcebergRig) -> None:
    committed, aborted, kept = rig.stage(ONE), rig.stage(TWO), rig.stage(TWO)
    rig.commit(1, committed)
    assert [answer.outcome for answer in rig.committer.abort([aborted])] == [Outcome.COMMITTED]
    before = rig.files()
    # A folder that is noted, and nothing in it: the process died at once.
    rig.folders.open("1-9-00000000")
    rig.folders.open("2-1-00000000")
    (rig.root / "warehouse/shop/orders/data/flinkish").joinpath(APP, ".open", "notes.txt").write_text("mine")
    newer = IcebergRig(rig.root, epoch=2)
    assert newer.committer.sweep([kept], lambda: frozenset({1})) == 2
    gone = {one["path"].rpartition("/")[2] for one in aborted.payload["files"]}
    assert before - newer.files() == gone
    left = {"2-1-00000000", kept.payload["folder"], "notes.txt"}
    assert set(newer.folders.list_open()) == left
    assert newer.commit(2, kept).outcome is Outcome.COMMITTED
    assert newer.rows() == Counter([*ONE, *TWO])


def test_a_sweep_keeps_files_that_a_snapshot_names_although_their_folder_is_open(rig: IcebergRig) -> None:
    staged = rig.stage(ONE)
    folder, name = f"{rig.root}/warehouse/shop/orders/data/flinkish/{APP}", staged.payload["folder"]
    # What an attempt of a task left beside the files that count.
    Path(folder, name, "00000-0-left.parquet").write_bytes(b"left over")
    rig.commit(1, staged)
    assert not Path(folder, name, "00000-0-left.parquet").exists()
    rig.folders.open(name)
    assert IcebergRig(rig.root, epoch=2).committer.sweep([], frozenset) == 1
    assert rig.rows() == Counter(ONE)


def ask_and_lose_the_answer(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch, *staged: Committable
) -> Callable[[], Any]:
    """Commit checkpoint 1; the catalog takes the request when the returned function is called."""
    kind, late = type(rig.catalog), list[Callable[[], Any]]()
    commit = kind.commit_table

    def delay(*given: Any) -> Any:
        late.append(partial(commit, *given))
        raise CommitStateUnknownException("no answer")

    with monkeypatch.context() as slow:
        slow.setattr(kind, "commit_table", delay)
        assert rig.commit(1, *staged).outcome is Outcome.RETRY
    [request] = late
    return request


def partition_anew(rig: IcebergRig) -> None:
    with rig.table.update_spec() as spec:
        spec.add_field("name", IdentityTransform(), "name")


def test_a_request_that_the_catalog_takes_after_a_sweep_is_refused(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(rig.table, "x")
    staged, other = rig.stage(ONE), rig.stage(TWO)
    request = ask_and_lose_the_answer(rig, monkeypatch, staged, other)
    partition_anew(rig)
    answer = rig.commit(1, staged, other)
    assert answer.outcome is Outcome.LOST and answer.is_proven_aborted
    newer = IcebergRig(rig.root, epoch=2)
    assert newer.committer.sweep([], frozenset) == 2
    assert len(rig.files()) == 1
    snapshot = rig.table.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None and len(rig.table.snapshots()) == 2
    assert snapshot.summary.additional_properties[f"{APP}-lost"] == "1"
    with pytest.raises(CommitFailedException):
        request()
    assert newer.commit(1, newer.stage([*ONE, *TWO])).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(100, "x"), *ONE, *TWO])
    assert newer.committer.sweep([], frozenset) == 0 and len(rig.table.snapshots()) == 3


def test_a_request_that_the_catalog_takes_before_a_sweep_keeps_its_files(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = rig.stage(ONE)
    request = ask_and_lose_the_answer(rig, monkeypatch, staged)
    partition_anew(rig)
    assert rig.commit(1, staged).outcome is Outcome.LOST
    request()
    newer = IcebergRig(rig.root, epoch=2)
    assert newer.committer.sweep([], frozenset) == 1
    assert newer.commit(1, newer.stage(ONE)).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter(ONE) and len(rig.table.snapshots()) == 1


def test_a_sweep_after_the_replay_needs_no_snapshot(rig: IcebergRig, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = rig.stage(ONE)
    request = ask_and_lose_the_answer(rig, monkeypatch, staged)
    partition_anew(rig)
    assert rig.commit(1, staged).outcome is Outcome.LOST
    newer = IcebergRig(rig.root, epoch=2)
    assert newer.commit(1, newer.stage(ONE)).outcome is Outcome.COMMITTED
    assert newer.committer.sweep([], frozenset) == 1
    with pytest.raises(CommitFailedException):
        request()
    assert rig.rows() == Counter(ONE) and len(rig.table.snapshots()) == 1


def test_files_stay_while_the_table_takes_no_snapshot_that_would_refuse_their_request(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = rig.stage(ONE)
    request = ask_and_lose_the_answer(rig, monkeypatch, staged)
    with rig.table.transaction() as change:
        change.set_properties({"write.format.default": "orc"})
    answer = rig.commit(1, staged)
    assert answer.outcome is Outcome.LOST and not answer.is_proven_aborted
    newer = IcebergRig(rig.root, epoch=2)
    assert newer.committer.sweep([], frozenset) == 0
    request()
    assert rig.rows() == Counter(ONE)
    with rig.table.transaction() as change:
        change.remove_properties("write.format.default")
    assert newer.committer.sweep([], frozenset) == 1 and rig.rows() == Counter(ONE)


def test_a_sweep_that_somebody_overtakes_deletes_nothing(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = rig.stage(ONE)
    request = ask_and_lose_the_answer(rig, monkeypatch, staged)
    partition_anew(rig)
    assert rig.commit(1, staged).outcome is Outcome.LOST
    newer, commit = IcebergRig(rig.root, epoch=2), iceberg_tables.IcebergTables.commit

    def overtaken(self: Any, *given: Any) -> Table:
        request()
        return commit(self, *given)

    with monkeypatch.context() as busy:
        busy.setattr(iceberg_tables.IcebergTables, "commit", overtaken)
        assert newer.committer.sweep([], frozenset) == 0
    assert rig.rows() == Counter(ONE)
    assert newer.committer.sweep([], frozenset) == 1 and rig.rows() == Counter(ONE)


def test_outages_are_waited_for_and_what_cannot_pass_ends_the_job_without_a_secret(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = rig.stage(ONE)
    kind = type(rig.catalog)

    def fail(error: Exception) -> Any:
        def raise_it(*_: Any) -> Any:
            raise error

        return raise_it

    with monkeypatch.context() as broken:
        broken.setattr(kind, "load_table", fail(ConnectionError("refused")))
        assert rig.commit(1, staged).outcome is Outcome.RETRY
        secret = f"no rights: {rig.sink.properties['uri']} at http://me:hidden@host/x"
        broken.setattr(kind, "load_table", fail(PermissionError(secret)))
        with pytest.raises(EnvironmentFault, match="cannot be loaded") as found:
            rig.commit(1, staged)
    assert "hidden" not in str(found.value) and found.value.__cause__ is None


def test_a_commit_survives_a_power_cut_before_it_is_answered(
    rig: IcebergRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flinkish_spark.connectors.iceberg import data_files

    synced: list[Path] = []
    monkeypatch.setattr(data_files, "sync_directory", synced.append)
    staged = rig.stage(ONE)
    [file] = staged.payload["files"]
    path = Path(file["path"].removeprefix("file://"))
    assert {path, path.parent, rig.root / "warehouse/shop/orders"} <= set(synced)
    synced.clear()
    rig.commit(1, staged)
    table = rig.table
    snapshot = table.current_snapshot()
    assert snapshot is not None
    needed = [table.metadata_location, snapshot.manifest_list, snapshot.manifests(table.io)[0].manifest_path]
    assert {Path(one.removeprefix("file://")) for one in needed} <= set(synced)
    synced.clear()
    # Another process may have died before it could.
    rig.commit(1, staged, by=rig.new_committer())
    assert {Path(one.removeprefix("file://")) for one in needed} <= set(synced)


def test_a_struct_that_is_null_may_have_required_fields(tmp_path: Path) -> None:
    inner = StructType(NestedField(3, "a", StringType(), required=True))
    fields = NestedField(1, "id", LongType()), NestedField(2, "s", inner, required=False)
    rig = IcebergRig(tmp_path, "id LONG, s STRUCT<a: STRING>", create_table=False)
    rig.catalog.create_table("shop.orders", Schema(*fields))
    assert rig.commit(1, rig.stage([(1, None), (2, {"a": "x"})])).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, None), (2, '{"a": "x"}')])
