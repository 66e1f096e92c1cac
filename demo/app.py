"""The job of the demo, as a user would write it: orders in, running totals per user out.

Run it with `spark-submit` or `python`; `make demo` does so, and kills it again and again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pyspark.sql import SparkSession

from flinkish_spark import (
    CheckpointConfig,
    DeltaSink,
    FixedDelay,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    RecordHeaders,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
    configure_spark_with_jars,
)


class RunningTotal(KeyedProcessFunction):
    """Emits, for every order, its user's total so far."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))

    def process_element(self, order, ctx):
        total, orders = self.total.value() or (0, 0)
        total, orders = total + order.amount, orders + 1
        self.total.update((total, orders))
        yield order.user, total, orders


def build(spark, args, function=None):
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job="orders",
        job_dir=args.job_dir,
        store_options=args.store_options,
        checkpoint=CheckpointConfig(interval_ms=args.interval_ms),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
    )
    orders = env.from_source(
        KafkaSource(
            bootstrap_servers=args.bootstrap_servers,
            topics=["orders"],
            group_id="orders-app",
            value=Json("user STRING, product STRING, amount LONG, at TIMESTAMP"),
        ),
        uid="orders",
    )
    totals = orders.key_by("user").process(
        function or RunningTotal(), output="user STRING, total LONG, orders LONG", uid="totals"
    )
    totals.sink_to(
        KafkaSink(
            bootstrap_servers=args.bootstrap_servers,
            topic="totals",
            key="user",
            value=Json(),
            # The demo's reader tells by it what is visible without a decision.
            record_headers=RecordHeaders.BATCH,
        ),
        uid="totals-kafka",
    )
    totals.sink_to(DeltaSink(args.table), uid="totals-delta")
    return env


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--store-options", type=json.loads, default={}, help="of the bucket, as JSON")
    parser.add_argument("--table", required=True)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--bare", action="store_true", help="with no JAR")
    parser.add_argument("--interval-ms", type=int, default=2_000)
    parser.add_argument("--jars", required=True, help="directory with the pinned JARs (make jars)")
    parser.add_argument("--more-jars", type=Path, help="directory with the JARs of Hadoop's S3A")
    parser.add_argument("--scratch", required=True, help="directory for Spark's local files")
    return parser.parse_args()


def session(args):
    builder = (
        SparkSession.builder.appName("orders")
        .master(args.master)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", f"{args.scratch}/local")
        .config("spark.sql.warehouse.dir", f"{args.scratch}/warehouse")
        # Only the modules of the AWS SDK that lie in build/s3a-jars need this; its bundle does not.
        .config("spark.hadoop.fs.s3a.optimized.copy.from.local.enabled", "false")
    )
    more = sorted(args.more_jars.glob("*.jar")) if args.more_jars else []
    if not args.bare:
        builder = configure_spark_with_jars(builder, args.jars, extra_jars=more)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def main():
    args = parse_args()
    build(session(args), args).execute()


if __name__ == "__main__":
    main()
