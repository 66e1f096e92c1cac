"""The contract of sinks, held by the JDBC sink over each database."""

from __future__ import annotations

import pytest

from flinkish_spark.testing.sinks import SINK_CASES, SinkUnderTest


@pytest.mark.parametrize("case", SINK_CASES)
@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_the_jdbc_sink(case, mode, database, spark, tmp_path) -> None:
    folder, key = tmp_path / "folder", ("user", "amount")

    def sink():
        return database.sink(create_table=True, mode=mode, key=key)

    def rows():
        there = database.dialect.columns_of(database.session, sink().settings.table_name)
        return database.table() if there else []

    case(SinkUnderTest(sink, rows, spark, folder, count_open=lambda: len(list(folder.rglob("*.arrow")))))
