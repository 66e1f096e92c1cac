"""Big state: how long a micro-batch takes with ten thousand keys and with millions, here and in native Spark.

    python -m bench.big_state --keys 10000 1000000 5000000 --touched few half --variants ours native

Each run has a process of its own. All keys are written first; then micro-batches touch ten thousand of them
(`few`), keys by chance (`chance`: of a million keys 500,000 rows touch some 393,000), or every second one,
those with even and with odd numbers in turn (`half`). A micro-batch has 500,000 rows; where half of the keys
are more than that, as many as they are. What counts is the median of the micro-batches behind the first
ones; and the most memory that any Python worker held. In the end the totals of all keys in our last
checkpoint are compared with those of a batch over the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from flinkish_spark.bridge.worker_processes import PRELOADING_DAEMON

ROWS = 500_000
FEW = 10_000
MEASURED = 8
ROOT = Path(__file__).resolve().parents[1]


class Memory(threading.Thread):
    """Watches the Python workers below this process: bytes that a worker alone has."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        me = psutil.Process()
        while True:
            for process in me.children(recursive=True):
                try:
                    if PRELOADING_DAEMON in process.cmdline():
                        self.most = max(self.most, process.memory_full_info().uss)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            time.sleep(0.5)


def session(folder):
    from pyspark.sql import SparkSession

    from flinkish_spark import configure_spark_with_jars

    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "6g")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    )
    spark = configure_spark_with_jars(builder, ROOT / "build" / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def rows_at_once(keys, touched):
    """Return how many rows a micro-batch has."""
    return max(ROWS, keys // 2) if touched == "half" else ROWS


def keyed(numbers, keys, touched):
    """Numbers, each with its key: first every key once, then few of them, any, or every second one."""
    from pyspark.sql import functions as F

    rows, number = rows_at_once(keys, touched), F.col("value")
    micro_batch = F.floor(number / rows)
    if touched == "half":
        # Numbers follow each other, so a micro-batch has each of its keys as often as the others.
        wanted = 2 * F.pmod(number, F.lit(keys // 2)) + F.pmod(micro_batch, F.lit(2))
    else:
        by = [micro_batch, number % FEW] if touched == "few" else [number]
        wanted = F.pmod(F.xxhash64(*by), F.lit(keys))
    key = F.when(number < keys, number).otherwise(wanted)
    return numbers.select(key.alias("k"), (number % 1000).alias("v"))


def rows_of(spark, keys, touched):
    """All numbers, as a stream."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_at_once(keys, touched))
    return keyed(source.option("numPartitions", 2).load(), keys, touched)


def wrong_totals(spark, folder, keys, touched):
    """Return how many keys there are in the last checkpoint, and how many have a total that is not right."""
    from pyspark.sql import functions as F

    from flinkish_spark.state_processor import read_state

    totals = read_state(spark, folder / "job", "totals", "total").cache()
    # Every thousand numbers add up to 499,500, and a micro-batch has thousands of them.
    read, remainder = divmod(2 * totals.agg(F.sum("value")).first()[0], 999)
    if remainder or read % rows_at_once(keys, touched):
        raise SystemExit(f"the totals of {read} numbers and {remainder} are not those of whole micro-batches")
    numbers = spark.range(read).withColumnRenamed("id", "value")
    wanted = keyed(numbers, keys, touched).groupBy("k").agg(F.sum("v").alias("wanted"))
    both = totals.join(wanted, F.col("key") == F.col("k"), "full")
    return totals.count(), both.where(~F.col("value").eqNullSafe(F.col("wanted"))).count()


def ours(spark, folder, keys, touched):
    import pyarrow as pa

    from flinkish_spark import (
        CheckpointConfig,
        ForeachCheckpointSink,
        StreamExecutionEnvironment,
        ValueStateDescriptor,
        VectorizedProcessFunction,
    )
    from flinkish_spark.operators.vectorized import sum_by_key

    class Totals(VectorizedProcessFunction):
        def open(self, context):
            context.get_state(ValueStateDescriptor("total", "LONG"))

        def process_batch(self, batch, ctx):
            total, index = ctx.state("total"), ctx.index
            sums = total.numbers() + sum_by_key(index, batch.column("v").to_numpy())
            total.put([sums])
            # One row per key group: what is measured is the state.
            yield pa.RecordBatch.from_arrays([pa.array([int(sums.sum())])], names=["total"])

    env = StreamExecutionEnvironment(
        spark, "big", str(folder / "job"), checkpoint=CheckpointConfig(interval_ms=10_000)
    )
    stream = env.from_dataframe(rows_of(spark, keys, touched), uid="numbers")
    totals = stream.key_by("k").process(Totals(), output="total LONG", uid="totals")
    totals.sink_to(ForeachCheckpointSink(lambda rows, checkpoint: None), uid="out")
    client = env.execute_async()

    def stop():
        client.stop_with_checkpoint()
        client.wait()

    return stop


def native(spark, folder, keys, touched):
    from pyspark.sql import functions as F

    state = "spark.sql.streaming.stateStore."
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set(state + "providerClass", provider)
    spark.conf.set(state + "rocksdb.changelogCheckpointing.enabled", "true")
    totals = rows_of(spark, keys, touched).groupBy("k").agg(F.sum("v").alias("total"))
    query = totals.writeStream.outputMode("update").format("noop")
    return query.option("checkpointLocation", str(folder / "checkpoint")).start().stop


def measure(args):
    """Run one variant; print one JSON line."""
    folder = Path(args.directory).resolve() / "run"
    shutil.rmtree(folder, ignore_errors=True)
    spark = session(folder)
    memory = Memory()
    memory.start()
    keys, touched = args.keys[0], args.touched[0]
    stop = {"ours": ours, "native": native}[args.variants[0]](spark, folder, keys, touched)
    # All keys, and two micro-batches more until everything is warm.
    rows = rows_at_once(keys, touched)
    first = -(-keys // rows) + 3
    found = {}
    while len([n for n in found if n >= first]) < MEASURED:
        time.sleep(0.5)
        for query in spark.streams.active:
            for progress in query.recentProgress:
                if progress["numInputRows"] >= rows:
                    found[progress["batchId"]] = progress["durationMs"]["triggerExecution"]
    times = [found[n] for n in sorted(found) if n >= first]
    found = {"ms": statistics.median(times), "worker_mib": memory.most >> 20, "all_ms": times}
    stop()
    if args.variants[0] == "ours":
        found["keys"], found["wrong"] = wrong_totals(spark, folder, keys, touched)
    print(json.dumps(found), flush=True)
    spark.stop()
    if found.get("wrong"):
        raise SystemExit(f"{found['wrong']} totals are wrong")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, nargs="*", default=[10_000, 100_000, 1_000_000, 5_000_000])
    parser.add_argument("--touched", nargs="*", default=["few", "chance", "half"])
    parser.add_argument("--variants", nargs="*", default=["ours", "native"])
    parser.add_argument("--directory", default="build/bench-state")
    parser.add_argument("--one", action="store_true", help="run the first of each in this process")
    args = parser.parse_args()
    if args.one:
        measure(args)
        return
    for variant in args.variants:
        for touched in args.touched:
            for keys in args.keys:
                command = [
                    sys.executable, "-m", "bench.big_state", "--one", "--variants", variant,
                    "--touched", touched, "--keys", str(keys), "--directory", args.directory,
                ]  # fmt: skip
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, check=False,
                    env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
                )  # fmt: skip
                answer = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
                print(f"{variant:7} {touched:5} {keys:>10,}", answer or done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
