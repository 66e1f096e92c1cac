"""The verdict on a run: both sinks against a recomputation from the input, row for row.

Multisets are compared, never counts of distinct rows: two rows for one and one row for none would
cancel out.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from demo.decisions import DecisionBook
from demo.delta_log import Table
from demo.orders import Total, expected_totals
from demo.readers import SinkReader, batch_of, checkpoint_of
from demo.topics import count_partitions, read_topic
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from tests.support.open_transactions import still_open


@dataclass(frozen=True, slots=True)
class Difference:
    """How a sink differs from what it should hold."""

    lost: int
    duplicated: int
    examples: tuple[str, ...] = ()

    @classmethod
    def between(cls, expected: Counter[Total], found: Counter[Total]) -> Difference:
        missing, surplus = expected - found, found - expected
        examples = [f"missing {row} x{n}" for row, n in list(missing.items())[:3]]
        examples += [f"surplus {row} x{n}" for row, n in list(surplus.items())[:3]]
        return cls(missing.total(), surplus.total(), tuple(examples))


@dataclass(frozen=True, slots=True)
class Partial:
    """A checkpoint with a receipt that a sink does not hold exactly."""

    sink: str
    checkpoint: int
    decided_rows: int
    visible_rows: int

    def __str__(self) -> str:
        return (
            f"checkpoint {self.checkpoint} has {self.decided_rows} rows for {self.sink} "
            f"and {self.visible_rows} are visible"
        )


@dataclass(frozen=True)
class Verdict:
    """What was found; :attr:`is_exact` is the answer."""

    orders: int
    checkpoints: int
    differences: dict[str, Difference]
    undecided_rows: int
    partial: tuple[Partial, ...]
    open_transactions: tuple[str, ...]
    group_lag: int
    orphan_files: int
    max_skew_ms: int
    remarks: tuple[str, ...] = field(default=())

    @property
    def lost(self) -> int:
        return sum(difference.lost for difference in self.differences.values())

    @property
    def duplicated(self) -> int:
        return sum(difference.duplicated for difference in self.differences.values())

    @property
    def partial_checkpoints(self) -> int:
        return self.undecided_rows + len({one.checkpoint for one in self.partial})

    @property
    def zeros(self) -> dict[str, int]:
        """The five numbers that must be 0."""
        return {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "partial_checkpoints": self.partial_checkpoints,
            "open_transactions": len(self.open_transactions),
            "group_lag": self.group_lag,
        }

    @property
    def is_exact(self) -> bool:
        return not any(self.zeros.values())

    def to_json(self) -> dict[str, int]:
        """Return the numbers for the JSON line."""
        return {
            "orders": self.orders,
            "checkpoints": self.checkpoints,
            **self.zeros,
            "orphan_files": self.orphan_files,
            "max_skew_ms": self.max_skew_ms,
        }


@dataclass(frozen=True)
class Checked:
    """Where the run's input and output are."""

    servers: str
    input_topic: str
    output_topic: str
    #: Of the output; the input may get more while the job runs.
    partitions: int
    group: str
    table: Path


def verify(run: Checked, reader: SinkReader) -> Verdict:
    """Compare everything, with the job ended and `reader` finished."""
    reader.book.refresh()
    # Asked before the topic is read: a commit that is still writing its markers is waited for.
    left_open = _open_transactions(run, reader.book)
    inputs = count_partitions(run.servers, run.input_topic)
    values = [record.value for record in read_topic(run.servers, run.input_topic, inputs)]
    expected = expected_totals(values)
    in_topic, by_batch = _topic_rows(run)
    table = Table.read(run.table)
    in_table: Counter[Total] = Counter(table.rows("user", "total", "orders"))  # type: ignore[arg-type]
    by_checkpoint: Counter[int] = Counter()
    for version in table.versions:
        mark = checkpoint_of(version.marks, reader.delta_sink)
        by_checkpoint[int(mark) if mark.isdecimal() else 0] += version.rows
    differences = {
        reader.kafka_sink: Difference.between(expected, in_topic),
        reader.delta_sink: Difference.between(expected, in_table),
    }
    partial = partial_checkpoints(reader, by_batch, by_checkpoint)
    return Verdict(
        orders=len(values),
        checkpoints=reader.book.confirmed,
        differences=differences,
        undecided_rows=reader.undecided_rows,
        partial=partial,
        open_transactions=left_open,
        group_lag=group_lag(run),
        orphan_files=len(table.orphans),
        max_skew_ms=reader.max_skew_ms(),
        remarks=(
            *(f"{sink}: {text}" for sink, one in differences.items() for text in one.examples),
            *(str(violation) for violation in reader.violations[:5]),
            *(str(one) for one in partial[:5]),
        ),
    )


def partial_checkpoints(
    reader: SinkReader, by_batch: Counter[str], by_checkpoint: Counter[int]
) -> tuple[Partial, ...]:
    """Return the confirmed checkpoints of which a sink holds more or fewer rows than were decided."""
    found = []
    for one in reader.book.checkpoints.values():
        if not one.is_confirmed:
            continue
        visible = {
            reader.kafka_sink: sum(by_batch[batch] for batch in one.batches),
            reader.delta_sink: by_checkpoint[one.checkpoint],
        }
        for sink, rows in visible.items():
            if rows != one.rows_of(sink):
                found.append(Partial(sink, one.checkpoint, one.rows_of(sink), rows))
    return tuple(found)


def group_lag(run: Checked) -> int:
    """Return how many input records the group has not committed."""
    places = [(run.input_topic, number) for number in range(count_partitions(run.servers, run.input_topic))]
    with KafkaAdmin(KafkaConnection(run.servers)) as admin:
        ends = admin.end_offsets(places, Isolation.READ_UNCOMMITTED)
        done = admin.committed_offsets(run.group)
    return sum(end - done.get(place, 0) for place, end in ends.items())


def _topic_rows(run: Checked) -> tuple[Counter[Total], Counter[str]]:
    rows: Counter[Total] = Counter()
    by_batch: Counter[str] = Counter()
    for record in read_topic(run.servers, run.output_topic, run.partitions):
        body = json.loads(record.value)
        rows[body["user"], body["total"], body["orders"]] += 1
        by_batch[batch_of(record.headers)] += 1
    return rows, by_batch


def _open_transactions(run: Checked, book: DecisionBook) -> tuple[str, ...]:
    job = book.job_uuid()
    if job is None:
        return ()
    with TransactionClient(KafkaConnection(run.servers)) as client:
        return tuple(f"{one.transactional_id} ({one.state})" for one in still_open(client, job))
