"""A key group's stored value with other entries in some states, or under another uid."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.operators.broadcast_state import BROADCAST_KIND
from flinkish_spark.operators.elements import TimeDomain
from flinkish_spark.operators.group_state import TIMERS
from flinkish_spark.operators.list_state import LIST_KIND
from flinkish_spark.operators.state_evolution import StateMismatch
from flinkish_spark.operators.stored_groups import changed_group, changed_partition
from flinkish_spark.operators.table_codec import ALIVE, TIME, TOUCHES, TableLayout
from flinkish_spark.runtime.columns import FIRST_PARTITION_GROUP
from flinkish_spark.runtime.row_blocks import from_block
from flinkish_spark.savepoints.group_writers import VALUE, Change, WriterRefused
from flinkish_spark.savepoints.times import EACH_TOUCHED_AT, TIMES, stored_times_of_elements, to_ms


class Edit(Protocol):
    """Other entries for some sections of every key group."""

    @property
    def name(self) -> str:
        """What is edited; a later edit of the same takes the place of an earlier one."""

    @property
    def rows(self) -> pa.Schema:
        """Schema of the blocks."""

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        """Return the entries of a key group by section, sorted by hash.

        Raises
        ------
        WriterRefused
            The rows do not fit together.
        """


@dataclass(frozen=True)
class EditedState:
    """The rows of one state, as a user gives them, and the columns that they are stored in.

    Parameters
    ----------
    section
        Name in a value.
    rows
        Schema of the blocks: the key's hash, then columns in the order of `stored`.
    stored
        Stored columns.
    """

    section: str
    rows: pa.Schema
    stored: pa.Schema

    @property
    def name(self) -> str:
        """The state, for messages."""
        return f"the state '{self.section.partition('/')[2]}'"

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        """Return the entries; a key occurs once, and has all of its times."""
        given = _joined(blocks, self.rows)
        arrays, columns = [], iter(given.columns)
        for field in self.stored:
            if field.name == ALIVE:
                arrays.append(pa.array([True] * given.num_rows, pa.bool_()))
            elif field.name in TIMES:
                arrays.append(_ms(self.name, field.name, next(columns)))
            elif field.name == TOUCHES:
                arrays.append(self._touches(arrays[-1], next(columns), given.columns[-1]))
            else:
                arrays.append(next(columns))
        table = pa.RecordBatch.from_arrays(arrays, schema=self.stored)
        _check_once(self.name, table, ("from", "to"))
        return {self.section: _by_hash(table)}

    def _touches(self, touched: pa.Array, given: pa.Array, values: pa.Array) -> pa.Array:
        try:
            return stored_times_of_elements(touched, given, values)
        except ValueError as error:
            raise WriterRefused(f"{EACH_TOUCHED_AT} of {self.name}: {error}") from None


@dataclass(frozen=True)
class EditedTimers:
    """The timers of both clocks, as a user gives them.

    Parameters
    ----------
    rows
        Schema of the blocks: the key's hash, the key, clock, time, beginning and end of the window.
    layouts
        How the timers of each clock are stored.
    """

    rows: pa.Schema
    layouts: Mapping[TimeDomain, TableLayout]
    name: str = "the timers"

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        """Return the timers; those of one time fire in the order of their hashes."""
        given = _joined(blocks, self.rows)
        *keys, clock, time_ms, begins, ends = given.columns
        known = pa.array([domain.value for domain in TimeDomain])
        if clock.null_count or not pc.all(pc.is_in(clock, known), min_count=0).as_py():
            raise WriterRefused(f"the clock of a timer is one of {', '.join(known.to_pylist())}")
        if time_ms.null_count or not begins.is_null().equals(ends.is_null()):
            raise WriterRefused("a timer has no time, or a window without beginning or end")
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
        _check_once(f"{self.name} of {domain.value}", table, (TIME, "from", "to"))
        return _by_hash(table)


def _joined(blocks: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    none = pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)
    return pa.concat_batches([none, *(from_block(block, schema) for block in blocks)])


def _by_hash(table: pa.RecordBatch) -> pa.RecordBatch:
    return table.take(pa.array(np.argsort(table.column(0).to_numpy(), kind="stable")))


def _ms(what: str, name: str, column: pa.Array) -> pa.Array:
    if column.null_count:
        raise WriterRefused(f"{TIMES[name]} of {what} is null; every entry has one")
    try:
        return to_ms(column)
    except ValueError as error:
        raise WriterRefused(f"{TIMES[name]} of {what}: {error}") from None


def _check_once(what: str, table: pa.RecordBatch, others: Collection[str]) -> None:
    """Refuse two entries of one place: keys, and what else tells entries apart."""
    slots = [name for name in table.schema.names if name.startswith("key_") or name in others]
    counts = pa.Table.from_batches([table]).group_by(slots).aggregate([([], "count_all")])
    if counts.num_rows != table.num_rows:
        twice = counts.filter(pc.greater(counts.column("count_all"), 1)).slice(0, 1).to_pylist()[0]
        raise WriterRefused(f"{what} has several rows for {[twice[name] for name in slots]!r:.200}; give one")


@dataclass(frozen=True)
class EditedBroadcast:
    """The entries of a broadcast state, as a user gives them.

    Parameters
    ----------
    name
        Of the state.
    rows
        Schema of the blocks, and of the stored entries: key and value.
    """

    name: str
    rows: pa.Schema
    kind: ClassVar[str] = BROADCAST_KIND

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        """Return the entries by the name of the state."""
        given, what = _joined(blocks, self.rows), f"the broadcast state '{self.name}'"
        if any(column.null_count for column in given.columns):
            raise WriterRefused(f"{what} has a null; neither keys nor values may be null")
        keys = pa.table({"key": given.column(0)})
        counts = keys.group_by(["key"]).aggregate([([], "count_all")])
        if counts.num_rows != given.num_rows:
            raise WriterRefused(f"{what} has several rows for one key; give one")
        return {self.name: given}


@dataclass(frozen=True)
class EditedItems:
    """The items of an operator list state, as a user gives them; all of them are the first partition's.

    Parameters
    ----------
    name
        Of the state.
    rows
        Schema of the blocks, and of the stored items.
    """

    name: str
    rows: pa.Schema
    kind: ClassVar[str] = LIST_KIND

    def tables(self, blocks: Sequence[bytes]) -> Mapping[str, pa.RecordBatch]:
        """Return the items by the name of the state."""
        given = _joined(blocks, self.rows)
        if given.column(0).null_count:
            raise WriterRefused(f"the operator list state '{self.name}' has a null; no item may be null")
        return {self.name: given}


PartitionEdit = EditedBroadcast | EditedItems


@dataclass(frozen=True)
class ByKind:
    """A :class:`Change`: another one for what partitions keep than for key groups."""

    keyed: Change
    partition: Change

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        """Return the value."""
        return (self.partition if group <= FIRST_PARTITION_GROUP else self.keyed)(group, parts)


@dataclass(frozen=True)
class EditPartition:
    """A :class:`Change`: what a partition keeps, with other entries in some states, under some uid.

    Parameters
    ----------
    owner
        Uid that the value is to have.
    edits
        By part; a partition that gets no rows of an edit has nothing of that state any more.
    """

    owner: str
    edits: Mapping[int, PartitionEdit]

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        """Return the value; copies of broadcast state that came together are equal, and one is enough."""
        before = next(iter(parts.get(VALUE, ())), None)
        tables: dict[str, pa.RecordBatch] = {}
        for part, edit in self.edits.items():
            tables.update(edit.tables(parts.get(part, ())))
        kind = next((edit.kind for edit in self.edits.values()), None)
        try:
            return changed_partition(before, self.owner, kind, tables)
        except StateMismatch as error:
            raise WriterRefused(str(error)) from None


@dataclass(frozen=True)
class EditGroup:
    """A :class:`Change`: the key group's value with other entries in some states, under some uid.

    Parameters
    ----------
    owner
        Uid that the value is to have.
    edits
        By part. A state that is edited and of which a key group has no rows is empty there.
    """

    owner: str
    edits: Mapping[int, Edit]

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        """Return the value."""
        before = parts.get(VALUE, [])
        if len(before) > 1:
            raise WriterRefused(f"key group {group} of '{self.owner}' is there twice")
        tables: dict[str, pa.RecordBatch] = {}
        for part, edit in self.edits.items():
            tables.update(edit.tables(parts.get(part, ())))
        return changed_group(before[0] if before else None, self.owner, tables)
