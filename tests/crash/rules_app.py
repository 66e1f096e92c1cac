"""Kafka -> patterns whose rules come and go from a second topic -> Kafka, as a process that can be shot.

The pattern tells of each reading alone, and then of it with the next one of its user. So what is told of a
reading says which version of the rule was searched for when it came, and from that follows which pairs have
to be told: the rest can be recomputed, wherever micro-batches end.

What goes wrong is said by the environment variables of `tests/crash/app.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import functions as F

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    Json,
    KafkaSink,
    KafkaSource,
    StreamExecutionEnvironment,
    WatermarkStrategy,
)
from flinkish_spark.cep import PATTERN_RULES, Pattern, PatternProcessFunction, PatternsFromStream
from tests.crash.app import FIND_DEAD_VARIABLE, find_dead_once
from tests.crash.event_time_app import LAST, OUT_OF_ORDER_MS, READING
from tests.crash.light_session import light_session
from tests.support.killing import observer_from

RULE, FOUND = "id STRING, version LONG, rule STRING", "user STRING, version LONG, first LONG, second LONG"
ID = "next"
#: The time of a reading: of two with the same one it is not known which comes first, so here are none.
AT = "at * 1000 + n % 1000"


class Topics(NamedTuple):
    """What the job reads, and what it writes."""

    readings: str
    rules: str
    found: str

    @classmethod
    def of(cls, prefix: str) -> Topics:
        """Return those of a run, which is not alone on its broker."""
        return cls(*(f"{prefix}.{name}" for name in cls._fields))


def rule_of(version: int) -> dict[str, Any]:
    """Return a version of the rule: one in four goes on with what has begun, one says that it is gone."""
    names: dict[int, list[str]] = {0: ["one", "two"], 1: ["one", "two"], 2: ["this", "that"]}
    args = names.get(version % 4)
    text = None if args is None else json.dumps({"pattern": "next", "args": args})
    return {"id": ID, "version": version, "rule": text}


def goes_on(before: int, version: int) -> bool:
    """Return whether what has begun with a version may end with another one."""
    return before == version or (before % 4 == 0 and version == before + 1)


def next_one(first: str, second: str) -> Pattern:
    """Return the pattern, by these names."""
    return Pattern.begin(first).where(_is_no_last).next(second).where(_is_no_last).optional()


def _is_no_last(reading: Any) -> bool:
    return bool(reading.user != LAST)


class Tell(PatternProcessFunction):
    """Says which readings were found, by which version of the rule."""

    def process_match(self, match: Any, ctx: Any) -> Iterator[Any]:
        numbers = [event.n for events in match.values() for event in events]
        yield ctx.get_current_key(), ctx.pattern_version(), numbers[0], (*numbers[1:], None)[0]


def build(spark: Any, args: argparse.Namespace) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job="rules",
        job_dir=args.job_dir,
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
        max_parallelism=16,
        trigger_interval_ms=200,
    )
    servers, topics = args.bootstrap_servers, Topics.of(args.prefix)
    readings = env.from_source(KafkaSource(servers, [topics.readings], value=Json(READING)), uid="readings")
    rules = env.from_source(KafkaSource(servers, [topics.rules], value=Json(RULE)), uid="rules")
    readings = readings.transform(lambda df: df.withColumn("at", F.expr(AT)))
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(OUT_OF_ORDER_MS * 1_001)
    bounded = bounded.with_timestamp_assigner("at")
    by_user = readings.assign_timestamps_and_watermarks(bounded).key_by("user")
    search = PatternsFromStream(READING, Tell(), {"next": next_one})
    found = by_user.connect(rules.broadcast(PATTERN_RULES)).process(search, output=FOUND, uid="found")
    found.sink_to(KafkaSink(servers, topics.found, key="user", value=Json()), uid="found-out")
    return env


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap-servers", "--prefix", "--job-dir", "--scratch"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    if os.environ.get(FIND_DEAD_VARIABLE):
        find_dead_once()
    env = build(light_session("rules", Path(args.scratch)), args)
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
