"""Sinks of Kafka that stage in one pass: each gets its own rows, in its own form, and no others."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    BarrierRecords,
    DeadLetter,
    DeltaSink,
    Emit,
    JdbcSink,
    Json,
    JsonSchema,
    KafkaSink,
    KeyedProcessFunction,
    OnBadRecord,
    String,
    Upsert,
)
from flinkish_spark.core.errors import BadRecordError
from flinkish_spark.job import spark_engine
from tests.support.jobs import (
    environment,
    failure_of,
    order,
    orders_source,
    produce,
    read_committed,
    read_delta,
    run_until,
)
from tests.support.two_ways import ODD, Totals

pytestmark = pytest.mark.timeout(600)

#: A record of the last one is too large for the topic that takes small ones only.
USERS = ("ann", "bob", "eve", "max" * 20)
ORDERS = 4_000
TOTALS = "user STRING, total LONG, at TIMESTAMP"


class TimedTotals(Totals):
    """The same, with a time of its own for each total."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        for user, total in super().process_element(value, ctx):
            yield user, total, datetime.fromtimestamp(total, UTC)


class Programs:
    """The topics of one job, and what it has written."""

    def __init__(self, servers: str, topic: Any, table: Path) -> None:
        self.servers, self.table = servers, table
        kinds = ("plain", "text", "odd", "sums", "checked", "large", "letters", "small")
        limits: dict[str, Any] = {"small": {"configs": {"max.message.bytes": "180"}}}
        self.topics = {kind: topic(2, **limits.get(kind, {})) for kind in kinds}

    def declare(self, env: Any, source: str) -> None:
        orders = env.from_source(orders_source(self.servers, source), uid="orders")
        totals = orders.key_by("user").process(TimedTotals(), output=TOTALS, uid="totals")
        sums = totals.key_by("user").sum("total", uid="sums", emit=Emit.PER_ELEMENT)
        large = totals.filter(lambda row: row.total > 10)
        streams = {"odd": totals.get_side_output(ODD), "sums": sums, "large": large}
        for kind, settings in self.settings().items():
            sink = KafkaSink(self.servers, self.topics[kind], **settings)
            streams.get(kind, totals).sink_to(sink, uid=f"to-{kind}")
        totals.sink_to(DeltaSink(str(self.table)), uid="table")

    def settings(self) -> dict[str, dict[str, Any]]:
        letters = DeadLetter(self.topics["letters"])
        return {
            "plain": {"key": "user", "value": Json(), "timestamp": "total"},
            # The same rows as another sink, in another form, with more around them.
            "text": {
                "key": Json("user STRING, total LONG"),
                "value": String("user"),
                "headers": {"total-of": "user"},
                "timestamp": "at",
            },
            "odd": {"key": "who", "value": String("amount")},
            "sums": {"value": Json("total LONG"), "barriers": BarrierRecords.EACH_CHECKPOINT},
            "checked": {"value": JsonSchema()},
            "large": {"key": "user", "value": Json()},
            "small": {"value": Json(), "on_bad_record": letters},
        }


class Routed(KeyedProcessFunction):
    """Sends each order to a topic of its user's; the first attempt at the last one fails."""

    def __init__(self, topics: list[str], failed: Path) -> None:
        self.topics, self.failed = topics, failed

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        if value.amount == ORDERS and not self.failed.exists():
            self.failed.touch()
            raise OSError("the first attempt")
        yield value.user, value.amount, self.topics[value.amount % len(self.topics)]


def values(records: Any) -> Counter[Any]:
    return Counter((one.key, one.value) for one in records)


def test_each_sink_gets_its_rows_in_its_form(
    spark: Any, broker: Any, topic: Any, job_dir: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Over a restart: same rows in two forms, a side output, another operator, policies."""
    joined: list[set[str]] = []
    plan = spark_engine._plan_joint_pass

    def noted(*given: Any) -> Any:
        found = plan(*given)
        joined.append({sink.uid.removeprefix("to-") for sink in found.sinks})
        return found

    monkeypatch.setattr(spark_engine, "_plan_joint_pass", noted)
    source, own = topic(2), Programs(broker.bootstrap_servers, topic, tmp_path / "table")
    amounts: dict[str, list[int]] = {user: [] for user in USERS}
    for turn in range(2):
        for user in USERS:
            more = [turn + at + 3 for at in range(6)]
            produce(own.servers, source, [order(user, amount) for amount in more], key=user.encode())
            amounts[user] += more
        env = environment(spark, job_dir)
        own.declare(env, source)
        done = sum(map(len, amounts.values()))
        run_until(env, lambda _, done=done: len(read_delta(own.table)) == done)
    together = {"plain", "text", "odd", "sums", "small", "checked", "table"}
    assert joined == [together] * 2
    totals = {user: [sum(known[: at + 1]) for at in range(len(known))] for user, known in amounts.items()}
    flat = [(user, total) for user, known in totals.items() for total in known]
    assert Counter((row["user"], row["total"]) for row in read_delta(own.table)) == Counter(flat)
    read = {kind: read_committed(own.servers, name) for kind, name in own.topics.items()}
    plain = Counter(
        (one.key.decode(), json.loads(one.value)["user"], json.loads(one.value)["total"])
        for one in read["plain"]
    )
    assert plain == Counter((user, user, total) for user, total in flat)
    assert all(one.timestamp == json.loads(one.value)["total"] for one in read["plain"])
    assert Counter(
        (json.loads(one.key)["user"], json.loads(one.key)["total"], one.value.decode())
        for one in read["text"]
    ) == Counter((user, total, user) for user, total in flat)
    assert all(one.timestamp == json.loads(one.key)["total"] * 1_000 for one in read["text"])
    assert all([*one.headers] == [("total-of", one.value)] for one in read["text"])
    odd = ((user, amount) for user, known in amounts.items() for amount in known if amount % 2)
    assert values(read["odd"]) == Counter((user.encode(), b"%d" % amount) for user, amount in odd)
    summed = [sum(known[: at + 1]) for known in totals.values() for at in range(len(known))]
    assert Counter(json.loads(one.value)["total"] for one in read["sums"] if one.value) == Counter(summed)
    assert len(read["checked"]) == len(flat)
    assert Counter(json.loads(one.value)["total"] for one in read["large"]) == Counter(
        total for _, total in flat if total > 10
    )
    small, letters = (
        Counter(json.loads(one.value)["user"] for one in read[kind]) for kind in ("small", "letters")
    )
    assert (small, letters) == (dict.fromkeys(USERS[:3], 12), {USERS[3]: 12})


def test_what_one_sink_refuses_fails_the_micro_batch_of_all(
    spark: Any, broker: Any, topic: Any, job_dir: Any
) -> None:
    """Nothing of it is seen in any topic; what comes behind it is written once the record may be dropped."""
    servers, source, wide = broker.bootstrap_servers, topic(1), topic(1)
    narrow = topic(1, configs={"max.message.bytes": "250"})

    def declared(policy: OnBadRecord) -> Any:
        env = environment(spark, job_dir)
        orders = env.from_source(orders_source(servers, source), uid="orders")
        counted = orders.key_by("user").sum("amount", uid="sums", emit=Emit.PER_ELEMENT)
        counted.sink_to(KafkaSink(servers, wide, value=Json()), uid="wide")
        limited = KafkaSink(servers, narrow, value=Json(), on_bad_record=policy)
        counted.sink_to(limited, uid="narrow")
        return env

    def written() -> list[list[int]]:
        read = (read_committed(servers, one) for one in (wide, narrow))
        return [[json.loads(record.value)["amount"] for record in records] for records in read]

    produce(servers, source, [order("ann", 1)])
    run_until(declared(OnBadRecord.FAIL), lambda _: written() == [[1], [1]])
    produce(servers, source, [order("bob", 2), order("x" * 500, 3), order("ann", 4)])
    assert "cannot be handled" in str(failure_of(declared(OnBadRecord.FAIL)))
    assert written() == [[1], [1]]
    run_until(declared(OnBadRecord.DROP), lambda _: len(written()[0]) == 4)
    assert [sorted(one) for one in written()] == [[1, 2, 3, 5], [1, 2, 5]]


def test_records_name_topics_and_tasks_are_repeated(
    spark: Any, broker: Any, topic: Any, job_dir: Any, tmp_path: Path
) -> None:
    """Two sinks whose columns of topics have collations of their own, and a third whose has none."""
    servers, source = broker.bootstrap_servers, topic(2)
    produce(servers, source, [order(f"user-{n % 7}", n) for n in range(1, ORDERS + 1)])
    env = environment(spark, job_dir)
    orders = env.from_source(orders_source(servers, source), uid="orders").key_by("user")
    written = {}
    for kind in ("STRING COLLATE UTF8_LCASE", "STRING COLLATE UNICODE_CI", "STRING"):
        uid = kind.rsplit(" ", 1)[-1].lower()
        topics = [topic(2) for _ in range(3)]
        routed = orders.process(
            Routed(topics, tmp_path / uid), output=f"user STRING, amount LONG, route {kind}", uid=uid
        )
        sink = KafkaSink(
            servers,
            topics[0],
            key="user",
            value=Json("amount LONG"),
            topic_column="route",
            other_topics=topics[1:],
        )
        routed.sink_to(sink, uid=f"out-{uid}")
        written[uid] = topics
    last = written["string"]
    run_until(env, lambda _: all(len(read_committed(servers, one)) >= ORDERS // 3 for one in last))
    for uid, topics in written.items():
        assert (tmp_path / uid).exists()
        for at, name in enumerate(topics):
            found = sorted(json.loads(one.value)["amount"] for one in read_committed(servers, name))
            assert found == [n for n in range(1, ORDERS + 1) if n % 3 == at]


def test_sinks_of_several_systems_share_a_pass_until_a_table_gets_a_rule(
    spark: Any, broker: Any, topic: Any, job_dir: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A topic, a database, a table, and one by its key; a record that the last refuses is shown in none."""
    # One partition, so that the sums of a user are those of the order in which records are written.
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)
    tables, database = {kind: tmp_path / kind for kind in ("all", "newest")}, tmp_path / "orders.db"
    shared: list[int] = []
    stage = spark_engine.stage_together

    def noted(rows: Any, plans: Any, columns: Any) -> Any:
        shared.append(len(plans))
        return stage(rows, plans, columns)

    monkeypatch.setattr(spark_engine, "stage_together", noted)

    def declared() -> Any:
        env = environment(spark, job_dir)
        orders = env.from_source(orders_source(servers, source), uid="orders")
        sums = orders.key_by("user").sum("amount", uid="sums", emit=Emit.PER_ELEMENT)
        chosen = sums.transform(lambda df: df.select(F.col("amount").alias("total"), "user"))
        chosen.sink_to(KafkaSink(servers, out, value=Json()), uid="topic")
        chosen.sink_to(DeltaSink(str(tables["all"])), uid="table")
        sums.sink_to(DeltaSink(str(tables["newest"]), mode=Upsert(("user",))), uid="newest")
        database_sink = JdbcSink(f"jdbc:sqlite:{database}", "orders", create_table=True)
        sums.sink_to(database_sink, uid="database")
        return env

    def written() -> list[list[int]]:
        with closing(sqlite3.connect(database)) as connection:
            in_database = [amount for (amount,) in connection.execute("SELECT amount FROM orders")]
        in_topic = [json.loads(one.value)["total"] for one in read_committed(servers, out)]
        return [
            sorted(in_database),
            sorted(in_topic),
            sorted(row["total"] for row in read_delta(tables["all"])),
        ]

    def newest() -> dict[str, int]:
        return {row["user"]: row["amount"] for row in read_delta(tables["newest"])}

    produce(servers, source, [order("ann", 1), order("ann", 2), order("bob", 5)])
    run_until(declared(), lambda _: database.exists() and newest() == {"ann": 3, "bob": 5})
    assert written() == [[1, 3, 5]] * 3
    assert shared and set(shared) == {4}
    shared.clear()
    spark.sql(f"ALTER TABLE delta.`{tables['all']}` ADD CONSTRAINT small CHECK (total < 100)")
    produce(servers, source, [order("bob", 6)])
    run_until(declared(), lambda _: newest() == {"ann": 3, "bob": 11})
    assert written() == [[1, 3, 5, 11]] * 3
    assert shared and set(shared) == {3}
    spark.sql(f"ALTER TABLE delta.`{tables['all']}` DROP CONSTRAINT small")
    produce(servers, source, [order("bob", 1), order(None, 1)])
    failure = failure_of(declared())
    assert isinstance(failure, BadRecordError) and "The key user IS NOT NULL" in str(failure)
    assert (written(), newest()) == ([[1, 3, 5, 11]] * 3, {"ann": 3, "bob": 11})
