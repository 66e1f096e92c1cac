"""A program whose functions need files, a package, an archive: what they find is what it emits."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from flinkish_spark import (
    AsyncDataStream,
    AsyncFunction,
    CheckpointConfig,
    FileFormat,
    FilterFunction,
    KeyedProcessFunction,
    MapFunction,
    NoRestart,
    StreamExecutionEnvironment,
)
from flinkish_spark.connectors.generator import Counting
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.sinks import FileSink
from flinkish_spark.sources import DataGeneratorSource, RateLimit
from flinkish_spark.windows import ProcessWindowFunction

FOUND = "who STRING, found STRING"


class Finds(MapFunction):
    """Looks for a file when it is opened, and reads it for each record."""

    def open(self, context: Any) -> None:
        self.path = context.get_distributed_cache().get_file("word")

    def map(self, value: Any) -> Any:
        return "map", Path(self.path).read_text()


class Keeps(FilterFunction):
    """Asks later, of a context that it has kept."""

    def open(self, context: Any) -> None:
        self.context = context

    def filter(self, value: Any) -> bool:
        folder = self.context.get_distributed_cache().get_file("folder")
        return (Path(folder) / "below" / "two.txt").read_text() == "two"


class Keyed(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        tool = context.get_distributed_cache().get_file("tool")
        self.said = subprocess.run([tool], capture_output=True, text=True, check=True).stdout.strip()

    def process_element(self, value: Any, ctx: Any) -> Any:
        yield "keyed", self.said


class Asks(AsyncFunction):
    def open(self, context: Any) -> None:
        self.path = context.get_distributed_cache().get_file("word")

    async def async_invoke(self, value: Any) -> Any:
        return [("async", Path(self.path).read_text())]


class Windowed(ProcessWindowFunction):
    def open(self, context: Any) -> None:
        self.path = context.get_distributed_cache().get_file("word")

    def process(self, key: Any, context: Any, elements: Any) -> Any:
        yield "window", Path(self.path).read_text()


class Imports(MapFunction):
    """Imports what the program has added, and reads an archive."""

    def __init__(self, *modules: str, archive: str = "") -> None:
        self.modules, self.archive = modules, archive

    def map(self, value: Any) -> Any:
        said = [str(importlib.import_module(name).SAYS) for name in self.modules]
        if self.archive:
            said.append((Path(SparkFiles.get(self.archive)) / "said.txt").read_text())
        return "import", " ".join(said)


def make_files(folder: Path, word: str = "word") -> None:
    """Write what :func:`register` registers."""
    (folder / "folder" / "below").mkdir(parents=True)
    (folder / "folder" / "below" / "two.txt").write_text("two")
    (folder / "word.txt").write_text(word)
    (folder / "tool.sh").write_text("#!/bin/sh\necho it runs\n")


def register(env: StreamExecutionEnvironment, folder: Path) -> None:
    env.register_cached_file(str(folder / "word.txt"), "word")
    env.register_cached_file((folder / "folder").as_uri(), "folder")
    env.register_cached_file(str(folder / "tool.sh"), "tool", True)


def finding(records: DataStream) -> dict[str, DataStream]:
    """Return a stream for each kind of function, by name."""
    keyed = records.filter(Keeps()).key_by("user")
    return {
        "map": records.map(Finds(), output=FOUND),
        "keyed": keyed.process(Keyed(), output=FOUND, uid="keyed"),
        "async": AsyncDataStream.ordered_wait(records, Asks(), 10_000, output=FOUND, uid="asks"),
        "window": keyed.count_window(1).process(Windowed(), output=FOUND, uid="windows"),
    }


EXPECTED = {"map": "word", "keyed": "it runs", "async": "word", "window": "word"}


class Both(MapFunction):
    """Reads a file in each new task, and imports a module."""

    def __init__(self, module: str) -> None:
        self.module = module

    def open(self, context: Any) -> None:
        self.word = Path(context.get_distributed_cache().get_file("word")).read_text()

    def map(self, value: Any) -> Any:
        return "endless", f"{self.word} {importlib.import_module(self.module).SAYS}"


def endless(env: StreamExecutionEnvironment, module: str) -> DataStream:
    rate = RateLimit(records_per_batch=20)
    numbers = env.from_source(DataGeneratorSource({"n": Counting()}, rate=rate), uid="numbers")
    return numbers.map(Both(module), output=FOUND)


def main() -> None:
    """Run on whatever `flinkish run` has prepared; what is found goes to files."""
    parser = argparse.ArgumentParser()
    for name in ("--folder", "--module"):
        parser.add_argument(name, required=True)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--master", help="as a program should not")
    parser.add_argument("--kinds", default=",".join((*EXPECTED, "import")))
    args = parser.parse_args()
    folder = Path(args.folder)
    if args.master is not None:
        SparkSession.builder.master(args.master).getOrCreate()
    env = StreamExecutionEnvironment.get_execution_environment(
        "dependent",
        str(folder / "job"),
        checkpoint=CheckpointConfig(interval_ms=500),
        restart_strategy=NoRestart(),
    )
    env.spark.sparkContext.setLogLevel("ERROR")
    register(env, folder / "files")
    env.add_python_file(str(folder / f"{args.module}.py"))
    records = env.from_collection([(f"user {n}", n) for n in range(20)], "user STRING, n LONG", uid="records")
    streams = finding(records)
    streams["import"] = records.map(Imports(args.module), output=FOUND)
    streams = {name: stream for name, stream in streams.items() if name in args.kinds.split(",")}
    if args.kinds == "endless":
        streams = {"endless": endless(env, args.module)}
    for name, stream in streams.items():
        stream.sink_to(FileSink(str(folder / "out" / name), FileFormat.JSON), uid=f"out-{name}")
    if args.fail:
        raise SystemExit(7)
    here = importlib.import_module(args.module)
    ended = env.execute()
    context = env.spark.sparkContext
    told = {
        "master": context.master,
        "setting": context.getConf().get("spark.orders.limit"),
        "here": here.SAYS,
    }
    print(json.dumps({**told, "pid": os.getpid(), "ended": ended.status.name}), flush=True)


if __name__ == "__main__":
    main()
