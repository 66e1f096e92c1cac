"""A reader of both sinks that runs beside the job and notes what was visible when.

The rule it checks: a row may be visible only if a decision in the job directory covers it. Rows are
looked at first and decisions second, so a row without a decision is a violation and not a race.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaConsumer

from demo.decisions import DecisionBook
from demo.delta_log import DeltaLog
from demo.topics import consumer_of
from flinkish_spark.connectors.kafka.writer import BATCH_HEADER
from flinkish_spark.core.store_spec import StoreSpec

_POLL_S = 0.25
#: Name under which a row without our header or mark is counted.
UNMARKED = "unmarked"


@dataclass(frozen=True, slots=True)
class Violation:
    """Rows that were visible when no decision covered them."""

    sink: str
    origin: str
    rows: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.origin} visible in {self.sink} without a decision"


class SinkReader(threading.Thread):
    """Polls the topic and the table until :meth:`finish`; one thread, counts only, no rows kept.

    Parameters
    ----------
    servers, topic, partitions
        The Kafka sink.
    table
        The Delta sink.
    job_dir
        Where decisions are.
    kafka_sink, delta_sink
        The sinks' uids.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        partitions: int,
        table: Path,
        job_dir: StoreSpec,
        *,
        kafka_sink: str,
        delta_sink: str,
    ) -> None:
        super().__init__(name="reader", daemon=True)
        self._open = lambda: consumer_of(servers, topic, partitions)
        self._log = DeltaLog(table)
        self.kafka_sink, self.delta_sink = kafka_sink, delta_sink
        self.book = DecisionBook(job_dir)
        self.violations: list[Violation] = []
        #: Rows seen so far.
        self.kafka_rows = self.delta_rows = 0
        self._first_seen: dict[tuple[str, str], float] = {}
        self._is_stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            consumer = self._open()
            try:
                while not self._is_stopping.is_set():
                    self._look(consumer)
                    self._is_stopping.wait(_POLL_S)
                while self._look(consumer):
                    pass
            finally:
                consumer.close()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        """End soon; what was not looked at by now is not of interest."""
        self._is_stopping.set()

    def finish(self, timeout_s: float = 60.0) -> None:
        """Look once more at everything that is there by now, and end."""
        self._is_stopping.set()
        self.join(timeout_s)
        if self.failure is not None:
            raise self.failure
        if self.is_alive():
            raise TimeoutError(f"the reader did not come to an end within {timeout_s:g} s")

    def _look(self, consumer: KafkaConsumer) -> int:
        """Look at both sinks, then at the decisions; return how many rows were new."""
        kafka, delta = self._new_in_topic(consumer), self._new_in_table()
        now = time.monotonic()
        # This order matters: a decision read before the rows could be older than they are.
        self.book.refresh()
        for batch, rows in kafka.items():
            self._first_seen.setdefault((self.kafka_sink, batch), now)
            if batch not in self.book.of_batch:
                self.violations.append(Violation(self.kafka_sink, f"micro-batch {batch}", rows))
        for checkpoint, rows in delta.items():
            self._first_seen.setdefault((self.delta_sink, checkpoint), now)
            if not checkpoint.isdecimal() or int(checkpoint) not in self.book.checkpoints:
                self.violations.append(Violation(self.delta_sink, f"checkpoint {checkpoint}", rows))
        self.kafka_rows += kafka.total()
        self.delta_rows += delta.total()
        return kafka.total() + delta.total()

    def _new_in_topic(self, consumer: KafkaConsumer) -> Counter[str]:
        found: Counter[str] = Counter()
        while True:
            polled = consumer.poll(timeout_ms=100)
            for records in polled.values():
                found.update(batch_of(record.headers) for record in records)
            if not polled:
                return found

    def _new_in_table(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for version in self._log.new_versions():
            if version.rows:
                found[checkpoint_of(version.marks, self.delta_sink)] += version.rows
        return found

    @property
    def undecided_rows(self) -> int:
        """Rows that were visible when no decision covered them."""
        return sum(violation.rows for violation in self.violations)

    def max_skew_ms(self) -> int:
        """Return the longest time between the two sinks showing a checkpoint, as precise as the polls."""
        seen: dict[tuple[int, str], float] = {}
        for (sink, origin), at in self._first_seen.items():
            number = int(origin) if origin.isdecimal() else self.book.of_batch.get(origin, 0)
            seen[number, sink] = min(at, seen.get((number, sink), at))
        both = {number for number, _ in seen} - {0}
        pairs = [(seen.get((n, self.kafka_sink)), seen.get((n, self.delta_sink))) for n in both]
        return max((round(abs(a - b) * 1000) for a, b in pairs if a is not None and b is not None), default=0)


def batch_of(headers: list[tuple[str, bytes]]) -> str:
    """Return "<lineage>/<batch>" of a record."""
    for name, value in headers:
        if name == BATCH_HEADER:
            return value.decode()
    return UNMARKED


def checkpoint_of(marks: tuple[tuple[str, int], ...], sink: str) -> str:
    """Return the checkpoint id of a table version."""
    for app_id, number in marks:
        if app_id.startswith("flinkish-") and app_id.endswith(f"-{sink}"):
            return str(number)
    return UNMARKED
