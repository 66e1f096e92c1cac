"""A job on a cluster, as a process: reads a topic to its end; says how it ended as one line of JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import Row, SparkSession

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    FlinkishError,
    ForeachCheckpointSink,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    NoRestart,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
)
from flinkish_spark.bridge.session import configure_spark_with_jars
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.sources import EndAtLatest
from tests.support.buckets import S3A_CONF, SECRETS
from tests.support.services import BUILD

ORDERS = "user STRING, amount LONG"


class Totals(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, order, ctx):
        self.total.update(self.total.value() + order.amount)
        yield order.user, self.total.value()


class _Kept:
    """Writes the rows of each checkpoint into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, rows: Iterator[Row], checkpoint: CheckpointId) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{checkpoint}.json").write_text(json.dumps([row.asDict() for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--master", "--host", "--servers", "--source", "--target", "--folder", "--kind", "--engine"):
        parser.add_argument(name, required=True)
    parser.add_argument("--job-dir", help="a bucket in place of the driver's disk")
    parser.add_argument("--store-options", type=json.loads, default={})
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
        **S3A_CONF,
        **{f"spark.executorEnv.{name}": value for name, value in SECRETS.items()},
    }
    builder = configure_spark_with_jars(
        builder.config(map=settings), BUILD / "jars", extra_jars=sorted((BUILD / "s3a-jars").glob("*.jar"))
    )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    is_slow = "slow" in args.kind
    env = StreamExecutionEnvironment(
        spark,
        job="two-hosts",
        job_dir=args.job_dir or str(folder / "job"),
        store_options=args.store_options,
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=20, delay_ms=500) if is_slow else NoRestart(),
    )
    source = KafkaSource(
        args.servers,
        [args.source],
        value=Json(ORDERS),
        ending=EndAtLatest(),
        reader=args.engine,
        max_offsets_per_trigger=10 if is_slow else 0,
    )
    stream = env.from_source(source, uid="orders")
    if "keyed" in args.kind:
        stream = stream.key_by("user").process(Totals(), output="user STRING, total LONG", uid="totals")
    else:
        stream = stream.map(lambda one: (one.user, one.amount), output=ORDERS)
    if "buffered" in args.kind:
        # Applied in this process, from what tasks on the hosts have written.
        stream.sink_to(ForeachCheckpointSink(_Kept(folder / "rows")), uid="out")
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
