"""Questions in, answers of a server out to Kafka and Delta, and counted by key: a process that is shot.

The server (`tests/support/answering_server.py`) runs in the test and never gives the same answer twice. What
goes wrong is said by the environment variables of `tests/crash/app.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from flinkish_spark import (
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    CheckpointConfig,
    DeltaSink,
    FixedDelay,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    OutputTag,
    StreamExecutionEnvironment,
    ToSide,
    ValueStateDescriptor,
    current_call,
)
from tests.crash.app import FIND_DEAD_VARIABLE, find_dead_once
from tests.crash.light_session import light_session
from tests.support.killing import observer_from

QUESTION, ANSWER = "n LONG", "n LONG, answer STRING"
LETTERS = OutputTag("letters", ANSWER)
#: Of the topics and the table, behind the prefix.
QUESTIONS, ANSWERS, COUNTED, AGAIN, PAIRED = "questions", "answers", "counted", "again", "paired"
CAPACITY = 16
#: Keys of the keyed operator.
KEYS = 7


class Asked(AsyncFunction):
    """Asks the server; what it refuses for good is a letter."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self, context: Any) -> None:  # type: ignore[override]
        self.client = aiohttp.ClientSession()

    async def close(self) -> None:  # type: ignore[override]
        await self.client.close()

    async def async_invoke(self, value: Any) -> list[Any]:
        headers = {"Idempotency-Key": str(current_call().idempotency_key)}
        async with self.client.get(f"{self.url}/{value.n}", headers=headers) as response:
            response.raise_for_status()
            return [(value.n, await response.text())]

    def on_error(self, value: Any, error: Exception) -> list[Any]:
        return [ToSide(LETTERS, (value.n, f"refused {value.n}"))]


class Counted(KeyedProcessFunction):
    """Says each answer again, with how many its key has had."""

    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.count.update(self.count.value() + 1)
        yield value.n, f"{value.answer} of {self.count.value()}"


class Paired(KeyedCoProcessFunction):
    """Says a number when it has come on both ways, and how often on each."""

    def open(self, context: Any) -> None:
        self.seen = context.get_state(ValueStateDescriptor("seen", "one LONG, other LONG", default=(0, 0)))

    def process_element1(self, value: Any, ctx: Any) -> Iterator[Any]:
        one, other = self.seen.value()
        yield from self._noted(value.n, one + 1, other)

    def process_element2(self, value: Any, ctx: Any) -> Iterator[Any]:
        one, other = self.seen.value()
        yield from self._noted(value.n, one, other + 1)

    def _noted(self, n: int, one: int, other: int) -> Iterator[Any]:
        self.seen.update((one, other))
        if one and other:
            yield n, f"{one} {other}"


def build(spark: Any, args: argparse.Namespace) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job="async",
        job_dir=args.job_dir,
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
        max_parallelism=8,
        trigger_interval_ms=200,
    )
    servers, prefix = args.bootstrap_servers, args.prefix
    questions = KafkaSource(servers, [f"{prefix}.{QUESTIONS}"], value=Json(QUESTION))
    asked = AsyncDataStream.unordered_wait_with_retry(
        env.from_source(questions, uid="questions"),
        Asked(args.url),
        30_000,
        CAPACITY,
        AsyncRetryStrategy.fixed_delay(2, 20),
        output=ANSWER,
        uid="asked",
        record_answers=True,
    )
    answers = asked.union(asked.get_side_output(LETTERS)) if args.together else asked
    answers.sink_to(KafkaSink(servers, f"{prefix}.{ANSWERS}", value=Json()), uid="kafka")
    answers.sink_to(DeltaSink(args.table), uid="delta")
    if not args.together:
        asked.get_side_output(LETTERS).sink_to(
            KafkaSink(servers, f"{prefix}.{ANSWERS}", value=Json()), uid="letters"
        )
    counted = asked.key_by(lambda row: row.n % KEYS, key="LONG").process(
        Counted(), output=ANSWER, uid="counted"
    )
    counted.sink_to(KafkaSink(servers, f"{prefix}.{COUNTED}", value=Json()), uid="counted-out")
    # Two ways from one operator that meet again, with another operator on one.
    more = counted.key_by("n").process(Counted(), output=ANSWER, uid="more")
    paired = counted.connect(more).key_by("n", "n").process(Paired(), output=ANSWER, uid="paired")
    paired.sink_to(KafkaSink(servers, f"{prefix}.{PAIRED}", value=Json()), uid="paired-out")
    # Once more, behind a keyed operator.
    again = AsyncDataStream.ordered_wait(
        counted.map(lambda row: (row.n,), output=QUESTION),
        Asked(args.url_again),
        30_000,
        CAPACITY,
        output=ANSWER,
        uid="again",
        record_answers=True,
    )
    again.sink_to(KafkaSink(servers, f"{prefix}.{AGAIN}", value=Json()), uid="again-out")
    return env


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in (
        "--bootstrap-servers",
        "--prefix",
        "--job-dir",
        "--scratch",
        "--table",
        "--url",
        "--url-again",
    ):
        parser.add_argument(name, required=True)
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    if os.environ.get(FIND_DEAD_VARIABLE):
        find_dead_once()
    env = build(light_session("async", Path(args.scratch)), args)
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
