"""Records of 20 MB from Kafka through state to Kafka and Delta, and the limits that must be raised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from pyspark.sql import SparkSession

from flinkish_spark import DeltaSink, Json, KafkaSink, KafkaSource, KeyedProcessFunction, ValueStateDescriptor
from flinkish_spark.testing.broker import LocalBroker
from tests.support.jobs import environment, read_committed, read_delta, rows, run_until

pytestmark = [
    pytest.mark.nightly(by_day="tests/integration/broker/test_python_staging.py"),
    pytest.mark.timeout(600),
]
SIZE, LIMIT = 20_000_000, 21_000_000
FIELDS = "user STRING, text STRING"
#: What a 20 MB record needs of a topic and of producers; readers need nothing.
TOPIC, PRODUCER = {"max.message.bytes": str(LIMIT)}, {"max.request.size": str(LIMIT)}


class Last(KeyedProcessFunction):
    """Keeps each user's last text, and passes it on."""

    def open(self, context: Any) -> None:
        self.last = context.get_state(ValueStateDescriptor("last", "STRING"))

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.last.update(value.text)
        yield value.user, self.last.value()


def texts() -> dict[str, str]:
    return {f"user{number}": chr(ord("a") + number) * (SIZE if number == 1 else 100) for number in range(3)}


def send(broker: LocalBroker, topic: str) -> None:
    producer = KafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, max_request_size=LIMIT, max_block_ms=60_000
    )
    for user, text in texts().items():
        producer.send(topic, json.dumps({"user": user, "text": text}).encode()).get(timeout=60)
    producer.close()


def digests(found: Any) -> list[tuple[str, str]]:
    return sorted((row["user"], hashlib.sha256(row["text"].encode()).hexdigest()) for row in found)


def job(
    spark: SparkSession, folder: Path, broker: LocalBroker, names: tuple[str, str], engine: str, **sink: Any
) -> Any:
    servers, (source, target) = broker.bootstrap_servers, names
    env = environment(spark, folder / "job")
    lines = KafkaSource(servers, [source], value=Json(FIELDS), reader=engine)
    kept = env.from_source(lines, uid="lines").key_by("user").process(Last(), output=FIELDS, uid="kept")
    kept.sink_to(KafkaSink(servers, target, value=Json(), **sink), uid="out")
    kept.sink_to(DeltaSink(str(folder / "table")), uid="table")
    return env


@pytest.mark.parametrize("engine", ["python", "jvm"])
def test_a_record_of_20_mb_comes_through_whole(
    spark: SparkSession, broker: LocalBroker, topic: Callable[..., str], tmp_path: Path, engine: str
) -> None:
    names = topic(configs=TOPIC), topic(configs=TOPIC)
    send(broker, names[0])
    env = job(spark, tmp_path, broker, names, engine, producer=PRODUCER)
    run_until(env, lambda client: rows(client, "out") >= 3 and rows(client, "table") >= 3)
    wanted = digests({"user": user, "text": text} for user, text in texts().items())
    shown = read_committed(broker.bootstrap_servers, names[1])
    assert digests(json.loads(record.value) for record in shown) == wanted
    assert digests(read_delta(tmp_path / "table")) == wanted
