"""The drop-in door beside Spark's own Kafka connector: source alone, and copying a topic."""

from __future__ import annotations

import time

import flinkish_spark
from bench.groups import DOOR


def run(spark, args, folder):
    """Copy the topic, or only read it; the first micro-batch is left out, as for the other peers."""
    source, sink = DOOR[args.variant]
    flinkish_spark.register(spark)
    frame = (
        spark.readStream.format(source)
        .option("kafka.bootstrap.servers", args.bootstrap_servers)
        .option("subscribe", args.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", args.batch)
        .load()
        .select("key", "value")
    )
    writer = frame.writeStream.format(sink).option("checkpointLocation", str(folder))
    if sink != "noop":
        writer = writer.option("kafka.bootstrap.servers", args.bootstrap_servers).option("topic", args.sink)
        writer = writer.option("kafka.linger.ms", "20").option("kafka.batch.size", "262144")
    query = writer.trigger(availableNow=True).start()
    first = None
    while query.isActive:
        if first is None and query.lastProgress is not None:
            first = time.monotonic()
        query.awaitTermination(0.01)
    if query.exception():
        raise query.exception()
    done = time.monotonic()
    progress = query.recentProgress
    # The first micro-batch of our source is empty, that of Spark's is not.
    return {
        "events_per_s": (args.events - progress[0].numInputRows) / (done - first),
        "batch_ms": [p.durationMs["triggerExecution"] for p in progress],
    }
