"""Four sources, numbered by origin into files, as a process that can be shot.

The number of a record is its place among those of its origin, kept in state: so it also says in which order
operators have seen them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from flinkish_spark import (
    CheckpointConfig,
    FileFormat,
    FileSink,
    FixedDelay,
    KeyedProcessFunction,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
)
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.sources import (
    Counting,
    DataGeneratorSource,
    Discovery,
    FileSource,
    JsonLines,
    RateLimit,
    SocketTextSource,
    SplitSource,
)
from tests.crash.light_session import light_session
from tests.support.killing import observer_from

#: By uid of the source.
SOURCES = ("files", "socket", "made", "books")
MADE_SPLITS = 2
SOCKET_ORIGIN = "peer"
NUMBERED = "source STRING, origin STRING, place LONG, line STRING"


class Books(SplitSource):
    """Lines of files that grow, a split each; what it is told of checkpoints is appended to a file."""

    schema = "origin STRING, line STRING"

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def splits(self) -> Sequence[str]:
        # In the order of their beginning: names are numbers.
        return sorted(path.name for path in Path(self.folder).glob("book-*"))

    def latest(self, split: str, start: int, limit: int | None) -> int:
        count = len(self._lines(split))
        return count if limit is None else min(count, start + limit)

    def read(self, split: str, start: int, end: int) -> Iterator[tuple[str, str]]:
        return ((split, line) for line in self._lines(split)[start:end])

    def on_commit(self, offsets: Mapping[str, Any]) -> None:
        self._note("committed", offsets)

    def on_release(self, offsets: Mapping[str, Any]) -> None:
        self._note("released", offsets)

    def _lines(self, split: str) -> list[str]:
        # What is behind the last end of a line is still being written.
        return (Path(self.folder) / split).read_text().split("\n")[:-1]

    def _note(self, what: str, offsets: Mapping[str, Any]) -> None:
        with (Path(self.folder) / "told").open("a") as file:
            file.write(json.dumps([what, dict(offsets)]) + "\n")


class Numbering(KeyedProcessFunction):
    """Puts a record's place among those of its origin beside it."""

    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0))

    def process_element(self, record: Any, ctx: Any) -> Iterator[Any]:
        place = self.count.value()
        self.count.update(place + 1)
        yield record.source, record.origin, place, record.line


def sources_in(directory: Path, port: int) -> dict[str, Any]:
    """Return the sources by uid."""
    files = FileSource(
        str(directory / "files"),
        JsonLines(),
        "origin STRING, line STRING",
        discovery=Discovery.CONTINUOUS,
        splits=2,
        discover_every_ms=200,
        max_files_per_batch=40,
    )
    made = DataGeneratorSource(
        {"id": Counting()}, seed=3, splits=MADE_SPLITS, rate=RateLimit(records_per_second=200)
    )
    socket = SocketTextSource("127.0.0.1", port, max_retries=UNLIMITED, retry_delay_ms=100)
    books = Books(directory / "books").limit_rate(RateLimit(records_per_batch=200))
    return {"files": files, "socket": socket, "made": made, "books": books}


def with_origin(uid: str, frame: Any) -> Any:
    """Give the records of a source its name, and an origin and a line if they have none."""
    frame = frame.withColumn("source", F.lit(uid))
    if uid == "socket":
        frame = frame.withColumns({"origin": F.lit(SOCKET_ORIGIN), "line": F.col("value")})
    if uid == "made":
        origin = (F.col("id") % MADE_SPLITS).cast("string")
        frame = frame.withColumns({"origin": origin, "line": F.col("id").cast("string")})
    return frame.select("source", "origin", "line")


def build(spark: Any, directory: Path, port: int) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job="sources",
        job_dir=str(directory / "job"),
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
        max_parallelism=8,
        trigger_interval_ms=200,
    )
    first, *others = (
        env.from_source(source, uid=uid).transform(lambda frame, uid=uid: with_origin(uid, frame))
        for uid, source in sources_in(directory, port).items()
    )
    numbered = first.union(*others).key_by("source", "origin")
    numbered = numbered.process(Numbering(), output=NUMBERED, uid="numbered")
    numbered.sink_to(FileSink(str(directory / "out"), FileFormat.JSON), uid="out")
    return env


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--directory", "--port", "--scratch"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    env = build(light_session("sources", Path(args.scratch)), Path(args.directory), int(args.port))
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
