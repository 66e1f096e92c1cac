"""The MERGE of an upsert: our Delta sink, the same by hand in Spark, and delta-rs.

    python -m bench.merge --table 19000 --rows 10000 --rounds 7

A table of one file; then rows of which half replace one and half are new. Ours is a micro-batch that is
staged, and the commit of its checkpoint. By hand it is `DeltaTable.merge`, as in foreachBatch, with Spark's
settings and with those that fit. delta-rs has a process of its own, without a JVM, and gets Arrow.
After each run the table is read and compared. Variants take turns; the first round is thrown away.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.start import ROOT, session

SCHEMA = "id LONG, name STRING, amount LONG, seen LONG"
#: Spark's own number of shuffle partitions, and one for two cores.
_DEFAULT, _FITTING = 200, 2
#: In the environment of delta-rs: a request a line, the milliseconds of each as the answer.
_DELTA_RS = """
import json, sys, time
import pyarrow.parquet as pq
from deltalake import DeltaTable
for line in sys.stdin:
    asked = json.loads(line)
    rows = pq.read_table(asked["rows"])
    began = time.monotonic()
    table = DeltaTable(asked["table"])
    merge = table.merge(source=rows, predicate="t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    print(json.dumps(1000 * (time.monotonic() - began)), flush=True)
"""


def content(numbers, seen):
    """Return rows as they are after so many changes."""
    return [(number, f"name-{number}", number * 7 % 1_000 + seen, seen) for number in numbers]


class Ours:
    """The Delta sink, as a job uses it."""

    def __init__(self, spark, args):
        self.spark, self.folder, self.epochs = spark, Path(args.directory) / "sink", itertools.count()

    def __call__(self, table, rows):
        from flinkish_spark import DeltaSink, Upsert
        from flinkish_spark.testing.sink_contract import SinkUnderTest

        sink = DeltaSink(str(table), mode=Upsert(keys=("id",)))
        place = self.folder / str(next(self.epochs))
        process = SinkUnderTest(lambda: sink, list, self.spark, place, schema=SCHEMA).start()
        began = time.monotonic()
        staged = process.stage(rows, checkpoint=(checkpoint := process._subject.next_checkpoint()))
        between = time.monotonic()
        process.commit(checkpoint, staged)
        return {"stage": 1_000 * (between - began), "merge": 1_000 * (time.monotonic() - between)}


class ByHand:
    """`DeltaTable.merge`, as a function of foreachBatch calls it."""

    def __init__(self, spark, partitions):
        self.spark, self.partitions = spark, partitions

    def __call__(self, table, rows):
        from delta.tables import DeltaTable

        self.spark.conf.set("spark.sql.shuffle.partitions", self.partitions)
        frame = self.spark.createDataFrame(rows, SCHEMA).repartition(2).localCheckpoint()
        began = time.monotonic()
        merge = DeltaTable.forPath(self.spark, str(table)).alias("t").merge(frame.alias("s"), "t.id = s.id")
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
        self.spark.conf.set("spark.sql.shuffle.partitions", _FITTING)
        return {"merge": 1_000 * (time.monotonic() - began)}


class DeltaRs:
    """delta-rs, in a process that stays."""

    def __init__(self, python, args):
        self.file = Path(args.directory) / "rows.parquet"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([python, "-c", _DELTA_RS], **pipes)

    def __call__(self, table, rows):
        names = [field.split()[0] for field in SCHEMA.split(", ")]
        pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), self.file)
        self.process.stdin.write(json.dumps({"table": str(table), "rows": str(self.file)}) + "\n")
        self.process.stdin.flush()
        return {"merge": json.loads(self.process.stdout.readline())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", type=int, default=19_000, help="rows that are there")
    parser.add_argument("--rows", type=int, default=10_000, help="of a MERGE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delta-rs", default=str(ROOT / "build" / "peers" / "deltars" / "bin" / "python"))
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-merge"), help="made anew")
    parser.add_argument("--jars", default=str(ROOT / "build" / "jars"))
    args = parser.parse_args()
    shutil.rmtree(args.directory, ignore_errors=True)
    args.variant, args.event_log = "ours", ""
    spark = session(args)
    spark.conf.set("spark.sql.shuffle.partitions", _FITTING)
    variants = {
        "ours": Ours(spark, args),
        f"by hand, {_DEFAULT} partitions": ByHand(spark, _DEFAULT),
        f"by hand, {_FITTING} partitions": ByHand(spark, _FITTING),
        "delta-rs": DeltaRs(args.delta_rs, args),
    }
    kept = range(args.table)
    rows = content(range(args.table - args.rows // 2, args.table + args.rows - args.rows // 2), 1)
    wanted = sorted([*content(kept[: args.table - args.rows // 2], 0), *rows])
    took = {name: [] for name in variants}
    for number in range(args.rounds + 1):
        for name, run in variants.items():
            table = Path(args.directory) / f"table-{number}-{len(took[name])}-{list(variants).index(name)}"
            spark.createDataFrame(content(kept, 0), SCHEMA).coalesce(1).write.format("delta").save(str(table))
            parts = run(table, rows)
            found = sorted(map(tuple, spark.read.format("delta").load(str(table)).collect()))
            if found != wanted:
                raise SystemExit(f"{name} made {len(found)} rows, expected are {len(wanted)} others")
            took[name].append(parts)
    print("| | stage ms | MERGE ms (least to most) |\n|---|---|---|")
    for name, found in took.items():
        merges = [one["merge"] for one in found[1:]]
        stages = [one["stage"] for one in found[1:] if "stage" in one]
        stage = f"{statistics.median(stages):,.0f}" if stages else ""
        spread = f"{statistics.median(merges):,.0f} ({min(merges):,.0f}-{max(merges):,.0f})"
        print(f"| {name} | {stage} | {spread} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
