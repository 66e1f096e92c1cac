"""What exactly-once costs: a topic copied by a job of ours and by Spark's own at-least-once sinks.

The same records, no operator in between, the same size of micro-batches; to another topic and to a Delta
table. Ours with a checkpoint every second and every ten.
"""

from __future__ import annotations

import time

from bench.groups import COPY
from bench.spark_kafka import READER_DEFAULTS
from flinkish_spark import (
    CheckpointConfig,
    DeltaSink,
    KafkaSink,
    KafkaSource,
    Raw,
    StreamExecutionEnvironment,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore

_PRODUCER = {"linger.ms": "20", "batch.size": "262144"}


def run(spark, args, folder, times_of):
    """Copy the topic once; the first micro-batch is left out, as everywhere in the bench."""
    interval_ms = COPY[args.variant]
    if interval_ms is None:
        return _by_spark(spark, args, folder)
    return _by_us(spark, args, folder, interval_ms, times_of)


def _by_spark(spark, args, folder):
    frame = (
        spark.readStream.format("kafka")
        .options(**READER_DEFAULTS)
        .option("kafka.bootstrap.servers", args.bootstrap_servers)
        .option("subscribe", args.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", args.batch)
        .load()
    )
    if "kafka" in args.variant:
        writer = frame.select("value").writeStream.format("kafka").option("topic", args.sink)
        writer = writer.option("kafka.bootstrap.servers", args.bootstrap_servers)
        writer = writer.options(**{f"kafka.{name}": value for name, value in _PRODUCER.items()})
    else:
        # All that the raw format gives.
        writer = frame.drop("timestampType").writeStream.format("delta").option("path", str(folder / "table"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    first = None
    while query.isActive:
        if first is None and query.lastProgress is not None:
            first = time.monotonic()
        query.awaitTermination(0.01)
    if query.exception():
        raise query.exception()
    return {"events_per_s": (args.events - args.batch) / (time.monotonic() - first)}


def _by_us(spark, args, folder, interval_ms, times_of):
    config = CheckpointConfig(interval_ms=interval_ms)
    env = StreamExecutionEnvironment(spark, "bench", str(folder / "job"), checkpoint=config)
    source = KafkaSource(
        args.bootstrap_servers, [args.source], value=Raw(), max_offsets_per_trigger=args.batch
    )
    stream = env.from_source(source, uid="orders")
    if "kafka" in args.variant:
        sink = KafkaSink(
            args.bootstrap_servers,
            args.sink,
            value=Raw("value"),
            producer=_PRODUCER,
            atomic="atomic" in args.variant,
        )
    else:
        sink = DeltaSink(str(folder / "table"))
    stream.sink_to(sink, uid="copy")
    times = times_of(JobDir(LocalStore(folder / "job")), "copy")
    env.observe(times)
    client = env.execute_async()
    while times.rows < args.events:
        client.wait(10)
    client.stop_with_checkpoint()
    client.wait()
    assert client.progress.rows_by_sink["copy"] == args.events
    return times.summary(args)
