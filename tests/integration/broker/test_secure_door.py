"""The door against a broker with SASL_SSL; what people can read of it holds no secret."""

from __future__ import annotations

import contextlib
import io
import json
import uuid
from pathlib import Path

import pytest
from kafka import KafkaProducer
from pyspark.errors import StreamingQueryException

import flinkish_spark
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from tests.support.jobs import read_committed
from tests.support.secure_broker import SecureBroker

pytestmark = pytest.mark.timeout(240)
PASSWORD, WRONG = "correct-horse-battery", "not-it-at-all-123"
USERS = {"alice": PASSWORD}


def with_prefix(options: dict[str, str]) -> dict[str, str]:
    return {f"kafka.{name}": value for name, value in options.items()}


def copied(secured: SecureBroker, login: dict[str, str], topic: str) -> list[bytes]:
    arguments = KafkaConnection(secured.bootstrap_servers, login).to_client_arguments()
    return sorted(record.value for record in read_committed(arguments, topic))


def run(spark, checkpoint: Path, options: dict[str, str], source: str, target: str):
    """Copy a topic; return what a person may see of the query."""
    frame = spark.readStream.format("flinkish-kafka").options(**options, subscribe=source)
    frame = frame.option("startingOffsets", "earliest").load().select("key", "value")
    writer = frame.writeStream.format("flinkish-kafka").options(**options, topic=target)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    seen = io.StringIO()
    try:
        query.awaitTermination(120)
    finally:
        with contextlib.redirect_stdout(seen):
            frame.explain(True)
            query.explain(True)
        seen.write(json.dumps([p.json for p in query.recentProgress]))
        seen.write(str(query.exception()))
        for file in (f for f in checkpoint.rglob("*") if f.is_file()):
            seen.write(file.read_text(encoding="utf-8", errors="replace"))
    return seen.getvalue()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", pytest.param("PLAIN", marks=pytest.mark.nightly)])
def test_a_query_logs_in_and_shows_no_secret(spark, secured, tmp_path, capfd, mechanism):
    flinkish_spark.register(spark)
    login = secured.login("alice", mechanism)
    source, target = (f"topic-{uuid.uuid4().hex[:12]}" for _ in range(2))
    connection = KafkaConnection(secured.bootstrap_servers, login)
    with KafkaAdmin(connection) as admin:
        admin.create_topic(source, 1)
        admin.create_topic(target, 1)
    producer = KafkaProducer(**connection.to_client_arguments())
    for n in range(20):
        producer.send(source, value=b"%d" % n)
    producer.close()
    options = {"kafka.bootstrap.servers": secured.bootstrap_servers, **with_prefix(login)}
    seen = run(spark, tmp_path / "c", options, source, target)
    assert copied(secured, login, target) == sorted(b"%d" % n for n in range(20))
    streams = capfd.readouterr()
    for text in (seen, streams.out, streams.err):
        assert PASSWORD not in text


def test_a_wrong_password_is_one_clear_error_without_it(spark, secured, tmp_path, capfd):
    flinkish_spark.register(spark)
    login = secured.login("alice")
    login["sasl.jaas.config"] = login["sasl.jaas.config"].replace(PASSWORD, WRONG)
    options = {"kafka.bootstrap.servers": secured.bootstrap_servers, **with_prefix(login)}
    with pytest.raises(StreamingQueryException) as failed:
        run(spark, tmp_path / "c", options, "any", "any-other")
    assert "AuthorizationError" in str(failed.value)
    streams = capfd.readouterr()
    for text in (str(failed.value), streams.out, streams.err):
        assert WRONG not in text


def test_an_inline_private_key_is_not_in_the_plan(spark, secured, certificates, tmp_path, capfd):
    """KIP-651: the key itself is an option; Spark's own redaction does not know it."""
    flinkish_spark.register(spark)
    key, begin, chain = certificates.client.read_text().partition("-----BEGIN CERT")
    login = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": certificates.authority.read_text(),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": key,
        "ssl.keystore.certificate.chain": begin + chain,
    }
    source, target = (f"topic-{uuid.uuid4().hex[:12]}" for _ in range(2))
    with KafkaAdmin(KafkaConnection(secured.certificate_servers, login)) as admin:
        admin.create_topic(source, 1)
        admin.create_topic(target, 1)
    options = {"kafka.bootstrap.servers": secured.certificate_servers, **with_prefix(login)}
    seen = run(spark, tmp_path / "c", options, source, target)
    secret = key.splitlines()[2]
    streams = capfd.readouterr()
    for text in (seen, streams.out, streams.err):
        assert secret not in text
