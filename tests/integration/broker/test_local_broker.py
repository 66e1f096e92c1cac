"""LocalBroker keeps its promises: data and port survive a kill, a taken port is one clear error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient

from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.testing.broker import LocalBroker

from .conftest import BROKER_JARS


@pytest.mark.nightly
def test_what_was_acknowledged_survives_a_kill(own_broker: LocalBroker) -> None:
    address = own_broker.start().bootstrap_servers
    admin = KafkaAdminClient(bootstrap_servers=address)
    admin.create_topics({"t": {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    admin.close()
    producer = KafkaProducer(bootstrap_servers=address, acks="all")
    producer.send("t", b"kept").get(timeout=10)
    producer.close()

    own_broker.kill()
    own_broker.start()

    assert own_broker.bootstrap_servers == address
    consumer = KafkaConsumer(bootstrap_servers=address, consumer_timeout_ms=10_000)
    consumer.assign([TopicPartition("t", 0)])
    consumer.seek_to_beginning()
    assert next(consumer).value == b"kept"
    consumer.close()


@pytest.mark.nightly
def test_a_paused_broker_answers_again_after_resume(own_broker: LocalBroker) -> None:
    own_broker.start()
    own_broker.pause()
    time.sleep(4)  # longer than the broker's own session
    own_broker.resume()
    admin = KafkaAdminClient(bootstrap_servers=own_broker.bootstrap_servers)
    admin.create_topics({"t": {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    assert "t" in admin.list_topics()
    admin.close()


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            EnvironmentFault, match=rf"Port {port} .* is taken.* To do: stop it, or give another"
        ):
            LocalBroker(tmp_path, jars_dir=BROKER_JARS, port=port).start()


@pytest.mark.nightly
def test_a_stopped_broker_has_no_pid(own_broker: LocalBroker) -> None:
    own_broker.start()
    own_broker.stop()
    own_broker.stop()
    with pytest.raises(ConfigError, match="not running"):
        own_broker.pause()


def test_an_empty_jar_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `make jars`"):
        LocalBroker(tmp_path, jars_dir=tmp_path)


def test_the_broker_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from flinkish_spark.testing.broker import LocalBroker\n"
        f"broker = LocalBroker({str(tmp_path)!r}, jars_dir={str(BROKER_JARS)!r}).start()\n"
        "print(broker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    broker_pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while _alive(broker_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(broker_pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and ") Z " in stat.read_text())
