"""The tasks that write the key groups of a new savepoint, from rows or by editing stored entries."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress, TimeDomain
from flinkish_spark.core.errors import USER_FUNCTION_MARKER
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.operators.context import FunctionContext
from flinkish_spark.operators.process import ElementError, Elements, GroupRun, KeyedProcessOperator
from flinkish_spark.protocol.savepoints import StateFile
from flinkish_spark.savepoints.bootstrap import KeyedStateBootstrapFunction
from flinkish_spark.savepoints.entries import (
    EACH_TOUCHED_AT,
    TIMES,
    file_values,
    to_ms,
    to_stored_times,
)
from flinkish_spark.savepoints.files import SavepointDamagedError
from flinkish_spark.savepoints.written_files import write_state_file
from flinkish_spark.state.codec import ALIVE, HASH, TIME, TOUCHES, StateValueError, TableLayout
from flinkish_spark.state.columnar import next_due_of
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.group_values import (
    change_group,
    change_partition,
    describe_group,
    kind_of,
    read_tables,
)
from flinkish_spark.state.key_group import (
    STATE_SECTION,
    TIMERS,
    GroupLayout,
    GroupState,
    NoBases,
)
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.operator_state import BROADCAST_KIND
from flinkish_spark.state.savepoint_files import has_checksum
from flinkish_spark.state.timers import Timers
from flinkish_spark.transport.blocks import from_block, to_block
from flinkish_spark.transport.columns import FIRST_PARTITION_GROUP
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import RowReader, arrow_schema

#     rows by key, blocks  --+
#     rows of a state ------ + -> shuffled and sorted by key group -> one value per key group -> state files
#     values of a savepoint -+
#
# All rows of the shuffle have one form: key group, *part*, and bytes. Part 0 is the stored value of the key
# group; each other part has the rows of one DataFrame, as blocks.

KEY_GROUP, PART, BLOCK = "key_group", "part", "block"
#: Columns of the shuffle.
PACKED = T.StructType(
    [
        T.StructField(KEY_GROUP, T.IntegerType()),
        T.StructField(PART, T.IntegerType()),
        T.StructField(BLOCK, T.BinaryType()),
    ]
)
#: The part with the stored value of the key group.
VALUE = 0
_PACKED = arrow_schema(PACKED)


class WriterError(ValueError):
    """The rows for a savepoint do not fit together; raised in tasks, reaches the driver as text."""


@dataclass(frozen=True)
class PackRows:
    """Packs rows of a key group into blocks; runs in tasks before the shuffle."""

    part: int
    #: Schema of the columns after the key group.
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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
            yield _pack(ordered[begins].tolist(), self.part, blocks)


@dataclass(frozen=True)
class PackValues:
    """Reads the values in state files, which are given as JSON; runs in tasks before the shuffle."""

    #: Place of the savepoint with the files.
    place: StoreSpec
    #: Kinds of partition state whose values are copies of each other and go to one key group.
    together: frozenset[str] = frozenset()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(0).to_pylist():
                file = StateFile.from_json(json.loads(text))
                if not has_checksum(self.place, file):
                    raise SavepointDamagedError(f"the checksum of {file.path} does not match", file=file.path)
                for group, value in file_values(self.place, file):
                    is_copy = group < FIRST_PARTITION_GROUP and kind_of(value) in self.together
                    # One at a time: a value is a whole key group.
                    yield _pack([FIRST_PARTITION_GROUP if is_copy else group], VALUE, [value])


def _pack(groups: Sequence[int], part: int, blocks: Sequence[bytes | memoryview]) -> pa.RecordBatch:
    columns = [
        pa.array(groups, pa.int32()),
        pa.array([part] * len(groups), pa.int32()),
        pa.array(blocks, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PACKED)


@dataclass(frozen=True)
class WriteGroups:
    """Makes the values of key groups and writes them to a state file; runs in tasks after the shuffle."""

    #: Place of the new savepoint.
    place: StoreSpec
    #: Prefix of the file names; each task attempt has its own name.
    name: str
    change: EditGroup

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        states, due = dict[str, str](), list[Sequence[int | None]]()

        def values() -> Iterator[tuple[Sequence[int], Sequence[bytes]]]:
            for group, parts in _groups(batches):
                value = self.change(group, parts)
                if value is not None:
                    states.update(describe_group(value).types)
                    due.append([group, *next_timers(value)])
                    yield [group], [value]

        facts = {"states": states, "due": due}
        yield from write_state_file(self.place, self.change.owner, self.name, values(), facts)


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


def next_timers(value: bytes) -> tuple[int | None, ...]:
    """Return the times of the next timers in a whole value, by event and by processing time."""
    tables = read_tables(value)
    found = []
    for clock in (TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME):
        timers = tables.get(TIMERS + clock.value)
        due = [] if timers is None else [pc.min(timers.column(TIME)).as_py()]
        due += [next_due_of(one, clock) for name, one in tables.items() if name.startswith(STATE_SECTION)]
        found.append(min((due_ms for due_ms in due if due_ms is not None), default=None))
    return tuple(found)


#: The column with the time of a row, if rows have one.
ROW_TIME = "time"


class FillGroup:
    """Makes state and timers of a key group by the user's bootstrap function.

    A block's columns are the key's hash, the time if there is one, `c0`.. for the fields, `k0`.. for the key.
    """

    def __init__(
        self,
        uid: str,
        max_parallelism: int,
        function: KeyedStateBootstrapFunction,
        rows: pa.Schema,
        fields: Sequence[str],
        key_types: Sequence[T.DataType],
        now_ms: int,
    ) -> None:
        self._uid, self._groups, self._function = uid, max_parallelism, function
        self._rows, self._fields, self._key_types = rows, tuple(fields), tuple(key_types)
        self._now_ms = now_ms
        self._opened: tuple[GroupRun, GroupLayout, RowReader] | None = None

    def __call__(self, blocks: Sequence[bytes]) -> bytes | None:
        run, layout, reader = self._open()
        rows = _concat_blocks(blocks, self._rows)
        times: list[int | None] | None = None
        if ROW_TIME in rows.schema.names:
            order = np.argsort(rows.column(ROW_TIME).fill_null(MIN_WATERMARK_MS).to_numpy(), kind="stable")
            rows = rows.take(pa.array(order))
            times = rows.column(ROW_TIME).to_pylist()
        keys, values = reader.read(rows)
        state = GroupState(layout, None, NoBases())
        progress = Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, self._now_ms)
        hash_of = dict(zip(keys, rows.column(HASH).to_pylist(), strict=True))
        state.load(run.states, run.timers, hash_of, progress)
        try:
            emitted = run.run([], progress, [Elements(keys, values, times)])
        except ElementError as failure:
            raise self._blame(f"{failure} (at a row of the key {keys[failure.at]!r:.200})") from failure.error
        if emitted.rows or emitted.side:
            raise self._blame("it emits rows, and a bootstrap has no output")
        try:
            return state.dump_whole() if state.store(run.states, run.timers) else None
        except StateValueError as error:
            raise self._blame(str(error)) from error

    def _open(self) -> tuple[GroupRun, GroupLayout, RowReader]:
        if self._opened is None:
            function: Any = self._function
            run = GroupRun(_BootstrapOperator(function), self._uid, self._groups)
            fields = tuple(f"c{at}" for at in range(len(self._fields)))
            keys = tuple(f"k{at}" for at in range(len(self._key_types)))
            reader = RowReader(self._fields, fields, keys)
            self._opened = run, GroupLayout.of(run.states, self._key_types), reader
        return self._opened

    def _blame(self, says: str) -> WriterError:
        told = {"uid": self._uid, "error": says}
        return WriterError(f"{USER_FUNCTION_MARKER} {json.dumps(told)}")


class _BootstrapOperator(KeyedProcessOperator):
    """Runs a bootstrap function like the function of a job; its timers fire in the job."""

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        own = states.view_for_function()
        own.why_no_accumulators = (
            "a bootstrap function has none, since they are part of a job's result and no job runs; count the "
            "rows of the DataFrame"
        )
        self._function.open(own)


@dataclass(frozen=True)
class EditedState:
    """The user's rows for one state, and the columns in which they are stored."""

    section: str
    #: Schema of the blocks: the key's hash, then columns in the order of `stored`.
    rows: pa.Schema
    stored: pa.Schema
    kind: ClassVar[str | None] = None

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        given, what = _concat_blocks(blocks, self.rows), f"the state '{self.section.partition('/')[2]}'"
        arrays, columns, name = [], iter(given.columns), ""
        try:
            for field in self.stored:
                name = TIMES.get(field.name, EACH_TOUCHED_AT)
                if field.name == ALIVE:
                    arrays.append(pa.array([True] * given.num_rows, pa.bool_()))
                elif field.name in TIMES:
                    arrays.append(_ms(next(columns)))
                elif field.name == TOUCHES:
                    arrays.append(to_stored_times(arrays[-1], next(columns), given.columns[-1]))
                else:
                    arrays.append(next(columns))
        except ValueError as error:
            raise WriterError(f"{name} of {what}: {error}") from None
        table = pa.RecordBatch.from_arrays(arrays, schema=self.stored)
        _check_once(what, table, ("from", "to"))
        return {self.section: _sort_by_hash(table)}


@dataclass(frozen=True)
class EditedTimers:
    #: Schema of the blocks: the key's hash, the key, clock, time, beginning and end of the window.
    rows: pa.Schema
    #: How the timers of each clock are stored.
    layouts: Mapping[TimeDomain, TableLayout]
    section: ClassVar[str] = TIMERS
    kind: ClassVar[str | None] = None

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        """Return the timers; timers of the same time fire in the order of their hashes."""
        given = _concat_blocks(blocks, self.rows)
        *keys, clock, time_ms, begins, ends = given.columns
        known = pa.array([domain.value for domain in TimeDomain])
        if clock.null_count or not pc.all(pc.is_in(clock, known), min_count=0).as_py():
            raise WriterError(f"the clock of a timer is one of {', '.join(known.to_pylist())}")
        if time_ms.null_count or not begins.is_null().equals(ends.is_null()):
            raise WriterError("a timer has no time, or a window without beginning or end")
        slots = [*keys, time_ms, to_ms(begins), to_ms(ends)]
        return {
            TIMERS + domain.value: self._table(domain, layout, slots, pc.equal(clock, domain.value))
            for domain, layout in self.layouts.items()
        }

    def _table(
        self, domain: TimeDomain, layout: TableLayout, slots: Sequence[pa.Array], own: pa.Array
    ) -> pa.RecordBatch:
        columns = [column.filter(own) for column in slots]
        count = len(columns[0])
        hashes, times = columns[0].to_numpy(), columns[-3].to_numpy()
        places = np.empty(count, dtype=np.int64)
        places[np.lexsort((hashes, times))] = np.arange(count)
        arrays = [
            *columns,
            pa.array(places),
            pa.nulls(count, pa.int64()),
            pa.array([True] * count, pa.bool_()),
        ]
        table = pa.RecordBatch.from_arrays(arrays, schema=layout.schema)
        _check_once(f"the timers of {domain.value}", table, (TIME, "from", "to"))
        return _sort_by_hash(table)


def _concat_blocks(blocks: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    none = pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)
    return pa.concat_batches([none, *(from_block(block, schema) for block in blocks)])


def _sort_by_hash(table: pa.RecordBatch) -> pa.RecordBatch:
    return table.take(pa.array(np.argsort(table.column(0).to_numpy(), kind="stable")))


def _ms(column: pa.Array) -> pa.Array:
    if column.null_count:
        raise ValueError("it is null; every entry must have one")
    return to_ms(column)


def _check_once(what: str, table: pa.RecordBatch, others: Collection[str]) -> None:
    """Refuse two entries with the same key, and the same window or time."""
    slots = [name for name in table.schema.names if name.startswith("key_") or name in others]
    counts = pa.Table.from_batches([table]).group_by(slots).aggregate([([], "count_all")])
    if counts.num_rows != table.num_rows:
        twice = counts.filter(pc.greater(counts.column("count_all"), 1)).slice(0, 1).to_pylist()[0]
        raise WriterError(f"{what} has several rows for {[twice[name] for name in slots]!r:.200}; give one")


@dataclass(frozen=True)
class EditedPartition:
    """The user's entries of a broadcast state, or items of an operator list state.

    All items are put into the first partition.
    """

    section: str
    #: Schema of the blocks and of the stored table: key and value, or item.
    rows: pa.Schema
    kind: str

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        given, name = _concat_blocks(blocks, self.rows), self.section.partition("/")[2]
        what = f"the {self.kind} '{name}'"
        if any(column.null_count for column in given.columns):
            raise WriterError(f"{what} has a null; no key, value or item may be null")
        if self.kind == BROADCAST_KIND:
            keys = pa.table({"key": given.column(0)}).group_by(["key"]).aggregate([([], "count_all")])
            if keys.num_rows != given.num_rows:
                raise WriterError(f"{what} has several rows for one key; give one")
        return {name: given}


Edit = EditedState | EditedTimers | EditedPartition


@dataclass(frozen=True)
class EditGroup:
    """Makes the new value of a key group, or of a partition without keys, from its parts."""

    #: Uid of the operator that will own the value.
    owner: str
    #: By part. An edited state becomes empty in key groups without rows.
    edits: Mapping[int, Edit]
    #: For a new operator, whose rows are the first part.
    fill: FillGroup | None = None

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        is_keyed = group > FIRST_PARTITION_GROUP
        if is_keyed and self.fill is not None:
            return self.fill(parts[VALUE + 1])
        # Copies of broadcast state are equal, so the first is enough.
        before = parts.get(VALUE, [])
        if is_keyed and len(before) > 1:
            raise WriterError(f"key group {group} of '{self.owner}' is there twice")
        value = before[0] if before else None
        own = {part: edit for part, edit in self.edits.items() if (edit.kind is None) is is_keyed}
        tables: dict[str, pa.RecordBatch] = {}
        for part, edit in own.items():
            tables.update(edit.tables(parts.get(part, ())))
        if is_keyed:
            return change_group(value, self.owner, tables)
        try:
            kind = next((edit.kind for edit in own.values()), None)
            return change_partition(value, self.owner, kind, tables)
        except StateMismatch as error:
            raise WriterError(str(error)) from None
