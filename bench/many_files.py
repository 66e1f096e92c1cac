"""A Delta table of many files: how long a sink and a source take to open it, and a source to plan its files.

python -m bench.many_files --files 100000
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from bench.start import ROOT
from flinkish_spark.connectors.delta.log import DeltaSnapshot
from flinkish_spark.connectors.delta.source import files_of
from flinkish_spark.connectors.delta.tables import DeltaTables, info_of
from flinkish_spark.sources import DeltaTableSource

ROWS = 10


def write_table(folder, files):
    """Write a table with one commit; all of its files have the same bytes."""
    (folder / "_delta_log").mkdir(parents=True)
    held = io.BytesIO()
    pq.write_table(pa.table({"id": range(ROWS), "name": [str(one) for one in range(ROWS)]}), held)
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "long"), ("name", "string"))
    ]
    metadata = {
        "id": "00000000-0000-0000-0000-000000000000",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": 0,
    }
    actions = [{"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}, {"metaData": metadata}]
    for number in range(files):
        name = f"part-{number:06d}.parquet"
        (folder / name).write_bytes(held.getvalue())
        stats = {"numRecords": ROWS, "minValues": {"id": 0}, "maxValues": {"id": ROWS - 1}, "nullCount": {}}
        add = {"path": name, "partitionValues": {}, "size": len(held.getvalue()), "modificationTime": number}
        actions.append({"add": {**add, "dataChange": True, "stats": json.dumps(stats)}})
    text = "\n".join(map(json.dumps, actions))
    (folder / "_delta_log" / f"{0:020}.json").write_text(f"{text}\n")


def timed(what, work):
    """Print how long a piece of work takes; return what it returns."""
    began_s = time.monotonic()
    found = work()
    print(f"{what}: {time.monotonic() - began_s:.2f} s", flush=True)
    return found


def measure(folder, log, files):
    """Print what sink and source take with such a log."""
    timed(f"{log}, the sink opens it", lambda: info_of(DeltaTables({}).open(str(folder))))
    source = timed(f"{log}, the source opens it", lambda: DeltaTableSource(str(folder)))
    rows_of = source._rows_of
    snapshot = timed(f"{log}, the source reads it", lambda: DeltaSnapshot.read(rows_of.table, None))
    found = timed(f"{log}, the source plans its files", lambda: files_of(snapshot, rows_of))
    assert len(found) == files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-many-files"))
    args = parser.parse_args()
    folder = Path(args.directory)
    shutil.rmtree(folder, ignore_errors=True)
    write_table(folder, args.files)
    for log in ("a commit", "a checkpoint"):
        if log == "a checkpoint":
            DeltaTable(str(folder)).create_checkpoint()
        measure(folder, log, args.files)


if __name__ == "__main__":
    main()
