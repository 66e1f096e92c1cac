"""Jobs on a cluster of two hosts that see nothing of the driver's disk."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.testing import LocalBroker
from tests.support.buckets import LocalS3
from tests.support.databases import TestDatabase
from tests.support.jobs import eventually, order, produce, read_committed
from tests.support.services import BUILD, ROOT
from tests.support.two_hosts import Cluster, two_hosts, why_not
from tests.support.two_hosts_app import REFUSED

# A single host, and what it says, are tried by day in tests/unit/job/test_executors.py.
pytestmark = [
    pytest.mark.nightly(by_day="tests/unit/job/test_executors.py"),
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


@pytest.fixture(scope="module")
def buckets(cluster: Cluster) -> Iterator[LocalS3]:
    """S3 as driver and hosts reach it."""
    with LocalS3(cluster.address) as found:
        yield found


@pytest.fixture
def database(service: Callable[[str], Any]) -> Iterator[TestDatabase]:
    """PostgreSQL, which no host reaches: rows enter it from the driver."""
    server, name = service("postgres"), f"test_{uuid.uuid4().hex[:12]}"
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = server.url.replace(f"/{server.database}", f"/{name}")
    found = TestDatabase(url, server.user, server.password)
    yield found
    found.close()


@contextlib.contextmanager
def started(
    cluster: Cluster,
    servers: str,
    place: Path,
    kind: str,
    bucket: StoreSpec | None = None,
    database: TestDatabase | None = None,
) -> Iterator[subprocess.Popen[str]]:
    name = kind if bucket is None else f"{kind}-s3"
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for topic in (f"in-{name}", f"out-{name}", f"letters-out-{name}"):
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
    }
    command = [sys.executable, "-m", "tests.support.two_hosts_app"]
    if bucket is not None:
        words |= {"--job-dir": bucket.url, "--store-options": json.dumps(dict(bucket.options))}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": cluster.address}
    if database is not None:
        words["--database"] = database.url
        environment["FLINKISH_TEST_PASSWORD"] = database.password
    command += [str(word) for pair in words.items() for word in pair]
    with (place / f"{name}.log").open("w") as log:
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT
        )
        try:
            yield driver
        finally:
            driver.kill()
            driver.wait()


def ended(driver: subprocess.Popen[str], timeout_s: float = 240) -> dict[str, Any]:
    out, _ = driver.communicate(timeout=timeout_s)
    assert driver.returncode == 0, out[-3000:]
    said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return said


def run(
    cluster: Cluster, servers: str, place: Path, kind: str, bucket: StoreSpec | None = None
) -> dict[str, Any]:
    with started(cluster, servers, place, kind, bucket) as driver:
        return ended(driver)


def amounts(servers: str, topic: str) -> Counter[int]:
    return Counter(json.loads(record.value)["amount"] for record in read_committed(servers, topic))


def test_from_kafka_to_kafka_the_job_directory_stays_with_the_driver(
    cluster: Cluster, bridged: str, place: Path
) -> None:
    assert run(cluster, bridged, place, "plain") == {"ended": "finished"}
    assert amounts(bridged, "out-plain") == Counter(range(_RECORDS))


def test_files_and_modules_of_the_driver_s_disk_travel_to_hosts_that_do_not_see_it(
    cluster: Cluster, bridged: str, place: Path
) -> None:
    assert run(cluster, bridged, place, "files") == {"ended": "finished"}
    assert amounts(bridged, "out-files") == Counter(range(_RECORDS))


@pytest.mark.parametrize(
    ("kind", "what"), [("keyed", "state of operator 'totals'"), ("buffered", "sink 'out'")]
)
def test_what_tasks_keep_in_the_job_directory_is_refused_before_the_start(
    cluster: Cluster, bridged: str, place: Path, kind: str, what: str
) -> None:
    said = run(cluster, bridged, place, kind)
    assert said["ended"] == "EnvironmentFault"
    assert "do not see the job directory" in said["says"] and what in said["says"]
    assert not (place / f"{kind}-jvm" / "job").exists()


def totals() -> dict[str, tuple[int, int]]:
    """Return by user how many orders there are, and their sum."""
    by_user: dict[str, list[int]] = {}
    for n in range(_RECORDS):
        by_user.setdefault(f"u{n % 7}", []).append(n)
    return {user: (len(amounts), sum(amounts)) for user, amounts in by_user.items()}


def emitted(rows: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the same of running totals: each order gives one, and the last is the greatest."""
    by_user: dict[str, list[int]] = {}
    for row in rows:
        by_user.setdefault(row["user"], []).append(row["total"])
    assert all(len(set(found)) == len(found) or user == "u0" for user, found in by_user.items())
    return {user: (len(found), max(found)) for user, found in by_user.items()}


def test_keyed_state_lies_in_a_bucket_that_the_hosts_reach(
    cluster: Cluster, bridged: str, place: Path, buckets: LocalS3
) -> None:
    assert run(cluster, bridged, place, "keyed", buckets.new_store()) == {"ended": "finished"}
    rows = (json.loads(record.value) for record in read_committed(bridged, "out-keyed-s3"))
    assert emitted(rows) == totals()


def test_what_tasks_buffer_lies_in_a_bucket_that_the_hosts_reach(
    cluster: Cluster, bridged: str, place: Path, buckets: LocalS3
) -> None:
    bucket = buckets.new_store()
    assert run(cluster, bridged, place, "keyed-buffered", bucket) == {"ended": "finished"}
    found = sorted((place / "keyed-buffered-jvm-s3" / "rows").iterdir())
    assert emitted(row for file in found for row in json.loads(file.read_text())) == totals()
    assert not [key for key in bucket.open_bucket().sizes_below("sinks") if key.endswith(".arrow")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["slow", "slow-keyed"])
def test_a_host_that_is_cut_off_and_an_executor_that_dies_change_nothing(
    cluster: Cluster, bridged: str, place: Path, buckets: LocalS3, kind: str
) -> None:
    is_keyed = kind == "slow-keyed"
    bucket = buckets.new_store() if is_keyed else None
    topic = "out-slow-keyed-s3" if is_keyed else "out-slow"

    def shows(count: int) -> bool:
        assert driver.poll() is None, "the job has ended"
        return len(read_committed(bridged, topic)) >= count

    with started(cluster, bridged, place, kind, bucket) as driver:
        assert eventually(lambda: shows(40), 240)
        assert cluster.executors(0)
        cluster.cut_off(0)
        try:
            # Until Spark has given it up, and while the other host goes on.
            seen = len(read_committed(bridged, topic))
            assert eventually(lambda: shows(seen + 60), 240)
        finally:
            cluster.plug_in(0)
        for executor in cluster.executors(1):
            executor.kill()
        assert ended(driver, 500) == {"ended": "finished"}
    if is_keyed:
        assert emitted(json.loads(record.value) for record in read_committed(bridged, topic)) == totals()
    else:
        assert amounts(bridged, topic) == Counter(range(_RECORDS))


@pytest.mark.timeout(900)
def test_sinks_of_all_families_are_exact_when_a_host_is_cut_off_and_an_executor_dies(
    cluster: Cluster, bridged: str, place: Path, buckets: LocalS3, database: TestDatabase
) -> None:
    bucket, topic = buckets.new_store(), "out-slow-keyed-families-s3"

    def shows(count: int) -> bool:
        assert driver.poll() is None, "the job has ended"
        return len(read_committed(bridged, topic)) >= count

    with started(cluster, bridged, place, "slow-keyed-families", bucket, database) as driver:
        assert eventually(lambda: shows(40), 240)
        cluster.cut_off(0)
        try:
            seen = len(read_committed(bridged, topic))
            assert eventually(lambda: shows(seen + 40), 300)
        finally:
            cluster.plug_in(0)
        for executor in cluster.executors(1):
            executor.kill()
        said = ended(driver, 600)
    assert said["ended"] == "finished"
    found = Counter((row["user"], row["total"]) for row in of_json(bridged, topic))
    assert emitted({"user": user, "total": total} for user, total in found.elements()) == totals()
    assert Counter(tuple(row) for row in said["delta"]) == found
    assert Counter(database.query("SELECT * FROM totals")) == found
    visible = bucket.to_parent(1).to_child("out/objects").open()
    objects = Counter(tuple(row) for key in visible.list("visible") for row in json.loads(visible.read(key)))
    letters = Counter(
        (record["user"], record["total"])
        for record in (json.loads(row["record"]) for row in of_json(bridged, f"letters-{topic}"))
    )
    assert letters == Counter({row: count for row, count in found.items() if row[1] % REFUSED == 0})
    assert objects == found - letters


def of_json(servers: str, topic: str) -> list[dict[str, Any]]:
    return [json.loads(record.value) for record in read_committed(servers, topic)]
