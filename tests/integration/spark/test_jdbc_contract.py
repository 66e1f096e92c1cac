"""The contract of sinks, held by the JDBC sink over each database."""

from __future__ import annotations

import pytest

from flinkish_spark.testing.sink_contract import SINK_CASES, SinkUnderTest

#: Each mode's statements run on every database in the tests of commits; staging is the same for all.
MODES = {"sqlite": "upsert", "postgresql": "insert", "mysql": "upsert"}


@pytest.mark.parametrize("case", SINK_CASES)
def test_the_jdbc_sink(case, database, spark, tmp_path) -> None:
    folder, key, mode = tmp_path / "folder", ("user", "amount"), MODES[database.dialect.name]

    def sink():
        return database.sink(create_table=True, mode=mode, key=key)

    def rows():
        there = database.dialect.columns_of(database.session, sink().settings.table_name)
        return database.table() if there else []

    case(SinkUnderTest(sink, rows, spark, folder, count_open=lambda: len(list(folder.rglob("*.arrow")))))
