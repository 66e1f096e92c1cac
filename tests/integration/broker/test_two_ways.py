"""A source on two ways that meet again: two scans, each exact by itself, also where a job is cut off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from flinkish_spark import Json, KeyedProcessFunction, MapStateDescriptor, MemorySink, WatermarkStrategy
from tests.support.jobs import await_that, environment, orders_source, produce, rows, running

pytestmark = pytest.mark.timeout(500)
ORDERS = "user STRING, amount LONG, at LONG"
BRANCHES = "user STRING, branch STRING, amount LONG, at LONG"
USERS = ("ann", "ben", "cid", "dan")


class Numbered(KeyedProcessFunction):
    """The n-th record of its user and branch."""

    def open(self, context: Any) -> None:
        self.counts = context.get_map_state(MapStateDescriptor("counts", "STRING", "LONG"))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        number = self.counts.get(value.branch, 0) + 1
        self.counts[value.branch] = number
        yield value.user, value.branch, number, value.amount


def put(servers: str, topic: str, first: int, count: int) -> None:
    for partition, user in enumerate(USERS):
        values = [
            json.dumps({"user": user, "amount": n, "at": 10 * n}).encode()
            for n in range(first, first + count)
        ]
        produce(servers, topic, values, partition=partition % 2)


def job(spark: Any, job_dir: Any, servers: str, topic: str, folder: Any) -> tuple[Any, list[MemorySink]]:
    env = environment(spark, job_dir)
    source = orders_source(servers, topic, value=Json(ORDERS))
    by_at = WatermarkStrategy.for_bounded_out_of_orderness(10).with_timestamp_assigner("at")
    orders = env.from_source(source, by_at, uid="orders")
    even = orders.filter(lambda one: one.amount % 2 == 0).map(
        lambda one: (one.user, "even", one.amount, one.at), output=BRANCHES
    )
    third = orders.transform(
        lambda frame: frame.where("amount % 3 = 0").withColumn("amount", -frame.amount)
    ).map(lambda one: (one.user, "third", one.amount, one.at), output=BRANCHES)
    numbered = (
        even.union(third)
        .key_by("user")
        .process(Numbered(), output="user STRING, branch STRING, number LONG, amount LONG", uid="numbered")
    )
    pairs = orders.key_by("user").interval_join(orders.key_by("user"), lower_ms=10, upper_ms=20, uid="pairs")
    sinks = [MemorySink(f"{folder}/numbered"), MemorySink(f"{folder}/pairs")]
    numbered.sink_to(sinks[0], uid="numbered-out")
    pairs.sink_to(sinks[1], uid="pairs-out")
    return env, sinks


@pytest.mark.nightly(by_day="tests/contracts/test_sources.py")
def test_both_scans_of_a_source_are_exact(
    spark: Any, broker: Any, topic: Any, job_dir: Any, tmp_path: Any
) -> None:
    servers, source = broker.bootstrap_servers, topic(2)
    count, found = 60, [Counter[Any](), Counter[Any]()]
    put(servers, source, 0, 20)
    for turn in range(2):
        env, sinks = job(spark, job_dir, servers, source, tmp_path)
        with running(env) as client:
            before = rows(client, "pairs-out")
            put(servers, source, 20 * (turn + 1), 20)
            if turn == 0:
                # Cut off wherever it is: what no checkpoint has decided is read again.
                await_that(lambda b=before, c=client: rows(c, "pairs-out") > b, client)
                continue
            wanted = [
                Counter(
                    (user, branch, number, sign * n)
                    for user in USERS
                    for branch, step, sign in (("even", 2, 1), ("third", 3, -1))
                    for number, n in enumerate(range(0, count, step), 1)
                ),
                Counter(
                    (user, n, 10 * n, user, n + k, 10 * (n + k))
                    for user in USERS
                    for n in range(count)
                    for k in (1, 2)
                    if n + k < count
                ),
            ]

            def is_there(sinks: list[MemorySink] = sinks, wanted: Any = wanted) -> bool:
                return all(len(one.rows()) >= all_.total() for one, all_ in zip(sinks, wanted, strict=True))

            await_that(is_there, client)
            client.stop_with_checkpoint()
            client.wait()
            found = [Counter(map(tuple, one.rows())) for one in sinks]
    assert found == wanted
