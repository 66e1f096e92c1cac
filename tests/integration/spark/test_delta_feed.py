"""A Delta table's change feed makes a copy of the table, whether its rows go by deletion vectors or not."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark import DeltaSink, JobStatus, MemorySink, Upsert
from flinkish_spark.sources import DeltaChanges, DeltaSource
from tests.support.jobs import await_that, environment, running
from tests.support.savepoint_support import started, stop

pytestmark = pytest.mark.timeout(600)

FEED = "'delta.enableChangeDataFeed'='true', 'delta.enableDeletionVectors'='{}'"
COPY = Upsert(
    keys=("id",),
    sequence_by="_commit_version",
    delete_when="_change_type IN ('delete', 'update_preimage')",
    not_stored=("_change_type", "_commit_version", "_commit_timestamp"),
)


def test_a_copy_has_what_the_last_change_of_a_version_left(spark: Any, tmp_path: Any) -> None:
    """Deletes and inserts of a key in one version: by INSERT OVERWRITE, an UPDATE of keys, a MERGE."""
    wanted, copies = {(2, "m"), (3, "b2"), (9, "n")}, {}
    env = environment(spark, tmp_path / "job")
    for by in ("true", "false"):
        path, copies[by] = str(tmp_path / f"table-{by}"), str(tmp_path / f"copy-{by}")
        table = f"delta.`{path}`"
        spark.sql(f"CREATE TABLE {table} (id INT, v STRING) USING delta TBLPROPERTIES ({FEED.format(by)})")
        spark.sql(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
        spark.sql(f"INSERT OVERWRITE {table} VALUES (1, 'a2'), (2, 'b2'), (3, 'c')")
        spark.sql(f"UPDATE {table} SET id = id + 1")
        spark.sql(
            f"MERGE INTO {table} AS t USING (SELECT explode(array(2, 4, 9)) AS id) AS s ON t.id = s.id "
            "WHEN MATCHED AND s.id = 4 THEN DELETE WHEN MATCHED THEN UPDATE SET v = 'm' "
            "WHEN NOT MATCHED THEN INSERT (id, v) VALUES (9, 'n')"
        )
        feed = DeltaSource(path, DeltaChanges.FEED, starting_version=0)
        env.from_source(feed, uid=f"in-{by}").sink_to(DeltaSink(copies[by], mode=COPY), uid=f"out-{by}")

    def copied(copy: str) -> set[tuple[Any, ...]]:
        if not any((tmp_path / copy / "_delta_log").glob("*.json")):
            return set()
        return set(map(tuple, spark.read.format("delta").load(copy).collect()))

    with started(env) as client:
        await_that(lambda: all(copied(copy) == wanted for copy in copies.values()), client)
        stop(client)


@pytest.mark.parametrize(
    "last", ["UPDATE {t} SET v = 'u' WHERE id = 1", "ALTER TABLE {t} SET TBLPROPERTIES ('x'='y')"]
)
def test_a_feed_with_an_end_ends_there(spark: Any, tmp_path: Any, last: str) -> None:
    path, sink = str(tmp_path / "table"), MemorySink(str(tmp_path))
    spark.sql(
        f"CREATE TABLE delta.`{path}` (id INT, v STRING) USING delta TBLPROPERTIES ({FEED.format('true')})"
    )
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (1, 'a'), (2, 'b')")
    spark.sql(last.format(t=f"delta.`{path}`"))
    env = environment(spark, tmp_path / "job")
    feed = DeltaSource(path, DeltaChanges.FEED, starting_version=1, ending_version=2)
    env.from_source(feed, uid="in").sink_to(sink, uid="out")
    with running(env) as client:
        assert client.wait(timeout_ms=250_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    found = [tuple(row)[:4] for row in sink.rows()]
    changed = [(1, "a", "update_preimage", 2), (1, "u", "update_postimage", 2)] if "UPDATE" in last else []
    assert sorted(found[:2]) == [(1, "a", "insert", 1), (2, "b", "insert", 1)] and found[2:] == changed
