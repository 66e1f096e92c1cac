"""A way to run a job: spark-submit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from flinkish_spark.bridge.session import spark_conf
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.jars import find_pinned_jars
from tests.support.jobs import produce, read_delta, totals_in
from tests.support.services import BUILD, ROOT


@pytest.mark.timeout(240)
def test_spark_submit_runs_the_demos_job_and_sigterm_ends_it_with_a_checkpoint(broker, tmp_path):
    servers = broker.bootstrap_servers
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for topic in ("orders", "totals"):
            admin.create_topic(topic, 2)
    values = [
        json.dumps({"user": f"u{n % 7}", "product": "p", "amount": 1, "at": "2026-01-01T00:00:00Z"}).encode()
        for n in range(140)
    ]
    produce(servers, "orders", values, partition=0)
    conf = [f"--conf={name}={value}" for name, value in spark_conf(find_pinned_jars(BUILD / "jars")).items()]
    arguments = {
        "--bootstrap-servers": servers,
        "--job-dir": tmp_path / "job",
        "--table": tmp_path / "table",
        "--jars": BUILD / "jars",
        "--scratch": tmp_path / "scratch",
    }
    command = [
        str(Path(sys.executable).with_name("spark-submit")),
        *conf,
        str(ROOT / "demo" / "app.py"),
        *[str(word) for pair in arguments.items() for word in pair],
    ]
    log = tmp_path / "log"
    with open(log, "w") as out:
        submitted = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 150
        while sum(totals_in(servers, "totals").values()) < 140:
            assert submitted.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        (driver,) = [
            p
            for p in psutil.Process(submitted.pid).children(recursive=True)
            if p.name().startswith("python") and "app.py" in " ".join(p.cmdline())
        ]
        driver.send_signal(signal.SIGTERM)
        assert submitted.wait(60) == 0, log.read_text()[-3000:]
    finally:
        submitted.kill()
    expected = Counter((f"u{user}", total) for user in range(7) for total in range(1, 21))
    assert totals_in(servers, "totals") == expected
    assert Counter((r["user"], r["total"]) for r in read_delta(tmp_path / "table")) == expected
