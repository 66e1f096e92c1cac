"""A million rows into a Delta table: staged by our sink, beside an append by Spark's own writer.

    python -m bench.delta_staging --rows 1000000 --rounds 5

Both read the same Parquet and write one file per task. Ours counts rows, makes statistics and syncs files.
Its commit is not in the figures, Spark's is. CPU is that of all processes. Variants take turns; the first
two rounds are thrown away, since a JVM compiles in them.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import time
from pathlib import Path

from pyspark.sql import functions as F

from bench.start import ROOT, _cpu_s, session

SCHEMA = "id LONG, user STRING, amount DECIMAL(12,2), at TIMESTAMP, note STRING"
_COMPILING = 2


def write_rows(spark, rows, path):
    number = F.col("id")
    columns = [
        number,
        F.concat(F.lit("user-"), number % 10_000).alias("user"),
        (number % 997 / 7).cast("DECIMAL(12,2)").alias("amount"),
        F.timestamp_millis(number * 10 + 1_700_000_000_000).alias("at"),
        F.md5(number.cast("string")).alias("note"),
    ]
    spark.range(0, rows, 1, 2).select(*columns).write.parquet(path)


class Ours:
    def __init__(self, spark, folder):
        from flinkish_spark import DeltaSink
        from flinkish_spark.testing.sink_contract import SinkUnderTest

        self.sink = DeltaSink(str(folder / "ours"))
        under_test = SinkUnderTest(lambda: self.sink, list, spark, folder / "job", schema=SCHEMA)
        self.writer, self.blocks = under_test.start()._writer, itertools.count(1)

    def __call__(self, rows):
        from flinkish_spark.contracts.sink import StageRequest
        from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
        from flinkish_spark.transport import columns as C

        values = (F.lit(int(C.Kind.RECORD)), *(F.lit(0).cast("long"),) * 2, F.xxhash64("id"))
        control = [value.alias(name) for value, name in zip(values, C.SINK_CONTROL, strict=True)]
        block = next(self.blocks)
        request = StageRequest(rows.select(*control, "*"), Lineage(0), BatchId(block), block, CheckpointId(1))
        return sum(ack.rows for ack in self.writer.stage(request).tasks)


class Spark:
    def __init__(self, folder):
        self.path = str(folder / "spark")

    def __call__(self, rows):
        rows.write.format("delta").mode("append").save(self.path)
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-delta-staging"), help="made anew")
    parser.add_argument("--jars", default=str(ROOT / "build" / "jars"))
    args = parser.parse_args()
    folder = Path(args.directory)
    shutil.rmtree(folder, ignore_errors=True)
    args.variant, args.event_log = "ours", ""
    spark = session(args)
    write_rows(spark, args.rows, str(folder / "rows"))
    rows = spark.read.schema(SCHEMA).parquet(str(folder / "rows"))
    variants = {"ours": Ours(spark, folder), "Spark's": Spark(folder)}
    took = {name: [] for name in variants}
    for _ in range(args.rounds + _COMPILING):
        for name, run in variants.items():
            cpu_s, began_s = _cpu_s(), time.monotonic()
            written = run(rows)
            took[name].append((time.monotonic() - began_s, _cpu_s() - cpu_s))
            assert written in (None, args.rows), written
    print("| writer | s (least to most) | CPU s (least to most) |\n|---|---|---|")
    for name, found in took.items():
        cells = [
            f"{statistics.median(one):.2f} ({min(one):.2f}-{max(one):.2f})"
            for one in zip(*found[_COMPILING:], strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
