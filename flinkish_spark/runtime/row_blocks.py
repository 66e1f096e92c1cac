"""Rows on their way to an operator and from it, packed: one cell of a shuffle row is the rows of a key group.

Spark's shuffle, its sort and the pandas frames of applyInPandasWithState cost per row and per column; a block
costs them once. A block is the body of an Arrow record batch without its schema, which both sides know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.runtime import columns as C

#: Rows that a packer holds before it packs: enough for big blocks, little enough for a worker's memory.
PACKED_ROWS = 1 << 18

#: A row of the shuffle. Beside blocks there are control rows, whose block is empty.
PACKED_SCHEMA = pa.schema(
    [
        pa.field(C.ROUTE, pa.int32()),
        pa.field(C.KIND, pa.int32()),
        pa.field(C.CHANNEL, pa.int64()),
        pa.field(C.SEQUENCE, pa.int64()),
        pa.field(C.BLOCK, pa.binary()),
    ]
)


class BlockError(ValueError):
    """A block is not what its schema says."""


def to_block(rows: pa.RecordBatch) -> bytes:
    """Return rows as a block."""
    return rows.serialize().to_pybytes()  # type: ignore[no-any-return]


def from_block(block: bytes | memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a block; they refer to its memory.

    Raises
    ------
    BlockError
        It is no block of that schema.
    """
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(block), schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise BlockError(f"a block of rows cannot be read: {error}") from error


@dataclass(frozen=True)
class BlockPacker:
    """Called by mapInArrow, once per task: rows with a route in, blocks out.

    Rows of one route keep their order. Pickled into the plan, so it holds values only.

    Parameters
    ----------
    rows
        How many rows are held at most before they are packed, give or take one of Spark's batches.
    """

    rows: int = PACKED_ROWS

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pack."""
        held: list[pa.RecordBatch] = []
        count = 0
        for batch in batches:
            if batch.num_rows:
                held.append(batch)
                count += batch.num_rows
            if count >= self.rows:
                yield packed(held)
                held, count = [], 0
        if held:
            yield packed(held)


def packed(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return blocks of the rows of batches whose first column is the route."""
    rows = pa.concat_batches(batches)
    routes = rows.column(0).to_numpy()
    order = np.argsort(routes, kind="stable")
    ordered = routes[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    ends = np.append(begins[1:], len(ordered))
    payload = rows.select(rows.schema.names[1:]).take(pa.array(order))
    blocks = [
        to_block(payload.slice(begin, end - begin))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    count = len(blocks)
    columns = [
        pa.array(ordered[begins], pa.int32()),
        pa.array(np.full(count, int(C.Kind.RECORD), dtype=np.int32)),
        pa.array(np.zeros(count, dtype=np.int64)),
        pa.array(np.zeros(count, dtype=np.int64)),
        pa.array(blocks, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PACKED_SCHEMA)


def in_order(blocks: Iterable[bytes | memoryview], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of blocks in the canonical order: by channel, then by sequence.

    Blocks come out of a shuffle in any order; within a block rows mostly are in order already.
    """
    batches = [from_block(block, schema) for block in blocks]
    if len(batches) > 1:
        batches.sort(
            key=lambda batch: (batch.column(C.CHANNEL)[0].as_py(), batch.column(C.SEQUENCE)[0].as_py())
        )
    rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    channel, sequence = (rows.column(name).to_numpy() for name in (C.CHANNEL, C.SEQUENCE))
    rises = (channel[1:] > channel[:-1]) | ((channel[1:] == channel[:-1]) & (sequence[1:] >= sequence[:-1]))
    if rises.all():
        return rows
    return rows.take(pa.array(np.lexsort((sequence, channel))))


@dataclass(frozen=True)
class BlockUnpacker:
    """Called by mapInArrow behind an operator: blocks in, rows with control columns out.

    Parameters
    ----------
    schema
        Of the rows in a block.
    """

    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Unpack."""
        out = pa.schema([*_CONTROL, *self.schema])
        for batch in batches:
            kinds = batch.column(C.KIND).to_pylist()
            for at, kind in enumerate(kinds):
                if kind == int(C.Kind.RECORD):
                    yield self._rows(batch, at, out)
                else:
                    yield self._control(batch, at, out)

    def _rows(self, batch: pa.RecordBatch, at: int, out: pa.Schema) -> pa.RecordBatch:
        rows = from_block(batch.column(C.BLOCK)[at].as_buffer(), self.schema)
        count = rows.num_rows
        first = batch.column(C.SEQUENCE)[at].as_py()
        control: list[Any] = [
            np.full(count, int(C.Kind.RECORD), dtype=np.int32),
            np.zeros(count, dtype=np.int64),
            np.full(count, batch.column(C.CHANNEL)[at].as_py(), dtype=np.int64),
            np.arange(first, first + count, dtype=np.int64),
        ]
        return pa.RecordBatch.from_arrays([*map(pa.array, control), *rows.columns], schema=out)

    def _control(self, batch: pa.RecordBatch, at: int, out: pa.Schema) -> pa.RecordBatch:
        kind, channel, place = (batch.column(name)[at].as_py() for name in (C.KIND, C.CHANNEL, C.SEQUENCE))
        # The sequence of a control row is its checkpoint.
        control = [
            pa.array([value], field.type)
            for value, field in zip((kind, place, channel, place), _CONTROL, strict=True)
        ]
        return pa.RecordBatch.from_arrays(
            [*control, *(pa.nulls(1, field.type) for field in self.schema)], schema=out
        )


_CONTROL = (
    pa.field(C.KIND, pa.int32()),
    pa.field(C.CHECKPOINT, pa.int64()),
    pa.field(C.CHANNEL, pa.int64()),
    pa.field(C.SEQUENCE, pa.int64()),
)
