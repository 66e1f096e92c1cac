"""What several job tests share: a small job, its input, and what readers of its sinks see."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, TransactionState
from kafka.errors import MetadataEmptyBrokerList

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    Json,
    KafkaSource,
    KeyedProcessFunction,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
)

if TYPE_CHECKING:
    from flinkish_spark import JobClient

ORDER = "user STRING, amount LONG"
TOTAL = "user STRING, total LONG"
#: How long something may take that comes for certain; no verdict depends on it.
PATIENCE_S = 120


class RunningTotal(KeyedProcessFunction):
    """Emits, for every order, its user's total so far."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG"))

    def process_element(self, order, ctx):
        total = (self.total.value() or 0) + order.amount
        self.total.update(total)
        yield order.user, total


def environment(spark, job_dir: Path, **settings: Any) -> StreamExecutionEnvironment:
    """An environment with quick checkpoints, under settings that the test may replace."""
    defaults = {
        "job": "orders",
        "checkpoint": CheckpointConfig(interval_ms=500),
        # Without it Spark asks idle sources a hundred times a second, and endless ones give it no rest.
        "trigger_interval_ms": 100,
        "restart_strategy": FixedDelay(attempts=5, delay_ms=100),
    }
    return StreamExecutionEnvironment(spark, job_dir=str(job_dir), **{**defaults, **settings})


def orders_source(servers: str, topic: str, **settings: Any) -> KafkaSource:
    return KafkaSource(servers, [topic], **{"value": Json(ORDER), **settings})


def order(user: str | None, amount: int = 1) -> bytes:
    return json.dumps({"user": user, "amount": amount}).encode()


def produce(
    servers: str, topic: str, values: Iterable[bytes | None], key: bytes | None = None, **where: Any
) -> None:
    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=5)
    # A record needs a key or a value.
    sent = [
        producer.send(topic, value=value, key=key or (b"null" if value is None else None), **where)
        for value in values
    ]
    for future in sent:
        future.get(timeout=30)
    producer.close()


def read_committed(
    servers: str | Mapping[str, Any], topic: str, isolation: str = "read_committed"
) -> list[Any]:
    """Every record that a reader sees once all markers are written, in partition order.

    `servers` are addresses, or all arguments of a client.
    """
    arguments = {"bootstrap_servers": servers} if isinstance(servers, str) else servers
    await_markers(arguments)
    consumer = KafkaConsumer(
        **arguments, isolation_level=isolation, auto_offset_reset="earliest", enable_auto_commit=False
    )
    places = [TopicPartition(topic, p) for p in sorted(consumer.partitions_for_topic(topic) or ())]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    ends, records = consumer.end_offsets(places), []
    # What a reader sees is there: how long it takes says nothing.
    given_up = time.monotonic() + PATIENCE_S
    while any(consumer.position(p) < ends[p] for p in places):
        assert time.monotonic() < given_up, f"{topic} is not read to its end"
        for batch in consumer.poll(timeout_ms=500).values():
            records += batch
    consumer.close()
    return sorted(records, key=lambda r: (r.partition, r.offset))


def await_markers(arguments: Mapping[str, Any]) -> None:
    """Wait until readers see what was committed: the answer to a commit comes before the markers."""
    ending = {TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT}

    def are_written() -> bool:
        try:
            with KafkaAdminClient(**arguments) as admin:
                return not any(admin.list_transactions(state_filters=ending).values())
        except MetadataEmptyBrokerList:
            # A broker that is too busy to tell its controller that it lives is in no answer for a moment.
            return False

    assert eventually(are_written, PATIENCE_S)


def totals_in(servers: str, topic: str) -> Counter[tuple[str | None, int]]:
    rows = (json.loads(record.value) for record in read_committed(servers, topic))
    return Counter((row["user"], row["total"]) for row in rows)


def expected_totals(amounts: Mapping[str | None, list[int]]) -> Counter[tuple[str | None, int]]:
    """What RunningTotal emits for each user's amounts, in their order."""
    return Counter((user, sum(all_[: n + 1])) for user, all_ in amounts.items() for n in range(len(all_)))


def read_delta(path: Path) -> list[dict[str, Any]]:
    """The rows of a Delta table, by its log and not by its folder."""
    files: list[str] = []
    for found in _files_by_version(path):
        files = found
    return [row for name in files for row in pq.read_table(path / name).to_pylist()]


def delta_versions(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of each version of a Delta table."""
    read = functools.cache(lambda name: pq.read_table(path / name).to_pylist())
    for files in _files_by_version(path):
        yield [row for name in files for row in read(name)]


def _files_by_version(path: Path) -> Iterator[list[str]]:
    files: dict[str, None] = {}
    for entry in sorted((path / "_delta_log").glob("*.json")):
        for action in map(json.loads, entry.read_text().splitlines()):
            if "add" in action:
                files[action["add"]["path"]] = None
            if "remove" in action:
                files.pop(action["remove"]["path"], None)
        yield list(files)


def eventually(holds: Callable[[], bool], within_s: float = 30) -> bool:
    """Wait until something holds; return whether it does."""
    end = time.monotonic() + within_s
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def await_that(condition: Callable[[], Any], client: JobClient, timeout_s: float = 240) -> None:
    """Wait until the condition holds while the job lives; a job that failed raises here."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return
        # A condition that reads a topic takes its time from the job that is to fill it.
        pause_ms = max(200, round(4_000 * (time.monotonic() - began)))
        assert not client.wait(timeout_ms=min(pause_ms, 2_000)), "the job ended"
        assert time.monotonic() < deadline, f"not within {timeout_s} s; {client.progress}"


def run_until(env: StreamExecutionEnvironment, condition: Callable[[JobClient], Any]) -> JobClient:
    """Run the job until the condition holds, stop it with a checkpoint, and return its client."""
    with running(env) as client:
        await_that(lambda: condition(client), client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=180_000), "the job did not stop"
    return client


def failure_of(env: StreamExecutionEnvironment, timeout_ms: int = 240_000) -> Exception:
    """Run the job until it fails and return the error."""
    with running(env) as client:
        try:
            ended = client.wait(timeout_ms)
        except Exception as error:
            return error
    raise AssertionError(f"the job {'ended' if ended else 'runs'} without an error; {client.progress}")


@contextmanager
def running(env: StreamExecutionEnvironment) -> Iterator[JobClient]:
    """Start the job; whatever still runs at the end of the block is cancelled."""
    client = env.execute_async()
    try:
        yield client
    finally:
        end(client)


def end(client: JobClient) -> None:
    """Cancel whatever still runs; its own failure was or will be reported by `wait`."""
    client.cancel()
    client._thread.join(60)


def rows(client: JobClient, sink: str) -> int:
    return client.progress.rows_by_sink.get(sink, 0)
