"""Jobs whose directory, and Spark's checkpoint with it, lie in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkFiles

from flinkish_spark import (
    AsyncDataStream,
    AsyncFunction,
    CheckpointConfig,
    DeltaSink,
    ForeachCheckpointSink,
    KeyedProcessFunction,
    NoRestart,
    RestoreSettings,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
    doctor,
    read_state,
)
from flinkish_spark.bridge.buckets import check_bucket
from flinkish_spark.checkpoint.answers import AnswerKind
from flinkish_spark.connectors.generator import Counting, RandomChoice
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.doctor import Health
from flinkish_spark.planning import keyed as keyed_plan
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.sources import DataGeneratorSource, RateLimit
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.state_processor import SavepointWriter
from tests.support.buckets import LocalAzure, LocalS3
from tests.support.jobs import await_that, running
from tests.support.services import BUILD

_KEYS = 5
pytestmark = pytest.mark.skipif(
    not any((BUILD / "s3a-jars").glob("hadoop-aws-*.jar")), reason="Hadoop's S3A is not there: `make s3a`"
)


class Count(KeyedProcessFunction):
    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0))

    def process_element(self, value, ctx):
        self.count.update(self.count.value() + 1)
        yield value.k, self.count.value()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalS3]:
    with LocalS3() as found:
        yield found


@pytest.fixture
def bucket(server: LocalS3) -> StoreSpec:
    return server.new_store()


def environment(spark: Any, place: StoreSpec, **settings: Any) -> StreamExecutionEnvironment:
    options = {} if place.is_local else {"store_options": dict(place.options)}
    config = CheckpointConfig(interval_ms=700, retained=3)
    return StreamExecutionEnvironment(
        spark, "counts", place.url, **options, checkpoint=config, restart_strategy=NoRestart(), **settings
    )


def fetched(env: StreamExecutionEnvironment, url: str, file: str, below: str) -> None:
    """Register a file in a bucket, and the folder in which it lies; look at what tasks find."""
    env.register_cached_file(f"{url}/{file}", "file")
    env.register_cached_file(f"{url}/{file.rpartition('/')[0]}", "folder")
    places = env._supervisor()._settings.cached_files
    assert Path(SparkFiles.get(places["file"])).read_text() == file
    assert (Path(SparkFiles.get(places["folder"])) / below.partition("/")[2]).read_text() == below
    assert [Path(places[name]).name for name in ("file", "folder")] == ["word", "model"]


def test_files_and_folders_in_a_bucket_are_fetched_by_the_driver_for_all_tasks(
    spark: Any, bucket: StoreSpec
) -> None:
    for name in ("model/word", "model/below/word"):
        bucket.open().put(name, name.encode())
    # By the login of the job directory, which is in the same bucket.
    env = environment(spark, bucket.to_child("job"))
    fetched(env, bucket.url, "model/word", "model/below/word")
    with pytest.raises(ConfigError, match=f"the cached file 'gone' is not at {bucket.url}/gone"):
        env.register_cached_file(f"{bucket.url}/gone", "gone")


def job(spark: Any, place: StoreSpec, sink: Any, **settings: Any) -> StreamExecutionEnvironment:
    env = environment(spark, place, **settings)
    fields = {"k": RandomChoice([f"k{n}" for n in range(_KEYS)]), "n": Counting()}
    source = DataGeneratorSource(fields, rate=RateLimit(records_per_batch=20))
    stream = env.from_source(source, uid="numbers")
    stream.key_by("k").process(Count(), output="k STRING, count LONG", uid="counts").sink_to(sink, uid="out")
    return env


def exact(found: list[tuple[str, int]]) -> int:
    """Return how many records there are, each of which its key's count so far, none missing or twice."""
    for key in range(_KEYS):
        own = sorted(count for k, count in found if k == f"k{key}")
        assert own == list(range(1, len(own) + 1))
    return len(found)


def table(spark: Any, path: Path) -> list[tuple[str, int]]:
    return [(row.k, row["count"]) for row in spark.read.format("delta").load(str(path)).collect()]


@pytest.fixture
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key groups of a few entries have bases, and get new ones all the time."""
    policy = BasePolicy(smallest_bytes=1, delta_share=0.0, smallest_delta_rows=0)
    monkeypatch.setattr(keyed_plan, "BASE_POLICY", policy)


@pytest.fixture
def azure(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreSpec]:
    """A container, of which Spark's session knows until the end of the test."""
    packages = BUILD / "azurite"
    if why := LocalAzure.why_not(packages):
        pytest.skip(why)
    with_tls: Any = StoreSpec.hadoop_url
    without_tls = property(lambda place: with_tls.fget(place).replace("abfss:", "abfs:"))
    monkeypatch.setattr(StoreSpec, "hadoop_url", without_tls)
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    with LocalAzure(packages) as found:
        place, settings = found.for_spark(found.new_store())
        for name, value in settings.items():
            conf.set(name, value)
        yield place
        for name in settings:
            conf.unset(name)


class Drawn(AsyncFunction):
    """Answers with something that it will never answer again."""

    async def async_invoke(self, value: Any) -> list[tuple[int, str]]:
        return [(value.n, uuid.uuid4().hex)]


@pytest.mark.nightly(by_day="tests/integration/spark/test_async_calls.py")
def test_answers_of_systems_outside_are_recorded_in_a_bucket(
    spark, bucket: StoreSpec, tmp_path: Path
) -> None:
    """Two sinks have the same one of each element, also where the job was cut off."""
    tables = [tmp_path / "one", tmp_path / "two"]
    for ends in range(2):
        env = environment(spark, bucket)
        source = DataGeneratorSource({"n": Counting()}, rate=RateLimit(records_per_batch=20))
        numbers = env.from_source(source, uid="numbers")
        asked = AsyncDataStream.ordered_wait(
            numbers, Drawn(), 5_000, output="n LONG, drawn STRING", uid="asked"
        )
        asked.sink_to(DeltaSink(str(tables[0])), uid="one")
        asked.filter(lambda row: True).sink_to(DeltaSink(str(tables[1])), uid="two")
        with running(env) as client:
            await_that(lambda client=client: client.progress.checkpoints >= 2, client)
            if ends:
                client.stop_with_checkpoint()
                while not client.wait(timeout_ms=1_000):
                    pass
            else:
                client.cancel()
    one, two = (
        sorted((row.n, row.drawn) for row in spark.read.format("delta").load(str(table)).collect())
        for table in tables
    )
    assert one == two and len({n for n, _ in one}) == len(one) > 40
    assert not [key for key in bucket.open_bucket().sizes_below("") if key.startswith("answers/")]


@pytest.mark.nightly(by_day="tests/unit/checkpoint/test_buckets.py")
@pytest.mark.parametrize("where", ["bucket", "azure"])
@pytest.mark.usefixtures("small_bases")
def test_a_job_goes_on_from_a_bucket_and_goes_back_in_it(
    spark, where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Cancelled and started again, each time fenced by copies; then back to an earlier checkpoint."""
    bucket: StoreSpec = request.getfixturevalue(where)
    counts = []
    for _ in range(2):
        with running(job(spark, bucket, DeltaSink(str(tmp_path / "t")))) as client:
            await_that(lambda: client.progress.checkpoints >= 2, client)
            client.cancel()
        counts.append(exact(table(spark, tmp_path / "t")))
    assert 0 < counts[0] < counts[1]
    job_dir = open_job_dir(bucket)
    target = job_dir.live_commits()[-2].checkpoint
    with running(job(spark, bucket, DeltaSink(str(tmp_path / "t")))) as client:
        order = client.rewind(target, Tables.RESTORE)
        assert order.wait(timeout_ms=60_000).lineage is not None
        seen = client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints > seen, client)
        client.stop_with_checkpoint()
        while not client.wait(timeout_ms=1_000):
            pass
    exact(table(spark, tmp_path / "t"))
    assert job_dir.newest_owner().value >= 3 and job_dir.history().live.value == 1


def test_how_often_a_bucket_is_asked_for_a_checkpoint(spark, bucket: StoreSpec, capsys: Any) -> None:
    """What the protocol reads and writes, what is polled and buffered; Spark asks for itself beside.

    Two micro-batches, and so four buffer files, for each checkpoint: six requests for a micro-batch, one for
    a buffer file, the others once per checkpoint.
    """
    rows: list[tuple[str, int]] = []

    def take(found: Any, checkpoint: Any) -> None:
        rows.extend((row.k, row["count"]) for row in found)

    with running(job(spark, bucket, ForeachCheckpointSink(take))) as client:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        before, began = client.store_requests, client.progress.checkpoints
        await_that(lambda: client.progress.checkpoints >= began + 8, client)
        after, taken = client.store_requests, client.progress.checkpoints - began
        client.cancel()
    each = {kind: round((after[kind] - before[kind]) / taken, 1) for kind in after}
    with capsys.disabled():
        print(f"\nrequests per checkpoint: {round(sum(each.values()), 1)} of {each}")
    assert sum(each.values()) <= 36
    assert exact(rows)


_BY_NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("disk", "s3"),
        pytest.param("s3", "s3", marks=_BY_NIGHT),
        pytest.param("s3", "disk", marks=_BY_NIGHT),
    ],
)
@pytest.mark.usefixtures("small_bases")
def test_a_savepoint_goes_from_anywhere_to_anywhere(
    spark, server: LocalS3, bucket: StoreSpec, tmp_path: Path, first: str, then: str
) -> None:
    """The state of a job in a bucket, of one on a disk, and back."""
    place, target = StoreSpec(str(tmp_path / "first")), StoreSpec(str(tmp_path / "savepoint"))
    if first == "s3":
        # In the job's bucket, where its options hold.
        place, target = bucket, bucket.to_parent(2).to_child("savepoints/7")
    with running(job(spark, place, DeltaSink(str(tmp_path / "t")))) as client:
        await_that(lambda: client.progress.checkpoints >= 1, client)
        assert client.stop_with_savepoint(target.url).wait(timeout_ms=60_000).kind is AnswerKind.COMPLETED
    before = exact(table(spark, tmp_path / "t"))
    new = server.new_store() if then == "s3" else StoreSpec(str(tmp_path / "then"))
    restore = RestoreSettings(target.url, store_options=dict(target.options) or None)
    with running(job(spark, new, DeltaSink(str(tmp_path / "t")), restore=restore)) as client:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        client.cancel()
    assert exact(table(spark, tmp_path / "t")) > before


@pytest.mark.usefixtures("small_bases")
def test_state_in_a_bucket_is_read_and_written_without_the_job(
    spark, bucket: StoreSpec, tmp_path: Path
) -> None:
    """Of a retained checkpoint by copies on the disk or in the bucket, of a savepoint where it is."""
    options = {"store_options": dict(bucket.options)}
    above = bucket.to_parent(2)
    saved, edited = (above.to_child(f"savepoints/{number}").url for number in (7, 8))
    with running(job(spark, bucket, DeltaSink(str(tmp_path / "t")))) as client:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        assert client.stop_with_savepoint(saved).wait(timeout_ms=60_000).kind is AnswerKind.COMPLETED
    counts: dict[str, int] = {}
    for key, count in table(spark, tmp_path / "t"):
        counts[key] = max(counts.get(key, 0), count)
    assert bucket.open_bucket().sizes_below("bases/counts/counts"), "that is where the state is"

    def read(path: str, **more: Any) -> dict[str, int]:
        rows = read_state(spark, path, "counts", "count", **options, **more).collect()
        return {row.key: row["value"] for row in rows}

    scratch = above.to_child("scratch")
    assert read(bucket.url) == read(bucket.url, scratch=scratch.url) == read(saved) == counts
    assert scratch.open_bucket().sizes_below("")
    with pytest.raises(ConfigError, match="the job directory is never changed"):
        read(bucket.url, scratch=bucket.to_child("scratch").url)
    doubled = read_state(spark, saved, "counts", "count", **options).selectExpr("key", "value * 2 AS value")
    writer = SavepointWriter.from_existing(spark, saved, **options).replace_state("counts", "count", doubled)
    with pytest.raises(EnvironmentFault, match="inside or around the savepoint"):
        writer.write(saved, **options)
    writer.write(edited, **options)
    with pytest.raises(EnvironmentFault, match="Another savepoint is there"):
        writer.write(edited, **options)
    assert read(edited) == {key: 2 * count for key, count in counts.items()}


@pytest.mark.nightly(by_day="tests/unit/checkpoint/test_buckets.py")
@pytest.mark.usefixtures("small_bases")
def test_what_no_checkpoint_needs_goes_while_the_job_runs(
    spark, bucket: StoreSpec, tmp_path: Path, snapshots_all_the_time: None
) -> None:
    """Nothing that is needed goes, and the rest does not pile up."""
    store, most = bucket.open_bucket(), 0
    for _ in range(2):
        with running(job(spark, bucket, DeltaSink(str(tmp_path / "t")))) as client:
            for wanted in range(2, 26):
                await_that(lambda: client.progress.checkpoints >= wanted, client)  # noqa: B023
                most = max(most, len(store.sizes_below("spark")))
            client.cancel()
        exact(table(spark, tmp_path / "t"))
    left = store.sizes_below("spark")
    assert any(name.endswith(".zip") for name in left), "snapshots were uploaded"
    batches = [int(name.rpartition("/")[2]) for name in left if "/offsets/" in name]
    assert min(batches) > 10, "old entries of the log are gone"
    versions = [
        int(name.rpartition("/")[2].partition("_")[0]) for name in left if name.endswith(".changelog")
    ]
    assert min(versions) > 5 and most < 400
    bases = [int(name.split("-")[1]) for name in store.sizes_below("bases")]
    assert min(bases) > 5 and len(bases) < 200


def test_a_bucket_that_spark_reaches_elsewhere_is_refused_before_anything_is_written(
    spark, bucket: StoreSpec, server: LocalS3
) -> None:
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    name = bucket.url.split("/")[2]
    with LocalS3() as other:
        conf.set(f"fs.s3a.bucket.{name}.endpoint", f"http://127.0.0.1:{other.port}")
        with pytest.raises(EnvironmentFault, match=r"cannot reach|does not see") as refused:
            env = job(spark, bucket, DeltaSink("/nowhere/t"))
            assert env.job_dir == bucket.url
            env.execute()
    assert "endpoint" in refused.value.what_to_do or "fs.s3a" in refused.value.what_to_do
    assert not bucket.open_bucket().sizes_below("")


def test_entries_of_sparks_log_are_created_once(spark, bucket: StoreSpec) -> None:
    """By our class in the JVM: of two that write one entry one is told so; one's own, repeated, is none."""
    check_bucket(spark, bucket, bucket.open())
    there = bucket.open_bucket()
    there.delete_all(list(there.sizes_below("")))
    java = spark._jvm
    path = java.org.apache.hadoop.fs.Path(bucket.hadoop_url)
    files = java.io.github.flinkishspark.shim.BucketCheckpointFiles(path, spark._jsc.hadoopConfiguration())

    def begun(name: str, content: bytes, *, overwrite: bool) -> Any:
        out = files.createAtomic(java.org.apache.hadoop.fs.Path(f"{bucket.hadoop_url}/{name}"), overwrite)
        out.write(content)
        return out

    first, second = (begun("offsets/0", content, overwrite=False) for content in (b"first", b"second"))
    second.close()
    with pytest.raises(Py4JJavaError, match=r"FileAlreadyExistsException"):
        first.close()
    begun("offsets/0", b"second", overwrite=False).close()
    assert there.read("offsets/0") == b"second"
    begun("state/1.changelog", b"old", overwrite=True).close()
    begun("state/1.changelog", b"new", overwrite=True).close()
    begun("state/2.changelog", b"cancelled", overwrite=True).cancel()
    begun("offsets/1", b"cancelled", overwrite=False).cancel()
    assert there.sizes_below("") == {"offsets/0": 6, "state/1.changelog": 3}


def test_the_doctor_tries_a_bucket_and_leaves_nothing(spark, bucket: StoreSpec, server: LocalS3) -> None:
    found = doctor(spark, job_dir=bucket.url, store_options=dict(bucket.options))
    says = [one.says for one in found.findings if one.about.startswith("bucket of")]
    assert any("conditional puts work" in one for one in says)
    assert [one for one in says if one.endswith("sees what the driver writes")][1:], says
    assert not bucket.open_bucket().sizes_below("")
    nobody = server.missing_bucket()
    found = doctor(spark, job_dir=nobody.url, store_options=dict(nobody.options))
    (refused,) = [one for one in found.findings if one.health is Health.REFUSED]
    assert "a job cannot work in it" in refused.says
