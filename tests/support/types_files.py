"""The sources of files, and a source of one's own, as ways for values of a type: without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flinkish_spark.connectors.files.input_formats import InputFormat
from flinkish_spark.connectors.splits import SplitSource, SplitStreamReader, read_piece
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import CollectionSource, CsvFiles, FileSource, JsonLines, ParquetFiles, TextLines
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.to_python import to_values
from tests.support.types_texts import csv_cell, json_text


class Rows(SplitSource):
    """Yields rows of one field, or one batch of them."""

    def __init__(self, ddl: str, values: list[Any], *, as_batch: bool = False) -> None:
        self.schema, self.values, self.as_batch = f"v {ddl}", values, as_batch

    def splits(self) -> list[str]:
        return ["one"]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        return len(self.values)

    def end(self, split: str) -> int:
        return len(self.values)

    def read(self, split: str, start: int, end: int) -> Iterator[Any]:
        if self.as_batch:
            yield pa.RecordBatch.from_arrays([column(f"v {self.schema[2:]}", self.values)], names=["v"])
        else:
            yield from ((value,) for value in self.values[start:end])


def column(field: str, values: list[Any]) -> pa.Array:
    """Return values as Arrow has them, with nothing of ours between."""
    [kind] = arrow_schema(parse_ddl(field)).types
    return pa.array([_plain(value) for value in values], kind)


def _plain(value: Any) -> Any:
    """Maps as pairs, which is what Arrow takes them as."""
    if isinstance(value, dict) and list(value) != ["v"]:
        return [(key, _plain(one)) for key, one in value.items()]
    return value


def read_all(source: SplitSource, folder: Path) -> list[Any]:
    """Return the field of all records of a source, through the reader that Spark calls."""
    return _read_through(SplitStreamReader(source.bind("in"), str(folder / "control")))


def _read_through(reader: SplitStreamReader) -> list[Any]:
    start = reader.initialOffset()
    pieces = reader.partitions(start, reader.latestOffset(start, None))
    return [
        value
        for piece in pieces
        for batch in read_piece(reader.source, piece)
        for value in to_values(batch.column(0))
    ]


def own_rows(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    return read_all(Rows(ddl, values), folder)


def own_batches(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    return read_all(Rows(ddl, values, as_batch=True), folder)


def collection(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    return read_all(CollectionSource([(value,) for value in values], f"v {ddl}"), folder)


def parquet(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    schema = arrow_schema(parse_ddl(f"v {ddl}"))
    table = pa.Table.from_arrays([column(f"v {ddl}", values)], schema=schema)
    pq.write_table(table, folder / "values.parquet")
    return _read("values.parquet", ParquetFiles(), ddl, folder)


def json_lines(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    lines = "".join(f'{{"v":{json_text(value)}}}\n' for value in values)
    (folder / "values.json").write_text(lines, encoding="utf-8", newline="")
    return _read("values.json", JsonLines(), ddl, folder)


def csv(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    # A second column, since an empty line is none.
    cells = [csv_cell(value) for value in values]
    (folder / "values.csv").write_bytes(b"v,n\n" + b"".join(cell + b",1\n" for cell in cells))
    return _read("values.csv", CsvFiles(), ddl, folder)


def _read(name: str, form: InputFormat, ddl: str, folder: Path) -> list[Any]:
    return read_files(FileSource(str(folder), form, f"v {ddl}", pattern=name), folder)


def read_files(source: FileSource, folder: Path) -> list[Any]:
    """Return the first field of all records of a source of files, checked as a job checks it."""
    bound = source.bind("in")
    job_dir = JobDir(LocalStore(folder / "job"))
    bound.preflight(None, job_dir, "in")  # type: ignore[arg-type]
    bound.check_input(job_dir, "in", None)
    return _read_through(SplitStreamReader(bound, str(folder / "job" / "control")))


def text_lines(ddl: str, values: list[Any], folder: Path) -> list[Any]:
    (folder / "values.txt").write_text(
        "".join(f"{value}\n" for value in values), encoding="utf-8", newline=""
    )
    return _read("values.txt", TextLines(), ddl, folder)


FILES = {
    "rows of SplitSource": own_rows,
    "batches of SplitSource": own_batches,
    "ParquetFiles": parquet,
    "JsonLines": json_lines,
    "CsvFiles": csv,
    "TextLines": text_lines,
    "CollectionSource": collection,
}
