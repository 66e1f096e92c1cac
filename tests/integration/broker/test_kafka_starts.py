"""Where Kafka sources begin, and which partitions they read, with both engines and over a real broker."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kafka import KafkaProducer

from flinkish_spark import (
    DeadLetter,
    JobStatus,
    Json,
    KafkaSource,
    KeyedProcessFunction,
    MemorySink,
    OnBadRecord,
    StartingOffsets,
    WatermarkStrategy,
)
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.savepoints.files import RestoreSettings
from flinkish_spark.sources import (
    EndAtLatest,
    EndAtTimestamp,
    KafkaRecordsSource,
    StartAtCommittedOffsets,
    StartAtOffsets,
    StartAtTimestamp,
)
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.support.jobs import (
    ORDER,
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    order,
    orders_source,
    produce,
    read_committed,
    running,
)
from tests.support.savepoint_support import started, stop_with

pytestmark = pytest.mark.timeout(600)


class Times(KeyedProcessFunction):
    """Says when each record was."""

    def process_element(self, value: Any, ctx: Any) -> Any:
        yield value.value, ctx.timestamp()


class Ended(NamedTuple):
    """One job of all sources of this file that have an end; each is a branch of it."""

    topics: dict[str, str]
    rows: dict[str, list[Any]]


#: Where a job begins, and the amounts that it reads then.
STARTS = {"offsets": [13, 14], "time": [10, 11, 12, 13, 14], "group": [12, 13, 14, *range(100, 110)]}


@pytest.fixture(scope="module")
def ended(spark: Any, broker: Any, topic: Any, tmp_path_factory: Any) -> Ended:
    servers, folder = broker.bootstrap_servers, tmp_path_factory.mktemp("ended")
    # Two sources of a job cannot read one topic.
    begin = {name: topic(2) for name in STARTS}
    topics = {"json": topic(), "times": topic(), "alone": topic(3)}
    env, sinks = environment(spark, folder / "job"), {}

    def branch(uid: str, stream: Any) -> None:
        sinks[uid] = MemorySink(str(folder / uid))
        stream.sink_to(sinks[uid], uid=f"{uid}-out")

    for source in begin.values():
        produce(servers, source, [order("a", n) for n in range(10)], partition=0)
        produce(servers, source, [order("a", n) for n in range(100, 110)], partition=1)
    time.sleep(0.05)
    between_ms = int(time.time() * 1_000)
    time.sleep(0.05)
    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        for source in begin.values():
            produce(servers, source, [order("a", n) for n in range(10, 15)], partition=0)
            admin.commit_offsets(f"group-{source}", {(source, 0): 12})
    for name, source in begin.items():
        start = {
            "offsets": StartAtOffsets({source: {0: 13}}, StartingOffsets.LATEST),
            "time": StartAtTimestamp(between_ms),
            "group": StartAtCommittedOffsets(f"group-{source}"),
        }[name]
        given = orders_source(servers, source, starting_offsets=start, ending=EndAtLatest())
        branch(name, env.from_source(given, uid=name))

    source = topics["alone"]
    for partition in range(3):
        amounts = [order("a", 10 * partition + n) for n in range(3)]
        produce(servers, source, amounts, partition=partition)
    given = orders_source(servers, source, partitions={source: [0, 2]}, ending=EndAtLatest())
    branch("alone", env.from_source(given, uid="alone"))

    produce(servers, topics["json"], [order("a", 1), b"no object", order("b", 2)])
    given = KafkaRecordsSource(
        servers,
        pattern=f"{topics['json']}.*",
        value=Json(ORDER, OnBadRecord.DROP),
        metadata=["topic", "offset"],
        ending=EndAtLatest(),
    )
    branch("json", env.from_source(given, uid="json"))

    produce(servers, topics["times"], [b"a"], timestamp_ms=1_234)
    given = KafkaRecordsSource(servers, [topics["times"]], ending=EndAtLatest())
    timed = env.from_source(given, uid="lines").assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps()
    )
    branch("times", timed.key_by("value").process(Times(), output="value STRING, at LONG", uid="times"))

    with running(env) as client:
        assert client.wait(timeout_ms=550_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    return Ended(topics, {uid: sink.rows() for uid, sink in sinks.items()})


def test_a_job_begins_at_offsets_at_a_time_or_where_a_group_stands(ended: Ended) -> None:
    for name, wanted in STARTS.items():
        assert sorted(row.amount for row in ended.rows[name]) == wanted, name


class Late(KafkaAdmin):
    """Behind its first answer, a record comes."""

    def come(self, produce_it: Any) -> None:
        self.produce_it = produce_it

    def _offsets(self, *asked: Any) -> Any:
        answer = super()._offsets(*asked)
        if (produce_it := self.__dict__.pop("produce_it", None)) is not None:
            produce_it()
        return answer


@pytest.mark.parametrize("ask", [StartAtTimestamp, EndAtTimestamp])
def test_a_record_that_comes_between_two_requests(broker: Any, topic: Any, ask: Any) -> None:
    servers, source = broker.bootstrap_servers, topic(1)
    produce(servers, source, [b"before"])
    time.sleep(0.05)
    wanted_ms = int(time.time() * 1_000)
    with Late(KafkaConnection(servers, {})) as admin:
        admin.come(lambda: produce(servers, source, [b"between"]))
        assert ask(wanted_ms).offsets(admin, [(source, 0)]) == {(source, 0): 1}
        assert admin.end_offsets([(source, 0)]) == {(source, 0): 2}


def test_single_partitions_are_read_alone(ended: Ended) -> None:
    assert sorted(row.amount for row in ended.rows["alone"]) == [0, 1, 2, 20, 21, 22]


@pytest.mark.nightly
def test_topics_by_a_pattern_and_one_that_comes_later(
    spark: Any, broker: Any, topic: Any, tmp_path: Path
) -> None:
    servers, prefix = broker.bootstrap_servers, topic()
    sink, env = MemorySink(str(tmp_path / "rows")), environment(spark, tmp_path / "job")
    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        admin.create_topic(f"{prefix}-in-1", 2)
        produce(servers, f"{prefix}-in-1", [b"a", b"b"])
        given = KafkaRecordsSource(servers, pattern=f"{prefix}-in-.*", schema="value STRING, topic STRING")
        env.from_source(given, uid="lines").sink_to(sink, uid="memory")
        with running(env) as client:
            await_that(lambda: len(sink.rows()) == 2, client)
            admin.create_topic(f"{prefix}-in-2", 1)
            produce(servers, f"{prefix}-in-2", [b"c"])
            await_that(lambda: len(sink.rows()) == 3, client)
            client.stop_with_checkpoint()
            client.wait()
    assert sorted(row.value for row in sink.rows()) == ["a", "b", "c"]


def test_topics_that_come_while_the_job_runs_and_while_it_does_not(
    spark: Any, broker: Any, topic: Any, tmp_path: Path
) -> None:
    """The first start finds no topic at all; a longer name that begins like a match is none."""
    servers, prefix = broker.bootstrap_servers, topic()
    sink = MemorySink(str(tmp_path / "rows"))

    def job() -> Any:
        env = environment(spark, tmp_path / "job")
        given = KafkaSource(
            servers,
            pattern=f"{prefix}-in-[0-9]",
            value=Json(ORDER),
            group_id=prefix,
            metadata=["topic", "timestamp"],
        )
        timed = env.from_source(given, uid="orders").assign_timestamps_and_watermarks(
            WatermarkStrategy.for_monotonous_timestamps()
        )
        timed.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals").sink_to(sink, uid="memory")
        return env

    def totals() -> list[tuple[str, int]]:
        return sorted((row.user, row.total) for row in sink.rows())

    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        with running(job()) as client:
            await_that(lambda: client.progress.checkpoints > 0, client)
            admin.create_topic(f"{prefix}-in-1", 2)
            admin.create_topic(f"{prefix}-in-12", 1)
            produce(servers, f"{prefix}-in-1", [order("a", 1)], partition=1)
            produce(servers, f"{prefix}-in-12", [order("none", 1)])
            await_that(lambda: totals() == [("a", 1)], client)
            admin.create_topic(f"{prefix}-in-2", 1)
            produce(servers, f"{prefix}-in-2", [order("a", 2)])
            await_that(lambda: totals() == [("a", 1), ("a", 3)], client)
            client.stop_with_checkpoint()
            client.wait()
        admin.create_topic(f"{prefix}-in-3", 1)
        produce(servers, f"{prefix}-in-3", [order("a", 3)])
        with running(job()) as client:
            await_that(lambda: len(sink.rows()) == 3, client)
            client.stop_with_checkpoint()
            client.wait()
        assert totals() == [("a", 1), ("a", 3), ("a", 6)]
        read = {at: offset for at, offset in admin.committed_offsets(prefix).items() if offset}
    assert read == {(f"{prefix}-in-{topic}", 1 if topic == 1 else 0): 1 for topic in (1, 2, 3)}


@pytest.mark.nightly
def test_a_savepoint_of_a_list_goes_on_with_a_pattern_and_back(
    spark: Any, broker: Any, topic: Any, tmp_path: Path
) -> None:
    """Channels have other numbers, offsets and watermarks stay: nothing is read twice, nothing is late."""
    servers, source = broker.bootstrap_servers, topic(2)
    more, sink = f"{source}-more", MemorySink(str(tmp_path / "rows"))
    read = [{"topics": [source]}, {"pattern": f"{source}.*"}, {"topics": [source, more]}]

    def job(turn: int) -> Any:
        env = environment(spark, tmp_path / f"job-{turn}")
        given = KafkaSource(servers, **read[turn], value=Json(ORDER))
        timed = env.from_source(given, uid="orders").assign_timestamps_and_watermarks(
            WatermarkStrategy.for_monotonous_timestamps()
        )
        windows = timed.key_by("user").window(TumblingEventTimeWindows(10_000))
        windows.sum("amount", uid="totals").sink_to(sink, uid="memory")
        return env

    def put(user: str, amount: int, second: int, partition: int, to: str = source) -> None:
        produce(servers, to, [order(user, amount)], partition=partition, timestamp_ms=1_000 * second)

    def totals() -> list[tuple[str, int]]:
        return sorted((row.user, row.amount) for row in sink.rows())

    def run(turn: int, wanted: list[tuple[str, int]]) -> None:
        at = None if turn == 0 else RestoreSettings(str(tmp_path / f"savepoint-{turn - 1}"))
        with started(job(turn), at) as client:
            await_that(lambda: totals() == wanted, client)
            stop_with(client, tmp_path / f"savepoint-{turn}")

    put("a", 1, 1, 0)
    put("b", 2, 11, 1)
    put("a", 4, 12, 0)
    run(0, first := [("a", 1)])
    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        admin.create_topic(more, 1)
    put("a", 8, 13, 0)
    put("b", 16, 12, 1)
    put("c", 32, 14, 0, more)
    for partition, to in ((0, source), (1, source), (0, more)):
        put("d", 64, 22, partition, to)
    run(1, second := sorted([*first, ("a", 12), ("b", 18), ("c", 32)]))
    for partition, to in ((0, source), (1, source), (0, more)):
        put("e", 128, 33, partition, to)
    run(2, sorted([*second, ("d", 192)]))


def test_a_pattern_with_json_values_and_where_they_came_from(ended: Ended) -> None:
    source, rows = ended.topics["json"], ended.rows["json"]
    found = sorted((row.user, row.amount, row._topic, row._offset) for row in rows)
    assert found == [("a", 1, source, 0), ("b", 2, source, 2)]


@pytest.mark.nightly
def test_dead_letters_of_single_records_over_two_starts(
    spark: Any, broker: Any, topic: Any, tmp_path: Path
) -> None:
    """A second scan, with positions of its own, brings each of them once; the group has the lower ones."""
    servers, source, letters = broker.bootstrap_servers, topic(), topic()
    sink = MemorySink(str(tmp_path / "rows"))
    wanted = {"orders-dead-letter": 2, "memory": 1}
    for start in (1, 2):
        produce(servers, source, [order("a", start), f"bad {start}".encode(), None])
        env = environment(spark, tmp_path / "job")
        value = Json(ORDER, DeadLetter(letters))
        given = KafkaRecordsSource(servers, pattern=f"{source}.*", value=value, group_id=source)
        env.from_source(given, uid="orders").sink_to(sink, uid="memory")
        with running(env) as client:
            await_that(lambda: client.progress.rows_by_sink == wanted, client)
            client.stop_with_checkpoint()
            client.wait()
    assert sorted(row.amount for row in sink.rows()) == [1, 2]
    found = [record.value for record in read_committed(servers, letters)]
    assert Counter(found) == {None: 2, b"bad 1": 1, b"bad 2": 1}
    with KafkaAdmin(KafkaConnection(servers, {})) as admin:
        assert admin.committed_offsets(source) == {(source, 0): 6}


def test_partitions_that_are_ahead_wait_for_the_others(
    spark: Any, broker: Any, topic: Any, tmp_path: Path
) -> None:
    """The reader holds a partition back; the slow one has all of its records read first."""
    servers, source = broker.bootstrap_servers, topic(2)
    hour_ms = 3_600_000
    producer = KafkaProducer(bootstrap_servers=servers)
    for partition, step_ms in ((0, hour_ms), (1, 60_000)):
        for n in range(60):
            producer.send(source, order(f"p{partition}", n), partition=partition, timestamp_ms=n * step_ms)
    producer.close()
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_watermark_alignment("in", hour_ms)
    given = orders_source(servers, source, max_offsets_per_trigger=10, ending=EndAtLatest())
    sink, env = MemorySink(str(tmp_path / "rows")), environment(spark, tmp_path / "job")
    timed = env.from_source(given, uid="orders").assign_timestamps_and_watermarks(strategy)
    timed.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals").sink_to(sink, uid="memory")
    with running(env) as client:
        assert client.wait(timeout_ms=200_000), f"the job did not end; {client.progress}"
    assert len(sink.rows()) == 120
    ends = [entry[source] for entry in logged(tmp_path / "job", source)]
    # An hour of event time is one record here and sixty there: all of partition 1 lies within two records.
    assert all(int(end["0"]) <= 10 for end in ends if int(end["1"]) < 60)


def logged(job_dir: Path, topic: str) -> list[Any]:
    """Return the offsets of a topic in each micro-batch of the log."""
    (folder,) = (job_dir / "spark").glob("*/offsets")
    entries = sorted((one for one in folder.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name))
    lines = [line for one in entries for line in one.read_text().split("\n")[2:] if line.startswith("{")]
    return [offsets for offsets in map(json.loads, lines) if topic in offsets]


def test_the_time_of_a_record_is_that_of_kafka(ended: Ended) -> None:
    assert [tuple(row) for row in ended.rows["times"]] == [("a", 1_234)]
