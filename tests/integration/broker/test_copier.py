"""Kafka's own system test of transactions, with a job as the copier.

`transactions_test.py` of Kafka copies 100,000 records from 2 partitions to 3, or a third of them from one to
one where their order counts, while three brokers or the copiers are restarted one after the other, in order
or hard; a read_committed reader watches. Its 16 combinations are these; in place of group metadata, which our
sinks do without, both ways in which a sink stages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flinkish_spark.testing.broker_cluster import BrokerCluster
from tests.support.copying import Copying
from tests.support.services import BROKER_JARS, BUILD

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.nightly(by_day="tests/integration/broker/test_atomic_job.py"),
]
RECORDS = 100_000
#: A broker that is killed is missed after three seconds.
_MISSED_S = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    with BrokerCluster(tmp_path_factory.mktemp("copied"), jars_dir=BROKER_JARS) as brokers:
        yield brokers


def bounce_brokers(copying: Copying, *, clean: bool) -> None:
    for node in copying.cluster.nodes:
        if clean:
            node.stop()
        else:
            node.kill()
            time.sleep(_MISSED_S)
        node.start()
        copying.cluster.await_in_sync()


def bounce_clients(copying: Copying, *, clean: bool) -> None:
    for _ in range(3):
        seen = copying.watch.count
        copying.await_copied(seen + (copying.records - seen) // 5)
        copying.bounce(clean=clean)


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "default"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "spread"])
@pytest.mark.parametrize("target", ["brokers", "clients"])
@pytest.mark.parametrize("mode", ["hard", "clean"])
def test_each_record_is_copied_once(
    cluster: BrokerCluster, tmp_path: Path, mode: str, target: str, ordered: bool, atomic: bool
) -> None:
    records = RECORDS // 3 if ordered else RECORDS
    began = time.monotonic()
    with Copying(cluster, tmp_path, atomic=atomic, ordered=ordered, records=records) as copying:
        copying.await_copied(records // 50)
        (bounce_brokers if target == "brokers" else bounce_clients)(copying, clean=mode == "clean")
        left = records - copying.watch.count
        copied = copying.finish()
    line = {
        "mode": mode,
        "target": target,
        "ordered": ordered,
        "atomic": atomic,
        "left_behind_the_bounces": left,
        **vars(copied),
        "seconds": round(time.monotonic() - began, 1),
    }
    with (BUILD / "copier.jsonl").open("a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")
    assert copied.is_exact, copied
