"""Jobs whose directory, and Spark's checkpoint with it, lie on HDFS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from flinkish_spark import DeltaSink, ForeachCheckpointSink, RestoreSettings, doctor, read_state
from flinkish_spark.bridge.buckets import copy_in_tasks
from flinkish_spark.checkpoint.answers import AnswerKind
from flinkish_spark.core.errors import ConfigError, StoreError
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.doctor import Health
from flinkish_spark.protocol.lineage import Tables
from tests.integration.store.test_bucket_jobs import environment, exact, fetched, job, table
from tests.support.cli_rig import flinkish
from tests.support.hdfs import LocalHdfs
from tests.support.jobs import await_that, running


@pytest.fixture
def folder(hdfs: LocalHdfs) -> StoreSpec:
    return hdfs.new_store()


def test_a_job_goes_on_from_hdfs_and_its_savepoint_goes_elsewhere(
    spark, hdfs: LocalHdfs, folder: StoreSpec
) -> None:
    """Rows are buffered there, too; the second start is fenced by copies, the third is a job on its own."""
    rows: list[tuple[str, int]] = []

    def take(found: Any, checkpoint: Any) -> None:
        rows.extend((row.k, row["count"]) for row in found)

    with running(job(spark, folder, ForeachCheckpointSink(take))) as client:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        before, began = client.store_requests, client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints >= began + 5, client)
        taken = client.progress.checkpoints - began
        asked = {kind: (n - before[kind]) / taken for kind, n in client.store_requests.items()}
        # What Spark has written is looked for until it is there: on a slow machine more often. And old files
        # are deleted many at a time, not behind each checkpoint.
        assert asked["put"] + asked["create"] + asked["copy"] <= 12
        assert asked["read"] + asked["list"] <= 60
        assert asked["delete"] <= 40
        client.cancel()
    first = exact(rows)
    listed = flinkish("checkpoints", "list", folder.url)
    assert listed.exit_code == 0, listed.output
    target = folder.to_parent(2).to_child("savepoints/7")
    with running(job(spark, folder, ForeachCheckpointSink(take))) as client:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        assert client.stop_with_savepoint(target.url).wait(timeout_ms=60_000).kind is AnswerKind.COMPLETED
    second = exact(rows)
    restore = RestoreSettings(target.url)
    with running(job(spark, hdfs.new_store(), ForeachCheckpointSink(take), restore=restore)) as client:
        await_that(lambda: client.progress.checkpoints >= 1, client)
        client.cancel()
    assert 0 < first < second < exact(rows)
    assert open_job_dir(folder).newest_owner().value == 2


def test_files_and_folders_on_hdfs_are_fetched_by_the_driver_for_all_tasks(
    spark: Any, hdfs: LocalHdfs, tmp_path: Path
) -> None:
    place = hdfs.new_store()
    for name in ("model/word", "model/below/word"):
        place.open().put(name, name.encode())
    env = environment(spark, StoreSpec(str(tmp_path / "job")))
    fetched(env, place.url, "model/word", "model/below/word")
    with pytest.raises(ConfigError, match=f"the cached file 'gone' is not at {place.url}/gone"):
        env.register_cached_file(f"{place.url}/gone", "gone")


def test_a_job_on_a_disk_asks_nothing_of_the_file_system_of_the_cluster(spark, tmp_path: Path) -> None:
    """Where it is HDFS, a path without a scheme is one there; the one here cannot be reached.

    In a folder with odd characters a job runs, but Spark finds no state for its savepoint, which is said.
    """
    conf, rows = spark._jsc.hadoopConfiguration(), list[tuple[str, int]]()
    before, folder = conf.get("fs.defaultFS"), StoreSpec(str(tmp_path / "job"))
    sink = ForeachCheckpointSink(lambda found, checkpoint: rows.extend((r.k, r["count"]) for r in found))
    conf.set("fs.defaultFS", "hdfs://nobody.invalid:8020")
    try:
        with running(job(spark, folder, sink)) as client:
            await_that(lambda: client.progress.checkpoints >= 2, client)
            client.cancel()
        saved = str(tmp_path / "saved")
        with running(job(spark, folder, sink)) as client:
            await_that(lambda: client.progress.checkpoints >= 2, client)
            assert client.stop_with_savepoint(saved).wait(timeout_ms=60_000).kind is AnswerKind.COMPLETED
        counts = {key: max(count for k, count in rows if k == key) for key, _ in rows}
        for place in (folder.url, saved):
            read = read_state(spark, place, "counts", "count").collect()
            assert {row.key: row["value"] for row in read} == counts
        odd = StoreSpec(str(tmp_path / "a job #7%20"))
        with running(job(spark, odd, sink, restore=RestoreSettings(saved))) as client:
            await_that(lambda: client.progress.checkpoints >= 1, client)
            answer = client.trigger_savepoint(str(tmp_path / "none")).wait(timeout_ms=60_000)
            assert answer.kind is AnswerKind.SAVEPOINT_FAILED and "a symbolic link to it" in answer.text
            client.cancel()
    finally:
        conf.set("fs.defaultFS", before)
    exact(rows)


def test_a_takeover_copies_in_tasks(spark, folder: StoreSpec) -> None:
    """On a cluster; here the tasks run in the driver's JVM, and their Python is processes of its own."""
    files = folder.open_bucket()
    names = [f"spark/1/state/0/{n}/1_a.zip" for n in range(5)]
    for number, name in enumerate(names):
        files.put(name, b"%d" % number * 100_000)
    pairs = [(name, name.replace("spark/1", "spark/2")) for name in names]
    for _ in range(2):
        copy_in_tasks(spark, folder, pairs)
    assert [files.read(other) for _, other in pairs] == [files.read(name) for name in names]
    copy_in_tasks(spark, folder, [])
    with pytest.raises(StoreError, match=r"cannot copy 1 files of hdfs.*in tasks"):
        copy_in_tasks(spark, folder, [("spark/1/none", "spark/2/none")])


def test_entries_of_sparks_log_are_created_once(spark, folder: StoreSpec) -> None:
    """By a rename of Hadoop's that overwrites nothing: of two that write one entry one is told so."""
    there, java = folder.open_bucket(), spark._jvm
    path = java.org.apache.hadoop.fs.Path(folder.hadoop_url)
    files = java.io.github.flinkishspark.shim.BucketCheckpointFiles(path, spark._jsc.hadoopConfiguration())
    files.mkdirs(java.org.apache.hadoop.fs.Path(f"{folder.hadoop_url}/offsets"))

    def begun(name: str, content: bytes, *, overwrite: bool) -> Any:
        out = files.createAtomic(java.org.apache.hadoop.fs.Path(f"{folder.hadoop_url}/{name}"), overwrite)
        out.write(content)
        return out

    first, second = (begun("offsets/0", content, overwrite=False) for content in (b"first", b"second"))
    second.close()
    with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
        first.close()
    begun("offsets/1", b"cancelled", overwrite=False).cancel()
    assert there.read("offsets/0") == b"second"
    begun("offsets/0", b"third", overwrite=True).close()
    assert there.read("offsets/0") == b"third" and there.list("offsets") == ("offsets/0",)


def test_the_doctor_tries_hdfs_and_leaves_nothing(spark, folder: StoreSpec) -> None:
    found = doctor(spark, job_dir=folder.url)
    says = [one.says for one in found.findings if one.about.startswith("HDFS at")]
    assert any("creates without overwriting work" in one for one in says)
    assert len([one for one in says if one.endswith("sees what the driver writes")]) == 2, says
    assert not folder.open_bucket().sizes_below("")


def test_a_namenode_that_is_not_there_is_refused_before_anything_starts(spark) -> None:
    found = doctor(spark, job_dir="hdfs://nobody.invalid/jobs")
    (refused,) = [one for one in found.findings if one.health is Health.REFUSED]
    assert "names no NameNode" in refused.says
    with pytest.raises(ConfigError, match=r"names no NameNode.*8020 as a rule"):
        job(spark, StoreSpec.parse("hdfs://nobody.invalid/jobs"), DeltaSink("/nowhere/t")).execute()
    with pytest.raises(StoreError, match=r"refused.*can be reached from this host"):
        job(spark, StoreSpec.parse("hdfs://127.0.0.1:1/jobs"), DeltaSink("/nowhere/t")).execute()


@pytest.mark.nightly(by_day="tests/unit/checkpoint/test_buckets.py")
def test_a_job_goes_back_on_hdfs_and_old_files_go(
    spark, folder: StoreSpec, tmp_path: Path, snapshots_all_the_time: None
) -> None:
    """Then back to an earlier checkpoint."""
    store = folder.open_bucket()
    for _ in range(2):
        with running(job(spark, folder, DeltaSink(str(tmp_path / "t")))) as client:
            await_that(lambda: client.progress.checkpoints >= 15, client)
            client.cancel()
        exact(table(spark, tmp_path / "t"))
    left = store.sizes_below("spark")
    assert any(name.endswith(".zip") for name in left), "snapshots were uploaded"
    assert min(int(name.rpartition("/")[2]) for name in left if "/offsets/" in name) > 5
    job_dir = open_job_dir(folder)
    target = job_dir.live_commits()[-2].checkpoint
    with running(job(spark, folder, DeltaSink(str(tmp_path / "t")))) as client:
        assert client.rewind(target, Tables.RESTORE).wait(timeout_ms=60_000).lineage is not None
        seen = client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints > seen, client)
        client.stop_with_checkpoint()
        while not client.wait(timeout_ms=1_000):
            pass
    exact(table(spark, tmp_path / "t"))
