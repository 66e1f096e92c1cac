"""A key group's stored value with other entries in some states, or under another uid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.operators.stored_groups import changed_group
from flinkish_spark.operators.table_codec import ALIVE
from flinkish_spark.runtime.row_blocks import from_block
from flinkish_spark.savepoints.entries import TIMES, to_ms
from flinkish_spark.savepoints.group_writers import VALUE, WriterRefused


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

    def table(self, blocks: Sequence[bytes]) -> pa.RecordBatch:
        """Return the stored entries, sorted by hash.

        Raises
        ------
        WriterRefused
            A key occurs twice, or a time cannot be stored.
        """
        none = pa.RecordBatch.from_arrays([pa.array([], kind) for kind in self.rows.types], schema=self.rows)
        given = pa.concat_batches([none, *(from_block(block, self.rows) for block in blocks)])
        arrays, columns = [], iter(given.columns)
        for field in self.stored:
            if field.name == ALIVE:
                arrays.append(pa.array([True] * given.num_rows, pa.bool_()))
            elif field.name in TIMES:
                arrays.append(self._ms(field.name, next(columns)))
            else:
                arrays.append(next(columns))
        table = pa.RecordBatch.from_arrays(arrays, schema=self.stored)
        self._check_once(table)
        return table.take(pa.array(np.argsort(table.column(0).to_numpy(), kind="stable")))

    def _ms(self, name: str, column: pa.Array) -> pa.Array:
        if column.null_count:
            raise WriterRefused(f"{TIMES[name]} of {self._name} is null; every entry has one")
        try:
            return to_ms(column)
        except ValueError as error:
            raise WriterRefused(f"{TIMES[name]} of {self._name}: {error}") from None

    def _check_once(self, table: pa.RecordBatch) -> None:
        slots = [
            field.name
            for field in table.schema
            if field.name.startswith("key_") or field.name in ("from", "to")
        ]
        counts = pa.Table.from_batches([table]).group_by(slots).aggregate([([], "count_all")])
        if counts.num_rows != table.num_rows:
            twice = counts.filter(pc.greater(counts.column("count_all"), 1)).slice(0, 1).to_pylist()[0]
            key = [twice[name] for name in slots]
            raise WriterRefused(f"{self._name} has several rows for {key!r:.200}; give one")

    @property
    def _name(self) -> str:
        return f"the state '{self.section.partition('/')[2]}'"


@dataclass(frozen=True)
class EditGroup:
    """A :class:`Change`: the key group's value with other entries in some states, under some uid.

    Parameters
    ----------
    owner
        Uid that the value is to have.
    states
        By part. A state that is edited and of which a key group has no rows is empty there.
    """

    owner: str
    states: Mapping[int, EditedState]

    def __call__(self, group: int, parts: Mapping[int, list[bytes]]) -> bytes | None:
        """Return the value."""
        before = parts.get(VALUE, [])
        if len(before) > 1:
            raise WriterRefused(f"key group {group} of '{self.owner}' is there twice")
        tables = {edited.section: edited.table(parts.get(part, ())) for part, edited in self.states.items()}
        return changed_group(before[0] if before else None, self.owner, tables)
