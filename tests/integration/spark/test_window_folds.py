"""Folds of windows in a job: idle streams are woken, late rows go to the side, the end fires all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flinkish_spark import (
    AggregateColumn,
    AggregateFunction,
    Emit,
    Fold,
    JobStatus,
    MemorySink,
    OutputTag,
    ReduceFunction,
    ValueStateDescriptor,
    VectorizedProcessFunction,
    WatermarkStrategy,
)
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.operators.vectorized import greatest_by_key, sum_by_key
from flinkish_spark.protocol.restore import UnpositionedSources
from flinkish_spark.savepoints.files import RestoreSettings
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    EventTimeTrigger,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)
from tests.integration.spark.test_event_time import ReadOnce
from tests.support.jobs import await_that, environment, rows
from tests.support.savepoint_support import started, stop, stop_with

pytestmark = pytest.mark.timeout(600)
SCHEMA = "user STRING, amount LONG, at LONG"
LATE = OutputTag("late", SCHEMA)
COLUMNS = (AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("orders", Fold.COUNT))


TOTAL = "user STRING, total LONG"
REFUSED = OutputTag("refused", TOTAL)


class Greater(ReduceFunction):
    def reduce(self, first: Any, second: Any) -> Any:
        return first if first.total > second.total else second


class Added(AggregateFunction):
    def create_accumulator(self) -> Any:
        return None, 0

    def add(self, value: Any, accumulator: Any) -> Any:
        return value.user, accumulator[1] + value.amount

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        return first[0], first[1] + second[1]


class Alarms(VectorizedProcessFunction):
    """Sends what is much to the side at once, and a key's total 25 seconds behind its last row."""

    event_time = "at"

    def open(self, context: Any) -> None:
        context.get_state(ValueStateDescriptor("kept", "LONG"))

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> None:
        amounts = batch.column("total").to_numpy()
        much = pa.array(amounts > 5)
        ctx.output(REFUSED, batch.filter(much).select(["user", "total"]))
        kept = ctx.state("kept")
        kept.put([kept.numbers() + sum_by_key(ctx.index, amounts)])
        ctx.register_event_time_timers(greatest_by_key(ctx.index, ctx.times_ms) + 25_000)

    def on_timers(self, domain: Any, ctx: Any) -> Iterator[pa.RecordBatch]:
        assert domain is TimeDomain.EVENT_TIME
        kept, last = ctx.state("kept"), greatest_by_key(ctx.index, ctx.times_ms)
        columns = [*ctx.index.keys, kept.column(), pa.array(last)]
        yield pa.RecordBatch.from_arrays(columns, names=["user", "total", "at"]).filter(
            kept.column().is_valid()
        )
        kept.remove(np.ones(len(ctx.index), dtype=bool))


class AsByDefault(EventTimeTrigger):
    """Fires when windows do by themselves, of which columns know nothing: so it goes element by element."""


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


@pytest.mark.nightly
def test_windows_of_windows_end_with_the_input(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 1, 1_000), ("ben", 2, 2_000), ("ann", 4, 9_000), ("ann", 8, 11_000))
    env, keyed = users(spark, tmp_path, is_bounded=True)
    first = keyed.window(TumblingEventTimeWindows(10_000)).fold(*COLUMNS, uid="totals")
    sessions, sliding, minutes = (MemorySink(f"{tmp_path}/{name}") for name in ("a", "b", "c"))
    keyed.window(EventTimeSessionWindows(3_000)).sum("amount", uid="sessions").sink_to(sessions, uid="out-a")
    keyed.window(SlidingEventTimeWindows(20_000, 10_000)).max("amount", uid="sliding").sink_to(
        sliding, uid="out-b"
    )
    by_element = MemorySink(f"{tmp_path}/by-element")
    own = keyed.window(EventTimeSessionWindows(3_000)).trigger(AsByDefault())
    own.sum("amount", uid="sessions-by-element").sink_to(by_element, uid="out-by-element")
    # The totals have the last instants of their windows, so windows behind them see them on time.
    later = first.key_by("user").window(TumblingEventTimeWindows(20_000))
    later.fold(
        AggregateColumn("sums", Fold.COUNT), AggregateColumn("total", Fold.SUM, "total"), uid="later"
    ).sink_to(minutes, uid="out-c")
    # Rows per key and of vectorised functions have event times, too.
    behind, without = (MemorySink(f"{tmp_path}/{name}") for name in ("behind", "without"))
    greatest = first.key_by("user").reduce(Greater(), emit=Emit.PER_KEY, uid="greater").key_by("user")
    most = greatest.window(TumblingEventTimeWindows(20_000)).max("total", uid="greatest")
    told = first.key_by("user").process(Alarms(), output=TOTAL, uid="alarms")
    alarms = told.key_by("user").window(TumblingEventTimeWindows(100_000)).sum("total", uid="told")
    most.union(alarms).sink_to(behind, uid="out-behind")
    added = keyed.aggregate(Added(), accumulator=TOTAL, output=TOTAL, emit=Emit.PER_KEY, uid="added")
    added.union(told.get_side_output(REFUSED)).sink_to(without, uid="out-without")
    client = env.execute_async()
    assert client.wait(timeout_ms=300_000), "the job does not end"
    assert client.status is JobStatus.FINISHED
    assert found(sessions) == [("ann", 1, 1.0, 4.0), ("ann", 12, 9.0, 14.0), ("ben", 2, 2.0, 5.0)]
    # Windows that columns cannot have give the same rows.
    assert found(by_element) == found(sessions)
    assert by_element.rows()[0].asDict().keys() == sessions.rows()[0].asDict().keys()
    assert found(sliding) == [
        ("ann", 4, -10.0, 10.0),
        ("ann", 8, 0.0, 20.0),
        ("ann", 8, 10.0, 30.0),
        ("ben", 2, -10.0, 10.0),
        ("ben", 2, 0.0, 20.0),
    ]
    assert found(minutes) == [("ann", 2, 13, 0.0, 20.0), ("ben", 1, 2, 0.0, 20.0)]
    assert found(behind) == [
        ("ann", 8, 0.0, 20.0),
        ("ann", 13, 0.0, 100.0),
        ("ben", 2, 0.0, 20.0),
        ("ben", 2, 0.0, 100.0),
    ]
    assert sorted(tuple(row) for row in without.rows()) == [("ann", 8), ("ann", 13), ("ben", 2)]


class Timeless(Alarms):
    event_time = None


def test_windows_behind_rows_whose_time_nobody_says_are_refused(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 1, 1_000))
    for at, assigner in enumerate((TumblingEventTimeWindows(10_000), EventTimeSessionWindows(10_000))):
        env, keyed = users(spark, tmp_path, is_bounded=True, job=f"job-{at}")
        told = keyed.process(Timeless(), output="user STRING, total LONG", uid="alarms").key_by("user")
        windows = told.window(assigner)
        results = windows.sum("total", uid="sums") if at else windows.reduce(Greater(), uid="sums")
        results.sink_to(MemorySink(f"{tmp_path}/rows-{at}"), uid="out")
        with pytest.raises(GraphError, match=r"(?s)'sums' uses event.*name the column with the event_time"):
            env.execute()


@pytest.mark.nightly
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


@pytest.mark.nightly
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
