"""Accumulators behind a bounded generator, as a process that can be killed; says what they hold at the end.

What goes wrong is said by FLINKISH_KILL_AT; in each life one task of each function's stage fails once.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from flinkish_spark import CheckpointConfig, FileSink, FixedDelay, MapFunction, StreamExecutionEnvironment
from flinkish_spark.sources import Counting, DataGeneratorSource, RateLimit
from tests.crash.light_session import light_session
from tests.support.accumulating import ORDER, SINKS, accumulating
from tests.support.killing import observer_from

#: Enough for two checkpoints in each life that is to have them, and for a last life with some of its own.
RECORDS = 240


def order(number: int) -> tuple[str, int]:
    return f"user{number % 7}", number % 5


class Orders(MapFunction):
    """Makes an order of each number; fails once in each life, behind what it and others have counted."""

    def __init__(self, failed: Path) -> None:
        self.failed = failed

    def open(self, context: Any) -> None:
        self.seen = context.get_long_counter("numbers")

    def map(self, value: Any) -> Any:
        self.seen.add(1)
        if value.n % 40 == 39:
            try:
                self.failed.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                raise RuntimeError("this task fails once")
        return order(value.n)


def main() -> None:
    """Run it to its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    spark = light_session("accumulating", folder / f"scratch-{os.getpid()}", master="local[2,4]")
    env = StreamExecutionEnvironment(
        spark,
        "accumulating",
        str(folder / "job"),
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=5, delay_ms=100),
    )
    env.observe(observer_from(os.environ))
    source = DataGeneratorSource({"n": Counting()}, records=RECORDS, rate=RateLimit(records_per_batch=40))
    numbers = env.from_source(source, uid="numbers")
    orders = numbers.map(Orders(folder / f"failed-{os.getpid()}"), output=ORDER)
    accumulating(orders, **{name: FileSink(str(folder / name)) for name in SINKS})
    client = env.execute_async()
    while not client.wait(timeout_ms=200):
        pass
    (folder / "accumulators.json").write_text(json.dumps(client.progress.accumulators))


if __name__ == "__main__":
    main()
