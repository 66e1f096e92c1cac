"""A large file is read in parts, each of them once, whoever reads it and wherever a job stands in it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flinkish_spark.connectors.delta import file_rows
from flinkish_spark.connectors.files import input_formats
from flinkish_spark.connectors.files.input_formats import BadLine, FilePart, parts_of_lines
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.sources import (
    CsvFiles,
    DeltaChanges,
    DeltaSource,
    DeltaTableSource,
    FileSource,
    JsonLines,
    ParquetFiles,
    RateLimit,
    TextLines,
)
from tests.unit.connectors.delta.test_delta_table_source import Table
from tests.unit.connectors.files.test_file_source import reader_of
from tests.unit.connectors.test_split_source import step

ROWS = 500
SCHEMA = "value STRING"
VALUES = [f"\u00fc{number:04d}" for number in range(ROWS)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(input_formats, "_LEAST_PART_BYTES", 1_000)


def written(folder, kind):
    folder.mkdir()
    path = str(folder / f"x.{kind}")
    if kind == "parquet":
        pq.write_table(pa.table({"value": VALUES}), path, row_group_size=50, compression="none")
        return ParquetFiles()
    form = {"txt": "{}", "json": '{{"value": "{}"}}', "csv": "{}"}[kind.partition(".")[0]]
    text = "".join(form.format(one) + "\n" for one in (["value"] if kind == "csv" else []) + VALUES)
    data = "\ufeff".encode() + text.encode()
    with open(path, "wb") as file:
        file.write(gzip.compress(data) if kind.endswith(".gz") else data)
    return {"txt": TextLines(), "json": JsonLines(), "csv": CsvFiles()}[kind.partition(".")[0]]


def all_of(reader):
    """Return the rows of each micro-batch, and where each begins."""
    position, found, places = reader.initialOffset(), [], []
    while not SplitPosition.from_json(position).is_ended:
        places.append(position)
        position, rows = step(reader, position)
        found.append([row[0] for row in rows])
    return found, places


@pytest.mark.parametrize("kind", ["parquet", "txt", "json"])
def test_a_large_file_is_several_in_the_order_that_it_has(tmp_path, kind) -> None:
    source = FileSource(str(tmp_path / "in"), written(tmp_path / "in", kind), SCHEMA, max_bytes_per_batch=1)
    reader = reader_of(source, tmp_path)
    batches, places = all_of(reader)
    assert [one for rows in batches for one in rows] == VALUES
    assert len(batches) > 2 and max(map(len, batches)) < ROWS / 2
    # A process that begins anywhere reads what was read there, whatever a part would be for it.
    input_formats._LEAST_PART_BYTES = 300
    for rows, place in zip(batches, places, strict=True):
        again = reader_of(source, tmp_path)
        assert [row[0] for row in step(again, place)[1]] == rows


def test_splits_share_a_large_file(tmp_path) -> None:
    source = FileSource(str(tmp_path / "in"), written(tmp_path / "in", "parquet"), SCHEMA, splits=3)
    reader = reader_of(source, tmp_path)
    start = reader.initialOffset()
    pieces = reader.partitions(start, reader.latestOffset(start, None))
    assert len(pieces) == 3
    batches, _ = all_of(reader)
    assert sorted(one for rows in batches for one in rows) == VALUES


def test_a_rate_counts_the_records_of_parts(tmp_path) -> None:
    source = FileSource(str(tmp_path / "in"), written(tmp_path / "in", "parquet"), SCHEMA)
    reader = reader_of(source.limit_rate(RateLimit(records_per_batch=120)), tmp_path)
    batches, _ = all_of(reader)
    assert sum(map(len, batches)) == ROWS and 50 <= max(map(len, batches)) <= 250 and len(batches) > 2


@pytest.mark.parametrize("kind", ["csv", "txt.gz", "json.gz"])
def test_what_has_no_parts_is_one(tmp_path, kind) -> None:
    source = FileSource(str(tmp_path / "in"), written(tmp_path / "in", kind), SCHEMA, max_bytes_per_batch=1)
    batches, _ = all_of(reader_of(source, tmp_path))
    assert batches == [VALUES]


@pytest.mark.parametrize(
    "text", ["", "x", "x\n", "x\n" * 999, "x\n" * 1_000, "x" * 5_000, "x" * 5_000 + "\n\ny\n"]
)
def test_parts_of_lines_are_the_whole_file_and_end_behind_lines(tmp_path, text) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    parts = parts_of_lines(str(path))
    if parts == [FilePart()]:
        return
    data = path.read_bytes()
    pieces = [data[one.begin : one.end] for one in parts]
    assert b"".join(pieces) == data and len(pieces) > 1 and all(pieces)
    assert all(one.endswith(b"\n") for one in pieces[:-1])


@pytest.mark.parametrize(("kind", "bad"), [("json", b"{]"), ("txt", b"\xff")])
def test_a_bad_line_has_the_number_that_it_has_in_the_file(tmp_path, kind, bad) -> None:
    form = written(tmp_path / "in", kind)
    path = tmp_path / "in" / f"x.{kind}"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:420], bad + b"\n", *lines[420:]]))
    reader = reader_of(FileSource(str(tmp_path / "in"), form, SCHEMA), tmp_path)
    with pytest.raises(Exception, match=r"line 421 ") as found:
        all_of(reader)
    assert isinstance(found.value, BadLine | ValueError) or "line 421" in str(found.value)


def test_a_mark_is_one_only_where_the_file_begins(tmp_path) -> None:
    written(tmp_path / "in", "txt")
    path = tmp_path / "in" / "x.txt"
    lines = ["\ufeff" + one for one in VALUES]
    path.write_text("".join(one + "\n" for one in lines), encoding="utf-8")
    batches, _ = all_of(reader_of(FileSource(str(tmp_path / "in"), TextLines(), SCHEMA), tmp_path))
    assert [one for rows in batches for one in rows] == [VALUES[0], *lines[1:]]


@pytest.mark.parametrize("kind", ["table", "rows", "feed"])
def test_a_large_file_of_a_delta_table_is_several(tmp_path, kind) -> None:
    feed = {"delta.enableChangeDataFeed": "true"}
    table = Table(tmp_path / "t", features=["deletionVectors"], configuration=feed, n="long")
    # The example of Delta's protocol: rows 3, 4, 7, 11, 18 and 29.
    letters = "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    vector = {"storageType": "i", "pathOrInlineDv": letters, "sizeInBytes": 44, "cardinality": 6}
    added = table.add("x.parquet", {"n": list(range(1_000))}, deletionVector=vector)
    options = {"row_group_size": 10, "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"n": list(range(1_000))}), tmp_path / "t" / "x.parquet", **options)
    added["add"]["size"] = os.path.getsize(tmp_path / "t" / "x.parquet")
    table.commit(added)
    path = str(tmp_path / "t")
    source = {
        "table": lambda: DeltaTableSource(path, max_bytes_per_batch=1),
        "rows": lambda: DeltaSource(path, starting_version=1, ending_version=1, max_bytes_per_trigger=1),
        "feed": lambda: DeltaSource(
            path, DeltaChanges.FEED, starting_version=1, ending_version=1, max_bytes_per_trigger=1
        ),
    }[kind]()
    batches, _ = all_of(reader_of(source, tmp_path))
    assert [one for rows in batches for one in rows] == sorted({*range(1_000)} - {3, 4, 7, 11, 18, 29})
    assert len(batches) > 3


def test_a_part_is_told_which_of_its_own_rows_are_deleted(tmp_path, monkeypatch) -> None:
    table = Table(tmp_path / "t", features=["deletionVectors"], n="long")
    letters = "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    vector = {"storageType": "i", "pathOrInlineDv": letters, "sizeInBytes": 44, "cardinality": 6}
    table.commit(table.add("x.parquet", {"n": list(range(3_000))}, deletionVector=vector))
    options = {"row_group_size": 13, "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"n": list(range(3_000))}), tmp_path / "t" / "x.parquet", **options)
    # A vector may end in front of the end of the file.
    gone = np.random.default_rng(7).random(2_950) < 0.3
    monkeypatch.setattr(file_rows, "find_deleted_rows", lambda *_: {"x.parquet": np.packbits(gone)})
    source = DeltaTableSource(str(tmp_path / "t"))
    left = [n for n in range(3_000) if n >= len(gone) or not gone[n]]
    batches, _ = all_of(reader := reader_of(source, tmp_path))
    assert [one for rows in batches for one in rows] == left
    found = list(reader.source._list.read())
    told = [source._prepare_for_task(one).partition[file_rows.THERE_IN] for one in found]
    sizes = [len(zlib.decompress(base64.b64decode(one))) for one in told]
    assert len(found) > 9 and sizes == [-(-one.rows // 8) for one in found]


def test_a_part_is_stored_with_its_file(tmp_path) -> None:
    source = FileSource(str(tmp_path / "in"), written(tmp_path / "in", "txt"), SCHEMA)
    reader = reader_of(source, tmp_path)
    start = reader.initialOffset()
    [piece] = reader.partitions(start, reader.latestOffset(start, None))
    facts = json.loads(json.dumps(piece.facts))
    parts = [[int(number) for number in one[4]["flinkish:part"].split()] for one in facts]
    assert parts == sorted(parts) and parts[0][0] == 0 and sum(size for _, _, size, _ in parts) == facts[0][1]
