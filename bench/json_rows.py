"""Measures JSON per record, in Python over Arrow columns, with the way there and back.

`python -m bench.json_rows` reads the same records some times, in one warm session, and prints seconds and
CPU of the whole process tree.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark.bridge.session import configure_spark_with_jars
from flinkish_spark.connectors.plain_formats import read_json
from flinkish_spark.types.ddl import parse_ddl

JARS = Path(__file__).resolve().parents[1] / "build" / "jars"
SCHEMA = "user STRING, amount LONG, at TIMESTAMP"
ROUNDS = 4


def tree_cpu_s() -> float:
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [one.cpu_times() for one in tree if one.is_running()]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


def written(spark: SparkSession, count: int, folder: str) -> DataFrame:
    number = F.col("id")
    user, amount = (number % 10_000).cast("string"), (number % 997).cast("string")
    second = F.lpad((number % 60).cast("string"), 2, "0")
    parts = ['{"user":"u', user, '","product":"some product","amount":', amount]
    parts += [',"at":"2026-01-31T12:00:', second, 'Z"}']
    text = F.concat(*(F.lit(one) if isinstance(one, str) else one for one in parts))
    spark.range(0, count, 1, 4).select(text.cast("binary").alias("value")).write.parquet(folder)
    return spark.read.parquet(folder)


def read_all(records: DataFrame) -> None:
    schema = parse_ddl(SCHEMA)

    def read(batches):
        for batch in batches:
            rows, _ = read_json(batch.column("value"), schema, "the value", "UTC")
            yield pa.RecordBatch.from_arrays(rows.flatten(), names=schema.names)

    records.mapInArrow(read, schema).write.format("noop").mode("overwrite").save()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--records", type=int, default=3_000_000)
    count = options.parse_args().records
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = configure_spark_with_jars(builder.config("spark.driver.memory", "2g"), JARS).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        records = written(spark, count, f"{folder}/records")
        for _ in range(ROUNDS):
            began_s, cpu_s = time.monotonic(), tree_cpu_s()
            read_all(records)
            took_s, used_s = time.monotonic() - began_s, tree_cpu_s() - cpu_s
            print(f"{took_s:.1f} s, {used_s / count * 1e6:.2f} us of CPU a record", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
