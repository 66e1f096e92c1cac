"""The Delta sink without a job, by both of Delta's doors: modes, repeats, what is lost, what is left over."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from flinkish_spark import OverwritePartitions, Upsert
from flinkish_spark.connectors.delta.files import TableFiles
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.protocol.records import Outcome
from tests.support.delta_rig import UID, DeltaRig, Way

ROW = "id BIGINT, v STRING, p STRING"
#: The portable one upserts and overwrites partitions in test_delta_sink_job.py, too.
NATIVE = pytest.mark.parametrize("way", [Way.DELTA_RS, pytest.param(Way.SPARK, marks=pytest.mark.nightly)])
BY_ID = Upsert(keys=("id",))


@pytest.mark.parametrize("way", [Way.DELTA_RS, pytest.param(Way.SPARK, marks=pytest.mark.nightly)])
def test_a_checkpoint_is_one_version_and_a_repeat_changes_nothing(spark, tmp_path, way) -> None:
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=way, partition_by=("p",))
    rig.preflight()
    staged = rig.stage(0, [(1, "a", "x")]) + rig.stage(1, [(2, "b", "y/ä %:="), (3, None, None)])
    assert staged[0].payload["form"] == ("FILES" if way is Way.DELTA_RS else "ROWS")
    first = rig.commit(1, staged)
    assert first.outcome is Outcome.COMMITTED
    assert first.facts == {"version": 0, "rows": 3, "files": first.facts["files"]}
    for again in (rig.commit(1, staged), rig.other().commit(1, staged)):
        assert (again.outcome, again.facts) == (Outcome.ALREADY_COMMITTED, first.facts)
    assert rig.put(2, [(4, "d", "x")]).facts["version"] == 1
    # An older checkpoint's marker is covered by the newer one's.
    assert rig.commit(1, staged).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter([(1, "a", "x"), (2, "b", "y/ä %:="), (3, None, None), (4, "d", "x")])
    assert rig.versions == 2


def test_a_task_writes_one_file_of_each_partition(spark, tmp_path) -> None:
    """However many there are, and however they are mixed."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=Way.DELTA_RS, partition_by=("p",))
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "50")
    try:
        answer = rig.put(1, [(n, "v", None if n % 130 == 7 else f"p{n % 130}") for n in range(520)])
    finally:
        spark.conf.set(name, before)
    assert (answer.facts["rows"], answer.facts["files"]) == (520, 130)
    assert len(rig.rows()) == 520


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "mapped"),
    [(Way.DELTA_RS, True), (Way.SPARK, False)],
)
def test_either_door_finishes_what_the_other_staged(spark, tmp_path, first, mapped) -> None:
    """Also a checkpoint that has sets of both."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=first, partition_by=("p",))
    properties = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')" if mapped else ""
    rig.sql(f"CREATE TABLE {{t}} ({ROW}) USING delta PARTITIONED BY (p) {properties}")
    if mapped:
        rig.sql("ALTER TABLE {t} RENAME COLUMN v TO w")
        rig.sql("ALTER TABLE {t} RENAME COLUMN w TO v")
    second = Way.SPARK if first is Way.DELTA_RS else Way.DELTA_RS
    other = rig.other(way=second)
    staged = rig.stage(0, [(1, "a", "x y"), (2, None, None)])
    mixed = rig.stage(1, [(3, "c", "ü%20/")]) + other.stage(2, [(4, "d", "x y")])
    assert other.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.commit(1, staged).outcome is Outcome.ALREADY_COMMITTED
    assert not rig.committer.why_dead(mixed) and not other.committer.why_dead(mixed)
    assert rig.commit(2, mixed).outcome is Outcome.COMMITTED
    assert other.commit(2, mixed).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == Counter([(1, "a", "x y"), (2, None, None), (3, "c", "ü%20/"), (4, "d", "x y")])


@pytest.mark.nightly
@NATIVE
def test_an_upsert_takes_the_last_row_of_a_key(spark, tmp_path, way) -> None:
    """Over micro-batches and within one; the table is made by the first checkpoint."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=way, mode=BY_ID)
    rig.preflight()
    staged = rig.stage(9, [(1, "first", "x"), (2, "a", "x"), (2, "b", "y")])
    staged += rig.stage(10, [(1, "second", "y"), (3, "c", "x")])
    assert rig.commit(1, staged).facts == {"version": 0, "rows": 5, "files": 2}
    assert rig.rows() == Counter([(1, "second", "y"), (2, "b", "y"), (3, "c", "x")])
    assert rig.put(2, [(1, "third", None), (4, "d", "x")], [(4, "e", "x")]).outcome is Outcome.COMMITTED
    expected = Counter([(1, "third", None), (2, "b", "y"), (3, "c", "x"), (4, "e", "x")])
    assert rig.rows() == expected
    assert rig.other().commit(1, staged).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == expected and rig.versions == 2


def test_an_upsert_by_sequence_with_deletions(spark, tmp_path) -> None:
    mode = Upsert(keys=("id",), sequence_by="at", delete_when="op = 'D'", not_stored=("op",))
    rig = DeltaRig(spark, tmp_path / "t", "id BIGINT, at INT, v STRING, op STRING", mode=mode)
    rig.preflight()
    rig.put(
        1, [(1, 5, "new", "U"), (1, 3, "old", "U"), (2, 1, "b", "U"), (3, 1, "gone", "U"), (3, 2, None, "D")]
    )
    assert rig.rows() == Counter([(1, 5, "new"), (2, 1, "b")])
    # Older than the table's, equal, deleted, deleted too late, without a sequence.
    rig.put(2, [(1, 4, "late", "U"), (2, 1, "equal", "U"), (4, None, "d", "U")], [(1, 2, None, "D")])
    assert rig.rows() == Counter([(1, 5, "new"), (2, 1, "equal"), (4, None, "d")])
    rig.put(3, [(2, 9, None, "D"), (7, 1, None, "D")])
    assert rig.rows() == Counter([(1, 5, "new"), (4, None, "d")])


@pytest.mark.nightly
def test_an_upsert_into_a_table_that_others_write(spark, tmp_path) -> None:
    properties = "'delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name'"
    rig = DeltaRig(spark, tmp_path / "t", ROW, mode=Upsert(keys=("id", "p")))
    columns = (
        "id BIGINT NOT NULL, p STRING, v STRING, twice BIGINT GENERATED ALWAYS AS (id * 2), extra STRING"
    )
    rig.sql(f"CREATE TABLE {{t}} ({columns}) USING delta PARTITIONED BY (p) TBLPROPERTIES ({properties})")
    rig.preflight()
    rig.sql("INSERT INTO {t} (id, p, v, extra) VALUES (1, 'x', 'theirs', 'kept'), (1, 'y', 'theirs', 'kept')")
    assert rig.put(1, [(1, "ours", "x"), (2, "ours", "x")]).outcome is Outcome.COMMITTED
    assert rig.rows("id", "p", "v", "twice", "extra") == Counter(
        [(1, "x", "ours", 2, "kept"), (1, "y", "theirs", 2, "kept"), (2, "x", "ours", 4, None)]
    )


def test_a_null_key_is_refused_when_it_is_staged(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", ROW, mode=BY_ID)
    with pytest.raises(
        BadRecordError, match=r"The key id IS NOT NULL is violated by the record .*\"v\":\"b\""
    ):
        rig.stage(0, [(1, "a", "x"), (None, "b", "x")])


@pytest.mark.parametrize("large", ["false", "true"])
def test_a_row_kind_that_is_none_is_refused_with_its_record(spark, tmp_path, large) -> None:
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", large)
    try:
        schema = "id LONG, tags ARRAY<STRING>, kind STRING"
        rig = DeltaRig(spark, tmp_path / "t", schema, mode=Upsert(keys=("id",), row_kind="kind"))
        with pytest.raises(
            BadRecordError, match=r'kind IN \+I.* \{"id":2,"tags":\["x"\],"kind":"\?"\}'
        ) as error:
            rig.stage(0, [(1, ["a"], "+I"), (2, ["x"], "?")])
        assert error.value.facts["uid"] == UID
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


@pytest.mark.nightly
@NATIVE
def test_partitions_of_a_checkpoint_replace_those_of_the_table(spark, tmp_path, way) -> None:
    mode = OverwritePartitions()
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=way, mode=mode, partition_by=("p",))
    rig.preflight()
    rig.put(1, [(1, "a", "x"), (2, "b", "y/ %")], [(3, "c", "x")])
    assert rig.rows() == Counter([(1, "a", "x"), (2, "b", "y/ %"), (3, "c", "x")])
    staged = rig.stage(7, [(4, "d", "x")]) + rig.stage(8, [(5, "e", None), (6, "f", "x")])
    assert rig.commit(2, staged).outcome is Outcome.COMMITTED
    expected = Counter([(4, "d", "x"), (6, "f", "x"), (2, "b", "y/ %"), (5, "e", None)])
    assert rig.rows() == expected
    assert rig.put(3, [(9, "z", None)]).outcome is Outcome.COMMITTED
    # The repeat of an older checkpoint must not bring its partitions back.
    assert rig.other().commit(2, staged).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows() == expected - Counter([(5, "e", None)]) + Counter([(9, "z", None)])
    assert rig.versions == 3


def test_a_table_that_lost_its_partitions_is_not_overwritten_as_a_whole(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id BIGINT, p STRING", mode=OverwritePartitions())
    rig.sql("CREATE TABLE {t} (id BIGINT, p STRING) USING delta PARTITIONED BY (p)")
    staged = rig.stage(0, [(1, "x")])
    rig.sql("CREATE OR REPLACE TABLE {t} USING delta AS SELECT 8L AS id, 'theirs' AS p")
    assert "partitioning changed" in rig.committer.why_dead(staged)[0]
    lost = rig.commit(1, staged)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted
    for way in Way.DELTA_RS, Way.SPARK:
        with pytest.raises(SchemaError, match="It has no partitions"):
            rig.other(way=way).stage(1, [(1, "x")])
    assert rig.rows() == Counter([(8, "theirs")])


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [BY_ID, OverwritePartitions()])
def test_two_processes_and_a_stranger_at_the_same_time(spark, tmp_path, mode) -> None:
    """Of two that commit one checkpoint, one does; a stranger's rows are not lost."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, partition_by=("p",), mode=mode)
    rig.put(1, [(1, "a", "x")])
    outcomes, errors = [], []

    def commit(owner, checkpoint, staged):
        try:
            while True:
                answer = owner.commit(checkpoint, staged)
                if answer.outcome is not Outcome.RETRY:
                    outcomes.append(answer.outcome)
                    return
        except Exception as error:
            errors.append(error)

    def strange():
        for n in range(2):
            spark.createDataFrame([(100 + n, "s", "s")], ROW).write.format("delta").mode("append").save(
                str(rig.table)
            )

    staged = rig.stage(5, [(1, "b", "x"), (2, "c", "y")])
    owners = [rig, rig.other(), rig.other(way=Way.SPARK)]
    threads = [threading.Thread(target=commit, args=(owner, 2, staged)) for owner in owners]
    threads.append(threading.Thread(target=strange))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not errors
    assert Counter(outcomes) == Counter({Outcome.COMMITTED: 1, Outcome.ALREADY_COMMITTED: 2})
    expected = [(1, "b", "x"), (2, "c", "y"), *((100 + n, "s", "s") for n in range(2))]
    assert rig.rows() == Counter(expected)


@pytest.mark.parametrize(
    ("way", "mode"),
    [(Way.DELTA_RS, None), pytest.param(Way.SPARK, BY_ID, marks=pytest.mark.nightly)],
)
def test_a_staged_file_that_is_gone_is_proven_lost(spark, tmp_path, way, mode) -> None:
    settings = {} if mode is None else {"mode": mode}
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=way, **settings)
    rig.put(1, [(1, "a", "x")])
    staged = rig.stage(5, [(2, "b", "x")]) + rig.stage(6, [(3, "c", "x")])
    assert not rig.committer.why_dead(staged)
    done = rig.stage(7, [(4, "d", "x")])
    assert rig.commit(2, done).outcome is Outcome.COMMITTED
    cut, victim = (file_of(staged[n], tmp_path) for n in (0, 1))
    victim.unlink()
    assert list(rig.committer.why_dead(staged)) == [1]
    lost = rig.other().commit(3, staged)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted and victim.name in lost.detail
    # A part of a file is no file.
    cut.write_bytes(cut.read_bytes()[:-1])
    assert list(rig.committer.why_dead(staged)) == [0, 1]
    lost = rig.commit(3, staged[:1])
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted and cut.name in lost.detail
    # The marker goes before the evidence: what is in the table is not lost.
    assert rig.commit(2, staged).outcome is Outcome.ALREADY_COMMITTED
    assert rig.rows("id") == Counter([(1,), (4,)])


def file_of(committable, folder):
    return next(p for p in folder.rglob("*.parquet") if p.name in str(committable.payload))


@pytest.mark.parametrize("way", [Way.DELTA_RS, pytest.param(Way.SPARK, marks=pytest.mark.nightly)])
def test_a_damaged_file_is_never_passed_over(spark, tmp_path, way) -> None:
    """Whatever the session is set to do with files that it cannot read."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, mode=BY_ID, way=way)
    staged = rig.stage(0, [(1, "a", "x")]) + rig.stage(1, [(2, "b", "x")])
    file = file_of(staged[1], tmp_path)
    file.write_bytes(bytes(file.stat().st_size))
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with pytest.raises(Exception, match=r"Parquet|footer|corrupt"):
            rig.commit(1, staged)
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
    assert rig.versions == 0


@pytest.mark.nightly
def test_vacuum_takes_data_files_and_leaves_rows(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", ROW)
    rig.put(1, [(1, "a", "x")])
    rows = rig.other(way=Way.SPARK).stage(6, [(3, "c", "x")])
    files = rig.stage(5, [(2, "b", "x")])
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        rig.sql("VACUUM {t} RETAIN 0 HOURS")
    finally:
        spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    assert "is gone" in rig.committer.why_dead(files)[0]
    lost = rig.commit(2, files)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted
    assert rig.commit(2, rows).outcome is Outcome.COMMITTED
    assert rig.rows("id") == Counter([(1,), (3,)])


def test_folders_that_nobody_names_are_swept(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", ROW, mode=BY_ID)
    committed, kept = rig.stage(0, [(1, "a", "x")]), rig.stage(1, [(2, "b", "x")])
    running, leftover = rig.stage(2, [(3, "c", "x")]), rig.stage(3, [(4, "d", "x")])
    older = rig.other(epoch=0).stage(3, [(5, "e", "x")])
    newer = rig.other(epoch=7).stage(3, [(5, "e", "x")])
    rig.commit(1, committed)
    assert rig.committer.sweep(kept, lambda: frozenset({2})) == 3
    gone = {id(staged): bool(rig.committer.why_dead(staged)) for staged in (kept, running, newer)}
    assert not any(gone.values())
    assert all(rig.committer.why_dead(staged) for staged in (committed, leftover, older))
    assert rig.committer.sweep(kept, lambda: frozenset({2})) == 0
    assert rig.rows("id") == Counter([(1,)])


def test_what_was_staged_under_other_settings_is_dead(spark, tmp_path) -> None:
    """A sink whose settings were changed stages again; what is decided goes by its own settings."""
    rig = DeltaRig(spark, tmp_path / "t", ROW)
    staged = rig.stage(0, [(1, "a", "x"), (1, "b", "x")])
    upserting = rig.other(mode=BY_ID)
    assert "another mode" in upserting.committer.why_dead(staged)[0]
    assert upserting.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.rows("v") == Counter([("a",), ("b",)])
    elsewhere = DeltaRig(spark, tmp_path / "other", ROW)
    assert "was" not in elsewhere.committer.why_dead(elsewhere.stage(0, [(1, "a", "x")]))
    assert "for the table" in elsewhere.committer.why_dead(staged)[0]


def test_files_of_a_table_are_found_by_name_and_size(tmp_path) -> None:
    root = tmp_path / "a [b] {c}"
    files = TableFiles.of(f"file:{root}", {})
    assert files.missing({"one/x": 1}) == ["one/x"] and files.folders("none") == []
    for name in ("one/x", "two/y"):
        out = files.output(name)
        out.write(b"123")
        files.finish(name, out)
        with pytest.raises(FileExistsError):
            files.output(name)
    assert files.missing({"one/x": 3, "two/y": 2, "gone": 3}) == ["two/y", "gone"] and not files.missing({})
    assert sorted(files.folders("")) == ["one", "two"]
    files.delete("two")
    assert files.folders("") == ["one"]
