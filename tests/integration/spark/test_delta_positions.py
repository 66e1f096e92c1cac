"""A Delta table as it grows: a job that is restored, or has other partitions, goes on where it stood."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import MemorySink
from flinkish_spark.savepoints.files import RestoreSettings
from flinkish_spark.sources import DeltaChanges, DeltaSource
from tests.support.jobs import await_that, environment
from tests.support.savepoint_support import COUNT, Count, started, stop, stop_with

pytestmark = pytest.mark.timeout(600)


def insert(spark: Any, path: str, start: int, rows: int) -> None:
    spark.sql(f"INSERT INTO delta.`{path}` SELECT 'u' || id FROM range({start}, {start + rows})")


@pytest.mark.nightly(by_day="tests/contracts/test_sources.py")
def test_a_savepoint_within_the_first_reading_of_a_table_is_gone_on_from(spark: Any, tmp_path: Path) -> None:
    path, sinks = str(tmp_path / "table"), [MemorySink(f"{tmp_path}-{n}") for n in range(2)]
    properties = "'delta.enableChangeDataFeed'='true', 'delta.enableDeletionVectors'='true'"
    spark.sql(f"CREATE TABLE delta.`{path}` (user STRING) USING delta TBLPROPERTIES ({properties})")
    for n in range(6):
        insert(spark, path, 10 * n, 10)

    def job(name: str, sink: MemorySink) -> Any:
        # A micro-batch is one file, and a checkpoint may lie between any two of a commit.
        source = DeltaSource(path, DeltaChanges.FEED, max_files_per_trigger=1)
        env = environment(spark, tmp_path / name, trigger_interval_ms=200)
        changes = env.from_source(source, uid="feed")
        counts = changes.key_by("user").process(Count(), output=COUNT, uid="counts")
        counts.sink_to(sink, uid="out")
        return env

    with started(job("one", sinks[0])) as client:
        await_that(lambda: len(sinks[0].rows()) >= 10, client)
        metadata = stop_with(client, tmp_path / "savepoint")
    before = len(sinks[0].rows())
    assert before < 60, "the savepoint was to lie within the table"
    assert "feed" in metadata.sources
    insert(spark, path, 0, 5)
    with started(job("two", sinks[1]), RestoreSettings(str(tmp_path / "savepoint")), partitions=3) as client:
        await_that(lambda: len(sinks[1].rows()) >= 65 - before, client)
        stop(client)
    # Key groups move to other partitions, and the source goes on in the same job.
    insert(spark, path, 5, 5)
    with started(job("two", sinks[1]), partitions=2) as client:
        await_that(lambda: len(sinks[1].rows()) >= 70 - before, client)
        stop(client)
    found = Counter((row.user, row.n) for sink in sinks for row in sink.rows())
    wanted = Counter({(f"u{n}", 1): 1 for n in range(60)}) + Counter({(f"u{n}", 2): 1 for n in range(10)})
    assert found == wanted
