"""A process with a warm Spark session that runs queries of Nexmark, ours or Spark's own, on request.

Each line of standard input is a request as JSON, and is answered with one: see `engines.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

from pyspark.sql import functions as F

from bench.keyed import _STORE
from bench.nexmark import ours, spark
from bench.nexmark.queries import WINDOW_MS
from bench.variants import Times, session
from flinkish_spark import CheckpointConfig, KafkaSink, StreamExecutionEnvironment
from flinkish_spark.connectors.kafka.offsets import EndAtLatest
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore


class Worker:
    def __init__(self, args):
        self.args = args
        self.spark = session(Path(args.directory).resolve(), args.jars, args.class_archive)
        self.spark.conf.set("spark.sql.session.timeZone", "UTC")
        for name, value in _STORE.items():
            self.spark.conf.set(f"spark.sql.streaming.stateStore.{name}", value)

    def run(self, request):
        for name, value in request.items():
            setattr(self.args, name, value)
        return self._ours() if self.args.engine == "ours" else self._theirs()

    def _ours(self):
        args, query = self.args, self.args.query
        by_clock = query == "q12" or not args.bounded
        env = StreamExecutionEnvironment(
            self.spark, "nexmark", args.folder, checkpoint=CheckpointConfig(interval_ms=args.checkpoint_ms)
        )
        source = ours.source(query, args, **({} if by_clock else {"ending": EndAtLatest()}))
        found = ours.results(ours.timed(env, source, query), query)
        key = ours.KEYS.get(query, "")
        found.sink_to(KafkaSink(args.bootstrap_servers, args.sink, key=key), uid="out")
        times = Times(JobDir(LocalStore(Path(args.folder))), "out")
        env.observe(times)
        if not by_clock:
            env.execute()
            return times.summary(args)
        return self._until_told(env, times)

    def _until_told(self, env, times):
        """Run a job without an end: until all is read and windows by the clock have closed, or for ever."""
        args, client, read_s = self.args, env.execute_async(), None
        while read_s is None or time.monotonic() < read_s + 1.5 * WINDOW_MS / 1_000:
            client.wait(50)
            if args.bounded and read_s is None and self._read() >= args.events:
                read_s = time.monotonic()
        client.stop_with_checkpoint()
        client.wait()
        # Windows close by the clock, so what counts is when everything had been read.
        rate = (args.events - args.batch) / (read_s - times.staged[0])
        return {**times.summary(args), "events_per_s": rate}

    def _read(self):
        """Return up to which offsets whole micro-batches have read the topic, together."""
        for query in self.spark.streams.active:
            last = query.lastProgress
            for source in last.sources if last is not None else ():
                with contextlib.suppress(TypeError, ValueError, KeyError):
                    return sum(json.loads(source.endOffset)[self.args.source].values())
        return 0

    def _theirs(self):
        args, query = self.args, self.args.query
        rows = spark.rows(self.spark, args, query, args.engine)
        key = F.col(ours.KEYS[query]).cast("string") if query in ours.KEYS else F.lit(None).cast("string")
        writer = (
            rows.select(key.alias("key"), F.to_json(F.struct("*")).alias("value"))
            .writeStream.format("kafka")
            .outputMode("update" if query in spark.UPDATING else "append")
            .option("kafka.bootstrap.servers", args.bootstrap_servers)
            .option("kafka.linger.ms", "20")
            .option("kafka.batch.size", "262144")
            .option("topic", args.sink)
            .option("checkpointLocation", args.folder)
        )
        running = (writer.trigger(availableNow=True) if args.bounded else writer).start()
        first = None
        while running.isActive:
            if first is None and running.lastProgress is not None:
                first = time.monotonic()
            running.awaitTermination(0.02)
        if running.exception():
            raise running.exception()
        return {"events_per_s": (args.events - args.batch) / (time.monotonic() - first)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("engine", "bootstrap-servers", "source", "directory", "jars"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--class-archive", help="a folder with the JVM's classes of an earlier process")
    worker = Worker(parser.parse_args())
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
