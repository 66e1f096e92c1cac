"""A MERGE into a table of gigabytes: delta-rs, as the Delta sink commits an upsert, beside Spark's.

    python -m bench.big_merge --table 50000000 --rows 100000

Half of the rows replace one, half are new; what is replaced is spread over the whole table, or lies in its
last file. Each MERGE has a process of its own, and a table of its own with the same files. Memory is the most
that the process had (of Spark: its JVM); the result is counted and added up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.start import ROOT, session

ROWS_OF_A_FILE = 5_000_000


def content(numbers, seen):
    """Return rows as they are after so many changes."""
    amounts = pc.add(pc.subtract(numbers, pc.multiply(pc.divide(numbers, 1_000), 1_000)), seen)
    names = pc.binary_join_element_wise("name-", pc.cast(numbers, pa.string()), "")
    return pa.table({"id": numbers, "name": names, "amount": amounts, "seen": pa.repeat(seen, len(numbers))})


def make_table(path, rows):
    from deltalake import write_deltalake

    for begin in range(0, rows, ROWS_OF_A_FILE):
        numbers = pa.array(range(begin, min(begin + ROWS_OF_A_FILE, rows)), pa.int64())
        write_deltalake(str(path), content(numbers, 0), mode="append", target_file_size=1 << 40)


def rows_to_merge(table, count, where):
    old = count // 2
    step = table // old if where == "spread" else 1
    first = 0 if where == "spread" else table - old
    numbers = [*range(first, first + old * step, step), *range(table, table + count - old)]
    return content(pa.array(numbers, pa.int64()), 1)


def by_delta_rs(args):
    from flinkish_spark import Upsert
    from flinkish_spark.connectors.delta.tables import DeltaTables, Marker
    from flinkish_spark.connectors.staged_rows import DELETED

    rows = pq.read_table(args.source)
    rows = rows.append_column(DELETED, pa.repeat(False, len(rows)))
    tables = DeltaTables()
    began = time.monotonic()
    table = tables.open(args.path)
    tables.merge(args.path, table, rows, Upsert(keys=("id",)), Marker("bench", 1, "bench"))
    return time.monotonic() - began, _peak_of(os.getpid())


def by_spark(args):
    from delta.tables import DeltaTable

    args.variant, args.event_log = "ours", ""
    spark = session(args)
    spark.conf.set("spark.sql.shuffle.partitions", args.partitions)
    rows = spark.read.parquet(args.source).localCheckpoint()
    began = time.monotonic()
    merge = DeltaTable.forPath(spark, args.path).alias("t").merge(rows.alias("s"), "t.id = s.id")
    merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
    took = time.monotonic() - began
    return took, _peak_of(spark._jvm.ProcessHandle.current().pid())


def _peak_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10


def check(path, table, count):
    from deltalake import DeltaTable

    rows = total = 0
    for file in DeltaTable(str(path)).file_uris():
        seen = pq.read_table(file.removeprefix("file://"), columns=["seen"]).column("seen")
        rows, total = rows + len(seen), total + (pc.sum(seen).as_py() or 0)
    if (rows, total) != (table + count - count // 2, count):
        raise SystemExit(f"{path} has {rows} rows, of which {total} are new")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", type=int, default=50_000_000, help="rows that are there")
    parser.add_argument("--rows", type=int, default=100_000, help="of a MERGE")
    parser.add_argument("--partitions", type=int, default=16, help="of Spark's shuffles")
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-big-merge"))
    parser.add_argument("--jars", default=str(ROOT / "build" / "jars"))
    parser.add_argument("--run", choices=("delta-rs", "spark"), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        seconds, peak = (by_delta_rs if args.run == "delta-rs" else by_spark)(args)
        print(json.dumps({"seconds": round(seconds, 1), "peak_mb": peak >> 20}))
        return 0
    folder = Path(args.directory)
    shutil.rmtree(folder, ignore_errors=True)
    make_table(folder / "table", args.table)
    size = sum(one.stat().st_size for one in (folder / "table").glob("*.parquet"))
    print(f"{args.table:,} rows, {size >> 20:,} MiB\n\n| keys | by | seconds | MiB |\n|---|---|---|---|")
    for where in ("newest", "spread"):
        source = folder / f"{where}.parquet"
        pq.write_table(rows_to_merge(args.table, args.rows, where), source)
        for by in ("delta-rs", "spark"):
            path = folder / f"{where}-{by}"
            shutil.copytree(folder / "table", path, copy_function=os.link)
            told = ["--run", by, "--path", str(path), "--source", str(source), "--directory", str(folder)]
            more = ["--jars", args.jars, "--partitions", str(args.partitions)]
            command = [sys.executable, "-m", "bench.big_merge", *told, *more]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            check(path, args.table, args.rows)
            print(f"| {where} | {by} | {found['seconds']:,} | {found['peak_mb']:,} |", flush=True)
            shutil.rmtree(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
