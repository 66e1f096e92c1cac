"""Tables as the audit reads them: by their log, without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from flinkish_spark.audit.counting import Extent, InputOffsets
from flinkish_spark.audit.decided import Decided
from flinkish_spark.audit.outputs import OriginNames, OutputKind, OutputReader, OutputSpec, UnreadableTable
from flinkish_spark.connectors.delta.table import app_id
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.lineage import LineageHistory
from tests.unit.demo.test_demo_delta_log import mark, write_version

JOB = JobUuid("a" * 32)


def read(table: Path):
    expected = InputOffsets({("in", 0): Extent(0, 4)})
    reader = OutputReader(expected, OriginNames(), JOB, Decided({}, None, LineageHistory()), lambda: None)
    return reader.read(OutputSpec("out", OutputKind.DELTA, str(table)))


def added(table: Path, name: str, *offsets: int):
    table.mkdir(exist_ok=True)
    columns = {"_topic": ["in"] * len(offsets), "_partition": [0] * len(offsets), "_offset": list(offsets)}
    parquet.write_table(pa.table(columns), table / name)
    return {"add": {"path": name, "dataChange": True}}


def test_a_table_that_the_sink_merges_into_is_refused_and_not_called_lost(tmp_path: Path) -> None:
    table, ours = tmp_path / "t", app_id(JOB, "out")
    write_version(table, 0, mark(ours, 1), added(table, "a.parquet", 0, 1))
    # A compaction by anybody takes no row away, a deletion by somebody else does and is a loss.
    small = {"remove": {"path": "a.parquet", "dataChange": False}}
    write_version(table, 1, small, added(table, "b.parquet", 0, 1))
    write_version(table, 2, {"remove": {"path": "b.parquet", "dataChange": True}})
    found = read(table)
    assert found.rows == 0 and found.by_checkpoint == {1: 2}
    write_version(table, 3, mark(ours, 2), added(table, "c.parquet", 1), {"remove": {"path": "b.parquet"}})
    with pytest.raises(UnreadableTable, match="'out' replaces rows of the table"):
        read(table)


def test_a_table_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert read(tmp_path / "typo").notes == [f"there is no table at {tmp_path / 'typo'}"]
