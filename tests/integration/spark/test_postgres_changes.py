"""A table of PostgreSQL and its copies: in Delta, in another table, in a compacted topic; and totals."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from flinkish_spark import (
    ChangelogMode,
    DebeziumJson,
    DeltaSink,
    EpochUnit,
    Json,
    KafkaSink,
    KafkaSource,
    OnTombstone,
    Upsert,
)
from flinkish_spark.connectors.kafka.records import Decoding
from flinkish_spark.contracts.source import NO_JOB
from tests.crash.changelog_app import ACCOUNT, keep_totals
from tests.support.databases import TestDatabase
from tests.support.jobs import await_that, environment, read_committed, running
from tests.support.postgres_changes import PostgresChanges

pytestmark = pytest.mark.timeout(600)

Rows = set[tuple[Any, ...]]
CITIES = ("Bern", "Kiel", "Lodz")


class Accounts:
    """The table that is true, and how it changes."""

    def __init__(self, database: TestDatabase, servers: str, topic: str) -> None:
        host, _, rest = database.url.removeprefix("jdbc:postgresql://").partition(":")
        port, _, name = rest.partition("/")
        self.connection = psycopg.connect(
            host=host, port=port, dbname=name, user=database.user, password=database.password, autocommit=True
        )
        self.run("CREATE TABLE accounts (id INT PRIMARY KEY, city TEXT NOT NULL, balance NUMERIC(12,2))")
        self.changes = PostgresChanges(self.connection, "accounts", ["id"])
        self.servers, self.topic, self.chance = servers, topic, random.Random(30)

    def run(self, sql: str, *values: Any) -> list[Any]:
        done = self.connection.execute(sql, values)
        return done.fetchall() if done.description else []

    def change(self, count: int) -> None:
        """Change rows at random, and send what has changed."""
        for _ in range(count):
            city, number = self.chance.choice(CITIES), self.chance.randrange(40)
            amount = Decimal(self.chance.randrange(-99999, 99999)).scaleb(-2)
            match self.chance.randrange(6):
                case 0 | 1:
                    upsert = "ON CONFLICT (id) DO UPDATE SET balance = EXCLUDED.balance"
                    self.run(f"INSERT INTO accounts VALUES (%s, %s, %s) {upsert}", number, city, amount)
                case 2 | 3:
                    changed = "UPDATE accounts SET balance = balance + %s, city = %s WHERE id %% 7 = %s"
                    self.run(changed, amount, city, number % 7)
                case 4:
                    self.run("DELETE FROM accounts WHERE id = %s", number)
                case 5:
                    is_free = "NOT EXISTS (SELECT 1 FROM accounts WHERE id = %s)"
                    moved = f"UPDATE accounts SET id = %s WHERE id = %s AND {is_free}"
                    self.run(moved, 100 + number, number, 100 + number)
        self.changes.send(self.servers, self.topic)

    def rows(self) -> Rows:
        return set(self.run("SELECT id, city, balance FROM accounts"))

    def by_city(self) -> Rows:
        return set(self.run("SELECT city, count(*), sum(balance), max(balance) FROM accounts GROUP BY city"))

    def states(self) -> list[Rows]:
        """What the table was behind each record of the topic."""
        found: list[Rows] = [set()]
        for record in read_committed(self.servers, self.topic):
            state = set(found[-1])
            if record.value is not None:
                payload = json.loads(record.value)["payload"]
                if payload["before"]:
                    state.remove(_row(payload["before"]))
                if payload["after"]:
                    state.add(_row(payload["after"]))
            found.append(state)
        return found


def _row(value: dict[str, Any]) -> tuple[Any, ...]:
    number = int.from_bytes(base64.b64decode(value["balance"]), "big", signed=True)
    return value["id"], value["city"], Decimal(number).scaleb(-2)


@pytest.fixture
def accounts(postgres_database: TestDatabase, broker: Any, topic: Any) -> Iterator[Accounts]:
    made = Accounts(postgres_database, broker.bootstrap_servers, topic(1))
    yield made
    made.changes.drop()
    made.connection.close()


@pytest.mark.nightly(by_day="tests/integration/spark/test_changelogs.py")
def test_the_changes_of_a_table_come_to_the_table(spark: Any, postgres_database: TestDatabase) -> None:
    """Values of PostgreSQL's own, in the encodings that a connector has by default."""
    connection = postgres_database.session.connection
    connection.autocommit = True
    ddl = "id INT, n DECIMAL(12,2), any DECIMAL(38,10), day DATE, at TIMESTAMP_NTZ, ok BOOLEAN, data BINARY"
    connection.execute(
        'CREATE TABLE things (id INT PRIMARY KEY, n NUMERIC(12,2), "any" NUMERIC, day DATE, at TIMESTAMP, '
        "ok BOOLEAN, data BYTEA)"
    )
    changes = PostgresChanges(connection, "things", ["id"])
    try:
        row = "-0.01, -3.14159, '1969-12-31', '2018-06-20 15:13:16.945104', true, '\\x0001ff'"
        connection.execute(f"INSERT INTO things VALUES (1, {row}), (2, NULL, NULL, NULL, NULL, NULL, NULL)")
        connection.execute("UPDATE things SET n = 9999999999.99, ok = NULL WHERE id = 1")
        connection.execute("UPDATE things SET id = 3, data = '' WHERE id = 2")
        connection.execute("INSERT INTO things VALUES (4)")
        connection.execute("DELETE FROM things WHERE id = 4")
        taken = [(*one, "t", 0, at) for at, one in enumerate(changes.take())]
        there = connection.execute("SELECT * FROM things").fetchall()
    finally:
        changes.drop()
    records = spark.createDataFrame(
        taken, "key BINARY, value BINARY, topic STRING, partition INT, offset LONG"
    )
    form = DebeziumJson(ddl, epoch_units={"at": EpochUnit.MICROSECONDS})
    table: dict[int, Any] = {}
    made = Decoding(form, tombstones=OnTombstone.DROP).deserializer("in", NO_JOB, ["t"])
    for row in made.rows(records, ["t"], []).collect():
        *fields, kind = row
        if kind in ("+I", "+U"):
            table[fields[0]] = tuple(fields)
        else:
            assert table.pop(fields[0]) == tuple(fields)
    assert set(table.values()) == {tuple(row) for row in there} and len(table) == 2


def delta(spark: Any, path: Path, version: int | None = None) -> Rows:
    if not any((path / "_delta_log").glob("*.json")):
        return set()
    reader = spark.read.format("delta")
    reader = reader if version is None else reader.option("versionAsOf", version)
    return {tuple(row) for row in reader.load(str(path)).collect()}


def compacted(servers: str, topic: str) -> Rows:
    """What a reader of a topic has that keeps the last record of each key."""
    found: dict[int, Any] = {}
    for record in read_committed(servers, topic):
        found.pop(json.loads(record.key)["id"], None)
        if record.value is not None:
            value = json.loads(record.value)
            found[value["id"]] = (value["id"], value["city"], Decimal(str(value["balance"])))
    return set(found.values())


@pytest.mark.nightly
@pytest.mark.parametrize("reader", ["python", "jvm"])
def test_copies_equal_the_table_after_each_checkpoint(
    spark: Any, postgres_database: TestDatabase, accounts: Accounts, topic: Any, tmp_path: Path, reader: str
) -> None:
    """Over a job that is cancelled in the middle, while the table goes on changing."""
    copy = topic(2)

    def job() -> Any:
        env = environment(spark, tmp_path / "job", job="accounts")
        source = KafkaSource(
            accounts.servers,
            [accounts.topic],
            value=DebeziumJson(ACCOUNT),
            reader=reader,
            max_offsets_per_trigger=40,
        )
        changes = env.from_source(source, uid="changes")
        by_id = Upsert(keys=("id",), row_kind="_row_kind")
        changes.sink_to(DeltaSink(str(tmp_path / "table"), mode=by_id), uid="delta")
        changes.sink_to(
            postgres_database.sink(
                "copies", key=("id",), mode="upsert", row_kind="_row_kind", create_table=True
            ),
            uid="database",
        )
        changes.sink_to(
            KafkaSink(accounts.servers, copy, key=Json("id INT"), row_kind="_row_kind"),
            uid="topic",
        )
        keep_totals(changes, tmp_path / "cities")
        return env

    def are_equal() -> bool:
        return delta(spark, tmp_path / "table") == accounts.rows()

    accounts.change(60)
    with running(job()) as client:
        await_that(are_equal, client)
        accounts.change(60)
        await_that(lambda: client.progress.checkpoints > 1, client)
        client.cancel()
        client.wait(timeout_ms=120_000)
    accounts.change(40)
    with running(job()) as client:
        await_that(are_equal, client)
        client.stop_with_checkpoint()
        client.wait(timeout_ms=120_000)
    assert set(postgres_database.query("SELECT id, city, balance FROM copies")) == accounts.rows()
    assert compacted(accounts.servers, copy) == accounts.rows()
    assert delta(spark, tmp_path / "cities") == accounts.by_city()

    # Each version is the table as it was at some time, and time goes on.
    states, at = accounts.states(), 0
    newest = max(int(one.stem) for one in (tmp_path / "table" / "_delta_log").glob("*.json"))
    for version in range(newest + 1):
        found = delta(spark, tmp_path / "table", version)
        assert found in states[at:], version
        at += states[at:].index(found)
    assert newest > 2


@pytest.mark.nightly
def test_an_aggregate_over_a_compacted_topic(
    spark: Any, accounts: Accounts, topic: Any, tmp_path: Path
) -> None:
    """From upserts, whose rows do not say what they replace, by way of the whole changelog."""
    compact = topic(2)

    def job() -> Any:
        env = environment(spark, tmp_path / "job", job="totals")
        changes = DebeziumJson(ACCOUNT, mode=ChangelogMode.UPSERT)
        from_table = env.from_source(KafkaSource(accounts.servers, [accounts.topic], value=changes), uid="in")
        out = KafkaSink(accounts.servers, compact, key=Json("id INT"), row_kind="_row_kind")
        from_table.sink_to(out, uid="compact")
        return env

    def totals() -> Any:
        env = environment(spark, tmp_path / "second", job="second")
        source = KafkaSource(
            accounts.servers,
            [compact],
            key=Json("id INT"),
            value=Json(ACCOUNT),
            tombstones=OnTombstone.DELETE,
        )
        rows = env.from_source(source, uid="in").key_by("id").changelog_normalize(uid="whole")
        keep_totals(rows, tmp_path / "cities")
        return env

    accounts.change(80)
    with running(job()) as first, running(totals()) as second:
        await_that(lambda: delta(spark, tmp_path / "cities") == accounts.by_city(), second)
        accounts.change(60)
        await_that(lambda: delta(spark, tmp_path / "cities") == accounts.by_city(), second)
        for client in (first, second):
            client.stop_with_checkpoint()
            client.wait(timeout_ms=120_000)
