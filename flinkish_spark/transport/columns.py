"""Names and kinds of the control columns that travel beside a stream's own columns.

Every row between the control source and the sinks is a stream element: a record, or a control
row. The kind is explicit: a null test cannot tell them apart, since pandas turns null into NaN.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark.protocol.latency import FIRST_LATE_REPORTER, FIRST_OPERATOR_REPORTER
from flinkish_spark.transport.routing import topic_of
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.schemas import PREFIX

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import types as T


#: What mapInArrow calls, once per task.
Worker = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

KIND = "_fs_kind"
CHECKPOINT = "_fs_checkpoint"
#: Where a record or barrier comes from; with SEQUENCE the canonical order of an operator's input.
CHANNEL = "_fs_channel"
SEQUENCE = "_fs_seq"
ROUTE = "_fs_route"
STREAM = "_fs_stream"
HASH = "_fs_hash"
#: Whose row it is where several sinks get theirs in one frame: the sink's place among them.
SINK = "_fs_sink"
#: What a task is to read, as text: the one column that a source of ours has for Spark.
PIECE = "_fs_piece"
#: Rows of one route, packed; see `flinkish_spark/transport/blocks.py`.
BLOCK = "_fs_block"
#: The hash of a record's key, by which its state is found.
KEY_HASH = "_fs_key_hash"
#: A record's event time in milliseconds.
TIME = "_fs_time"
#: The greatest watermark that a generator of the user's has emitted up to a record, in its channel and task;
#: the least number there is before the first one. Where it is there, it is reported in place of the times.
MARK = "_fs_mark"
#: A key group's state on its way into an operator, in the first micro-batch of a seeded lineage.
STATE = "_fs_state"

#: Sequence of a call that a broadcast element makes: it matters where something is done with keyed state.
BROADCAST_CALL = -1
#: The "key group" of what the first partition keeps beside its key groups, outside of Spark's state; that of
#: the next partition is one less.
FIRST_PARTITION_GROUP = -1

#: Which output of an operator a row belongs to: 0 its main one, then its side outputs as they were declared.
SIDE = "_fs_side"

#: Channel of the row with a key group's state. Channels of records count from 0, so in the canonical
#: order of an operator's input the state comes before every record.
STATE_CHANNEL = -1


class Kind(enum.IntEnum):
    """What a row is; stored in :data:`KIND`."""

    RECORD = 0
    BARRIER = 1
    #: Calls a key group whose timers are due. Its channel is the operator's reporter number.
    WAKE = 2
    STATE = 3
    #: Measures latency. Its checkpoint is the wall clock in milliseconds when its micro-batch was planned,
    #: its channel the source and the subtask that it is in or goes to; see `protocol/latency.py`.
    MARKER = 4


#: Kinds from here on are reports to the driver: of the reporter with that number less this one.
FIRST_REPORT = 16
#: Kinds from here on say when a marker has reached an operator: the one with that number less this one. The
#: first number of such a report is the marker's, the second one the wall clock.
FIRST_LATENCY = FIRST_REPORT + FIRST_OPERATOR_REPORTER
#: Kinds from here on say how many late records a key group has dropped; see `protocol/time_plan.py`.
FIRST_LATE = FIRST_REPORT + FIRST_LATE_REPORTER


CONTROL = (KIND, CHECKPOINT, CHANNEL, SEQUENCE)
#: What a sink's writer gets in front of its fields, in this order.
SINK_CONTROL = (KIND, CHECKPOINT, CHANNEL, HASH)


#: Names that PySpark reads as nothing but a name: "a.b" would be a field of a STRUCT, "*" every column.
_WORD = re.compile(r"\w+")


def map_in_arrow(
    frame: DataFrame, worker: Worker, columns: T.StructType | str, resources: ResourceProfile | None = None
) -> DataFrame:
    """Return what a worker makes of a frame in Arrow batches, whatever names the frame's columns have.

    `DataFrame.mapInArrow` reads each column's name as an expression. Where the frame is itself what a worker
    makes, both run in one pass; rows that are kept (`persist`) are not made again.
    """
    given, workers = frame, tuple[Worker, ...]([worker])
    before = getattr(frame, _PASS, None)
    if isinstance(before, _Pass) and resources is None and not frame.is_cached:
        given, workers = before.given, (*before.workers, worker)
    run: Worker = worker if len(workers) == 1 else InTurn(workers)
    plain = given
    if not all(map(_WORD.fullmatch, given.columns)):
        plain = given.toDF(*(f"{PREFIX}column_{at}" for at in range(len(given.columns))))
        run = _UnderTheirNames(run, tuple(given.columns))
    said: dict[str, Any] = {} if resources is None else {"profile": resources}
    made = plain.mapInArrow(run, columns, **said)
    if resources is None and isinstance(made, DataFrame):
        setattr(made, _PASS, _Pass(given, workers, columns))
    return made


def records_read_by(pieces: DataFrame, reader: Worker, columns: T.StructType) -> DataFrame:
    """Return the records of a source that gives Spark only what is to be read; a worker reads it."""
    return as_records(map_in_arrow(pieces, reader, columns))


def as_records(frame: DataFrame, made_of: Mapping[str, Sequence[str]] = MappingProxyType({})) -> DataFrame:
    """Return a frame whose columns are known as a source's, or as made of these."""
    # Workers import this module, too, and have no plans.
    from flinkish_spark.bridge.plans import name_records

    named = name_records(frame, made_of)
    made = getattr(frame, _PASS, None)
    if made is not None:
        setattr(named, _PASS, made)
    setattr(named, _MADE_OF, made_of)
    return named


def behind_records(frame: DataFrame, worker: Worker, columns: T.StructType) -> DataFrame:
    """Return what a worker makes that leaves the columns of a frame what they are, or adds to them."""
    made = map_in_arrow(frame, worker, columns)
    made_of = getattr(frame, _MADE_OF, None)
    return made if made_of is None else as_records(made, made_of)


def select_in_pass(
    frame: DataFrame, select: Worker, columns: T.StructType, used: Mapping[str, Iterable[str]]
) -> DataFrame | None:
    """Return columns, each made of `used` ones, as the pass makes them that reads a source; None without."""
    made_of = getattr(frame, _MADE_OF, None)
    if made_of is None or not is_made_by_workers(frame):
        return None
    found = {
        name: sorted({one for own in names for one in made_of.get(own, [own])})
        for name, names in used.items()
    }
    return as_records(map_in_arrow(frame, select, columns), found)


def behind_select(
    frame: DataFrame, names: Sequence[str], name_it: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """Return a frame with at least these columns, under an alias."""
    # What a worker makes stays as it is, so that the next worker runs in the same pass: the alias is put in
    # front of the worker.
    made = getattr(frame, _PASS, None)
    if not isinstance(made, _Pass) or frame.is_cached:
        return name_it(frame.select(*(F.col(quoted(name)) for name in names)))
    given = name_it(made.given)
    return frame if given is made.given else map_in_arrow(given, InTurn(made.workers), made.columns)


#: Attribute of a frame that workers make, and of one that is a source's records.
_PASS, _MADE_OF = f"{PREFIX}pass", f"{PREFIX}made_of"


@dataclass(frozen=True, eq=False)
class _Pass:
    given: DataFrame
    workers: tuple[Worker, ...]
    columns: T.StructType | str


@dataclass(frozen=True)
class InTurn:
    """Workers one behind the other, as one."""

    workers: tuple[Worker, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = iter(batches)
        for worker in self.workers:
            made = worker(made)
        return made


@dataclass(frozen=True)
class CopyColumns:
    """Called by mapInArrow: leaves columns as they are, and gives others new names; one may get several."""

    kept: T.StructType
    renamed: tuple[tuple[str, str], ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pairs = [*((name, name) for name in self.kept.names), *self.renamed]
        for batch in batches:
            columns = [batch.column(name) for name, _ in pairs]
            yield pa.RecordBatch.from_arrays(columns, names=[name for _, name in pairs])


@dataclass(frozen=True)
class _UnderTheirNames:
    """Gives a worker the batches with the names that it knows."""

    worker: Worker
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.worker(batch.rename_columns(list(self.names)) for batch in batches)


def pass_of(frame: DataFrame) -> tuple[DataFrame, Worker] | None:
    """Return what workers are given of which a frame is made, and these as one; None if Spark makes it."""
    made = getattr(frame, _PASS, None)
    if not isinstance(made, _Pass) or frame.is_cached:
        return None
    return made.given, InTurn(made.workers)


def is_made_by_workers(frame: DataFrame) -> bool:
    """Return whether workers make the rows of a frame, so that a further one runs in the same pass."""
    return pass_of(frame) is not None


def with_position(records: DataFrame) -> DataFrame:
    """Add channel and sequence from Spark's input partition and the row's place in it."""
    place = F.monotonically_increasing_id()
    kept = [F.col(quoted(name)) for name in records.columns if name not in (CHANNEL, SEQUENCE)]
    placed = records.select(*kept, place.alias(SEQUENCE))
    return placed.select(
        *kept,
        F.shiftright(SEQUENCE, 33).alias(CHANNEL),
        F.col(SEQUENCE).bitwiseAND((1 << 33) - 1).alias(SEQUENCE),
    )


@dataclass(frozen=True)
class Origins:
    """Tells where a record came from, for error messages; `topics` is empty where the input is not Kafka."""

    topics: tuple[str, ...] = ()

    def describe(self, channel: int, sequence: int) -> dict[str, Any]:
        if not self.topics:
            return {"channel": channel, "sequence": sequence}
        topic, partition = topic_of(self.topics, channel), channel & 0xFFFFFFFF
        return {"topic": topic, "partition": partition, "offset": sequence}
