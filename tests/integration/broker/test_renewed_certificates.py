"""Authority and certificates are renewed in the same files while a job runs, and the broker starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from flinkish_spark import KafkaSink
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from tests.support.jobs import await_that, environment, order, orders_source, rows, running
from tests.support.secure_broker import SecureBroker
from tests.support.services import BROKER_JARS
from tests.support.tls import make_certificates

pytestmark = pytest.mark.timeout(400)


def test_a_job_of_the_jvm_starts_again_with_new_clients(spark: Any, tmp_path: Path) -> None:
    """Kafka's Java client keeps the certificates that it was made with: it was said to lack a right."""
    folder = tmp_path / "tls"
    certificates = make_certificates(folder)
    secured = SecureBroker(
        tmp_path / "broker", jars_dir=BROKER_JARS, certificates=certificates, users={"alice": "word"}
    )
    options = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.authority),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.client),
    }
    with secured:
        servers = secured.certificate_servers
        connection = KafkaConnection(servers, options)

        def produce(*amounts: int) -> None:
            producer = KafkaProducer(**connection.to_client_arguments())
            for amount in amounts:
                producer.send("in", order("a", amount)).get(timeout=60)
            producer.close()

        with KafkaAdmin(connection) as admin:
            admin.create_topic("in", 1)
            admin.create_topic("out", 1)
        env = environment(spark, tmp_path / "job")
        orders = env.from_source(orders_source(servers, "in", options=options), uid="orders")
        orders.sink_to(KafkaSink(servers, "out", options=options), uid="out")
        produce(1, 2)
        with running(env) as client:
            await_that(lambda: rows(client, "out") >= 2, client)
            make_certificates(folder)
            secured.stop()
            secured.start()
            produce(3, 4)
            await_that(lambda: rows(client, "out") >= 4, client)
            assert client.progress.restarts <= 2
            client.stop_with_checkpoint()
            assert client.wait(240_000)
