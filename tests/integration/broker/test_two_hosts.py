"""Jobs on a cluster of two hosts that see nothing of the driver's disk."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing import LocalBroker
from tests.support.jobs import order, produce, read_committed
from tests.support.services import BUILD, ROOT
from tests.support.two_hosts import Cluster, two_hosts, why_not

# A single host, and what it says, are tried by day in tests/unit/job/test_executors.py.
pytestmark = [
    pytest.mark.nightly(by_day="tests/integration/broker/test_ways_to_run.py"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there can be two hosts"),
]
_RECORDS = 600


class _BridgedBroker(LocalBroker):
    """A broker that hosts on a bridge reach, too."""

    def __init__(self, address: str, directory: Path) -> None:
        super().__init__(directory, jars_dir=BUILD / "broker-jars")
        with socket.create_server((address, 0)) as free:
            self.bridged = f"{address}:{free.getsockname()[1]}"

    def _security_properties(self) -> dict[str, str]:
        loopback, bridged = f"PLAINTEXT://127.0.0.1:{self._port}", f"BRIDGED://{self.bridged}"
        return {
            "listeners": f"{loopback},{bridged},{self._controller}",
            "advertised.listeners": f"{loopback},{bridged}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,BRIDGED:PLAINTEXT",
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the hosts do not see."""
    return tmp_path_factory.mktemp("driver")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, place: Path) -> Iterator[Cluster]:
    with two_hosts(tmp_path_factory.mktemp("cluster"), [place]) as found:
        yield found


@pytest.fixture(scope="module")
def bridged(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with _BridgedBroker(cluster.address, tmp_path_factory.mktemp("broker")) as broker:
        yield broker.bridged


def run(cluster: Cluster, servers: str, place: Path, kind: str, engine: str) -> dict[str, Any]:
    name = f"{kind}-{engine}"
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for topic in (f"in-{name}", f"out-{name}"):
            admin.create_topic(topic, 2)
    values = [order(f"u{n % 7}", n) for n in range(_RECORDS)]
    for partition in range(2):
        produce(servers, f"in-{name}", values[partition::2], partition=partition)
    words = {
        "--master": cluster.master,
        "--host": cluster.address,
        "--servers": servers,
        "--source": f"in-{name}",
        "--target": f"out-{name}",
        "--folder": place / name,
        "--kind": kind,
        "--engine": engine,
    }
    command = [sys.executable, "-m", "tests.support.two_hosts_app"]
    command += [str(word) for pair in words.items() for word in pair]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": cluster.address}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return said


@pytest.mark.parametrize("engine", ["jvm", "python"])
def test_from_kafka_to_kafka_the_job_directory_stays_with_the_driver(
    cluster: Cluster, bridged: str, place: Path, engine: str
) -> None:
    assert run(cluster, bridged, place, "plain", engine) == {"ended": "finished"}
    found = Counter(
        json.loads(record.value)["amount"] for record in read_committed(bridged, f"out-plain-{engine}")
    )
    assert found == Counter(range(_RECORDS))


@pytest.mark.parametrize(
    ("kind", "what"), [("keyed", "state of operator 'totals'"), ("buffered", "sink 'out'")]
)
def test_what_tasks_keep_in_the_job_directory_is_refused_before_the_start(
    cluster: Cluster, bridged: str, place: Path, kind: str, what: str
) -> None:
    said = run(cluster, bridged, place, kind, "jvm")
    assert said["ended"] == "EnvironmentFault"
    assert "do not see the job directory" in said["says"] and what in said["says"]
    assert not (place / f"{kind}-jvm" / "job").exists()
