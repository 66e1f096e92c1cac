"""A script in SQL from Kafka into Kafka, a database and files in folders, as one job."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter

from flinkish_spark import CaughtUp, add_sql_script
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from tests.support.jobs import environment, order, produce, read_committed

SCRIPT = """
CREATE TABLE orders (user STRING, amount LONG) USING kafka OPTIONS (
    kafka.bootstrap.servers '{servers}', topic '{source}', group.id '{source}-group', kafka.client.id 'sql'
);
CREATE TABLE copies (user STRING, amount STRING) USING kafka OPTIONS (
    kafka.bootstrap.servers '{servers}', topic '{copies}', key 'user'
);
INSERT INTO copies SELECT upper(user), amount FROM orders WHERE amount > 1;

CREATE TABLE totals (user STRING, total LONG, n LONG) USING jdbc OPTIONS (
    url 'jdbc:sqlite:{folder}/totals.db', dbtable 'totals', keys 'user', outputMode 'update'
);
INSERT INTO totals SELECT user, sum(amount), count(*) FROM orders GROUP BY user;

CREATE TABLE by_user (amount LONG, user STRING) USING files OPTIONS (path '{folder}/by_user', format 'json')
PARTITIONED BY (user);
INSERT INTO by_user (user, amount) SELECT user, amount FROM orders
"""


def test_kafka_into_three_systems_in_two_runs(spark, broker, topic, job_dir, tmp_path) -> None:
    servers, source, copies = broker.bootstrap_servers, topic(partitions=2), topic()
    with sqlite3.connect(tmp_path / "totals.db") as db:
        db.execute("CREATE TABLE totals (user TEXT PRIMARY KEY, total INTEGER, n INTEGER)")
    script = SCRIPT.format(servers=servers, source=source, copies=copies, folder=tmp_path)

    def run(*orders: tuple[str, int]) -> None:
        for user, amount in orders:
            produce(servers, source, [order(user, amount)], key=user.encode())
        env = environment(spark, job_dir)
        add_sql_script(env, script).execute(until=CaughtUp())

    run(("ann", 1), ("ben", 2), ("ann", 3))
    run(("ann", 4), ("cat", 1))
    found = Counter((one.key, one.value) for one in read_committed(servers, copies))
    assert found == Counter(
        (user.encode(), json.dumps({"user": user, "amount": amount}, separators=(",", ":")).encode())
        for user, amount in (("BEN", "2"), ("ANN", "3"), ("ANN", "4"))
    )
    with sqlite3.connect(tmp_path / "totals.db") as db:
        assert {*db.execute("SELECT * FROM totals")} == {("ann", 8, 3), ("ben", 2, 1), ("cat", 1, 1)}
    written = spark.read.json(f"{tmp_path}/by_user")
    assert Counter((row["user"], row["amount"]) for row in written.collect()) == Counter(
        [("ann", 1), ("ben", 2), ("ann", 3), ("ann", 4), ("cat", 1)]
    )
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        committed = admin.committed_offsets(f"{source}-group")
    assert sum(committed.values()) == 5
