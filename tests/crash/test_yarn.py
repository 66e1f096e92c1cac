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
from collections.abc import Callable, Iterator
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


def submitted(yarn: LocalYarn, folder: Path, words: dict[str, str]) -> str:
    """Submit the application as a user would; return its id."""
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
    command = [sys.executable, "-m", "flinkish_spark.cli", "run", "--target", "yarn-cluster", "--detached"]
    command += [word for name, value in conf.items() for word in ("-D", f"{name}={value}")]
    command += [str(ROOT / "tests/support/yarn_app.py"), *(word for pair in words.items() for word in pair)]
    # What this process imports must not be found by the application.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PY")}
    environment |= {"HADOOP_CONF_DIR": str(yarn.conf)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT
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


@pytest.mark.nightly(by_day="tests/integration/store/test_hdfs_jobs.py")
@pytest.mark.timeout(1_800)
def test_a_driver_on_yarn_is_killed_and_the_job_goes_on_elsewhere(
    yarn: LocalYarn, broker: LocalBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    """YARN starts the application master again; then the application is ended, and submitted anew."""
    pack(tmp_path / "env.tar.gz")
    servers, source, target = broker.bootstrap_servers, topic(partitions=2), topic(partitions=2)
    place: StoreSpec = yarn.new_store()
    # The driver, on whatever node it is, fetches it from there.
    place.above(1).open().put("beside/factor", b"1")
    words = {
        "--factor": place.above(1).below("beside/factor").url,
        "--servers": servers,
        "--source": source,
        "--target": target,
        "--job-dir": place.url,
    }
    sent: list[tuple[str, int]] = []

    def send(count: int) -> None:
        more = [(f"u{n % _USERS}", n) for n in range(len(sent), len(sent) + count)]
        for partition in range(2):
            mine = [order(user, amount) for user, amount in more if int(user[1:]) % 2 == partition]
            produce(servers, source, mine, partition=partition)
        sent.extend(more)

    def shown() -> list[tuple[str, int]]:
        rows = (json.loads(record.value) for record in read_committed(servers, target))
        return [(row["user"], row["total"]) for row in rows]

    send(200)
    application = submitted(yarn, tmp_path, words)
    wait_for(lambda: len(shown()) >= 200, yarn)
    send(200)
    assert kill(yarn) >= 2, "a JVM, and Python below it"
    send(200)
    wait_for(lambda: len(shown()) >= 600, yarn)
    assert open_job_dir(place).newest_owner().value >= 2
    end(yarn, application)
    wait_for(lambda: not drivers(yarn), yarn)
    send(200)
    application = submitted(yarn, tmp_path, words)
    wait_for(lambda: len(shown()) >= 800, yarn)
    end(yarn, application)
    expected, totals = [], dict.fromkeys((f"u{n}" for n in range(_USERS)), 0)
    for user, amount in sent:
        totals[user] += amount
        expected.append((user, totals[user]))
    assert sorted(shown()) == sorted(expected)
    assert open_job_dir(place).newest_owner().value >= 3
