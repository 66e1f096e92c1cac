"""Barrier records: their form, how they are found among others, and how they are committed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import Json, KafkaSink, KafkaSource
from flinkish_spark.connectors.kafka import source as kafka_upstream
from flinkish_spark.connectors.kafka import stream_reader as rows
from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
from flinkish_spark.connectors.kafka.client import reader as range_reader
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, TopicInfo
from flinkish_spark.connectors.kafka.client.barriers import (
    BARRIER_HEADER,
    BARRIER_KEY,
    BarrierMark,
    BarrierRecords,
    SeenBarrier,
    find_barriers,
    find_mark,
)
from flinkish_spark.connectors.kafka.client.batch_decoder import batches
from flinkish_spark.connectors.kafka.client.batches import UNCHECKED, encode_batches
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.reader import FetchedBatches, OffsetRange, record_schema
from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable
from flinkish_spark.connectors.kafka.stream_options import BarrierRecordPolicy, parse_stream
from flinkish_spark.connectors.kafka.writer import (
    BARRIER_TASK,
    KafkaCommitter,
    KafkaSinkCommittable,
)
from flinkish_spark.contracts.sink import StageRequest
from flinkish_spark.contracts.source import JobPlace, SourceStart
from flinkish_spark.core.config import CheckpointConfig, CheckpointingMode
from flinkish_spark.core.errors import ConfigError, CorruptObjectError, GraphError
from flinkish_spark.core.formats import DeadLetter
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.alignment import encode_announced_channel
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.input_gate import AlignmentMode
from flinkish_spark.protocol.records import Barrier, CommitAnswer, Committable, Outcome, TaskAck
from tests.support.chained_log import JOB, mark
from tests.support.sinks import sink_context_of

# -- form -----------------------------------------------------------------------------------------------


def test_a_mark_survives_its_header() -> None:
    for one in (mark(7, 3, previous=5), mark(1), replace(mark(2), sink="other-1")):
        assert BarrierMark.from_header(one.to_header()) == one
        assert (
            find_mark([{"key": "a", "value": b"b"}, {"key": BARRIER_HEADER, "value": one.to_header()}]) == one
        )
    assert mark(7, 3, previous=5).to_header() == (
        b'{"format":1,"job":"%s","sink":"out","checkpoint":7,"lineage":0,"partitions":3,"previous":5,'
        b'"written_at_ms":%d}' % (str(JOB).encode(), mark(7).written_at_ms)
    )
    assert len(mark(10**12, 10_000, previous=10**12 - 1).to_header()) < 300


def test_other_records_have_no_mark() -> None:
    assert find_mark(None) is None
    assert find_mark([]) is None
    assert find_mark([{"key": "flinkish-batch", "value": b"0/1"}]) is None


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b"{}",
        mark(7).to_header().replace(b'"format":1', b'"format":2'),
        mark(7).to_header().replace(str(JOB).encode(), b"nobody"),
        mark(7).to_header().replace(b'"checkpoint":7', b'"checkpoint":-7'),
        mark(7).to_header().replace(b'"out"', b'"../out"'),
    ],
)
def test_a_header_that_is_none_of_ours_is_an_error(header: bytes | None) -> None:
    with pytest.raises(CorruptObjectError, match="the header 'flinkish-barrier'"):
        BarrierMark.from_header(header)


# -- finding --------------------------------------------------------------------------------------------


class LogBytes:
    """Batches as a broker answers them."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.end = 0

    def add(self, values: list[bytes | None], headers: Any = None, keys: Any = None) -> LogBytes:
        column = pa.array(values, pa.binary())
        keys = pa.nulls(len(values), pa.binary()) if keys is None else pa.array(keys, pa.binary())
        for batch in encode_batches(
            keys, column, headers, 0, producer_id=7, producer_epoch=0, base_sequence=0,
            codec=Codec.NONE, max_batch_bytes=1_000_000,
        ):  # fmt: skip
            rest = UNCHECKED.unpack_from(batch.data)[1:]
            self.batches.append(UNCHECKED.pack(self.end, *rest) + batch.data[UNCHECKED.size :])
            self.end += batch.records
        return self

    def barrier(self, one: BarrierMark) -> LogBytes:
        return self.add([None], [(BARRIER_HEADER, one.to_header())])

    def answers(self, start: int, aborted: tuple[tuple[int, int], ...] = ()) -> Iterator[FetchedBatches]:
        found = [raw for raw in batches(b"".join(self.batches)) if raw.header.last_offset >= start]
        yield FetchedBatches(found[:2], aborted, start)
        yield FetchedBatches(found[2:], aborted, start)


def find(log: LogBytes, start: int, end: int, **more: Any) -> tuple[int, list[tuple[int, int]]]:
    seen = find_barriers(OffsetRange("t", 0, start, end), log.answers(start, **more))
    return seen.end, [(one.offset, int(one.mark.checkpoint)) for one in seen.barriers]


def test_barriers_are_found_among_batches_of_records() -> None:
    log = LogBytes().add([b"a", b"b", b"c"]).barrier(mark(1)).add([b"d"]).add([b"e", b"f"]).barrier(mark(2))
    assert find(log, 0, 8) == (8, [(3, 1), (7, 2)])
    assert find(log, 0, 7) == (7, [(3, 1)])
    # A range may begin and end inside a batch.
    assert find(log, 4, 6) == (6, [])
    assert find(log, 1, 2) == (2, [])
    assert find(log, 3, 4) == (4, [(3, 1)])


def test_what_was_aborted_is_neither_a_barrier_nor_an_end() -> None:
    log = LogBytes().barrier(mark(1)).add([b"a"])
    assert find(log, 0, 2, aborted=((7, 0),)) == (0, [])


def test_single_records_and_large_ones_are_no_barriers() -> None:
    log = LogBytes().add([b"x" * 5_000]).add([None], [("other", b"1")]).add([None]).barrier(mark(3))
    assert find(log, 0, 4) == (4, [(3, 3)])
    assert SeenBarrier(3, mark(3)).mark == mark(3)


def test_the_place_of_an_unreadable_barrier_is_named() -> None:
    log = LogBytes().add([b"a"]).add([None], [(BARRIER_HEADER, b"?")])
    with pytest.raises(CorruptObjectError) as caught:
        find(log, 0, 2)
    assert caught.value.__notes__ == ["The record is in t-0 at offset 1."]


# -- leaving out ----------------------------------------------------------------------------------------


class FakeReader:
    """Reads single records again with their headers, and counts that."""

    headers: ClassVar[dict[int, Any]] = {}
    asked: ClassVar[list[int]] = []

    def __init__(self, connection: Any, settings: Any) -> None:
        assert settings.include_headers

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        assert wanted.end == wanted.start + 1
        FakeReader.asked.append(wanted.start)
        row = {"offset": wanted.start, "headers": FakeReader.headers.get(wanted.start)}
        yield pa.RecordBatch.from_pylist([row], schema=record_schema(include_headers=True))


def test_only_records_that_look_like_barriers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "RangeReader", FakeReader)
    options = parse_stream(
        {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "flinkish.barrier.records": "skip"}
    )
    assert options.barrier_records is BarrierRecordPolicy.SKIP
    rows_ = [
        {"key": None, "value": b"v"},
        {"key": b"k", "value": None},
        {"key": None, "value": None},
        {"key": BARRIER_KEY, "value": None},
        {"key": None, "value": None},
    ]
    table = [{**row, "topic": "t", "partition": 0, "offset": 10 + i} for i, row in enumerate(rows_)]
    batch = pa.RecordBatch.from_pylist(table, schema=record_schema(include_headers=False))
    header = [{"key": BARRIER_HEADER, "value": mark(1).to_header()}]
    FakeReader.headers, FakeReader.asked = {12: header, 13: header}, []
    left = rows._drop_barrier_records(options, batch)
    assert FakeReader.asked == [12, 13, 14]
    assert left.column("offset").to_pylist() == [10, 11, 14]
    FakeReader.asked = []
    whole = batch.slice(0, 1)
    assert rows._drop_barrier_records(options, whole) is whole
    assert rows._drop_barrier_records(options, batch.slice(0, 2)).num_rows == 2
    assert FakeReader.asked == []


def test_the_door_delivers_barrier_records_unless_told_otherwise() -> None:
    given = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}
    assert parse_stream(given).barrier_records is BarrierRecordPolicy.DELIVER
    with pytest.raises(ConfigError, match="use deliver or skip"):
        parse_stream({**given, "flinkish.barrier.records": "maybe"})


# -- committing -----------------------------------------------------------------------------------------


def handle(number: int) -> KafkaCommittable:
    return KafkaCommittable(f"flinkish-{JOB}-1-{number}-0-0", number, 0, Evidence("t", 0, number), 1)


class FakeClient:
    """Answers as told, and notes what it was asked."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes, self.calls = outcomes, []
        self.dead: set[int] = set()

    def commit(self, one: KafkaCommittable) -> CommitAnswer:
        self.calls.append(("commit", one.producer_id))
        return CommitAnswer(self.outcomes.get("commit", Outcome.COMMITTED), "said")

    def abort(self, one: KafkaCommittable) -> CommitAnswer:
        self.calls.append(("abort", one.producer_id))
        return CommitAnswer(self.outcomes.get("abort", Outcome.COMMITTED), "said")

    def is_alive(self, handles: Any) -> dict[KafkaCommittable, Any]:
        return {
            one: SimpleNamespace(alive=one.producer_id not in self.dead, reason="gone") for one in handles
        }


def committer(client: FakeClient) -> KafkaCommitter:
    return KafkaCommitter(client, SimpleNamespace(uid="out"))  # type: ignore[arg-type]


def committables(*staged: KafkaSinkCommittable) -> list[Committable]:
    stored = [json.loads(json.dumps(one.to_payload())) for one in staged]
    return [Committable("out", payload) for payload in stored]


def barrier(number: int, checkpoint: int) -> KafkaSinkCommittable:
    return KafkaSinkCommittable(handle(number), CheckpointId(checkpoint))


def test_the_barrier_of_an_aborted_checkpoint_is_aborted_when_its_data_is_committed() -> None:
    """Checkpoint 4 was aborted; what it staged passed to 5. The same again after a crash."""
    all_ = committables(
        KafkaSinkCommittable(handle(1)), barrier(2, 4), KafkaSinkCommittable(handle(3)), barrier(4, 5)
    )
    expected = [("commit", 1), ("abort", 2), ("commit", 3), ("commit", 4)]
    client = FakeClient()
    for _ in range(2):
        answers = committer(client).commit(CheckpointId(5), all_)
        assert [a.outcome for a in answers] == [Outcome.COMMITTED] * 4
    assert client.calls == expected * 2


@pytest.mark.parametrize("outcome", [Outcome.RETRY, Outcome.FENCED])
def test_nothing_is_committed_behind_a_barrier_that_could_not_be_aborted(outcome: Outcome) -> None:
    client = FakeClient(abort=outcome)
    answers = committer(client).commit(
        CheckpointId(5), committables(barrier(2, 4), KafkaSinkCommittable(handle(3)))
    )
    assert [a.outcome for a in answers] == [outcome]
    assert client.calls == [("abort", 2)]


def test_lost_barrier_records_are_no_lost_data() -> None:
    client = FakeClient(commit=Outcome.LOST)
    [answer] = committer(client).commit(CheckpointId(5), committables(barrier(2, 5)))
    assert answer.outcome is Outcome.ALREADY_COMMITTED
    assert "barrier records only" in answer.detail
    [answer] = committer(client).commit(CheckpointId(5), committables(KafkaSinkCommittable(handle(3))))
    assert answer.outcome is Outcome.LOST


def test_only_what_will_be_committed_has_to_be_alive() -> None:
    client = FakeClient()
    all_ = committables(KafkaSinkCommittable(handle(1)), barrier(2, 4), barrier(4, 5))
    client.dead = {2}
    assert committer(client).why_dead(all_) == {}
    client.dead = {1, 2, 4}
    assert set(committer(client).why_dead(all_)) == {0, 2}


def test_aborting_needs_no_difference() -> None:
    client = FakeClient()
    committer(client).abort(committables(KafkaSinkCommittable(handle(1)), barrier(2, 4)))
    assert client.calls == [("abort", 1), ("abort", 2)]


def test_a_payload_is_read_exactly() -> None:
    assert KafkaSinkCommittable.of(handle(1).to_json()) == KafkaSinkCommittable(handle(1))
    for damaged in (-1, "7", True):
        with pytest.raises(CorruptObjectError):
            KafkaSinkCommittable.of({**handle(1).to_json(), "barrier_of": damaged})
    with pytest.raises(CorruptObjectError):
        KafkaSinkCommittable.of({**handle(1).to_json(), "barriers": 7})


def test_the_id_of_barrier_records_is_one_of_ours() -> None:
    name = f"{TransactionalId.prefix(JOB, OwnerEpoch(3), 5)}-{BARRIER_TASK}-0"
    parsed = TransactionalId.parse(name)
    assert parsed is not None
    assert (parsed.task, str(parsed)) == (BARRIER_TASK, name)


def test_the_checkpoint_of_a_micro_batch_is_what_its_tasks_saw() -> None:
    tasks = [
        TaskAck(0, 5, 1, (Barrier(CheckpointId(7), encode_announced_channel(0, 2)),)),
        TaskAck(1, 0, 0, (Barrier(CheckpointId(7), encode_announced_channel(1, 2)),)),
    ]
    request = StageRequest(None, Lineage(0), BatchId(3), 1, CheckpointId(9))  # type: ignore[arg-type]
    assert request.find_checkpoint(tasks) == CheckpointId(7)
    assert request.find_checkpoint([TaskAck(0, 5, 1)]) is None
    alone = replace(request, is_whole_checkpoint=True)
    assert alone.find_checkpoint([TaskAck(0, 5, 1)]) == CheckpointId(9)


# -- settings -------------------------------------------------------------------------------------------


def test_the_sink_takes_a_choice_and_nothing_else() -> None:
    assert KafkaSink("h:1", "t").barriers is BarrierRecords.NONE
    assert (
        KafkaSink("h:1", "t", barriers=BarrierRecords.EACH_CHECKPOINT).barriers
        is BarrierRecords.EACH_CHECKPOINT
    )
    with pytest.raises(ConfigError, match="barriers is True"):
        KafkaSink("h:1", "t", barriers=True)  # type: ignore[arg-type]


def test_an_upstream_job_is_checked_and_travels_as_text() -> None:
    one = UpstreamJob(AlignmentMode.ALIGNED_WITH_TIMEOUT, 500, "a" * 32)
    assert UpstreamJob.from_option(one.to_option()) == one
    assert one.wanted == JOB
    assert UpstreamJob().wanted is None
    for wrong in (
        {"mode": "SIDEWAYS"},
        {"mode": AlignmentMode.ALIGNED_WITH_TIMEOUT},
        {"alignment_timeout_ms": 5},
        {"job": "orders"},
    ):
        with pytest.raises(ConfigError, match="upstream job"):
            UpstreamJob(**wrong)  # type: ignore[arg-type]


def test_a_source_that_would_not_stop_at_barriers_alone_is_refused() -> None:
    value = Json("a INT", on_bad_record=DeadLetter("letters"))
    with pytest.raises(ConfigError, match="a dead-letter topic"):
        KafkaSource("h:1", ["t"], value=value, aligned_with=UpstreamJob())
    source = KafkaSource("h:1", ["t"], aligned_with=UpstreamJob())
    with pytest.raises(GraphError, match="not the only source"):
        source.load(None, JobPlace(StoreSpec("/job"), "1.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [AlignmentMode.UNALIGNED, AlignmentMode.ALIGNED_WITH_TIMEOUT])
def test_a_compacted_topic_is_refused_where_cuts_are_drawn_ahead_of_barriers(
    mode: AlignmentMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction takes older barrier records away, as they all have one key."""
    upstream = UpstreamJob(mode, 5 if mode is AlignmentMode.ALIGNED_WITH_TIMEOUT else None)
    known = {"plain": TopicInfo(1, None, 1_000), "both": TopicInfo(1, None, 1_000, is_compacted=True)}
    monkeypatch.setattr(KafkaAdmin, "topics", lambda _, names: {name: known[name] for name in names})
    connection = KafkaConnection("h:1")
    upstream.check_topics(connection, ["plain"])
    with pytest.raises(ConfigError, match=r"the topic 'both' is compacted.*use AlignmentMode.ALIGNED"):
        upstream.check_topics(connection, ["plain", "both"])


def test_nobody_asks_for_policies_that_do_not_matter() -> None:
    for upstream in (UpstreamJob(), UpstreamJob(AlignmentMode.AT_LEAST_ONCE)):
        upstream.check_topics(KafkaConnection("h:1"), ["t"])


def test_barrier_records_need_checkpoints_that_are_exactly_once() -> None:
    """Where branches may show a barrier apart, records of checkpoint n come behind its barrier record."""
    schema = T.StructType([T.StructField("a", T.StringType())])
    config = CheckpointConfig(mode=CheckpointingMode.AT_LEAST_ONCE)
    context = sink_context_of(JOB, OwnerEpoch(0), "out", schema, config)
    sink = KafkaSink("h:1", "t", barriers=BarrierRecords.EACH_CHECKPOINT)
    with pytest.raises(ConfigError, match=r"the sink 'out' writes barrier records.*leave barriers out"):
        sink.preflight(None, context)  # type: ignore[arg-type]


def test_a_least_number_of_records_is_refused() -> None:
    given = {
        "kafka.bootstrap.servers": "h:1",
        "subscribe": "t",
        "flinkish.upstream": UpstreamJob().to_option(),
    }
    assert UpstreamJob.from_option(parse_stream(given).upstream) == UpstreamJob()
    with pytest.raises(ConfigError, match="minOffsetsPerTrigger"):
        parse_stream({**given, "minOffsetsPerTrigger": "5"})


def test_a_seeded_source_takes_its_place_between_the_cuts_along() -> None:
    position = {"t": {"0": 5}, "flinkish:checkpoint": 3, "flinkish:upstream": {"job": None}}
    upstream = UpstreamJob()
    assert kafka_upstream.make_upstream_options(None, None) == {}
    plain = kafka_upstream.make_upstream_options(upstream, None)
    assert plain == {"flinkish.upstream": upstream.to_option()}
    seeded = kafka_upstream.make_upstream_options(upstream, SourceStart(position, "/seeds", "1"))
    assert seeded == {**plain, "flinkish.upstream.start": json.dumps(position)}
    unaware = SourceStart({"t": {"0": 5}}, "/seeds", "1")
    assert kafka_upstream.make_upstream_options(upstream, unaware) == plain
