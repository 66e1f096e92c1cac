"""Queries for which Spark keeps state, each into files, until it is told to stop."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flinkish_spark import CheckpointConfig, FileFormat, FileSink, FixedDelay
from flinkish_spark import StreamExecutionEnvironment as Environment
from tests.crash.light_session import light_session
from tests.support.killing import observer_from
from tests.support.native_queries import QUERIES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--queries", nargs="+", choices=QUERIES, required=True)
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
    for name in args.queries:
        rows = env.from_dataframe(QUERIES[name].stream(spark, args.directory / "in"), uid=name)
        rows.sink_to(FileSink(str(args.directory / "out" / name), FileFormat.JSON), uid=f"{name}-files")
    env.execute(live_line=False)


if __name__ == "__main__":
    main()
