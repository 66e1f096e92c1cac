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


def said(
    uid: str, topic: str, partition: int, offset: int, time_ms: int, detail: str
) -> list[tuple[str, bytes]]:
    texts = {"error": "unreadable", "source": uid, "topic": topic, "partition": partition, "offset": offset}
    texts |= {"timestamp": time_ms, "detail": detail}
    return [(f"flinkish-{name}", str(text).encode()) for name, text in texts.items()]


def test_a_dead_letter_is_its_record(spark: Any, broker: Any, topic: Any, tmp_path: Path) -> None:
    """Of each way to read: key, value, headers in their order; where it was read, its time, and why.

    A letter's own time is that of its writing: by the record's the retention of its topic would delete it.
    """
    servers, large = broker.bootstrap_servers, {"max.message.bytes": "3000000"}
    any_time, ahead_ms = {"message.timestamp.after.max.ms": str(2**63 - 1)}, 7_200_000
    now_ms = int(time.time() * 1_000)
    env, topics = environment(spark, tmp_path / "job"), {}
    for uid in ("kafka", "records"):
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
            given = KafkaSource(servers, [source], value=value, ending=EndAtLatest())
        env.from_source(given, uid=uid).sink_to(MemorySink(str(tmp_path / uid)), uid=f"{uid}-out")
    with running(env) as client:
        assert client.wait(timeout_ms=250_000)
    misfit, no_text = "the value is no JSON object", "the value is no UTF-8: invalid start byte"
    for uid, (source, letters) in topics.items():
        found = {(r.key, r.value): (r.timestamp, r.headers) for r in read_committed(servers, letters)}
        assert all(now_ms < at < now_ms + 1_000_000 for at, _ in found.values())
        assert {of: headers for of, (_, headers) in found.items()} == {
            (b"ahead", b"[2]"): said(uid, source, 1, 4, now_ms + ahead_ms, misfit),
            (b"k", b"\xff"): [
                *OWN,
                *said(uid, source, 1, 1, 1_234_567, no_text),
            ],
            (b"null", None): said(uid, source, 1, 2, 7, "the record has no value"),
            (None, b"[1]"): said(uid, source, 1, 3, 7, misfit),
            (b"large", LARGE): [*OWN[:1], *said(uid, source, 0, 0, 8, misfit)],
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
            KafkaSource(servers, ["in"], value=value, ending=EndAtLatest()), uid="orders"
        )
        orders.sink_to(KafkaSink(servers, "out", **settings), uid="out")
        return env

    with running(job("one", DeadLetter("bad"), transaction_timeout_ms=240_000)) as client:
        assert client.wait(timeout_ms=120_000)
    assert [record.value for record in read_committed(servers, "bad")] == [b"[1]"]
    # Said of the letters alone, it counts for them alone.
    longer = job("two", DeadLetter("bad", transaction_timeout_ms=400_000), transaction_timeout_ms=240_000)
    with pytest.raises(ConfigError, match="sink 'orders-dead-letter' is 400000 ms, which the brokers"):
        raise failure_of(longer)
