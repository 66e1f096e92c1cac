"""Folds of windows in a job: idle streams are woken, late rows go to the side, the end fires all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import AggregateColumn, Fold, JobStatus, MemorySink, OutputTag, WatermarkStrategy
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.restoring import UnpositionedSources
from flinkish_spark.savepoints.settings import RestoreSettings
from flinkish_spark.store import LocalStore
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)
from tests.savepoint_support import started, stop, stop_with
from tests.spark.test_event_time import ReadOnce
from tests.support import await_that, environment, rows

pytestmark = pytest.mark.timeout(600)
SCHEMA = "user STRING, amount LONG, at LONG"
LATE = OutputTag("late", SCHEMA)
COLUMNS = (AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("orders", Fold.COUNT))


def feed(folder: Path, name: str, *records: tuple[str, int, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"user": user, "amount": n, "at": at}) + "\n" for user, n, at in records]
    (folder / f".{name}").write_text("".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def users(
    spark: Any, tmp_path: Path, *, is_bounded: bool, job: str = "job", folder: str = "in"
) -> tuple[Any, Any]:
    env = environment(spark, tmp_path / job, trigger_interval_ms=50)
    files = spark.readStream.schema(SCHEMA).json(str(tmp_path / folder))
    source = (
        env.from_source(ReadOnce(files), uid="files")
        if is_bounded
        else env.from_dataframe(files, uid="files")
    )
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
    return env, source.assign_timestamps_and_watermarks(strategy).key_by("user")


def found(sink: MemorySink) -> list[tuple[Any, ...]]:
    """Return (user, folds..., start and end in seconds)."""
    plain = [tuple(row) for row in sink.rows()]
    return sorted((*row[:-2], row[-2].timestamp(), row[-1].timestamp()) for row in plain)


def test_windows_of_windows_end_with_the_input(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 1, 1_000), ("ben", 2, 2_000), ("ann", 4, 9_000), ("ann", 8, 11_000))
    env, keyed = users(spark, tmp_path, is_bounded=True)
    first = keyed.window(TumblingEventTimeWindows(10_000)).fold(*COLUMNS, uid="totals")
    sessions, sliding, minutes = (MemorySink(f"{tmp_path}/{name}") for name in ("a", "b", "c"))
    keyed.window(EventTimeSessionWindows(3_000)).sum("amount", uid="sessions").sink_to(sessions, uid="out-a")
    keyed.window(SlidingEventTimeWindows(20_000, 10_000)).max("amount", uid="sliding").sink_to(
        sliding, uid="out-b"
    )
    # The totals have the last instants of their windows, so windows behind them see them on time.
    later = first.key_by("user").window(TumblingEventTimeWindows(20_000))
    later.fold(
        AggregateColumn("sums", Fold.COUNT), AggregateColumn("total", Fold.SUM, "total"), uid="later"
    ).sink_to(minutes, uid="out-c")
    client = env.execute_async()
    assert client.wait(timeout_ms=300_000), "the job does not end"
    assert client.status is JobStatus.FINISHED
    assert found(sessions) == [("ann", 1, 1.0, 4.0), ("ann", 12, 9.0, 14.0), ("ben", 2, 2.0, 5.0)]
    assert found(sliding) == [
        ("ann", 4, -10.0, 10.0),
        ("ann", 8, 0.0, 20.0),
        ("ann", 8, 10.0, 30.0),
        ("ben", 2, -10.0, 10.0),
        ("ben", 2, 0.0, 20.0),
    ]
    assert found(minutes) == [("ann", 2, 13, 0.0, 20.0), ("ben", 1, 2, 0.0, 20.0)]


def test_an_idle_stream_is_woken_late_rows_go_to_the_side_and_a_restart_goes_on(
    spark: Any, tmp_path: Path
) -> None:
    feed(tmp_path / "in", "0", ("ann", 1, 1_000), ("ann", 2, 12_000))

    def job() -> tuple[Any, MemorySink, MemorySink]:
        env, keyed = users(spark, tmp_path, is_bounded=False)
        windows = keyed.window(TumblingEventTimeWindows(10_000)).side_output_late_data(LATE)
        totals = windows.fold(*COLUMNS, uid="totals")
        sink, late = MemorySink(f"{tmp_path}/rows"), MemorySink(f"{tmp_path}/late")
        totals.sink_to(sink, uid="out")
        totals.get_side_output(LATE).sink_to(late, uid="late")
        # One that drops them, and is in two chains.
        sums = keyed.window(TumblingEventTimeWindows(10_000)).sum("amount", uid="sums")
        sums.sink_to(MemorySink(f"{tmp_path}/sums"), uid="sums-out")
        again = sums.key_by("user").window(TumblingEventTimeWindows(10_000)).max("amount", uid="again")
        again.sink_to(MemorySink(f"{tmp_path}/again"), uid="again-out")
        return env, sink, late

    env, sink, _ = job()
    client = env.execute_async()
    # The window is over by what the second record shows, behind its micro-batch.
    await_that(lambda: rows(client, "out") == 1, client)
    client.stop_with_checkpoint()
    client.wait()
    assert found(sink) == [("ann", 1, 1, 0.0, 10.0)]

    feed(tmp_path / "in", "1", ("ann", 4, 2_000), ("ann", 8, 13_000), ("cid", 1, 25_000))
    env, sink, late = job()
    client = env.execute_async()
    await_that(lambda: len(sink.rows()) == 2, client)
    client.stop_with_checkpoint()
    client.wait()
    assert found(sink) == [("ann", 1, 1, 0.0, 10.0), ("ann", 10, 2, 10.0, 20.0)]
    assert [tuple(row) for row in late.rows()] == [("ann", 4, 2_000)]
    assert client.progress.late_dropped == {"sums": 1}
    statistics = JobDir(LocalStore(tmp_path / "job")).statistics()
    assert statistics is not None
    counted = [
        one.late_dropped for entry in statistics.entries for one in entry.participants if one.uid == "sums"
    ]
    assert sum(filter(None, counted)) == 1


def test_windows_by_processing_time_fire_without_records(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 1, 1_000), ("ann", 2, 2_000))
    env, keyed = users(spark, tmp_path, is_bounded=False)
    sink = MemorySink(f"{tmp_path}/rows")
    keyed.window(TumblingProcessingTimeWindows(500)).sum("amount", uid="sums").sink_to(sink, uid="out")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 1, client)
    client.stop_with_checkpoint()
    client.wait()
    assert [tuple(row)[:2] for row in sink.rows()] == [("ann", 3)]


def test_open_windows_go_on_from_a_savepoint_with_more_partitions(spark: Any, tmp_path: Path) -> None:
    names = [f"u{number}" for number in range(40)]
    feed(tmp_path / "in", "0", *((name, 1, 1_000) for name in names), ("ann", 2, 12_000))
    sink = MemorySink(f"{tmp_path}/rows")

    def job(name: str, folder: str) -> Any:
        env, keyed = users(spark, tmp_path, is_bounded=False, job=name, folder=folder)
        keyed.window(EventTimeSessionWindows(5_000)).fold(*COLUMNS, uid="totals").sink_to(sink, uid="out")
        return env

    with started(job("job", "in")) as client:
        await_that(lambda: rows(client, "out") == len(names), client)
        stop_with(client, tmp_path / "savepoint")
    assert found(sink) == sorted((name, 1, 1, 1.0, 6.0) for name in names)
    sink.clear()

    # Ann's session is open in the savepoint; what comes now merges with it, and ben brings the watermark.
    feed(tmp_path / "rest", "1", ("ann", 4, 15_000), ("ben", 1, 30_000))
    restore = RestoreSettings(
        str(tmp_path / "savepoint"), unpositioned=UnpositionedSources.BEGIN_WHERE_THEY_ARE
    )
    with started(job("more", "rest"), restore, partitions=5) as client:
        await_that(lambda: rows(client, "out") == 1, client)
        stop(client)
    assert found(sink) == [("ann", 6, 2, 12.0, 20.0)]
