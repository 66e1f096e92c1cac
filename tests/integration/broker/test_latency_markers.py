"""Latency markers between Kafka topics: readers and writers in the JVM and in Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KafkaSink
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    expected_totals,
    order,
    orders_source,
    produce,
    rows,
    running,
    totals_in,
)

pytestmark = pytest.mark.timeout(400)
USERS = ("ann", "bob", "cid", "dan")


@pytest.mark.nightly(by_day="tests/integration/spark/test_latency_markers.py")
def test_markers_come_through_operators_to_kafka_sinks(
    spark: Any, broker: Any, topic: Any, job_dir: Path
) -> None:
    """Both engines are branches of one job."""
    servers, topics = broker.bootstrap_servers, {}
    env = environment(spark, job_dir, latency_tracking_interval_ms=1)
    for engine in ("jvm", "python"):
        source, totals, raw = topics[engine] = topic(2), topic(2), topic(1)
        for user in USERS:
            produce(servers, source, [order(user, n) for n in range(10)], key=user.encode())
        orders = env.from_source(orders_source(servers, source, reader=engine), uid=f"orders-{engine}")
        found = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid=f"totals-{engine}")
        found.sink_to(KafkaSink(servers, totals, key="user"), uid=f"out-{engine}")
        orders.sink_to(KafkaSink(servers, raw, key="user"), uid=f"raw-{engine}")
    sinks = [f"{name}-{engine}" for name in ("out", "raw") for engine in topics]
    with running(env) as client:
        await_that(lambda: [rows(client, sink) for sink in sinks] == [40] * 4, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=180_000), "the job did not stop"
    wanted = set()
    for engine in topics:
        names = (f"totals-{engine}", f"out-{engine}")
        of_operator = {(name, f"orders-{engine}", subtask) for name in names for subtask in (0, 1)}
        wanted |= {(f"raw-{engine}", f"orders-{engine}", 0), *of_operator}
    assert {(at.operator, at.source, at.subtask) for at in client.latencies} == wanted
    assert all((one.min_ms or 0) > 0 for _, one in client.latencies.items())
    for _, totals, _ in topics.values():
        assert totals_in(servers, totals) == expected_totals({user: [*range(10)] for user in USERS})
        counted: Counter[Any] = Counter(key for key, _ in totals_in(servers, totals).elements())
        assert counted == Counter(dict.fromkeys(USERS, 10))
