"""A run that ends when it has caught up: what was there at its start is committed, and the next goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import CaughtUp, JobStatus, MemorySink, WatermarkStrategy
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.sources import (
    CollectionSource,
    FileSource,
    HybridSource,
    RateLimit,
    SplitSource,
    TextLines,
)
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.support.jobs import ORDER, TOTAL, RunningTotal, environment, expected_totals

pytestmark = pytest.mark.timeout(600)


class Folder(SplitSource):
    """Lines of files in a folder: a split per file, which grows."""

    schema = ORDER

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def splits(self):
        return sorted(path.name for path in Path(self.folder).glob("*.jsonl"))

    def latest(self, split, start, limit):
        count = len(self._lines(split))
        return count if limit is None else min(count, start + limit)

    def read(self, split, start, end):
        for line in self._lines(split)[start:end]:
            record = json.loads(line)
            yield record["user"], record["amount"]

    def _lines(self, split):
        return (Path(self.folder) / split).read_text().splitlines()

    def write(self, split, orders):
        with (Path(self.folder) / split).open("a") as file:
            file.writelines(json.dumps({"user": u, "amount": a}) + "\n" for u, a in orders)


class Endless(SplitSource):
    """A hundred records each time it is asked; it never has nothing new."""

    schema = "n LONG"

    def splits(self):
        return ["all"]

    def latest(self, split, start, limit):
        return start + (100 if limit is None else min(limit, 100))

    def read(self, split, start, end):
        return ((n,) for n in range(start, end))


class Texts(Endless):
    """Its offsets are texts, of which nobody knows the order."""

    def first(self, split):
        return "a"

    def latest(self, split, start, limit):
        return "b"

    def read(self, split, start, end):
        return iter([(1,)])


def run(env):
    client = env.execute_async(until=CaughtUp())
    assert client.wait(timeout_ms=240_000), f"the run did not end; {client.progress}"
    return client


def totals_job(spark, job_dir, source, sink, **settings):
    env = environment(spark, job_dir, **settings)
    keyed = env.from_source(source, uid="orders").key_by("user")
    keyed.process(RunningTotal(), output=TOTAL, uid="totals").sink_to(sink, uid="out")
    return env


def found(sink) -> Counter:
    return Counter((row.user, row.total) for row in sink.rows())


def test_each_run_reads_what_is_new_and_state_goes_on(spark, job_dir, tmp_path) -> None:
    """Also from an input that is empty at the first start."""
    folder, sink = tmp_path / "in", MemorySink(str(tmp_path / "rows"))
    folder.mkdir()
    source = Folder(folder)

    def job():
        return totals_job(spark, job_dir, source, sink)

    assert run(job()).status is JobStatus.FINISHED
    assert sink.rows() == []
    source.write("a.jsonl", [("x", 1), ("y", 2), ("x", 3)])
    assert run(job()).status is JobStatus.FINISHED
    assert found(sink) == expected_totals({"x": [1, 3], "y": [2]})
    source.write("a.jsonl", [("x", 4)])
    source.write("b.jsonl", [("y", 5)])
    run(job())
    assert found(sink) == expected_totals({"x": [1, 3, 4], "y": [2, 5]})
    nothing_new = run(job())
    assert nothing_new.progress.batches == 0
    assert found(sink) == expected_totals({"x": [1, 3, 4], "y": [2, 5]})


def test_an_input_that_never_pauses_is_read_up_to_where_it_ended(spark, job_dir, tmp_path) -> None:
    sink = MemorySink(str(tmp_path / "rows"))
    env = environment(spark, job_dir)
    env.from_source(Endless().limit_rate(RateLimit(records_per_batch=30)), uid="numbers").sink_to(
        sink, uid="out"
    )
    run(env)
    found = sorted(row.n for row in sink.rows())
    assert found == list(range(len(found)))
    assert len(found) >= 100


def test_an_input_that_never_pauses_and_makes_timers_due_with_each_micro_batch(
    spark, job_dir, tmp_path
) -> None:
    sink = MemorySink(str(tmp_path / "rows"))
    env = environment(spark, job_dir)
    times = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("n")
    numbers = env.from_source(Endless().limit_rate(RateLimit(records_per_batch=50)), times, uid="numbers")
    windows = numbers.key_by(lambda row: 0, key="INT").window(TumblingEventTimeWindows(10))
    windows.reduce(lambda a, b: (b.n,), uid="last").sink_to(sink, uid="out")
    run(env)
    last = sorted(row.n for row in sink.rows())
    assert last == list(range(9, 10 * len(last), 10))
    assert len(last) >= 9


def test_limits_of_a_micro_batch_do_not_end_a_run(spark, job_dir, tmp_path) -> None:
    """Files and a collection behind each other, a file in each micro-batch: everything is read in one run."""
    folder, sink = tmp_path / "in", MemorySink(str(tmp_path / "rows"))
    folder.mkdir()
    for n in range(5):
        (folder / f"{n}.txt").write_text(f"file {n}\n")
    files = FileSource(str(folder), TextLines(), "value STRING", max_files_per_batch=1)
    other = FileSource(str(folder), TextLines(), "value STRING", max_files_per_batch=2)
    env = environment(spark, job_dir)
    env.from_source(files, uid="files").sink_to(sink, uid="out")
    env.from_source(HybridSource(CollectionSource([("first",)], "value STRING"), other), uid="both").sink_to(
        sink_of_both := MemorySink(str(tmp_path / "both")), uid="out-both"
    )
    run(env)
    texts = [f"file {n}" for n in range(5)]
    assert sorted(row.value for row in sink.rows()) == texts
    assert sorted(row.value for row in sink_of_both.rows()) == [*texts, "first"]


def test_windows_that_the_watermark_has_passed_fire_and_others_stay_open(spark, job_dir, tmp_path) -> None:
    """Sums of ten seconds, and of these sums of twenty: both levels fire within the run."""
    folder, sink = tmp_path / "in", MemorySink(str(tmp_path / "rows"))
    folder.mkdir()
    source = Folder(folder)
    source.schema = "user STRING, amount LONG"

    def job():
        env = environment(spark, job_dir)
        times = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("amount")
        stream = env.from_source(source, times, uid="orders").key_by("user")
        tens = stream.window(TumblingEventTimeWindows(10_000)).reduce(
            lambda a, b: (a.user, a.amount + b.amount), uid="tens"
        )
        twenties = tens.key_by("user").window(TumblingEventTimeWindows(20_000))
        twenties.reduce(lambda a, b: (a.user, a.amount + b.amount), uid="twenties").sink_to(sink, uid="out")
        return env

    source.write("a.jsonl", [("x", 1_000), ("x", 11_000), ("x", 21_000), ("x", 45_000)])
    run(job())
    assert sorted(row.amount for row in sink.rows()) == [12_000, 21_000]
    source.write("a.jsonl", [("x", 65_000)])
    run(job())
    assert sorted(row.amount for row in sink.rows()) == [12_000, 21_000, 45_000]


def test_a_run_that_fails_in_between_reads_up_to_the_same_end(spark, job_dir, tmp_path) -> None:
    folder, sink, marks = tmp_path / "in", MemorySink(str(tmp_path / "rows")), tmp_path / "failed"
    folder.mkdir()
    marks.mkdir()
    source = Folder(folder)
    source.write("a.jsonl", [("x", n) for n in range(20)])

    def fail_for_a_while(row):
        # More often than Spark tries a task.
        if row.amount == 7 and len(failed := list(marks.iterdir())) < 5:
            (marks / str(len(failed))).touch()
            raise OSError("no connection")
        return row

    env = environment(spark, job_dir)
    stream = env.from_source(source.limit_rate(RateLimit(records_per_batch=5)), uid="orders")
    stream.map(fail_for_a_while, output=ORDER).sink_to(sink, uid="out")
    client = run(env)
    assert client.progress.restarts > 0
    assert sorted(row.amount for row in sink.rows()) == list(range(20))


def test_a_source_without_an_end_that_can_be_compared_is_refused(spark, job_dir, tmp_path) -> None:
    frame = spark.readStream.format("rate").load()
    env = environment(spark, job_dir)
    env.from_dataframe(frame, uid="rate").sink_to(MemorySink(str(tmp_path)), uid="out")
    with pytest.raises(GraphError, match="'rate' cannot be read until the job has caught up"):
        env.execute_async(until=CaughtUp())
    env = environment(spark, job_dir)
    env.from_source(Texts(), uid="texts").sink_to(MemorySink(str(tmp_path)), uid="out")
    client = env.execute_async(until=CaughtUp())
    with pytest.raises(ConfigError, match="Only of numbers"):
        client.wait(timeout_ms=120_000)
    env = environment(spark, job_dir)
    env.from_source(Endless(), uid="numbers").sink_to(MemorySink(str(tmp_path)), uid="out")
    with pytest.raises(ConfigError, match="until"):
        env.execute_async(until="caught up")  # type: ignore[arg-type]


def test_an_aligned_source_is_refused(spark, job_dir, tmp_path) -> None:
    times = (
        WatermarkStrategy.for_monotonous_timestamps()
        .with_timestamp_assigner("n")
        .with_watermark_alignment("all", 1_000)
    )
    env = environment(spark, job_dir)
    env.from_source(Endless(), times, uid="numbers").sink_to(MemorySink(str(tmp_path)), uid="out")
    with pytest.raises(GraphError, match="with_watermark_alignment"):
        env.execute_async(until=CaughtUp())
