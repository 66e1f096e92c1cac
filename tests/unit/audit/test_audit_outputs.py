"""Tables as the audit reads them: by their log, without Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from flinkish_spark.audit.counting import Extent, InputOffsets
from flinkish_spark.audit.decided import JobDecisions, partial_checkpoints
from flinkish_spark.audit.outputs import OriginNames, OutputKind, OutputReader, OutputSpec
from flinkish_spark.connectors.delta.table import app_id
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from flinkish_spark.protocol.lineage import LineageHistory
from tests.support.cli_rig import JobOnDisk
from tests.unit.demo.test_demo_delta_log import mark, write_version

JOB = JobUuid("a" * 32)


NOTHING_DECIDED = JobDecisions({}, None, LineageHistory())


def read(
    place: Path,
    decided: JobDecisions = NOTHING_DECIDED,
    job: JobUuid = JOB,
    kind: OutputKind = OutputKind.DELTA,
):
    expected = InputOffsets({("in", 0): Extent(0, 20)})
    reader = OutputReader(expected, OriginNames(), job, decided, lambda: None)
    return reader.read(OutputSpec("out", kind, str(place)))


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
    with pytest.raises(EnvironmentFault, match="'out' replaces rows of the table"):
        read(table)


def test_a_table_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert read(tmp_path / "typo").notes == [f"there is no table at {tmp_path / 'typo'}"]


def test_what_a_rewind_left_in_a_table_is_no_duplicate_also_when_its_decision_is_deleted(
    tmp_path: Path,
) -> None:
    """Retention deletes the decisions of dead checkpoints first, and their rows stay."""
    job, table = JobOnDisk(tmp_path / "job"), tmp_path / "t"
    job.complete(1, 2)
    job.went_back(1, 1)
    job.complete(4, 5, lineage=1)
    ours = app_id(job.uuid, "out")
    offsets = {1: range(6), 2: range(6, 12), 4: range(6, 12), 5: range(12, 18)}
    for number, (checkpoint, rows) in enumerate(offsets.items()):
        write_version(table, number, mark(ours, checkpoint), added(table, f"{checkpoint}.parquet", *rows))
    with_decision = read(table, JobDecisions.read(job.job_dir), job.uuid)
    shutil.rmtree(next((tmp_path / "job" / "checkpoints").glob("*2")))
    decided = JobDecisions.read(job.job_dir)
    assert list(decided.checkpoints) == [1, 4, 5]
    found = read(table, decided, job.uuid)
    for one in (with_decision, found):
        assert (one.rows, one.superseded, one.named.duplicated, one.named.examples) == (24, 6, 0, [])
        assert partial_checkpoints(decided, one.visible, decided) == []
    # What nobody has left behind is a fault as before.
    write_version(table, 4, mark(ours, 9), added(table, "9.parquet", 17))
    found = read(table, decided, job.uuid)
    assert found.named.duplicated == 1
    assert [one.what for one in partial_checkpoints(decided, found.visible, decided)] == ["checkpoint 9"]


def test_a_table_and_files_show_no_input_that_their_checkpoint_had_not_read(tmp_path: Path) -> None:
    job, table, files = JobOnDisk(tmp_path / "job"), tmp_path / "t", tmp_path / "files"
    job.complete(1, 2)
    decided = JobDecisions.read(job.job_dir)
    ends = {number: replace(one, offsets_text=f'v1\n{{}}\n{{"in": {{"0": {6 * number}}}}}')
            for number, one in decided.checkpoints.items()}  # fmt: skip
    decided = replace(decided, checkpoints=ends)
    for number, rows in {1: (0, 1, 2, 3, 4, 6), 2: (5, 7, 8, 9, 10, 11)}.items():
        write_version(
            table, number - 1, mark(app_id(job.uuid, "out"), number), added(table, f"{number}.p", *rows)
        )
        folder = files / "2026"
        folder.mkdir(parents=True, exist_ok=True)
        columns = {"_topic": ["in"] * 6, "_partition": [0] * 6, "_offset": list(rows)}
        batches = [f"0/{2 * number + place // 3}" for place in range(6)]
        parquet.write_table(pa.table({**columns, "flinkish-batch": batches}), folder / f"{number}.parquet")
    for place, kind in ((table, OutputKind.DELTA), (files, OutputKind.PARQUET)):
        found = read(place, decided, job.uuid, kind)
        told = [str(one) for one in partial_checkpoints(decided, found.visible, decided)]
        assert told == ["'out' shows in checkpoint 1 a row of in-0 offset 6, which it had not read"], kind
    assert decided.checkpoints[1].checkpoint == int(CheckpointId(1))


def test_a_file_that_is_no_parquet_and_one_without_statistics(tmp_path: Path) -> None:
    files, table = tmp_path / "files", tmp_path / "t"
    files.mkdir()
    (files / "a.parquet").write_bytes(b"")
    with pytest.raises(EnvironmentFault, match=r"a\.parquet cannot be read as Parquet"):
        read(files, kind=OutputKind.PARQUET)
    action = added(table, "a.parquet", 0, 1)
    action["add"]["stats"] = "{}"
    write_version(table, 0, mark(app_id(JOB, "out"), 1), action)
    assert read(table).by_checkpoint == {1: 2}
