"""Calls to systems outside in running jobs: a real HTTP server whose answers are never the same twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from flinkish_spark import (
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    DeltaSink,
    JobStatus,
    KeyedProcessFunction,
    MemorySink,
    OutputTag,
    ToSide,
    ValueStateDescriptor,
    current_call,
)
from tests.integration.spark.test_replay import DeleteStaged
from tests.support.answering_server import answering
from tests.support.jobs import environment, read_delta, running

pytestmark = pytest.mark.timeout(600)
LETTERS = OutputTag("letters", "id LONG, why STRING")
ANSWERS = "id LONG, answer STRING"


class Asked(AsyncFunction):
    """Asks a server about an id."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self, context: Any) -> None:  # type: ignore[override]
        self.client = aiohttp.ClientSession()

    async def close(self) -> None:  # type: ignore[override]
        await self.client.close()

    async def async_invoke(self, value: Any) -> Any:
        headers = {"Idempotency-Key": str(current_call().idempotency_key)}
        async with self.client.get(f"{self.url}/{value.id}", headers=headers) as response:
            response.raise_for_status()
            return [(value.id, await response.text())]

    def timeout(self, value: Any) -> Any:
        return [ToSide(LETTERS, (value.id, "time-out"))]

    def on_error(self, value: Any, error: Exception) -> Any:
        return [ToSide(LETTERS, (value.id, str(getattr(error, "status", error))))]


class Counted(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.seen = context.get_state(ValueStateDescriptor("seen", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.seen.update(self.seen.value() + 1)
        yield value.id, value.answer, self.seen.value()


def finish(env: Any) -> Any:
    with running(env) as client:
        assert client.wait(timeout_ms=300_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
        return client


def test_each_element_has_one_answer_whoever_reads_it(spark: Any, tmp_path: Path) -> None:
    ids = [(number,) for number in range(300)]
    with answering(
        latency_ms=5,
        failing=Counter({"7": 2, "8": 9}),
        busy=Counter({"9": 1}),
        silent=Counter({"11": 1}),
    ) as server:
        env = environment(spark, tmp_path / "job")
        asked = AsyncDataStream.ordered_wait_with_retry(
            env.from_collection(ids, "id LONG", uid="ids"),
            Asked(server.url),
            5_000,
            20,
            AsyncRetryStrategy.fixed_delay(2, 50),
            output=ANSWERS,
            uid="asked",
        )
        sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in ("one", "two", "letters", "counted")}
        asked.sink_to(sinks["one"], uid="one")
        asked.filter(lambda row: row.id % 2 == 0).sink_to(sinks["two"], uid="two")
        asked.get_side_output(LETTERS).sink_to(sinks["letters"], uid="letters")
        counted = asked.key_by("id").process(Counted(), output=f"{ANSWERS}, seen LONG", uid="counted")
        counted.sink_to(sinks["counted"], uid="counted-out")
        client = finish(env)
    found = {name: sorted(map(tuple, sink.rows())) for name, sink in sinks.items()}
    assert found["letters"] == [(8, "500"), (11, "time-out")]
    answers = dict(found["one"])
    assert len(found["one"]) == len(answers) == 298
    assert found["two"] == [row for row in found["one"] if row[0] % 2 == 0]
    assert found["counted"] == [(*row, 1) for row in found["one"]]
    assert {key: count for key, count in server.calls.items() if count > 1} == {"7": 3, "8": 3, "9": 2}
    assert all(len(keys) == 1 for keys in server.keys.values())
    assert 2 <= server.most_at_once <= 40
    cost = client.progress.async_calls["asked"]
    assert (cost.elements, cost.calls, cost.retries, cost.timeouts) == (300, 305, 5, 1)
    assert not any((tmp_path / "job" / "answers").rglob("*-*"))


def test_a_replay_reads_what_was_answered(spark: Any, tmp_path: Path) -> None:
    """What one sink has lost behind the decision is staged again, with the answers that the other has."""
    tables = [tmp_path / "one", tmp_path / "two"]
    with answering() as server:
        env = environment(spark, tmp_path / "job")
        asked = AsyncDataStream.ordered_wait(
            env.from_collection([(number,) for number in range(100)], "id LONG", uid="ids"),
            Asked(server.url),
            5_000,
            output=ANSWERS,
            uid="asked",
            record_answers=True,
        )
        for table in tables:
            asked.sink_to(DeltaSink(str(table)), uid=table.name)
        vandal = DeleteStaged(tmp_path / "job", "two")
        env.observe(vandal)
        finish(env)
    vandal.check()
    one, two = (sorted((row["id"], row["answer"]) for row in read_delta(table)) for table in tables)
    assert one == two and [number for number, _ in one] == [*range(100)]
    assert set(server.calls.values()) == {1}
