"""Orders in, running totals out to Kafka and Delta, until the job has caught up: a scheduler starts it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flinkish_spark import CaughtUp, CheckpointConfig, DeltaSink, FixedDelay, Json, KafkaSink, KafkaSource
from flinkish_spark import StreamExecutionEnvironment as Environment
from tests.crash.light_session import light_session
from tests.support.jobs import ORDER, TOTAL, RunningTotal
from tests.support.killing import observer_from


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--servers", "--source", "--target", "--directory"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    directory = Path(args.directory)
    env = Environment(
        light_session("catch-up", directory / "scratch"),
        "catch-up",
        str(directory / "job"),
        checkpoint=CheckpointConfig(interval_ms=2_000),
        restart_strategy=FixedDelay(attempts=3, delay_ms=100),
    )
    env.observe(observer_from(os.environ))
    orders = KafkaSource(args.servers, [args.source], value=Json(ORDER), max_offsets_per_trigger=40)
    totals = env.from_source(orders, uid="orders").key_by("user")
    totals = totals.process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(args.servers, args.target), uid="kafka")
    totals.sink_to(DeltaSink(str(directory / "table")), uid="table")
    env.execute(live_line=False, until=CaughtUp())


if __name__ == "__main__":
    main()
