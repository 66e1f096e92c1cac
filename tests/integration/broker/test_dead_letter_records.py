"""Dead letters of Kafka sources: what they keep of their record and say of it; who decides how they wait."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient

from flinkish_spark import DeadLetter, Json, KafkaSink, KafkaSource, MemorySink
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.sources import EndAtLatest, KafkaRecordsSource
from flinkish_spark.testing import LocalBroker
from tests.support.jobs import environment, failure_of, order, produce, read_committed, running
from tests.support.services import BROKER_JARS

ORDER = "user STRING, amount LONG"
OWN = [("trace", b"1"), ("empty", b""), ("trace", b"2"), ("flinkish-error", b"of an earlier life")]
LARGE = b"[" + b"x" * 2_000_000

pytestmark = pytest.mark.timeout(300)


def said(uid: str, topic: str, partition: int, offset: int, detail: str) -> list[tuple[str, bytes]]:
    texts = {"error": "unreadable", "source": uid, "topic": topic, "partition": partition, "offset": offset}
    return [(f"flinkish-{name}", str(text).encode()) for name, text in {**texts, "detail": detail}.items()]


def test_a_dead_letter_is_its_record(spark: Any, broker: Any, topic: Any, tmp_path: Path) -> None:
    """Of each way to read: key, value, headers in their order, time; where it was read, and why.

    The topic of the letters takes no time that is more than an hour ahead, as of Kafka 4 by default.
    """
    servers, large = broker.bootstrap_servers, {"max.message.bytes": "3000000"}
    any_time, ahead_ms = {"message.timestamp.after.max.ms": str(2**63 - 1)}, 7_200_000
    now_ms = int(time.time() * 1_000)
    env, topics = environment(spark, tmp_path / "job"), {}
    for uid in ("jvm", "python", "records"):
        letters = topic(configs={**large, "message.timestamp.after.max.ms": "3600000"})
        source = topic(2, configs={**large, **any_time})
        topics[uid] = (source, letters)
        at = {"partition": 1, "timestamp_ms": 1_234_567}
        produce(servers, source, [order("a", 1), b"\xff"], key=b"k", headers=OWN, **at)
        produce(servers, source, [None, b"[1]"], partition=1, timestamp_ms=7)
        produce(servers, source, [b"[2]"], key=b"ahead", partition=1, timestamp_ms=now_ms + ahead_ms)
        with_room = KafkaProducer(bootstrap_servers=servers, max_request_size=3_000_000)
        with_room.send(source, LARGE, b"large", OWN[:1], partition=0, timestamp_ms=8).get(timeout=30)
        with_room.close()
        value = Json(ORDER, DeadLetter(letters))
        if uid == "records":
            given: Any = KafkaRecordsSource(servers, [source], value=value, ending=EndAtLatest())
        else:
            given = KafkaSource(servers, [source], value=value, reader=uid, ending=EndAtLatest())
        env.from_source(given, uid=uid).sink_to(MemorySink(str(tmp_path / uid)), uid=f"{uid}-out")
    with running(env) as client:
        assert client.wait(timeout_ms=250_000)
    misfit = f"the value is no JSON object of the fields {ORDER}"
    for uid, (source, letters) in topics.items():
        found = {(r.key, r.value): (r.timestamp, r.headers) for r in read_committed(servers, letters)}
        ahead_at, ahead_headers = found.pop((b"ahead", b"[2]"))
        assert now_ms < ahead_at < now_ms + 1_000_000
        assert ahead_headers == said(uid, source, 1, 4, misfit)
        assert found == {
            (b"k", b"\xff"): (1_234_567, [*OWN, *said(uid, source, 1, 1, "the value is not UTF-8")]),
            (b"null", None): (7, said(uid, source, 1, 2, "the record has no value")),
            (None, b"[1]"): (7, said(uid, source, 1, 3, misfit)),
            (b"large", LARGE): (8, [*OWN[:1], *said(uid, source, 0, 0, misfit)]),
        }, uid


@pytest.fixture(scope="module")
def strict_broker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One that allows transactions of five minutes."""
    properties = {"transaction.max.timeout.ms": "300000"}
    folder = tmp_path_factory.mktemp("strict")
    with LocalBroker(folder, jars_dir=BROKER_JARS, extra_properties=properties) as found:
        yield found


@pytest.mark.nightly
def test_the_sink_decides_how_long_dead_letters_may_wait(
    spark: Any, strict_broker: Any, tmp_path: Path
) -> None:
    servers = strict_broker.bootstrap_servers
    admin = KafkaAdminClient(bootstrap_servers=servers)
    admin.create_topics(
        {name: {"num_partitions": 1, "replication_factor": 1} for name in ("in", "out", "bad")},
        wait_for_metadata=True,
    )
    admin.close()
    produce(servers, "in", [order("a", 1), b"[1]"])

    def job(folder: str, dead_letter: DeadLetter, **settings: Any) -> Any:
        env = environment(spark, tmp_path / folder)
        value = Json(ORDER, dead_letter)
        orders = env.from_source(
            KafkaSource(servers, ["in"], value=value, reader="python", ending=EndAtLatest()), uid="orders"
        )
        orders.sink_to(KafkaSink(servers, "out", writer="python", **settings), uid="out")
        return env

    with running(job("one", DeadLetter("bad"), transaction_timeout_ms=240_000)) as client:
        assert client.wait(timeout_ms=120_000)
    assert [record.value for record in read_committed(servers, "bad")] == [b"[1]"]
    # Said of the letters alone, it counts for them alone.
    longer = job("two", DeadLetter("bad", transaction_timeout_ms=400_000), transaction_timeout_ms=240_000)
    with pytest.raises(ConfigError, match="sink 'orders-dead-letter' is 400000 ms, which the brokers"):
        raise failure_of(longer)
