"""A query with the drop-in door, or several sinks behind it, that can be stopped at a step and shot there.

Everything that changes from one start to the next is in the directory FLINKISH_TRIPWIRE: a file
`armed` with "<step>:<moment>:<occurrence>". Whoever gets there renames it to `reached`, writes its pid
into `pid`, and waits until `reached` is gone. The steps are taken in several processes, so they are
counted in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from flinkish_spark import (
    DeltaSink,
    FileFormat,
    FileSink,
    JdbcSink,
    KafkaSink,
    SinkGroup,
    String,
    commit_together,
)
from flinkish_spark.connectors.kafka.data_source import FlinkishKafka
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.core.steps import Step
from flinkish_spark.foreach_batch.sinks_format import Flinkish
from tests.crash.light_session import light_session

TRIPWIRE = "FLINKISH_TRIPWIRE"


class Tripwire:
    """Waits at the armed step."""

    def __init__(self) -> None:
        self._directory = Path(os.environ[TRIPWIRE])

    def on_step_start(self, step: Step, subject: str) -> None:
        self._at(f"{step.value}:before")

    def on_step_end(self, step: Step, subject: str) -> None:
        self._at(f"{step.value}:after")

    def _at(self, place: str) -> None:
        armed, reached = self._directory / "armed", self._directory / "reached"
        with contextlib.suppress(FileNotFoundError):
            wanted, _, occurrence = armed.read_text().rpartition(":")
            if wanted != place:
                return
            count = self._directory / "count"
            seen = len(count.read_text()) + 1 if count.exists() else 1
            count.write_text("x" * seen)
            if seen < int(occurrence):
                return
            (self._directory / "pid").write_text(str(os.getpid()))
            os.rename(armed, reached)
            deadline = time.monotonic() + 120
            while reached.exists() and time.monotonic() < deadline:
                time.sleep(0.01)


class WatchedKafka(FlinkishKafka):
    """The product's data source with a tripwire."""

    @staticmethod
    def observer() -> Tripwire:
        return Tripwire()


class WatchedSinks(Flinkish):
    """The product's format of several sinks with a tripwire."""

    @staticmethod
    def observer() -> Tripwire:
        return Tripwire()


class WatchedGroup(SinkGroup):
    """The product's group of sinks with a tripwire."""

    @staticmethod
    def observer() -> Tripwire:
        return Tripwire()


def make_sinks(args: argparse.Namespace) -> dict[str, Sink]:
    """Return all kinds of sinks."""
    url, user, password = args.database.split(" ")
    return {
        "topic": KafkaSink(args.bootstrap_servers, args.output, key="key", value=String("value")),
        "table": DeltaSink(f"{args.sinks}/table"),
        "files": FileSink(f"{args.sinks}/files", FileFormat.JSON),
        "rows": JdbcSink(url, "copies", user=user, password=password),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap-servers", "--checkpoint", "--input", "--output", "--group", "--scratch"):
        parser.add_argument(name, required=True)
    parser.add_argument("--connect", default="", help="a server of Spark Connect that runs the query")
    parser.add_argument(
        "--sinks", default="", help="a folder: write into a group of sinks, of which some are in it"
    )
    parser.add_argument("--by-format", action="store_true", help="write into them by a format")
    parser.add_argument("--database", default="", help="the group's database: URL, user, password")
    args = parser.parse_args()
    if args.connect:
        spark = SparkSession.builder.remote(args.connect).getOrCreate()
    else:
        spark = light_session("door", Path(args.scratch))
    spark.dataSource.register(WatchedKafka)
    spark.dataSource.register(WatchedSinks)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    kafka = {"kafka.bootstrap.servers": args.bootstrap_servers}
    while not stopping.is_set():
        records = (
            spark.readStream.format("flinkish-kafka")
            .options(**kafka)
            .options(subscribe=args.input, startingOffsets="earliest", maxOffsetsPerTrigger="2000")
            .option("flinkish.group.id", args.group)
            .load()
        )
        if args.sinks:
            texts = records.selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
            sinks = make_sinks(args)
            if args.by_format:
                writer = texts.writeStream.format("flinkish").options(**commit_together(sinks))
            else:
                writer = texts.writeStream.foreachBatch(
                    WatchedGroup(sinks, checkpoint_location=args.checkpoint)
                )
        else:
            writer = records.select("key", "value").writeStream.format("flinkish-kafka").options(**kafka)
            writer = writer.option("topic", args.output)
        query = writer.option("checkpointLocation", args.checkpoint).start()
        try:
            while not stopping.is_set() and not query.awaitTermination(0.2):
                pass
            query.stop()
        except StreamingQueryException as failed:
            # What a worker's death looks like; a person would start the query again.
            print("the query failed:", str(failed).split("JVM stacktrace")[0][:3000], flush=True)
            time.sleep(0.2)


if __name__ == "__main__":
    main()
