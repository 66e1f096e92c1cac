"""What no restart mends ends a job, at once or after three tries, with its innermost cause."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import ColumnBuckets, DeltaSink, FileSink, MemorySink
from flinkish_spark.core.errors import (
    BadRecordError,
    ConfigError,
    CorruptObjectError,
    FlinkishError,
    InputLostError,
    NoProgressError,
)
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.restart import FixedDelay
from flinkish_spark.sources import CollectionSource, DeltaChanges, DeltaSource, RateLimit
from tests.support.jobs import await_that, environment, failure_of, rows, running

pytestmark = pytest.mark.timeout(900)
#: What must never reach a user's message.
OURS = ("Python Proxy", "py4j", "epoch_writer", "sink_staging", "Traceback", "\tat ")


def job(spark: Any, folder: Path, source: Any, sink: Any, transform: Callable[..., Any] | None = None) -> Any:
    """Of any number of restarts."""
    endless = FixedDelay(attempts=UNLIMITED, delay_ms=0)
    env = environment(spark, folder / "job", trigger_interval_ms=200, restart_strategy=endless)
    stream = env.from_source(source, uid="in")
    (stream if transform is None else stream.transform(transform)).sink_to(sink, uid="out")
    return env


def ended(env: Any) -> FlinkishError:
    error = failure_of(env)
    assert isinstance(error, FlinkishError), repr(error)
    assert [word for word in OURS if word in str(error)] == [], str(error)
    return error


@pytest.mark.nightly
def test_a_delta_table_that_changes_under_its_source(spark: Any, tmp_path: Path) -> None:
    """Updated: the setting is wrong. Created again: another input. Vacuumed: a file is gone, named."""

    def fill(path: str) -> None:
        spark.sql(
            f"CREATE TABLE delta.`{path}` (n LONG, s STRING) USING delta TBLPROPERTIES "
            "('delta.enableChangeDataFeed'='true', 'delta.enableDeletionVectors'='false')"
        )
        spark.sql(f"INSERT INTO delta.`{path}` SELECT id, 'x' FROM range(5)")

    def after(name: str, changes: DeltaChanges, change: Callable[[str], Any]) -> FlinkishError:
        path = str(tmp_path / name / "table")
        fill(path)

        def reading() -> Any:
            source, sink = DeltaSource(path, changes), MemorySink(f"{tmp_path}-{name}")
            return job(spark, tmp_path / name, source, sink, lambda frame: frame.select("n"))

        with running(reading()) as client:
            await_that(lambda: rows(client, "out") >= 5, client)
            client.stop_with_checkpoint()
            assert client.wait(timeout_ms=120_000)
        change(path)
        return ended(reading())

    def update(path: str) -> None:
        spark.sql(f"UPDATE delta.`{path}` SET s = 'y' WHERE n = 1")

    def lose_changes(path: str) -> None:
        # What VACUUM does when the retention is over.
        update(path)
        for file in (Path(path) / "_change_data").glob("*.parquet"):
            file.unlink()

    updated = after("updated", DeltaChanges.ROWS, update)
    assert type(updated) is ConfigError and "updates or deletes rows" in str(updated)
    again = after("again", DeltaChanges.ROWS, lambda p: (shutil.rmtree(p), fill(p)))
    assert type(again) is InputLostError, repr(again)
    gone = after("vacuumed", DeltaChanges.FEED, lose_changes)
    assert type(gone) is InputLostError and "_change_data/cdc-" in gone.what and "VACUUM" in str(gone)


@pytest.mark.parametrize("damage", ["offsets", pytest.param("no metadata", marks=pytest.mark.nightly)])
def test_a_damaged_log_of_sparks(spark: Any, tmp_path: Path, damage: str) -> None:
    source = CollectionSource([(n,) for n in range(400)], "n LONG").limit_rate(
        RateLimit(records_per_batch=20)
    )
    env = job(spark, tmp_path, source, MemorySink(f"{tmp_path}-log"))
    with running(env) as client:
        await_that(lambda: client.progress.checkpoints >= 2, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000)
    (log,) = (tmp_path / "job" / "spark").iterdir()
    kind = damage.removeprefix("no ")
    entries = sorted((log / kind).glob("[0-9]*"), key=lambda entry: int(entry.name)) or [log / kind]
    (entries[-1].parent / f".{entries[-1].name}.crc").unlink(missing_ok=True)
    if damage == "no metadata":
        entries[-1].unlink()
    else:
        entries[-1].write_bytes(entries[-1].read_bytes()[:-10])
    error = ended(job(spark, tmp_path, source, MemorySink(f"{tmp_path}-log")))
    assert type(error) is CorruptObjectError
    # The next owner's folder has the next number.
    file = f"job/spark/2/{entries[-1].relative_to(log)} "
    assert (file if damage != "no metadata" else "MISSING_METADATA_FILE") in error.what


def test_a_partition_value_that_no_file_system_takes(spark: Any, tmp_path: Path) -> None:
    long = CollectionSource([("a" * 300, 1)], "u STRING, n LONG")
    error = ended(job(spark, tmp_path, long, FileSink(f"{tmp_path}/out", bucket_by=ColumnBuckets("u"))))
    assert type(error) is BadRecordError
    assert "the partition column u having at most 253 bytes in a folder's name" in str(error)
    assert '"n":1' in str(error) and "in sink 'out'" in str(error)


def test_a_failure_that_comes_back_ends_the_job_with_its_innermost_cause(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that dies on a record: two restarts, then the end, although the strategy has none."""
    source = CollectionSource([("a", 1)], "u STRING, n LONG")

    def dying(frame: Any) -> Any:
        def die(batches: Any) -> Any:
            import os

            os._exit(3)
            yield from batches

        return frame.mapInPandas(die, "u STRING, n LONG")

    env = job(spark, tmp_path, source, DeltaSink(f"{tmp_path}/out"), dying)
    with running(env) as client, caplog.at_level(logging.WARNING, logger="flinkish_spark"):
        with pytest.raises(NoProgressError) as caught:
            client.wait(timeout_ms=300_000)
        assert client.progress.restarts == 2
    error, told = caught.value, client.progress.last_error
    assert (error.tries, str(error.batch)) == (3, "0")
    assert told == str(error) and len(told) < 1_000
    assert told.startswith("SparkException: Python worker exited unexpectedly (crashed)")
    assert "in sink 'out', at micro-batch 0" in told
    said = [one.getMessage() for one in caplog.records if "restarting in" in one.getMessage()]
    assert len(said) == 2 and all(": SparkException: Python worker exited" in one for one in said)
    assert [word for word in OURS for one in (told, *said) if word in one] == []
