"""A plain query becomes a job in the middle of its input: both together give the rows of a batch query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import FileFormat, FileSink
from flinkish_spark.core.errors import JobDirError
from flinkish_spark.job.plain_query import PROVIDER, ROCKSDB
from tests.crash.test_native import found
from tests.support.cli_rig import flinkish
from tests.support.jobs import environment, failure_of, run_until
from tests.support.native_queries import QUERIES, write_end, write_events

pytestmark = pytest.mark.timeout(600)

STATE = "spark.sql.streaming.stateStore."
IN_ROCKSDB = {PROVIDER: ROCKSDB}
WITH_CHANGELOGS = {**IN_ROCKSDB, f"{STATE}rocksdb.changelogCheckpointing.enabled": "true"}
FORMAT_2 = {**WITH_CHANGELOGS, f"{STATE}checkpointFormatVersion": "2"}
JOIN_3 = {**IN_ROCKSDB, "spark.sql.streaming.join.stateFormatVersion": "3"}
#: Queries, and the settings of the plain one; the first have Spark's default, the HDFS-backed provider.
CASES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "aggregate": ("tumbling", {}),
    "deduplicate": ("distinct-orders", {}),
    "applyInPandasWithState": ("running-totals", {}),
    "session-rocksdb": ("session", IN_ROCKSDB),
    "aggregate-changelogs": ("two-aggregates", WITH_CHANGELOGS),
    "deduplicate-format-2": ("distinct-within", FORMAT_2),
    "transformWithState": ("silences", IN_ROCKSDB),
    "join": ("left-join", JOIN_3),
}


@contextmanager
def settings(spark: Any, given: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in given}
    try:
        for name, value in given.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def run_plain(frame: Any, rows: Path, checkpoint: Path) -> None:
    writer = frame.writeStream.format("json").option("path", str(rows))
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()


@pytest.mark.parametrize("case", CASES)
def test_together_they_give_the_right_rows(spark, job_dir, tmp_path, case) -> None:
    name, given = CASES[case]
    query, folder = QUERIES[name], tmp_path / "in"
    folder.mkdir()

    def job():
        env = environment(spark, job_dir)
        rows = env.from_dataframe(query.stream(spark, folder), uid=name)
        rows.sink_to(FileSink(str(tmp_path / "out" / name), FileFormat.JSON), uid="files")
        return env

    for number in (0, 1):
        write_events(folder, number)
    with settings(spark, given):
        run_plain(query.stream(spark, folder), tmp_path / "plain", tmp_path / "checkpoint")
    result = flinkish("adopt", tmp_path / "checkpoint", job_dir)
    assert result.exit_code == 0, result.output
    for number in (2, 3):
        write_events(folder, number)
    write_end(folder, 4)
    expected = query.expected(spark, folder)
    schema = query.stream(spark, folder).schema
    plain = Counter(map(tuple, spark.read.schema(schema).json(str(tmp_path / "plain")).collect()))
    run_until(job(), lambda _: plain + found(spark, tmp_path, name) >= expected)
    assert plain + found(spark, tmp_path, name) == expected


def test_another_query_is_refused_before_anything_is_changed(spark, job_dir, tmp_path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_events(folder, 0)
    frame = QUERIES["tumbling"].stream(spark, folder)
    run_plain(frame, tmp_path / "plain", tmp_path / "checkpoint")
    assert flinkish("adopt", tmp_path / "checkpoint", job_dir).exit_code == 0

    def job(frame):
        env = environment(spark, job_dir)
        env.from_dataframe(frame, uid="frame").sink_to(
            FileSink(str(tmp_path / "out"), FileFormat.JSON), uid="files"
        )
        return env

    error = failure_of(job(QUERIES["distinct-orders"].stream(spark, folder)))
    assert isinstance(error, JobDirError) and "for stateStoreSave" in str(error)
    with settings(spark, {"spark.sql.shuffle.partitions": "3"}):
        assert "has 2 shuffle partitions, and this job 3" in str(failure_of(job(frame)))
    assert not (job_dir / "job.json").exists()
