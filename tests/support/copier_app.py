"""The copier of Kafka's own system test of transactions, as a job of ours: one topic into another."""

from __future__ import annotations

import argparse
from pathlib import Path

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    KafkaSink,
    KafkaSource,
    Raw,
    StreamExecutionEnvironment,
)
from flinkish_spark.bridge.session import configure_spark_with_jars


def main() -> None:
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("servers", "source", "target", "group", "engine", "job-dir", "jars", "scratch"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--atomic", action="store_true")
    parser.add_argument("--records-per-batch", type=int, required=True)
    parser.add_argument("--trigger-interval-ms", type=int, required=True)
    args = parser.parse_args()
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(Path(args.scratch) / "local"),
        "spark.sql.warehouse.dir": str(Path(args.scratch) / "warehouse"),
    }
    builder = SparkSession.builder.master("local[2]").appName("copier").config(map={**conf})
    spark = configure_spark_with_jars(builder, args.jars).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    env = StreamExecutionEnvironment(
        spark,
        job="copier",
        job_dir=args.job_dir,
        checkpoint=CheckpointConfig(interval_ms=1_000, restart_budget_ms=50_000),
        trigger_interval_ms=args.trigger_interval_ms,
        restart_strategy=FixedDelay(attempts=1_000, delay_ms=200),
    )
    source = KafkaSource(
        args.servers,
        [args.source],
        group_id=args.group,
        reader=args.engine,
        max_offsets_per_trigger=args.records_per_batch,
    )
    sink = KafkaSink(
        args.servers,
        args.target,
        key="key",
        value=Raw("value"),
        transaction_timeout_ms=60_000,
        atomic=args.atomic,
    )
    env.from_source(source, uid="in").sink_to(sink, uid="out")
    env.execute()


if __name__ == "__main__":
    main()
