"""Queries for which Spark keeps state, each into files, until it is told to stop."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flinkish_spark import CheckpointConfig, FileFormat, FileSink, FixedDelay
from flinkish_spark import StreamExecutionEnvironment as Environment
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from tests.crash.light_session import light_session
from tests.support.killing import observer_from
from tests.support.native_queries import EVENT, KINDS, QUERIES


def add_events(env: Environment, folder: Path, kind: str) -> DataStream:
    files = FileSource(
        str(folder), JsonLines(), EVENT, discovery=Discovery.CONTINUOUS, splits=1, max_files_per_batch=1
    )
    return env.from_source(files, uid=f"{kind}s").filter(lambda event: event.kind == kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--queries", nargs="+", choices=QUERIES, required=True)
    parser.add_argument("--sources", action="store_true", help="read by sources of ours, and not by Spark's")
    args = parser.parse_args()
    spark = light_session("native", args.directory / "scratch")
    env = Environment(
        spark,
        "native",
        str(args.directory / "job"),
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=3, delay_ms=100),
    )
    env.observe(observer_from(os.environ))
    folder = args.directory / "in"
    streams = {kind: add_events(env, folder, kind) for kind in KINDS} if args.sources else {}
    for name in args.queries:
        query = QUERIES[name]
        if args.sources:
            own = query.build_over_streams
            rows = env.from_query(own, *(streams[kind] for kind in query.kinds), uid=name)
        else:
            rows = env.from_dataframe(query.stream(spark, folder), uid=name)
        rows.sink_to(FileSink(str(args.directory / "out" / name), FileFormat.JSON), uid=f"{name}-files")
    env.execute(live_line=False)


if __name__ == "__main__":
    main()
