"""`flinkish adopt` over checkpoints made by hand: what it makes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.bridge.plans import _NATIVE
from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.core.errors import JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job import plain_query
from flinkish_spark.job.adoption import WORDS, check_adopted
from flinkish_spark.job.plain_query import PROVIDER, ROCKSDB
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.plan_layout import NativeOperator, OperatorInstance, PlanLayout, Scan, ScanRole
from tests.support.cli_rig import flinkish
from tests.support.plain_checkpoint import PlainCheckpoint

A, B = b"a" * 16, b"b" * 16
AGGREGATE = NativeOperator(0, "totals", "out", "an aggregate (groupBy, agg)")
LAYOUT = PlanLayout(
    (Scan(ScanRole.RECORDS, "totals", "out"), Scan(ScanRole.BARRIERS, "", "out")), (), natives=(AGGREGATE,)
)


@pytest.fixture
def plain(tmp_path: Path) -> PlainCheckpoint:
    plain = PlainCheckpoint(tmp_path / "checkpoint")
    plain.run({A: b"1" * 8}, {B: b"2" * 8})
    plain.run({A: b"3" * 8}, {})
    return plain


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir(LocalStore(tmp_path / "job"))


def adopt(tmp_path: Path) -> Any:
    return flinkish("adopt", tmp_path / "checkpoint", tmp_path / "job")


# -- adopt --------------------------------------------------------------------------------------------


def test_the_last_micro_batch_becomes_a_confirmed_checkpoint(tmp_path: Path, plain, job) -> None:
    result = adopt(tmp_path)
    assert result.exit_code == 0, result.output
    decision = job.newest_commit()
    assert (decision.checkpoint, decision.batch) == (CheckpointId(1), BatchId(1))
    assert job.receipt(decision.checkpoint) is not None
    offsets = LoggedOffsets.parse(decision.offsets_text)
    assert offsets.sources == ({"logOffset": 0}, {"flinkish:checkpoint": 1})
    facts = json.loads(decision.offsets_text.split("\n")[1])
    assert (facts["batchWatermarkMs"], facts["conf"][PROVIDER]) == (5, ROCKSDB)
    log = SparkLog(job.store, "spark/1", str(tmp_path / "job/spark/1"))
    assert log.read("offsets", BatchId(1)) == log.read("offsets", BatchId(0)) == decision.offsets_text
    assert log.read("commits", BatchId(1)) == decision.commits_text
    assert log.first_positions() == {0: {"path": "file:///in/0.json"}}
    assert json.loads(decision.commits_text.split("\n")[1])["nextBatchWatermarkMs"] == 9
    # What a start would pin is whole.
    SparkPins(log, tmp_path / "job").pin(decision)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_second_time_is_refused(tmp_path: Path, plain) -> None:
    assert adopt(tmp_path).exit_code == 0
    result = adopt(tmp_path)
    assert result.exit_code == 1 and "is in use" in result.stderr and "new directory" in result.stderr


def test_a_job_that_runs_is_left_alone(tmp_path: Path, plain) -> None:
    lock = JobLock.from_folder(tmp_path / "job")
    lock.acquire()
    try:
        result = adopt(tmp_path)
        assert result.exit_code == 1 and "is owned by process" in result.stderr
    finally:
        lock.release()


def test_a_query_without_state_needs_none(tmp_path: Path, job) -> None:
    plain = PlainCheckpoint(tmp_path / "checkpoint")
    (tmp_path / "checkpoint/state/0/_metadata/metadata").unlink()
    (tmp_path / "checkpoint/state/0/_metadata/.metadata.crc").unlink()
    plain.run()
    (tmp_path / "checkpoint/state").rename(tmp_path / "elsewhere")
    plain.write("commits/0", "v1\n")
    assert adopt(tmp_path).exit_code == 0
    assert job.newest_commit().commits_text == 'v2\n{"stateUniqueIds": {}}'


def test_names_of_schemas_begin_with_the_first_micro_batch(tmp_path: Path, job) -> None:
    plain = PlainCheckpoint(tmp_path / "checkpoint", **{PROVIDER: ROCKSDB})
    (tmp_path / "checkpoint/state/0/_metadata/metadata").unlink()
    for batch in (0, 5, 9):
        path = f"/gone/state/0/_stateSchema/default/{batch}_uuid"
        store = {"storeName": "default", "numPartitions": 2, "stateSchemaFilePaths": [path]}
        body = {"operatorInfo": {"operatorId": 0, "operatorName": "transformWithStateExec"}}
        plain.write(f"state/0/_metadata/v2/{batch}", f"v2\n{json.dumps({**body, 'stateStoreInfo': [store]})}")
        plain.write(f"state/0/_stateSchema/default/{batch}_uuid", f"schema {batch}")
    for _ in range(7):
        plain.run()
    for partition in (0, 1):
        plain.snapshot(partition, 7)
    result = adopt(tmp_path)
    assert result.exit_code == 0, result.output
    state = tmp_path / "job/spark/1/state/0"
    text = (state / "_metadata/v2/0").read_text()
    (path,) = json.loads(text.split("\n")[1])["stateStoreInfo"][0]["stateSchemaFilePaths"]
    assert path.endswith("/state/0/_stateSchema/default/0_uuid")
    assert (state / "_stateSchema/default/0_uuid").read_text() == "schema 5"


REFUSED: dict[str, tuple[Callable[[PlainCheckpoint], object], str, str]] = {
    "no checkpoint": (
        lambda plain: (plain.place / "metadata").unlink(), "is not the checkpoint", "checkpointLocation"
    ),
    "never run": (
        lambda plain: [path.unlink() for path in (plain.place / "offsets").iterdir()],
        "that has run", "checkpointLocation",
    ),
    "planned": (lambda plain: plain.plan(2), "micro-batch 2", "trigger(availableNow=True)"),
    "our sinks": (
        lambda plain: plain.write("flinkish/job.json", "{}"), "sinks of flinkish_spark", "leave the query"
    ),
    "named sources": (lambda plain: plain.plan(1, version="v2"), "names its sources", "begin a new job"),
    "another provider": (
        lambda plain: (plain.conf.update({PROVIDER: "com.acme.Store"}), plain.plan(1)),
        "com.acme.Store", "begin a new job",
    ),
    "another codec": (
        lambda plain: (
            plain.conf.update({"spark.sql.streaming.stateStore.compression.codec": "zstd"}), plain.plan(1)
        ),
        "codec = zstd", "begin a new job",
    ),
    "another watermark": (
        lambda plain: (
            plain.conf.update({"spark.sql.streaming.multipleWatermarkPolicy": "max"}), plain.plan(1)
        ),
        "multipleWatermarkPolicy = max", "begin a new job",
    ),
    "session windows": (
        lambda plain: plain.describe("sessionWindowStateStoreSaveExec", {"numColsPrefixKey": 1}),
        "cannot be moved from the HDFS-backed provider", ROCKSDB,
    ),
    "checksums": (
        lambda plain: (
            plain.conf.update({"spark.sql.streaming.stateStore.rowChecksum.enabled": "true"}), plain.plan(1)
        ),
        "rows have checksums", ROCKSDB,
    ),
    "a join": (
        lambda plain: plain.describe("symmetricHashJoin", {"storeName": "left-keyToNumValues"}, {}),
        "a join of two streams", "join.stateFormatVersion=3",
    ),
    "an old query": (
        lambda plain: (plain.place / "state/0/_metadata/metadata").unlink(), "does not say which operator",
        "begin a new job",
    ),
    "a torn entry": (lambda plain: plain.write("commits/1", "v1\n{torn"), "cannot be read", "from a backup"),
    "a short entry": (lambda plain: plain.write("offsets/1", "v1"), "cannot be read", "from a backup"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_job_can_go_on_from(tmp_path: Path, plain: PlainCheckpoint, case: str) -> None:
    change, what, what_to_do = REFUSED[case]
    change(plain)
    result = adopt(tmp_path)
    assert result.exit_code == 1, result.output
    assert what in result.stderr and what_to_do in result.stderr.partition("To do:")[2]
    assert not (tmp_path / "job").exists()


def test_a_query_that_runs_is_refused(tmp_path: Path, plain, monkeypatch) -> None:
    read = plain_query.read_hdfs_backed

    def run_meanwhile(*given: Any) -> Any:
        plain.plan(2)
        return read(*given)

    monkeypatch.setattr(plain_query, "read_hdfs_backed", run_meanwhile)
    result = adopt(tmp_path)
    assert result.exit_code == 1 and "runs" in result.stderr and "stop it" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.parametrize("job_dir", ["s3://bucket/job", "relative"])
def test_other_places(tmp_path: Path, plain, job_dir: str) -> None:
    result = flinkish("adopt", tmp_path / "checkpoint", job_dir)
    assert result.exit_code == 1 and "To do: give" in result.stderr
    assert flinkish("adopt", "s3a://bucket/checkpoint", tmp_path / "job").exit_code == 2


# -- the first start ------------------------------------------------------------------------------------


def test_the_same_query_fits(tmp_path: Path, plain, job) -> None:
    adopt(tmp_path)
    check_adopted(job, LAYOUT, 2)


def layout(**changes: Any) -> PlanLayout:
    return PlanLayout(**{"scans": LAYOUT.scans, "operators": (), "natives": LAYOUT.natives, **changes})


@pytest.mark.parametrize(
    ("given", "partitions", "what"),
    [
        (LAYOUT, 3, "has 2 shuffle partitions, and this job 3"),
        (layout(natives=()), 2, "keeps state for nothing"),
        (layout(natives=(AGGREGATE, AGGREGATE)), 2, "another query"),
        (layout(natives=(NativeOperator(0, "totals", "out", "limit()"),)), 2, "for limit()"),
        (
            layout(natives=(NativeOperator(0, "totals", "out", "dropDuplicates() or distinct()"),)),
            2,
            "for drop",
        ),
        (layout(scans=(LAYOUT.scans[0], *LAYOUT.scans)), 2, "reads 2"),
        (layout(scans=LAYOUT.scans[::-1]), 2, "another query"),
        (layout(operators=(OperatorInstance("sums", "out"),)), 2, "another query"),
    ],
)
def test_another_job_does_not(
    tmp_path: Path, plain, job, given: PlanLayout, partitions: int, what: str
) -> None:
    adopt(tmp_path)
    with pytest.raises(JobDirError) as found:
        check_adopted(job, given, partitions)
    assert what in str(found.value) and "To do:" in str(found.value)


def test_words_for_operators_are_those_of_plans() -> None:
    assert {word for words in WORDS.values() for word in words} == set(_NATIVE.values()) | {
        "a join of two streams"
    }
