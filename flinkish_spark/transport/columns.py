"""Names and kinds of the control columns that travel beside a stream's own columns.

Every row between the control source and the sinks is a stream element: a record, or a control
row. The kind is explicit: a null test cannot tell them apart, since pandas turns null into NaN.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark.core.arrow_pass import (
    ComposedWorker,
    Worker,
    copy_pass,
    find_pass,
    is_made_by_workers,
    map_in_arrow,
)
from flinkish_spark.protocol.latency import FIRST_LATE_REPORTER, FIRST_OPERATOR_REPORTER
from flinkish_spark.transport.routing import find_topic
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import PREFIX

if TYPE_CHECKING:
    from pyspark.sql import types as T


KIND = "_fs_kind"
CHECKPOINT = "_fs_checkpoint"
#: Channel of a record or barrier; with SEQUENCE the canonical order of an operator's input.
CHANNEL = "_fs_channel"
SEQUENCE = "_fs_seq"
ROUTE = "_fs_route"
STREAM = "_fs_stream"
HASH = "_fs_hash"
#: Number of the row's sink, in a frame with rows for several sinks.
SINK = "_fs_sink"
#: Split for a task to read, as text: the only column of our sources for Spark.
PIECE = "_fs_piece"
#: Rows of one route, packed; see `flinkish_spark/transport/blocks.py`.
BLOCK = "_fs_block"
#: The hash of a record's key, by which its state is looked up.
KEY_HASH = "_fs_key_hash"
#: A record's event time in milliseconds.
TIME = "_fs_time"
#: The greatest watermark that the user's generator has emitted up to a record, in its channel and task;
#: MIN_WATERMARK_MS before the first one. If the column exists, it is reported instead of the times.
MARK = "_fs_mark"
#: A key group's state on its way into an operator, in the first micro-batch of a seeded lineage.
STATE = "_fs_state"

#: Sequence of a call by a broadcast element, which matters only if functions are applied to keyed state.
BROADCAST_CALL = -1
#: The "key group" of the first partition's unkeyed state outside Spark's state store; that of the next
#: partition is one less.
FIRST_PARTITION_GROUP = -1

#: Number of a row's output: 0 for the main output, then side outputs in the order of their declaration.
SIDE = "_fs_side"

#: Channel of the row with a key group's state. Channels of records count from 0, so in the canonical
#: order of an operator's input the state comes before every record.
STATE_CHANNEL = -1


class Kind(enum.IntEnum):
    """Kind of a row; stored in :data:`KIND`."""

    RECORD = 0
    BARRIER = 1
    #: Calls a key group whose timers are due. Its channel is the operator's reporter number.
    WAKE = 2
    STATE = 3
    #: A latency marker. Its checkpoint is the wall clock in milliseconds when its micro-batch was planned;
    #: its channel is the source and the current or next subtask; see `protocol/latency.py`.
    MARKER = 4


#: Kinds from here on are reports to the driver; the difference is the reporter's number.
FIRST_REPORT = 16
#: Kinds from here on report when a marker has reached an operator; the difference is the operator's number.
#: The first number of such a report is the marker's, the second one the wall clock.
FIRST_LATENCY = FIRST_REPORT + FIRST_OPERATOR_REPORTER
#: Kinds from here on report the late records that a key group has dropped; see `protocol/time_plan.py`.
FIRST_LATE = FIRST_REPORT + FIRST_LATE_REPORTER


CONTROL = (KIND, CHECKPOINT, CHANNEL, SEQUENCE)
#: Columns before a sink's fields, in this order.
SINK_CONTROL = (KIND, CHECKPOINT, CHANNEL, HASH)


def read_records(pieces: DataFrame, reader: Worker, columns: T.StructType) -> DataFrame:
    """Return the records of a source: Spark only gets the splits, a worker reads them."""
    return mark_records(map_in_arrow(pieces, reader, columns))


def mark_records(frame: DataFrame, made_of: Mapping[str, Sequence[str]] = MappingProxyType({})) -> DataFrame:
    # Imported here, since workers import this module and do not need plans.
    from flinkish_spark.bridge.plans import name_records

    named = name_records(frame, made_of)
    copy_pass(frame, named)
    setattr(named, _MADE_OF, made_of)
    return named


def map_records(frame: DataFrame, worker: Worker, columns: T.StructType) -> DataFrame:
    """Apply a worker that keeps the columns of a frame, or adds to them; the frame stays one of records."""
    made = map_in_arrow(frame, worker, columns)
    made_of = getattr(frame, _MADE_OF, None)
    return made if made_of is None else mark_records(made, made_of)


def select_in_pass(
    frame: DataFrame, select: Worker, columns: T.StructType, used: Mapping[str, Iterable[str]]
) -> DataFrame | None:
    """Compute columns, each made of `used` ones, in the pass that reads a source; None without one."""
    made_of = getattr(frame, _MADE_OF, None)
    if made_of is None or not is_made_by_workers(frame):
        return None
    found = {
        name: sorted({one for own in names for one in made_of.get(own, [own])})
        for name, names in used.items()
    }
    return mark_records(map_in_arrow(frame, select, columns), found)


def select_aliased(
    frame: DataFrame, names: Sequence[str], name_it: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """Return a frame with at least these columns, under an alias set by `name_it`."""
    # Keep the output of workers, so that the next worker can run in the same pass: set the alias before the
    # workers.
    made = find_pass(frame)
    if made is None:
        return name_it(frame.select(*(F.col(quote_name(name)) for name in names)))
    given = name_it(made.given)
    return frame if given is made.given else map_in_arrow(given, ComposedWorker(made.workers), made.columns)


#: Attribute of a frame with a source's records.
_MADE_OF = f"{PREFIX}made_of"


@dataclass(frozen=True)
class CopyColumns:
    """Keeps some columns and copies others under new names; a column may get several. For mapInArrow."""

    kept: T.StructType
    renamed: tuple[tuple[str, str], ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pairs = [*((name, name) for name in self.kept.names), *self.renamed]
        for batch in batches:
            columns = [batch.column(name) for name, _ in pairs]
            yield pa.RecordBatch.from_arrays(columns, names=[name for _, name in pairs])


def add_position(records: DataFrame) -> DataFrame:
    """Add channel and sequence: Spark's input partition and the row's position in it."""
    place = F.monotonically_increasing_id()
    kept = [F.col(quote_name(name)) for name in records.columns if name not in (CHANNEL, SEQUENCE)]
    placed = records.select(*kept, place.alias(SEQUENCE))
    return placed.select(
        *kept,
        F.shiftright(SEQUENCE, 33).alias(CHANNEL),
        F.col(SEQUENCE).bitwiseAND((1 << 33) - 1).alias(SEQUENCE),
    )


@dataclass(frozen=True)
class Origins:
    """Describes the origin of a record for error messages; `topics` is empty if the input is not Kafka."""

    topics: tuple[str, ...] = ()

    def describe(self, channel: int, sequence: int) -> dict[str, Any]:
        if not self.topics:
            return {"channel": channel, "sequence": sequence}
        topic, partition = find_topic(self.topics, channel), channel & 0xFFFFFFFF
        return {"topic": topic, "partition": partition, "offset": sequence}
