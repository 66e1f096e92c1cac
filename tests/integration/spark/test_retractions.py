"""Results of windows that are taken back, in tables by key and window: of Delta, and of a database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import DeltaSink, Upsert, WatermarkStrategy
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.windows import EventTimeSessionWindows, ProcessWindowFunction
from tests.integration.spark.test_event_time import feed
from tests.support.databases import TestDatabase
from tests.support.jobs import await_that, environment

pytestmark = pytest.mark.timeout(600)


class Whole(ProcessWindowFunction):
    """Says when a session began and ended, and how many elements it has."""

    def process(self, key: str, context: Any, elements: Any) -> Any:
        window = context.window
        yield {"user": key, "begins": window.start_ms, "ends": window.end_ms, "n": len(elements)}


def sessions(spark: Any, tmp_path: Path, field: str = "gone", database: TestDatabase | None = None) -> Any:
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(strategy)
    windows = timed.key_by("user").window(EventTimeSessionWindows(10)).allowed_lateness(1_000)
    found = windows.emit_retractions(field).process(
        Whole(), output="user STRING, begins LONG, ends LONG, n LONG", uid="sessions"
    )
    by_window = Upsert(("user", "begins", "ends"), delete_when=field, not_stored=(field,))
    found.sink_to(DeltaSink(str(tmp_path / "table"), mode=by_window), uid="out")
    if database is not None:
        key = ("user", "begins", "ends")
        same = database.sink("sessions", key=key, mode="upsert", delete_when=field, create_table=True)
        found.sink_to(same, uid="database")
    return env


@pytest.mark.nightly
def test_sessions_that_become_one_leave_one_row(
    spark: Any, tmp_path: Path, postgres_database: TestDatabase
) -> None:
    """Over a restart: what has to be taken back is part of the state."""
    table = str(tmp_path / "table")

    def stored() -> set[tuple[Any, ...]]:
        return {tuple(row) for row in spark.read.format("delta").load(table).collect()}

    def has(rows: set[tuple[Any, ...]]) -> bool:
        return any(tmp_path.glob("table/_delta_log/*.json")) and stored() == rows

    def in_database() -> set[tuple[Any, ...]]:
        # The column that says what is gone is not there.
        return set(postgres_database.table("sessions"))

    feed(tmp_path / "in", "0", ("ann", 0), ("ann", 15), ("ben", 100))
    client = sessions(spark, tmp_path, database=postgres_database).execute_async()
    await_that(lambda: has({("ann", 0, 10, 1), ("ann", 15, 25, 1)}), client)
    client.stop_with_checkpoint()
    client.wait()
    assert in_database() == {("ann", 0, 10, 1), ("ann", 15, 25, 1)}

    feed(tmp_path / "in", "1", ("ann", 8), ("ben", 120))
    client = sessions(spark, tmp_path, database=postgres_database).execute_async()
    await_that(lambda: has({("ann", 0, 25, 3), ("ben", 100, 110, 1)}), client)
    client.stop_with_checkpoint()
    client.wait()
    assert in_database() == {("ann", 0, 25, 3), ("ben", 100, 110, 1)}


def test_a_field_that_results_have_already_is_refused(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(SchemaError, match="the output of 'sessions' has the field 'N' twice"):
        sessions(spark, tmp_path, "N").execute()
