"""A job on a cluster, as a process: reads a topic to its end; says how it ended as one line of JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pyspark.sql import SparkSession

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    FlinkishError,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    MemorySink,
    NoRestart,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
)
from flinkish_spark.bridge.session import configure_spark_with_jars
from flinkish_spark.sources import EndAtLatest
from tests.support.services import BUILD

ORDERS = "user STRING, amount LONG"


class Totals(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, order, ctx):
        self.total.update(self.total.value() + order.amount)
        yield order.user, self.total.value()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--master", "--host", "--servers", "--source", "--target", "--folder", "--kind", "--engine"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    folder = Path(args.folder)
    builder = SparkSession.builder.master(args.master).appName("two hosts")
    settings = {
        "spark.driver.host": args.host,
        "spark.driver.bindAddress": args.host,
        "spark.ui.enabled": "false",
        "spark.executor.memory": "700m",
        # A host that is cut off is given up soon.
        "spark.network.timeout": "20s",
        "spark.network.timeoutInterval": "5s",
        "spark.executor.heartbeatInterval": "4s",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = configure_spark_with_jars(builder.config(map=settings), BUILD / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    env = StreamExecutionEnvironment(
        spark,
        job="two-hosts",
        job_dir=str(folder / "job"),
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=20, delay_ms=500) if args.kind == "slow" else NoRestart(),
    )
    source = KafkaSource(
        args.servers,
        [args.source],
        value=Json(ORDERS),
        ending=EndAtLatest(),
        reader=args.engine,
        max_offsets_per_trigger=10 if args.kind == "slow" else None,
    )
    stream = env.from_source(source, uid="orders")
    if args.kind == "keyed":
        stream = stream.key_by("user").process(Totals(), output="user STRING, total LONG", uid="totals")
    else:
        stream = stream.map(lambda one: (one.user, one.amount), output=ORDERS)
    if args.kind == "buffered":
        stream.sink_to(MemorySink("memory"), uid="out")
    else:
        stream.sink_to(KafkaSink(args.servers, args.target, value=Json(), writer=args.engine), uid="out")
    try:
        env.execute()
        said = {"ended": "finished"}
    except FlinkishError as error:
        said = {"ended": type(error).__name__, "says": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
