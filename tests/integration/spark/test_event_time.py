"""Event time of a running job: watermarks in Spark's log, idle streams that are woken, restarts, the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    JobStatus,
    KeyedProcessFunction,
    MemorySink,
    ValueStateDescriptor,
    WatermarkGenerator,
    WatermarkStrategy,
)
from flinkish_spark.connectors.dataframe import DataFrameSource
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.job.requests import StopMode
from flinkish_spark.joins import LookupTable
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.savepoints.files import SavepointDir
from tests.support.jobs import await_that, environment, rows

pytestmark = pytest.mark.timeout(600)
BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness(0)


class Alarm(KeyedProcessFunction):
    """Says what it sees, and once more a second of event time later."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        timers = ctx.timer_service()
        timers.register_event_time_timer(value.at + 1_000)
        yield value.user, "seen", ctx.timestamp(), timers.current_watermark()

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), "fired", time_ms, ctx.timer_service().current_watermark()


class Later(KeyedProcessFunction):
    """Says everything again, half a second later by the wall clock."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        timers = ctx.timer_service()
        timers.register_processing_time_timer(timers.current_processing_time() + 500)
        yield tuple(value)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), "later", time_ms, ctx.timer_service().current_processing_time()


class Known(LookupTable):
    """Knows all but one."""

    def lookup(self, keys: Any) -> dict[Any, Any]:
        return {user: [(len(user),)] for user in keys if user != "stranger"}


def feed(folder: Path, name: str, *records: tuple[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"user": user, "at": at}) + "\n" for user, at in records]
    (folder / f".{name}").write_text("".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def job(spark: Any, tmp_path: Path) -> tuple[Any, MemorySink]:
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    strategy = BOUNDED.with_timestamp_assigner("at")
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(strategy)
    # Their records have times all the same, and what they drop lets time go on.
    known = timed.filter(lambda one: one.user != "nobody").lookup_join(
        Known(), "number LONG", key=lambda one: one.user
    )
    moved = known.rebalance().partition_custom(lambda user, tasks: len(user) % tasks, "user")
    users = moved.flat_map(lambda one: [tuple(one)[:2]] if one.user else [], output="user STRING, at LONG")
    output = "user STRING, what STRING, time LONG, clock LONG"
    alarms = users.key_by("user").process(Alarm(), output=output, uid="alarms")
    again = alarms.key_by("user").process(Later(), output=output, uid="later")
    sink = MemorySink(f"{tmp_path}/rows")
    again.sink_to(sink, uid="out")
    return env, sink


def watermarks(tmp_path: Path) -> list[int]:
    """Return what each micro-batch of the log carried."""
    (folder,) = (tmp_path / "job" / "spark").glob("*/offsets")
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.isdecimal()), key=lambda e: int(e.name)
    )
    return [LoggedOffsets.parse(entry.read_text()).control.time.watermark_ms for entry in entries]


def test_an_idle_stream_is_woken_and_time_survives_a_restart(spark: Any, tmp_path: Path) -> None:
    """Behaviour 124: what micro-batches carry never goes back."""
    feed(tmp_path / "in", "0", ("ann", 10_000), ("ben", 15_000))
    env, sink = job(spark, tmp_path)
    client = env.execute_async()
    # Ann's alarm is due by what ben has brought, his is not. Each of the three rows comes again, later.
    await_that(lambda: rows(client, "out") == 6, client)
    client.stop_with_checkpoint()
    client.wait()
    found = {tuple(row)[:3] for row in sink.rows() if row["what"] != "later"}
    assert found == {("ann", "seen", 10_000), ("ben", "seen", 15_000), ("ann", "fired", 11_000)}
    later = [row for row in sink.rows() if row["what"] == "later"]
    assert all(row["clock"] >= row["time"] for row in later)
    carried = watermarks(tmp_path)
    assert carried == sorted(carried) and (carried[0], carried[-1]) == (MIN_WATERMARK_MS, 14_999)

    feed(tmp_path / "in", "1", ("cid", 12_000))
    env, sink = job(spark, tmp_path)
    client = env.execute_async()
    # The record is late: its timer fires at once, and so does nothing of ben's.
    await_that(lambda: any(row["what"] == "fired" and row["user"] == "cid" for row in sink.rows()), client)
    assert not [row for row in sink.rows() if row["user"] == "ben" and row["what"] == "fired"]
    # A record that is dropped behind the strategy lets time go on, and nobody sees it.
    feed(tmp_path / "in", "2", ("nobody", 15_500), ("stranger", 20_000))
    await_that(lambda: any(row["what"] == "fired" and row["user"] == "ben" for row in sink.rows()), client)
    client.stop_with_checkpoint()
    client.wait()
    of_cid = [tuple(row) for row in sink.rows() if row["user"] == "cid" and row["what"] != "later"]
    assert of_cid[0] == ("cid", "seen", 12_000, 14_999)
    assert {row["user"] for row in sink.rows()} == {"ann", "ben", "cid"}
    carried = watermarks(tmp_path)
    assert carried == sorted(carried) and carried[-1] == 19_999


@dataclass(frozen=True)
class ReadOnce(DataFrameSource):
    """Files of which there come no more."""

    @property
    def is_bounded(self) -> bool:
        return True

    def has_ended(self, position: LoggedOffsets) -> bool:
        return any(isinstance(one, dict) and one.get("logOffset", -1) >= 0 for one in position.sources)


def test_behind_the_end_of_its_input_a_job_fires_all_timers_and_ends(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 10_000), ("ben", 15_000))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    source = env.from_source(ReadOnce(files), uid="files")
    timed = source.assign_timestamps_and_watermarks(BOUNDED.with_timestamp_assigner("at"))
    output = "user STRING, what STRING, time LONG, clock LONG"
    sink = MemorySink(f"{tmp_path}/rows")
    timed.key_by("user").process(Alarm(), output=output, uid="alarms").sink_to(sink, uid="out")
    client = env.execute_async()
    assert client.wait(timeout_ms=240_000), "the job does not end"
    assert client.status is JobStatus.FINISHED
    fired = {row["user"]: row["clock"] for row in sink.rows() if row["what"] == "fired"}
    assert fired.keys() == {"ann", "ben"} and fired["ben"] == MAX_WATERMARK_MS


def pipeline(env: Any, spark: Any, folder: Path, uid: str, sink: MemorySink) -> None:
    files = spark.readStream.schema("user STRING, at LONG").json(str(folder))
    source = env.from_dataframe(files, uid=f"files-{uid}")
    timed = source.assign_timestamps_and_watermarks(BOUNDED.with_timestamp_assigner("at"))
    output = "user STRING, what STRING, time LONG, clock LONG"
    timed.key_by("user").process(Alarm(), output=output, uid=f"alarms-{uid}").sink_to(sink, uid=f"out-{uid}")


@pytest.mark.nightly
def test_a_source_that_stands_still_holds_back_no_other_pipeline(spark: Any, tmp_path: Path) -> None:
    """Two pipelines in one job: in Flink, too, each goes by its own inputs."""
    sinks = {uid: MemorySink(f"{tmp_path}/{uid}") for uid in ("quick", "slow")}

    def begin() -> Any:
        env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
        for uid, sink in sinks.items():
            pipeline(env, spark, tmp_path / f"in-{uid}", uid, sink)
        return env.execute_async()

    def fired(uid: str) -> set[tuple[str, int]]:
        return {(row["user"], row["time"]) for row in sinks[uid].rows() if row["what"] == "fired"}

    feed(tmp_path / "in-slow", "0", ("sam", 5_000))
    feed(tmp_path / "in-quick", "0", ("ann", 10_000), ("ben", 15_000))
    client = begin()
    await_that(lambda: fired("quick") == {("ann", 11_000)} and rows(client, "out-slow") == 1, client)
    client.stop_with_checkpoint()
    client.wait()
    assert fired("slow") == set()

    # Each goes on where it stood: what is late for the one is on time for the other.
    feed(tmp_path / "in-quick", "1", ("cid", 12_000))
    feed(tmp_path / "in-slow", "1", ("tom", 12_000))
    client = begin()
    await_that(lambda: ("sam", 6_000) in fired("slow") and rows(client, "out-quick") >= 2, client)
    client.stop_with_checkpoint()
    client.wait()
    seen = {row["user"]: row["clock"] for uid in sinks for row in sinks[uid].rows() if row["what"] == "seen"}
    assert (seen["cid"], seen["tom"]) == (14_999, 4_999)
    assert ("cid", 13_000) in fired("quick") and fired("slow") == {("sam", 6_000)}
    least = watermarks(tmp_path)
    assert least == sorted(least) and least[-1] == 11_999


class Total(KeyedProcessFunction):
    """Counts what came by the end of each ten seconds of event time."""

    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("n", "LONG"))

    def process_element(self, value: Any, ctx: Any) -> None:
        self.count.update((self.count.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(ctx.timestamp() // 10_000 * 10_000 + 9_999)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield "all", time_ms, self.count.value()


def test_a_job_that_is_drained_commits_all_that_waits_for_event_time(spark: Any, tmp_path: Path) -> None:
    """Two operators, one behind the other: the results of the first are in those of the second."""
    feed(tmp_path / "in", "0", ("ann", 10_000), ("ben", 15_000), ("ann", 31_000))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(
        BOUNDED.with_timestamp_assigner("at")
    )
    output = "who STRING, time LONG, n LONG"
    each = timed.key_by("user").process(Total(), output=output, uid="each")
    sink = MemorySink(f"{tmp_path}/rows")
    each.key_by("who").process(Total(), output=output, uid="all").sink_to(sink, uid="out")
    client = env.execute_async()
    # What the watermark 30,999 has let out; ann's second ten seconds wait, and so does what comes of them.
    await_that(lambda: rows(client, "out") == 1, client)
    answer = client.stop_with_savepoint(str(tmp_path / "savepoint"), StopMode.DRAIN).wait(90_000)
    assert answer is not None and answer.is_completed, answer
    assert client.wait(60_000), "the job did not stop"
    assert [tuple(row) for row in sink.rows()] == [("all", 19_999, 2), ("all", 39_999, 3)]
    metadata = SavepointDir(tmp_path / "savepoint").metadata()
    assert metadata.times is not None and not metadata.times.agenda.groups
    assert metadata.times.watermarks.get("all") == 30_999


class Behind(WatermarkGenerator):
    """Says that records come up to five seconds late."""

    def on_event(self, event: Any, timestamp_ms: int) -> int | None:
        return timestamp_ms - 5_000 if event.user != "nobody" else None


@pytest.mark.nightly
def test_a_generator_of_the_users_says_how_far_event_time_is(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 10_000), ("cid", 16_500), ("nobody", 90_000))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    strategy = WatermarkStrategy.for_generator(Behind).with_timestamp_assigner(
        lambda record, known: record.at
    )
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(strategy)
    output = "user STRING, what STRING, time LONG, clock LONG"
    sink = MemorySink(f"{tmp_path}/rows")
    timed.key_by("user").process(Alarm(), output=output, uid="alarms").sink_to(sink, uid="out")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 4, client)
    client.stop_with_checkpoint()
    client.wait()
    fired = [tuple(row) for row in sink.rows() if row["what"] == "fired"]
    assert fired == [("ann", "fired", 11_000, 11_500)]
