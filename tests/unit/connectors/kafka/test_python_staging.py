"""The Python writer without a broker: settings, routing, and what it does about every kind of answer.

The cluster here is a model: it keeps logs, checks sequence numbers as brokers do (KIP-98), and
loses connections, answers and leaders on command. What a real broker can be made to do is in
tests/integration/broker/test_python_staging.py.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from kafka import errors as kafka_errors
from kafka.errors import KafkaConnectionError
from kafka.future import Future

from flinkish_spark.checkpoint.failures import NOT_AUTHORIZED_MARKER
from flinkish_spark.connectors.kafka.client import faults
from flinkish_spark.connectors.kafka.client.admission import (
    OutgoingRecords,
    StickyPartitioner,
    partitions_for_keys,
    split_by_partition,
    split_by_topic,
)
from flinkish_spark.connectors.kafka.client.batch_decoder import batches, decode
from flinkish_spark.connectors.kafka.client.client import UNAUTHORIZED, UNSETTLED, ProducerGrant
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.faults import Reaction, find_reaction
from flinkish_spark.connectors.kafka.client.produce import BatchAnswer, ProduceClient, TopicLayout
from flinkish_spark.connectors.kafka.client.producer import (
    StagedCounts,
    StagedTransaction,
)
from flinkish_spark.connectors.kafka.client.settings import OnRefusal, ProducerSettings, StagingSettings
from flinkish_spark.connectors.task_staging import ABANDON_MS, abandon_all
from flinkish_spark.core.errors import (
    BAD_RECORD_MARKER,
    AuthorizationError,
    BadRecordError,
    BrokerUnavailableError,
    ConfigError,
    InternalError,
    RetriableError,
    SchemaError,
    UnavailableError,
)
from flinkish_spark.protocol.ids import Place
from tests.support.clocks import ManualClock
from tests.support.effort import seeds


class Request:
    """A Produce request of the model: acted on at once, answered when it is finished."""

    is_done = True

    def __init__(self, leader: int, batches: Mapping[Place, bytes]) -> None:
        self.leader, self.batches, self.places = leader, dict(batches), tuple(batches)


Fault = Callable[["ModelCluster", Request, Place], "BatchAnswer | None"]


class ModelCluster:
    """Brokers, topics and one coordinator; stands in for KafkaWire and ProduceClient at once.

    `faults` are asked for every batch, in order, once each: None lets it through, an answer is
    given instead of appending, and what they raise is raised by the request.
    """

    timeout_ms = 1000

    def __init__(self, **topics: tuple[int, ...]) -> None:
        self.connection = KafkaConnection(f"model-{random.getrandbits(60)}:9092")
        self.clock = ManualClock(1_000_000)
        self.leaders = {name.replace("_", "-"): list(leaders) for name, leaders in topics.items()}
        self.logs: dict[Place, list[tuple[int, bytes | None, bytes | None]]] = defaultdict(list)
        self.sequences: dict[Place, list[tuple[int, int, int]]] = defaultdict(list)
        self.requests: list[Request] = []
        self.joined: list[tuple[Place, ...]] = []
        self.faults: list[Fault] = []
        self.max_message_bytes = 1_000_000
        self.epoch = -1
        self.closes = 0

    # -- what KafkaWire and WirePool do -------------------------------------------------------

    def borrow(self, _connection: KafkaConnection) -> Any:
        return self

    def give_back(self, wire: Any) -> None:
        assert wire is self

    def close(self) -> None:
        self.closes += 1

    def init_producer_id(self, name: str, timeout_ms: int, *, connect_within_ms: int) -> ProducerGrant:
        self.epoch += 1
        return ProducerGrant(0, 7, self.epoch)

    # -- what ProduceClient does --------------------------------------------------------------

    def layouts(self, topics: Any, *, connect_within_ms: int) -> dict[str, TopicLayout]:
        unknown = TopicLayout(kafka_errors.UnknownTopicOrPartitionError.errno)
        known = {name: TopicLayout(0, tuple(leaders)) for name, leaders in self.leaders.items()}
        for leaders in self.leaders.values():
            # Whoever asks again finds that a leader was elected.
            leaders[:] = [max(1, leader) for leader in leaders]
        return {name: known.get(name, unknown) for name in topics}

    def add_partitions(self, *_: Any, connect_within_ms: int) -> dict[Place, int]:
        self.joined.append(tuple(_[-1]))
        return dict.fromkeys(_[-1], 0)

    def begin_produce(self, leader: int, name: str, batches: Mapping[Place, bytes], **more: Any) -> Request:
        assert set(batches) <= {place for joined in self.joined for place in joined}
        self.requests.append(Request(leader, batches))
        more["answered"].set()
        return self.requests[-1]

    def finish_produce(self, request: Request) -> dict[Place, BatchAnswer]:
        return {place: self._produce(request, place) for place in request.places}

    def _produce(self, request: Request, place: Place) -> BatchAnswer:
        answer = self.faults.pop(0)(self, request, place) if self.faults else None
        return answer if answer is not None else self.append(request, place)

    def append(self, request: Request, place: Place) -> BatchAnswer:
        data = request.batches[place]
        if self.leaders[place[0]][place[1]] != request.leader:
            return BatchAnswer(kafka_errors.NotLeaderForPartitionError.errno, -1)
        if len(data) > self.max_message_bytes:
            return BatchAnswer(kafka_errors.MessageSizeTooLargeError.errno, -1)
        (raw,) = batches(data)
        header, log, seen = raw.header, self.logs[place], self.sequences[place]
        for sequence, records, offset in seen[-5:]:
            if (sequence, records) == (header.base_sequence, header.records):
                return BatchAnswer(0, offset)
        if header.base_sequence != sum(records for _, records, _ in seen):
            return BatchAnswer(kafka_errors.OutOfOrderSequenceNumberError.errno, -1)
        seen.append((header.base_sequence, header.records, len(log)))
        found = decode(raw, with_headers=False)
        log += zip(
            found.timestamps_ms.tolist(), found.keys.to_pylist(), found.values.to_pylist(), strict=True
        )
        return BatchAnswer(0, seen[-1][2])

    def values(self) -> Counter[bytes | None]:
        return Counter(value for log in self.logs.values() for _, _, value in log)


def settings(cluster: ModelCluster, **changes: Any) -> StagingSettings:
    producer = ProducerSettings(**changes.pop("producer", {}))
    given = {"transactional_id": "t", "transaction_timeout_ms": 60_000, "default_topic": "a", **changes}
    return StagingSettings(connection=cluster.connection, producer=producer, **given)


def staged(cluster: ModelCluster, **changes: Any) -> StagedTransaction:
    transaction = StagedTransaction(settings(cluster, **changes), pool=cluster)  # type: ignore[arg-type]
    transaction._session.client = cluster  # type: ignore[assignment]
    return transaction


def binary(*values: bytes | None) -> Any:
    return pa.array(values, pa.binary())


def numbered(count: int, size: int = 100) -> Any:
    return binary(*(b"%06d" % n + b"." * (size - 6) for n in range(count)))


# -- settings ---------------------------------------------------------------------------------------


def test_settings_have_kafkas_names_with_or_without_sparks_prefix() -> None:
    given = {
        "kafka.compression.type": "ZSTD",
        "batch.size": "1000",
        "max.request.size": "5000",
        "request.timeout.ms": "10",
        "delivery.timeout.ms": "20",
        "acks": "all",
        "linger.ms": "0",
    }
    assert ProducerSettings.of(given) == ProducerSettings(Codec.ZSTD, 1000, 5000, 10, 20)
    assert ProducerSettings.of({}) == ProducerSettings()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("interceptor.x", "s3cret", r"'interceptor.x' is not known.*acks, batch.size, compression.type"),
        ("sasl.jaas.config", "s3cret", "is not known"),
        ("linger.ms", "s3cret", "'linger.ms' must be a whole number"),
        ("batch.size", "0", "'batch.size' must be a whole number of at least 1"),
        ("compression.type", "s3cret", "none, gzip, snappy, lz4 or zstd"),
        ("acks", "1", "'acks' must be all"),
        ("acks", "s3cret", "'acks' must be all, -1, 1 or 0"),
        ("enable.idempotence", "s3cret", "'enable.idempotence' must be true or false"),
    ],
)
def test_settings_that_cannot_be_used_are_named_and_their_values_are_not(
    name: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        ProducerSettings.of({name: value})
    assert "s3cret" not in str(refused.value)


def test_settings_travel_and_hide_secrets() -> None:
    connection = KafkaConnection("b:9092", {"ssl.key.password": "s3cret"})
    one = StagingSettings(connection=connection, transactional_id="t", transaction_timeout_ms=1)
    assert pickle.loads(pickle.dumps(one)) == one
    assert "s3cret" not in repr(one)


def test_the_markers_are_those_that_the_driver_looks_for() -> None:
    assert faults.BAD_RECORD_MARKER == BAD_RECORD_MARKER
    assert faults.NOT_AUTHORIZED_MARKER == NOT_AUTHORIZED_MARKER


#: By the numbers of Kafka's protocol; all others fail.
REACTIONS = {
    Reaction.DONE: {0, 46},
    Reaction.AGAIN: {7, 13, 14, 15, 16, 19, 20, 51, 55},
    Reaction.ASK_FOR_LEADER: {3, 5, 6, 9, 56, 74, 75},
    Reaction.CUT: {10, 18},
    Reaction.BAD_RECORD: {32, 87},
    Reaction.NOT_AUTHORIZED: {29, 31, 53},
    Reaction.FENCED: {47, 48, 49, 90},
}


def test_every_code_has_one_reaction_and_an_unknown_one_fails() -> None:
    """A wrong number would be tried again for ever, or never."""
    found: dict[Reaction, set[int]] = defaultdict(set)
    for number in (-1, *range(130), 9999):
        found[find_reaction(number)].add(number)
    assert {-1, 2, 17, 45, 50, 59, 120, 9999} <= found.pop(Reaction.FAIL)
    assert found == REACTIONS
    assert ({14, 15, 16, 51}, {29, 30, 31, 53}) == (UNSETTLED, UNAUTHORIZED)


# -- routing ----------------------------------------------------------------------------------------


def addressed(count: int = 1, **columns: Any) -> OutgoingRecords:
    given: dict[str, Any] = {"keys": None, "values": numbered(count), "timestamps_ms": 5, **columns}
    return OutgoingRecords.of(
        *(given.get(n) for n in ("keys", "values", "headers", "topics", "partitions")), 5
    )  # type: ignore[arg-type]


def test_records_without_key_fill_one_partition_after_the_other() -> None:
    spreader = StickyPartitioner(10_000, start=lambda count: count - 1)
    sizes = np.full(1000, 100)
    chosen = spreader.choose_partitions("a", sizes[:150], np.arange(4))
    assert chosen.tolist() == [3] * 100 + [0] * 50
    chosen = spreader.choose_partitions("a", sizes, np.arange(4))
    assert (
        chosen.tolist()
        == [0] * 50
        + [1] * 100
        + [2] * 100
        + [3] * 100
        + [0] * 100
        + [1] * 100
        + [2] * 100
        + [3] * 100
        + [0] * 100
        + [1] * 100
        + [2] * 50
    )
    assert spreader.choose_partitions("b", sizes[:1], np.array([2, 5])).tolist() == [5]


def test_records_without_key_keep_away_from_partitions_without_leader() -> None:
    layout = TopicLayout(0, (-1, 1, -1, 2))
    assert set(split_by_partition("a", addressed(1000), layout, StickyPartitioner(2000))) == {1, 3}
    assert set(
        split_by_partition("a", addressed(1000), TopicLayout(0, (-1, -1)), StickyPartitioner(2000))
    ) == {0, 1}


def test_partitions_are_explicit_by_key_or_spread_in_this_order() -> None:
    keys = binary(b"k", b"k", None, b"other")
    records = addressed(4, keys=keys, partitions=pa.array([2, None, None, 0], pa.int32()))
    found = split_by_partition(
        "a", records, TopicLayout(0, (1, 1, 1)), StickyPartitioner(1000, start=lambda _: 1)
    )
    by_key = int(partitions_for_keys(keys, 3)[1])
    expected: dict[int, list[int]] = defaultdict(list)
    for row, partition in enumerate([2, by_key, 1, 0]):
        expected[partition].append(row)
    rows = {p: [int(v[:6]) for v in part.values.to_pylist()] for p, part in found.items()}
    assert rows == expected


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_partition_that_does_not_exist_is_one_clear_error(wrong: int) -> None:
    cluster = ModelCluster(a=(1, 1, 1))
    message = f"partition {wrong} of topic a, which has the partitions 0 to 2"
    with pytest.raises(BadRecordError, match=message), staged(cluster) as transaction:
        transaction.write(None, numbered(2), partitions=pa.array([0, wrong]))
        transaction.prepare()
    assert not cluster.logs


def test_a_partition_that_was_added_since_is_found() -> None:
    cluster = ModelCluster(a=(1,))
    transaction = staged(cluster)
    transaction._session.layout("a")
    cluster.leaders["a"].append(1)
    transaction.write(None, numbered(1), partitions=pa.array([1]))
    assert transaction.prepare() is not None
    assert list(cluster.logs) == [("a", 1)]


def test_records_are_parted_by_topic() -> None:
    records = addressed(4, topics=pa.array(["x", None, "y", "x"]))
    found = {
        topic: [int(v[:6]) for v in part.values.to_pylist()] for topic, part in split_by_topic(records, "a")
    }
    assert found == {"x": [0, 3], "a": [1], "y": [2]}
    for topics in (None, pa.array(["x", None, "y", "x"]), pa.nulls(4, pa.string())):
        with pytest.raises(BadRecordError) as refused:
            list(split_by_topic(addressed(4, topics=topics), None))
        assert str(refused.value).startswith(f"{BAD_RECORD_MARKER} a record names no topic")


def test_columns_of_wrong_type_or_length_are_refused() -> None:
    transaction = staged(ModelCluster(a=(1,)))
    for wrong in (
        {"keys": numbered(3)},
        {"values": pa.array([1, 2])},
        {"topics": pa.array([1, 2])},
        {"partitions": pa.array([1.5, 2.5])},
        {"partitions": pa.array(["x", "y"])},
    ):
        with pytest.raises(SchemaError):
            OutgoingRecords.of(
                **{
                    "keys": None,
                    "values": numbered(2),
                    "headers": None,
                    "topics": None,
                    "partitions": None,
                    "timestamps_ms": 1,
                    **wrong,
                }
            )  # type: ignore[arg-type]
    with pytest.raises(SchemaError):
        transaction.write(numbered(3), numbered(2))
    with pytest.raises(InternalError, match="failed"):
        transaction.prepare()


# -- sending ----------------------------------------------------------------------------------------


def code(code: int, offset: int = -1) -> Fault:
    return lambda _cluster, _request, _place: BatchAnswer(code, offset)


def lost(_cluster: ModelCluster, _request: Request, _place: Place) -> BatchAnswer | None:
    raise BrokerUnavailableError("nobody answered", why="the connection was lost")


def test_a_request_holds_one_batch_for_each_partition_of_a_leader() -> None:
    cluster = ModelCluster(a=(1, 2, 1, 2))
    transaction = staged(cluster, producer={"batch_bytes": 10_000})
    transaction.write(None, numbered(400), partitions=pa.array(np.arange(400) % 4))
    transaction.write(None, numbered(4), topics="a", partitions=pa.array([0, 1, 2, 3]))
    committable = transaction.prepare()
    assert [(r.leader, [p for _, p in r.places]) for r in cluster.requests[:2]] == [(1, [0, 2]), (2, [1, 3])]
    assert committable is not None and committable.records == transaction.counts.sent == 404
    assert (committable.producer_id, committable.producer_epoch) == (7, 0)
    assert cluster.joined == [tuple(("a", p) for p in range(4))], "each partition joins once"
    assert len(cluster.requests) == 6
    place = committable.evidence
    assert 0 <= place.offset < len(cluster.logs[place.topic, place.partition])


def test_a_request_stays_below_its_limit_unless_it_is_one_batch() -> None:
    cluster = ModelCluster(a=(1,) * 8)
    transaction = staged(cluster, producer={"max_request_bytes": 3_000}, max_record_bytes=3_000)
    transaction.write(None, numbered(80), partitions=pa.array(np.arange(80) % 8))
    transaction.prepare()
    sizes = [sum(map(len, request.batches.values())) for request in cluster.requests]
    assert max(sizes) <= 3_000 and len(sizes) == 4


def test_what_was_refused_for_now_is_sent_again_as_it_was() -> None:
    cluster = ModelCluster(a=(1,))
    retriable = sorted(REACTIONS[Reaction.AGAIN] | REACTIONS[Reaction.ASK_FOR_LEADER])
    cluster.faults = [code(c) for c in retriable] + [lost, lost]
    transaction = staged(cluster)
    transaction.write(None, numbered(10))
    assert transaction.prepare() is not None
    assert len({request.batches["a", 0] for request in cluster.requests}) == 1
    assert len(cluster.requests) == len(retriable) + 3
    assert cluster.values() == Counter(numbered(10).to_pylist())


def test_a_batch_follows_its_leader() -> None:
    cluster = ModelCluster(a=(1, 2))
    transaction = staged(cluster)
    transaction._session.layout("a")
    cluster.leaders["a"] = [2, 1]
    transaction.write(None, numbered(2), partitions=pa.array([0, 1]))
    assert transaction.prepare() is not None
    assert [(r.leader, r.places) for r in cluster.requests[-1:]] == [(1, (("a", 1),))]


def test_a_repeat_that_is_there_already_counts_as_written() -> None:
    """The offset is unknown, so the evidence is another batch, or the attempt fails."""
    cluster = ModelCluster(a=(1, 1))
    cluster.faults = [code(kafka_errors.DuplicateSequenceNumberError.errno)]
    transaction = staged(cluster)
    transaction.write(None, numbered(2), partitions=pa.array([0, 1]))
    committable = transaction.prepare()
    assert committable is not None and committable.records == 2
    assert committable.evidence.partition == 1

    cluster.faults = [code(kafka_errors.DuplicateSequenceNumberError.errno)]
    transaction = staged(cluster)
    transaction.write(None, numbered(1))
    with pytest.raises(RetriableError, match="no record with its offset"):
        transaction.prepare()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (kafka_errors.OutOfOrderSequenceNumberError.errno, RetriableError, "45 OUT_OF_ORDER"),
        (kafka_errors.UnknownProducerIdError.errno, RetriableError, "59 UNKNOWN_PRODUCER_ID"),
        (kafka_errors.InvalidProducerEpochError.errno, UnavailableError, "no longer ours"),
        (
            kafka_errors.InvalidRecordError.errno,
            BadRecordError,
            r"^\[FLINKISH_BAD_RECORD\] .* topic a, partition 0",
        ),
        (
            kafka_errors.MessageSizeTooLargeError.errno,
            BadRecordError,
            r"^\[FLINKISH_BAD_RECORD\] the broker refuses",
        ),
        (
            kafka_errors.TopicAuthorizationFailedError.errno,
            AuthorizationError,
            r"WRITE and DESCRIBE on topics \[a\]",
        ),
        (
            kafka_errors.ClusterAuthorizationFailedError.errno,
            AuthorizationError,
            "IDEMPOTENT_WRITE on the cluster",
        ),
        (-7, RetriableError, "-7"),
    ],
)
def test_other_answers_fail_the_attempt(answer: int, kind: type[Exception], message: str) -> None:
    cluster = ModelCluster(a=(1,))
    cluster.faults = [code(answer)]
    transaction = staged(cluster)
    transaction.write(None, numbered(1))
    with pytest.raises(kind, match=message):
        transaction.prepare()
    with pytest.raises(InternalError):
        transaction.write(None, numbered(1))
    assert len(cluster.requests) == 1


def test_nothing_is_tried_for_longer_than_the_delivery_timeout() -> None:
    cluster = ModelCluster(a=(1,))
    cluster.faults = [code(kafka_errors.NotEnoughReplicasError.errno)] * 1000
    started_ms = cluster.clock.now_ms
    transaction = staged(cluster, producer={"delivery_timeout_ms": 5_000})
    transaction.write(None, numbered(1))
    with pytest.raises(UnavailableError, match=r"5000 ms were not enough.*19 NOT_ENOUGH_REPLICAS"):
        transaction.prepare()
    assert 5_000 <= cluster.clock.now_ms - started_ms < 6_000


def test_the_delivery_timeout_leaves_out_what_the_writer_does_elsewhere() -> None:
    """A task has several sinks, and slow operators: nobody can send again while it works for those."""
    cluster = ModelCluster(a=(1,))
    cluster.faults = [code(kafka_errors.NotLeaderForPartitionError.errno)] * 3
    transaction = staged(cluster, producer={"delivery_timeout_ms": 5_000}, transactions_of_task=16)
    # Enough to be sent, and refused, at once.
    transaction.write(None, numbered(3, 100_000))
    assert cluster.requests
    cluster.clock.sleep_ms(60_000)
    assert transaction.prepare() is not None
    assert cluster.values() == Counter(numbered(3, 100_000).to_pylist())


def test_transactions_of_a_task_share_its_memory() -> None:
    """A task that stages in a hundred sinks would else collect 4 MB for each."""
    for together, is_sent in ((1, False), (16, True), (1_000, True)):
        cluster = ModelCluster(a=(1,))
        transaction = staged(cluster, transactions_of_task=together)
        transaction.write(None, numbered(3, 100_000))
        assert bool(cluster.requests) is is_sent
        assert transaction.prepare() is not None


def test_all_that_a_failed_task_has_begun_is_abandoned_in_the_time_of_one() -> None:
    given: list[int] = []

    def abandon(within_ms: int) -> None:
        given.append(within_ms)
        threading.Event().wait(within_ms / 1_000 / 4)

    abandon_all([SimpleNamespace(abandon=abandon) for _ in range(3)])  # type: ignore[list-item]
    assert given[0] <= ABANDON_MS and given[1] < 0.8 * given[0] and given[2] < 0.8 * given[1]


def test_a_batch_that_a_topic_does_not_take_is_cut() -> None:
    cluster = ModelCluster(a=(1, 1))
    cluster.max_message_bytes = 700
    transaction = staged(cluster, producer={"batch_bytes": 20_000})
    for first in range(0, 1000, 250):
        values = numbered(1000).slice(first, 250)
        transaction.write(None, values, partitions=pa.array(np.arange(250) % 2))
    committable = transaction.prepare()
    assert committable is not None and committable.records == 1000
    assert cluster.values() == Counter(numbered(1000).to_pylist())
    assert all(log == sorted(log) for log in cluster.logs.values())
    accepted = [records for seen in cluster.sequences.values() for _, records, _ in seen]
    assert max(accepted) > 1, "the limit was not lowered further than needed"


def chaos(seed: int) -> Iterator[Fault]:
    """Faults at random, for ever, of which none damages a log."""
    draw = random.Random(seed)

    def append_and_lose(cluster: ModelCluster, request: Request, place: Place) -> BatchAnswer | None:
        cluster.append(request, place)
        return lost(cluster, request, place)

    def move(cluster: ModelCluster, _request: Request, place: Place) -> BatchAnswer | None:
        cluster.leaders[place[0]][place[1]] = draw.choice((1, 2, 3, -1))
        return None

    def settle(cluster: ModelCluster, _request: Request, _place: Place) -> BatchAnswer | None:
        for leaders in cluster.leaders.values():
            leaders[:] = [draw.choice((1, 2, 3)) for _ in leaders]
        return None

    def none(_cluster: ModelCluster, _request: Request, _place: Place) -> BatchAnswer | None:
        return None

    kinds = [
        lost,
        append_and_lose,
        move,
        settle,
        settle,
        none,
        none,
        code(kafka_errors.NotEnoughReplicasError.errno),
    ]
    while True:
        yield draw.choice(kinds)


@pytest.mark.parametrize("seed", seeds(20))
def test_whatever_is_lost_on_the_way_every_record_is_there_once_and_in_order(seed: int) -> None:
    cluster = ModelCluster(a=(1, 2, 3), b=(2,))
    faults_of = chaos(seed)
    cluster.faults = [next(faults_of) for _ in range(300)]
    transaction = staged(cluster, producer={"batch_bytes": 3_000, "delivery_timeout_ms": 10_000_000})
    names = pa.array(["a", "b"] * 1000)
    transaction.write(numbered(2000, 10), numbered(2000), topics=names)
    committable = transaction.prepare()
    assert committable is not None and committable.records == 2000
    assert cluster.values() == Counter(numbered(2000).to_pylist())
    for log in cluster.logs.values():
        assert [value for _, _, value in log] == sorted(value for _, _, value in log)


class BareWire:
    """A wire whose client does nothing but keep what it was given."""

    connection, timeout_ms = KafkaConnection("bare:9092"), 1000

    def __init__(self) -> None:
        self.future = Future()
        manager = SimpleNamespace(call_soon=lambda *_: self.future, send=None)
        self._admin: Any = SimpleNamespace(_manager=manager)

    def attempt(self, what: str, body: Callable[[Any], Any], **_: Any) -> Any:
        try:
            return body(self._admin)
        except KafkaConnectionError as error:
            raise self._make_unavailable_error(what, error) from error

    def _make_unavailable_error(self, what: str, cause: BaseException | None) -> BrokerUnavailableError:
        return BrokerUnavailableError(what, why=str(cause))


@pytest.mark.parametrize("how", ["orphaned", "cancelled", "closed"])
def test_a_request_that_its_client_dropped_is_lost(how: str) -> None:
    """Not every way in which kafka-python drops a request is an error of Kafka's."""
    wire, answered = BareWire(), threading.Event()
    client = ProduceClient(wire)  # type: ignore[arg-type]
    request = client.begin_produce(
        1, "t", {("a", 0): b"x"}, acks=-1, request_timeout_ms=9, answered=answered, connect_within_ms=9
    )
    assert not request.is_done and not answered.is_set()
    if how == "orphaned":
        wire._admin = None
    else:
        wire.future.failure(GeneratorExit() if how == "cancelled" else RuntimeError("Transport closed"))
        assert answered.is_set()
    assert request.is_done
    with pytest.raises(BrokerUnavailableError):
        client.finish_produce(request)


# -- the life of a transaction ----------------------------------------------------------------------


def test_without_records_there_is_no_transaction() -> None:
    """Behaviour 144."""
    cluster = ModelCluster(a=(1,))
    with staged(cluster, oversize=OnRefusal.DROP, max_record_bytes=500) as transaction:
        transaction.write(None, numbered(0))
        transaction.write(None, numbered(3, 1000))
        assert transaction.prepare() is None
    assert transaction.counts == StagedCounts(dropped=3)
    assert (cluster.epoch, cluster.joined) == (-1, [])
    with pytest.raises(InternalError, match="is prepared"):
        transaction.write(None, numbered(1))


def test_an_unknown_topic_is_one_clear_error() -> None:
    cluster = ModelCluster(a=(1,))
    transaction = staged(cluster)
    transaction.write(None, numbered(1), topics="none")
    with pytest.raises(RetriableError, match=r"topic 'none' does not exist.*create it"):
        transaction.prepare()
    transaction.abandon()
    transaction.abandon()


def test_small_writes_are_sent_together() -> None:
    cluster = ModelCluster(a=(1,))
    transaction = staged(cluster)
    for n in range(100):
        transaction.write(numbered(1), numbered(1), timestamps_ms=n)
    transaction.prepare()
    assert len(cluster.requests) == 1
    assert [timestamp for timestamp, _, _ in cluster.logs["a", 0]] == list(range(100))
