"""One bench worker: holds a warm Spark session and runs one variant on request.

Started by `bench.run`, one process per variant, so that CPU time can be told apart. Reads
lines on standard input, `run <n>` and `check <n>`, and answers each with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bench import copying, door, keyed
from bench.groups import COPY, DOOR, KEYED
from bench.reading_back import read_back
from bench.spark_kafka import READER_DEFAULTS
from bench.sum_peers import OUTPUT, PandasTotal, RowTotal
from demo.app import RunningTotal
from flinkish_spark import (
    CheckpointConfig,
    DeltaSink,
    Json,
    KafkaSink,
    KafkaSource,
    StreamExecutionEnvironment,
    configure_spark_with_jars,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore

SCHEMA = "user STRING, product STRING, amount LONG, at TIMESTAMP"


def session(base, jars, class_archive=None):
    """Return a session as all variants have it, with its files under `base`."""
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "3g")
        .config("spark.local.dir", str(base / "local"))
        .config("spark.sql.warehouse.dir", str(base / "warehouse"))
        .config("spark.databricks.delta.snapshotPartitions", "1")
    )
    spark = configure_spark_with_jars(builder, jars, class_archive=class_archive).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


class Worker:
    def __init__(self, args):
        self.args = args
        self.base = Path(args.directory).resolve() / args.variant
        shutil.rmtree(self.base, ignore_errors=True)
        self.spark = session(self.base, args.jars)

    def check(self, number):
        return read_back(self.spark, self.args, self.base / str(number))

    def run(self, number):
        folder = self.base / str(number)
        if self.args.variant in DOOR:
            return door.run(self.spark, self.args, folder)
        if self.args.variant in COPY:
            return copying.run(self.spark, self.args, folder, Times)
        if self.args.variant in KEYED:
            return keyed.run(self.spark, self.args, folder, Times)
        if self.args.variant.startswith("flinkish"):
            return self._flinkish(folder)
        return self._native(folder)

    def _flinkish(self, folder):
        args = self.args
        env = StreamExecutionEnvironment(
            self.spark, "bench", str(folder), checkpoint=CheckpointConfig(interval_ms=2_000)
        )
        source = KafkaSource(
            args.bootstrap_servers,
            [args.source],
            value=Json(SCHEMA),
            max_offsets_per_trigger=args.batch,
        )
        totals = env.from_source(source, uid="orders").key_by("user")
        totals = totals.process(RunningTotal(), output=OUTPUT, uid="totals")
        totals.sink_to(KafkaSink(args.bootstrap_servers, args.sink, key="user"), uid="totals-kafka")
        if args.variant == "flinkish-kafka-delta":
            totals.sink_to(DeltaSink(str(folder / "table")), uid="totals-delta")
        times = Times(JobDir(LocalStore(folder)))
        env.observe(times)
        client = env.execute_async()
        while times.rows < args.events:
            client.wait(10)
        # The peers end with their last micro-batch; a job of ours ends with a last checkpoint.
        client.stop_with_checkpoint()
        client.wait()
        assert client.progress.rows_by_sink["totals-kafka"] == args.events
        return times.summary(args)

    def _native(self, folder):
        args = self.args
        frame = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", args.bootstrap_servers)
            .option("subscribe", args.source)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", args.batch)
        )
        if args.variant.endswith("-tuned"):
            frame = frame.options(**READER_DEFAULTS)
        frame = frame.load()
        events = frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("e")).select("e.*")
        grouped = events.groupBy("user")
        if args.variant == "native-aggregate":
            totals = grouped.agg(F.sum("amount").alias("total"), F.count("*").alias("orders"))
        elif args.variant.startswith("tws-row"):
            totals = grouped.transformWithState(RowTotal(), OUTPUT, "Update", "None")
        else:
            totals = grouped.transformWithStateInPandas(PandasTotal(), OUTPUT, "Update", "None")
        rows = totals.select(F.col("user").alias("key"), F.to_json(F.struct("*")).alias("value"))
        provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        self.spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
        self.spark.conf.set("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        query = (
            rows.writeStream.format("kafka")
            .outputMode("update")
            .option("kafka.bootstrap.servers", args.bootstrap_servers)
            .option("kafka.linger.ms", "20")
            .option("kafka.batch.size", "262144")
            .option("topic", args.sink)
            .option("checkpointLocation", str(folder))
            .trigger(availableNow=True)
            .start()
        )
        first = None
        while query.isActive:
            if first is None and query.lastProgress is not None:
                first = time.monotonic()
            query.awaitTermination(0.02)
        if query.exception():
            raise query.exception()
        done = time.monotonic()
        return {"events_per_s": (args.events - args.batch) / (done - first)}


class Times:
    """An observer that notes when a micro-batch was staged, and the checkpoints' milestones."""

    def __init__(self, job_dir, sink="totals-kafka"):
        self._job_dir, self._sink = job_dir, sink
        self._seen = set()
        self.rows = 0
        self.staged = []
        self.triggered, self.decided, self.visible = {}, {}, {}

    def on_step_start(self, step, subject):
        pass

    def on_step_end(self, step, subject):
        now = time.monotonic()
        if step.value == "staged-file":
            self.staged.append(now)
            self._count()
        if step.value == "trigger":
            self.triggered[subject] = now
        if step.value == "decision":
            self.decided[subject] = now
        if step.value == "receipt":
            self.visible[subject] = now

    def _count(self):
        """Add up what the newest staged file says; it goes away with its checkpoint."""
        for name, staged in self._job_dir.list_staged(self._job_dir.lineage()).items():
            if name not in self._seen:
                self._seen.add(name)
                self.rows += next(ack.rows for ack in staged.acks if ack.sink == self._sink)

    def summary(self, args):
        # The clock starts when the first micro-batch is staged, as the peers' does when their
        # first one has ended; it stops when everything is committed, not when it is staged.
        done = max(self.visible.values())
        return {
            "events_per_s": (args.events - args.batch) / (done - self.staged[0]),
            "trigger_to_decision_ms": [
                round((self.decided[c] - self.triggered[c]) * 1000) for c in self.decided
            ],
            "decision_to_visible_ms": [
                round((self.visible[c] - self.decided[c]) * 1000) for c in self.visible if c in self.decided
            ],
        }


def main():
    parser = argparse.ArgumentParser()
    for name in ("variant", "bootstrap-servers", "source", "sink", "directory", "jars"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    worker = Worker(parser.parse_args())
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, number = line.split()
        answer = {"run": worker.run, "check": worker.check}[command](int(number))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
