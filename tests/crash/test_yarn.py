"""A job on YARN, submitted by `flinkish run`, with all that it keeps on HDFS; its driver is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyspark
import pytest

from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.jars import shim_jar
from flinkish_spark.testing.broker import LocalBroker
from tests.support.environment_archive import pack
from tests.support.hdfs import LocalYarn
from tests.support.jobs import order, produce, read_committed
from tests.support.services import BUILD, ROOT

_USERS = 5
_JARS = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")


@pytest.fixture(scope="module")
def yarn() -> Iterator[LocalYarn]:
    why_not = LocalYarn.why_not(BUILD / "hdfs-jars")
    if why_not:
        pytest.skip(why_not)
    with LocalYarn(BUILD / "hdfs-jars") as found:
        yield found


def words_of(yarn: LocalYarn, folder: Path, target: Sequence[str], words: dict[str, str]) -> list[str]:
    """Return the command with which a user submits the application."""
    jars = [
        shim_jar(),
        *(jar for jar in sorted((BUILD / "jars").glob("*.jar")) if jar.name.startswith(_JARS)),
    ]
    conf = {
        "spark.archives": f"{folder / 'env.tar.gz'}#env",
        "spark.jars": ",".join(map(str, jars)),
        # Not uploaded for each application: on every node of this cluster they lie here.
        "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
        "spark.yarn.maxAppAttempts": "3",
        "spark.pyspark.python": "./env/bin/python",
        "spark.executor.instances": "1",
        "spark.executor.memory": "700m",
        "spark.driver.memory": "900m",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": "127.0.0.1",
        "spark.executorEnv.SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [sys.executable, "-m", "flinkish_spark.cli", "run", *target]
    command += [word for name, value in conf.items() for word in ("-D", f"{name}={value}")]
    return [
        *command,
        str(ROOT / "tests/support/yarn_app.py"),
        *(word for pair in words.items() for word in pair),
    ]


def environment_of(yarn: LocalYarn) -> dict[str, str]:
    """Return the environment of a command: what this process imports must not be found by the application."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PY")}
    return environment | {"HADOOP_CONF_DIR": str(yarn.conf)}


def submitted(yarn: LocalYarn, folder: Path, words: dict[str, str]) -> str:
    """Submit the application, with its driver on the cluster; return its id."""
    done = subprocess.run(
        words_of(yarn, folder, ["--target", "yarn-cluster", "--detached"], words),
        env=environment_of(yarn),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = re.search(r"Submitted application (application_\w+)", done.stderr)
    assert found is not None, done.stderr[-3_000:]
    return found[1]


def drivers(yarn: LocalYarn) -> list[psutil.Process]:
    """Return the processes of the driver: the application master's JVM, and Python below it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(yarn.containers)) and "ApplicationMaster" in " ".join(
                process.cmdline()
            ):
                found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    return found


def kill(yarn: LocalYarn) -> int:
    """Kill the driver, however many processes it is; return how many."""
    found = drivers(yarn)
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return len(found)


def end(yarn: LocalYarn, application: str) -> None:
    """Let YARN end an application."""
    site = ET.parse(yarn.conf / "yarn-site.xml")
    values = {one.findtext("name"): one.findtext("value") for one in site.iter("property")}
    url = f"http://{values['yarn.resourcemanager.webapp.address']}/ws/v1/cluster/apps/{application}/state"
    body = json.dumps({"state": "KILLED"}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT"), timeout=60).close()


def logs(yarn: LocalYarn) -> str:
    """Return the ends of what containers have written."""
    files = sorted(yarn.containers.rglob("stderr")) + sorted(yarn.containers.rglob("stdout"))
    return "\n".join(f"== {file.parent.name}\n{file.read_text(errors='replace')[-1_500:]}" for file in files)


def wait_for(condition: Callable[[], bool], yarn: LocalYarn, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, logs(yarn)
        time.sleep(1)


class Orders:
    """What is sent to a job and what it has shown, with a topic of its own for either."""

    def __init__(self, yarn: LocalYarn, broker: LocalBroker, topic: Callable[..., str]) -> None:
        self._servers, self._source, self._target = (
            broker.bootstrap_servers,
            topic(partitions=2),
            topic(partitions=2),
        )
        self.place: StoreSpec = yarn.new_store()
        # The driver, on whatever node it is, fetches it from there.
        self.place.to_parent(1).open().put("beside/factor", b"1")
        self._sent: list[tuple[str, int]] = []

    @property
    def words(self) -> dict[str, str]:
        """The application's arguments."""
        return {
            "--factor": self.place.to_parent(1).to_child("beside/factor").url,
            "--servers": self._servers,
            "--source": self._source,
            "--target": self._target,
            "--job-dir": self.place.url,
        }

    def send(self, count: int) -> None:
        more = [(f"u{n % _USERS}", n) for n in range(len(self._sent), len(self._sent) + count)]
        for partition in range(2):
            mine = [order(user, amount) for user, amount in more if int(user[1:]) % 2 == partition]
            produce(self._servers, self._source, mine, partition=partition)
        self._sent.extend(more)

    def shown(self) -> list[tuple[str, int]]:
        rows = (json.loads(record.value) for record in read_committed(self._servers, self._target))
        return [(row["user"], row["total"]) for row in rows]

    def check(self) -> None:
        """Each running total is there once."""
        expected, totals = [], dict.fromkeys((f"u{n}" for n in range(_USERS)), 0)
        for user, amount in self._sent:
            totals[user] += amount
            expected.append((user, totals[user]))
        assert sorted(self.shown()) == sorted(expected)


@pytest.mark.nightly(by_day="tests/integration/store/test_hdfs_jobs.py")
@pytest.mark.timeout(1_800)
def test_a_driver_on_yarn_is_killed_and_the_job_goes_on_elsewhere(
    yarn: LocalYarn, broker: LocalBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    """YARN starts the application master again; then the application is ended, and submitted anew."""
    pack(tmp_path / "env.tar.gz")
    orders = Orders(yarn, broker, topic)
    orders.send(200)
    application = submitted(yarn, tmp_path, orders.words)
    wait_for(lambda: len(orders.shown()) >= 200, yarn)
    orders.send(200)
    assert kill(yarn) >= 2, "a JVM, and Python below it"
    orders.send(200)
    wait_for(lambda: len(orders.shown()) >= 600, yarn)
    assert open_job_dir(orders.place).newest_owner().value >= 2
    end(yarn, application)
    wait_for(lambda: not drivers(yarn), yarn)
    orders.send(200)
    application = submitted(yarn, tmp_path, orders.words)
    wait_for(lambda: len(orders.shown()) >= 800, yarn)
    end(yarn, application)
    orders.check()
    assert open_job_dir(orders.place).newest_owner().value >= 3


@contextmanager
def driver_here(yarn: LocalYarn, folder: Path, words: dict[str, str]) -> Iterator[psutil.Popen]:
    """Run the application with its driver in a process of this host, and kill what is left of it."""
    with (folder / "driver.log").open("ab") as log:
        driver = psutil.Popen(
            words_of(yarn, folder, ["--target", "yarn-client"], words),
            env=environment_of(yarn) | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
        )
        try:
            yield driver
        finally:
            for process in [driver, *_below(driver)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            driver.wait(60)


def _below(driver: psutil.Popen) -> list[psutil.Process]:
    try:
        return list(driver.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


@pytest.mark.nightly(by_day="tests/unit/cli/test_cli_run.py")
@pytest.mark.timeout(1_800)
def test_a_driver_beside_yarn_is_killed_and_the_next_one_goes_on(
    yarn: LocalYarn, broker: LocalBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    """Client mode: executors on YARN, the driver here. The second one ends by SIGTERM, with a checkpoint."""
    pack(tmp_path / "env.tar.gz")
    orders = Orders(yarn, broker, topic)

    def shows(count: int, driver: psutil.Popen) -> None:
        def has_shown() -> bool:
            assert driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE, _end_of(tmp_path)
            return len(orders.shown()) >= count

        wait_for(has_shown, yarn)

    orders.send(200)
    with driver_here(yarn, tmp_path, orders.words) as first:
        shows(200, first)
        assert not drivers(yarn), "the driver is on the cluster"
        orders.send(200)
    orders.send(200)
    with driver_here(yarn, tmp_path, orders.words) as second:
        shows(600, second)
        orders.send(200)
        shows(800, second)
        second.terminate()
        assert second.wait(120) == 0, _end_of(tmp_path)
    orders.check()
    assert open_job_dir(orders.place).newest_owner().value == 2


def _end_of(folder: Path) -> str:
    return (folder / "driver.log").read_text(errors="replace")[-3_000:]
