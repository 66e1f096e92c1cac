"""A job on a cluster, as a process: reads a topic to its end; says how it ended as one line of JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import Row, SparkSession

from flinkish_spark import (
    CheckpointConfig,
    CommitAnswer,
    DeltaSink,
    EnvironmentSecret,
    FixedDelay,
    FlinkishError,
    ForeachCheckpointSink,
    JdbcSink,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    MapFunction,
    NoRestart,
    Outcome,
    RefusedRecordError,
    SinkWithDeadLetters,
    StreamExecutionEnvironment,
    TwoPhaseCommitSink,
    ValueStateDescriptor,
)
from flinkish_spark.bridge.session import configure_spark_with_jars
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.sources import EndAtLatest
from tests.support.buckets import S3A_CONF, SECRETS
from tests.support.services import BUILD

ORDERS = "user STRING, amount LONG"
#: Totals that this number divides are refused by the two-phase sink.
REFUSED = 5


class Totals(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, order, ctx):
        self.total.update(self.total.value() + order.amount)
        yield order.user, self.total.value()


class Brought(MapFunction):
    """Passes a record on if the host has what the driver has registered."""

    def open(self, context):
        said = Path(context.get_distributed_cache().get_file("word")).read_text()
        assert said == importlib.import_module("brought_along").SAYS == "word"

    def map(self, order):
        return order.user, order.amount


def bring(env: StreamExecutionEnvironment, folder: Path) -> None:
    """Register a file and a module that lie on the driver's disk only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "word.txt").write_text("word")
    (folder / "brought_along.py").write_text("SAYS = 'word'\n")
    env.register_cached_file(str(folder / "word.txt"), "word")
    env.add_python_file(str(folder / "brought_along.py"))


class _Kept:
    """Writes the rows of each checkpoint into a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, rows: Iterator[Row], checkpoint: CheckpointId) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{checkpoint}.json").write_text(json.dumps([row.asDict() for row in rows]))


class ObjectsSink(TwoPhaseCommitSink):
    """An object in a bucket for each task: below `staged/`, and below `visible/` once it is committed."""

    def __init__(self, place: StoreSpec) -> None:
        self._place = place

    def begin(self, transaction):
        return transaction.name, []

    def write(self, handle, record):
        if record.total % REFUSED == 0:
            raise RefusedRecordError(f"{REFUSED} divides {record.total}")
        handle[1].append((record.user, record.total))

    def flush(self, handle):
        name, rows = handle
        self._place.open().put(f"staged/{name}", json.dumps(rows).encode())
        return name

    def commit(self, committable, checkpoint):
        bucket = self._place.open_bucket()
        if f"visible/{committable}" in bucket.list("visible"):
            return Outcome.ALREADY_COMMITTED
        try:
            bucket.copy(f"staged/{committable}", f"visible/{committable}")
        except ObjectMissing:
            return CommitAnswer(Outcome.LOST, f"{committable} is gone", is_proven_aborted=True)
        return Outcome.COMMITTED

    def abort(self, committable):
        self._place.open().delete(f"staged/{committable}")

    def list_open(self, prefix):
        names = (key.removeprefix("staged/") for key in self._place.open().list("staged"))
        return {name: name for name in names if name.startswith(prefix)}


def add_families(stream: DataStream, bucket: StoreSpec, servers: str, target: str, database: str) -> None:
    """Write totals to a sink of each family: what tasks of each stage on a host, the driver commits."""
    stream.sink_to(KafkaSink(servers, target, value=Json()), uid="kafka")
    stream.sink_to(DeltaSink(bucket.to_child("delta").hadoop_url), uid="delta")
    password = EnvironmentSecret("FLINKISH_TEST_PASSWORD")
    table = JdbcSink(database, "totals", user="flinkish", password=password, create_table=True)
    stream.sink_to(table, uid="jdbc")
    letters = KafkaSink(servers, f"letters-{target}", value=Json())
    objects = ObjectsSink(bucket.to_child("objects"))
    stream.sink_to(SinkWithDeadLetters(objects, dead_letters=letters), uid="objects")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--master", "--host", "--servers", "--source", "--target", "--folder", "--kind"):
        parser.add_argument(name, required=True)
    parser.add_argument("--job-dir", help="a bucket in place of the driver's disk")
    parser.add_argument("--store-options", type=json.loads, default={})
    parser.add_argument("--database", default="", help="the URL of a table's database")
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
        max_offsets_per_trigger=10 if is_slow else 0,
    )
    stream = env.from_source(source, uid="orders")
    if "keyed" in args.kind:
        stream = stream.key_by("user").process(Totals(), output="user STRING, total LONG", uid="totals")
    elif "files" in args.kind:
        bring(env, folder / "brought")
        stream = stream.map(Brought(), output=ORDERS)
    else:
        stream = stream.map(lambda one: (one.user, one.amount), output=ORDERS)
    if "families" in args.kind:
        bucket = StoreSpec.parse(args.job_dir, args.store_options).to_parent(1).to_child("out")
        add_families(stream, bucket, args.servers, args.target, args.database)
    elif "buffered" in args.kind:
        # Applied in this process, from what tasks on the hosts have written.
        stream.sink_to(ForeachCheckpointSink(_Kept(folder / "rows")), uid="out")
    else:
        stream.sink_to(KafkaSink(args.servers, args.target, value=Json()), uid="out")
    try:
        env.execute()
        said = {"ended": "finished"}
        if "families" in args.kind:
            table = spark.read.format("delta").load(bucket.to_child("delta").hadoop_url)
            said["delta"] = [tuple(row) for row in table.select("user", "total").collect()]
    except FlinkishError as error:
        said = {"ended": type(error).__name__, "says": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
