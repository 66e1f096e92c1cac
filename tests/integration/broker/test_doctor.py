"""`flinkish doctor` on a real session, a real broker and a real table: before the first job."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from kafka import KafkaProducer

from flinkish_spark import CheckpointConfig, doctor
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.job.doctor import Health
from tests.support.services import BUILD


@pytest.mark.timeout(240)
def test_each_line_says_what_is_and_what_to_do(spark, broker, topic, tmp_path) -> None:
    good, short, held = topic(2), f"short-{uuid.uuid4().hex}", topic(1)
    with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
        admin.create_topic(short, 1, {"retention.ms": "1000"})
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=uuid.uuid4().hex)
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(held, value=b"open").get(30)
    table = tmp_path / "table"
    spark.range(3).write.format("delta").save(str(table))
    before = sorted(tmp_path.rglob("*"))
    try:
        found = doctor(
            spark,
            job_dir=str(tmp_path / "jobs" / "orders"),
            bootstrap_servers=broker.bootstrap_servers,
            topics=[good, short, held, "no-such-topic-here"],
            tables=[str(table), str(tmp_path / "none")],
            checkpoint=CheckpointConfig(interval_ms=1_000, restart_budget_ms=60_000),
        )
    finally:
        producer.abort_transaction()
        producer.close()
    health = {one.about: one.health for one in found.findings}
    assert not found.is_well
    wanted = {
        "JAR of flinkish_spark": Health.FINE,
        "JAR of Delta Lake": Health.FINE,
        "brokers": Health.FINE,
        f"topic {good}": Health.FINE,
        f"topic {short}": Health.REFUSED,
        "topic no-such-topic-here": Health.REFUSED,
        f"table {table}": Health.FINE,
        f"table {tmp_path / 'none'}": Health.REFUSED,
        f"disk of {tmp_path}": Health.FINE,
    }
    assert {about: health.get(about) for about in wanted} == wanted, str(found)
    warned = [one for one in found.findings if one.about == f"topic {held}"]
    assert [one.health for one in warned] == [Health.WARNING, Health.FINE] and "open" in warned[0].says
    assert all(one.what_to_do for one in found.findings if one.health is not Health.FINE), str(found)
    assert sorted(tmp_path.rglob("*")) == before, "it changes nothing"


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_in_a_terminal(broker, topic, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flinkish_spark.cli", "doctor", "--master", "local[1]", "--json"]
    command += ["--jars", str(BUILD / "jars"), "--job-dir", str(tmp_path / "job")]
    command += ["--bootstrap-servers", broker.bootstrap_servers]
    done = subprocess.run([*command, "--topic", topic(1)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["is_well"]
    done = subprocess.run([*command, "--topic", "none-such"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    assert list(tmp_path.iterdir()) == []
