"""The tasks that write key groups of a new savepoint.

    rows by key, blocks  --+
    rows of a state ------ + -> shuffled and sorted by key group -> one value per key group -> state files
    values of a savepoint -+

What goes through the shuffle has one form: a key group, which *part* it is, and bytes. Part 0 is the value
that the key group had; every other part is rows of one DataFrame, as blocks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import types as T

from flinkish_spark.operators.due_table import next_due_of
from flinkish_spark.operators.elements import TimeDomain
from flinkish_spark.operators.group_state import STATE, TIMERS
from flinkish_spark.operators.stored_groups import describe_group, kind_of, stored_tables
from flinkish_spark.operators.table_codec import TIME
from flinkish_spark.protocol.savepoints import StateFile, state_path
from flinkish_spark.runtime.columns import FIRST_PARTITION_GROUP
from flinkish_spark.runtime.row_blocks import arrow_schema, as_schema, to_block
from flinkish_spark.savepoints.entries import file_values
from flinkish_spark.savepoints.errors import SavepointDamaged
from flinkish_spark.savepoints.state_files import StateFileWriter, sha256_of

KEY_GROUP, PART, BLOCK = "key_group", "part", "block"
#: What goes through the shuffle.
PACKED = T.StructType(
    [
        T.StructField(KEY_GROUP, T.IntegerType()),
        T.StructField(PART, T.IntegerType()),
        T.StructField(BLOCK, T.BinaryType()),
    ]
)
#: The part that is the value which the key group had.
VALUE = 0
#: What a task says about the file that it has written, as JSON.
REPORT = T.StructType([T.StructField("report", T.StringType())])
_PACKED = arrow_schema(PACKED)


class Change(Protocol):
    """From what there is of a key group to its value."""

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        """Return the value; None for nothing."""


class WriterRefused(ValueError):
    """What is to be written does not fit together; crosses the process boundary as text."""


@dataclass(frozen=True)
class PackRows:
    """Runs in tasks in front of the shuffle: a key group and columns in, blocks out.

    Parameters
    ----------
    part
        Which part the rows are.
    schema
        Of the columns behind the key group.
    """

    part: int
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield rows of PACKED."""
        for batch in batches:
            if not batch.num_rows:
                continue
            groups = batch.column(0).to_numpy()
            order = np.argsort(groups, kind="stable")
            own = pa.RecordBatch.from_arrays(batch.columns[1:], names=self.schema.names)
            rows, ordered = as_schema(own, self.schema).take(pa.array(order)), groups[order]
            begins = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1)).tolist()
            ends = [*begins[1:], len(ordered)]
            blocks = [to_block(rows.slice(a, b - a)) for a, b in zip(begins, ends, strict=True)]
            yield _packed(ordered[begins].tolist(), self.part, blocks)


@dataclass(frozen=True)
class PackValues:
    """Runs in tasks in front of the shuffle: files as JSON in, the values of their key groups out.

    Parameters
    ----------
    together
        Kinds of what partitions keep that are copies of each other, and come to one place.
    """

    folder: str
    together: frozenset[str] = frozenset()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield rows of PACKED."""
        for batch in batches:
            for text in batch.column(0).to_pylist():
                file = StateFile.from_json(json.loads(text))
                if sha256_of(Path(self.folder) / file.path) != file.sha256:
                    raise SavepointDamaged(f"the checksum of {file.path} does not match", file=file.path)
                for group, value in file_values(Path(self.folder), file):
                    is_copy = group < FIRST_PARTITION_GROUP and kind_of(value) in self.together
                    # One at a time: a value is a whole key group.
                    yield _packed([FIRST_PARTITION_GROUP if is_copy else group], VALUE, [value])


def _packed(groups: Sequence[int], part: int, blocks: Sequence[bytes | memoryview]) -> pa.RecordBatch:
    columns = [
        pa.array(groups, pa.int32()),
        pa.array([part] * len(groups), pa.int32()),
        pa.array(blocks, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PACKED)


@dataclass(frozen=True)
class WriteGroups:
    """Runs in tasks behind the shuffle: rows of PACKED, those of a key group together, into one state file.

    Parameters
    ----------
    folder
        Of the savepoint that is written.
    operator
        Uid, which is part of the path.
    name
        Opens the names of the files; an attempt of a task has a name of its own.
    change
        Makes the values.
    """

    folder: str
    operator: str
    name: str
    change: Change

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a row of REPORT, or none where nothing was written."""
        task = TaskContext.get()
        attempt = "0" if task is None else f"{task.partitionId()}-{task.taskAttemptId()}"
        name = f"{self.name}-{attempt}"
        writer: StateFileWriter | None = None
        states, groups, due = dict[str, str](), list[int](), list[list[Any]]()
        for group, parts in _groups(batches):
            value = self.change(group, parts)
            if value is None:
                continue
            states.update(describe_group(value).types)
            due.append([group, *next_timers(value)])
            writer = writer or StateFileWriter(Path(self.folder) / state_path(self.operator, name))
            writer.write([group], [value])
            groups.append(group)
        if writer is not None:
            size_bytes, sha256 = writer.close()
            report = {
                "file": {"name": name, "rows": writer.rows, "bytes": size_bytes, "sha256": sha256},
                "states": states,
                "groups": groups,
                "due": due,
            }
            yield pa.RecordBatch.from_pydict({"report": [json.dumps(report)]})


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, dict[int, list[bytes]]]]:
    """Yield key groups with the blocks of their parts."""
    rows = (
        row
        for batch in batches
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    for group, own in itertools.groupby(rows, key=lambda row: row[0]):
        parts: dict[int, list[bytes]] = {}
        for _, part, block in own:
            parts.setdefault(part, []).append(block)
        yield int(group), parts


def next_timers(value: bytes) -> tuple[int | None, int | None]:
    """Return when the next timers and windows of a whole value are due, by event and by processing time."""
    tables = stored_tables(value)
    event_ms, processing_ms = (
        min((due_ms for due_ms in _due_of(tables, clock) if due_ms is not None), default=None)
        for clock in (TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME)
    )
    return event_ms, processing_ms


def _due_of(tables: Mapping[str, pa.RecordBatch], clock: TimeDomain) -> Iterator[int | None]:
    timers = tables.get(TIMERS + clock.value)
    if timers is not None:
        yield pc.min(timers.column(TIME)).as_py()
    for name, table in tables.items():
        if name.startswith(STATE):
            yield next_due_of(table, clock)
