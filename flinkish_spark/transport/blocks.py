"""Blocks: the rows of a key group on their way to or from an operator, packed into one cell of a shuffle row.

Spark's shuffle, its sort and the pandas frames of applyInPandasWithState cost time per row and column, but
only once per block. A block is the body of an Arrow record batch without its schema, which both sides know.

    rows with a route --BlockPacker--> blocks --shuffle, operator--> blocks --BlockUnpacker--> rows

Control rows travel among the blocks, with an empty block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.state.codec import FrameError
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import as_schema
from flinkish_spark.types.rows import arrow_schema

if TYPE_CHECKING:
    import pandas as pd

#: Rows that a packer buffers: enough for big blocks, few enough for a worker's memory.
PACKED_ROWS = 1 << 18
#: Number of an output's rows from which an unpacker emits a batch.
UNPACKED_ROWS = 1 << 16
#: Sequence of an operator's first row behind the watermark; see :mod:`flinkish_spark.operators.process`.
BEHIND = 1 << 40

#: From rows with a route to fewer rows.
Combine = Callable[[pa.RecordBatch], pa.RecordBatch]

_RECORD = int(C.Kind.RECORD)
#: Control columns before a row's own columns.
CONTROL = T.StructType(
    [
        T.StructField(C.KIND, T.IntegerType()),
        T.StructField(C.CHECKPOINT, T.LongType()),
        T.StructField(C.CHANNEL, T.LongType()),
        T.StructField(C.SEQUENCE, T.LongType()),
    ]
)
_BLOCK = T.StructField(C.BLOCK, T.BinaryType())
#: Rows that go through the shuffle.
PACKED = T.StructType([T.StructField(C.ROUTE, T.IntegerType()), *CONTROL, _BLOCK])
#: Rows that come out of an operator.
EMITTED = T.StructType([T.StructField(C.SIDE, T.IntegerType()), *CONTROL, _BLOCK])


def make_block_schema(fields: Iterable[T.StructField], *, with_times: bool) -> pa.Schema:
    return arrow_schema([T.StructField(C.TIME, T.LongType()), *fields] if with_times else fields)


#: Rows of a block, their channel, and the sequence of the first row.
_Block = tuple[pa.RecordBatch, int, int]
_PACKED, _CONTROL = arrow_schema(PACKED), arrow_schema(CONTROL)


def to_block(rows: pa.RecordBatch) -> bytes:
    return rows.serialize().to_pybytes()  # type: ignore[no-any-return]


def from_block(block: bytes | memoryview | pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(block), schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise FrameError(f"a block of rows cannot be read: {error}") from error


@dataclass(frozen=True)
class TimeReport:
    """The reporter of event times to the driver, and the route of its rows."""

    #: Number of the reporter in the plan.
    reporter: int
    #: Route of a partition's barrier, whose rows the operator passes on.
    route: int


@dataclass(frozen=True)
class RouteCalls:
    """Further routes to call if an input has records."""

    #: Number of the operator among the reporters to the driver.
    operator: int
    routes: tuple[int, ...]


def _control_rows(routes: Sequence[int], kind: int, numbers: Sequence[Sequence[int]]) -> pa.RecordBatch:
    columns = [
        pa.array(routes, pa.int32()),
        pa.array([kind] * len(routes), pa.int32()),
        *[pa.array(one, pa.int64()) for one in numbers],
        pa.array([b""] * len(routes), pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PACKED)


@dataclass(frozen=True)
class BlockPacker:
    """Packs rows with a route into blocks among control rows; routes keep their order. For mapInArrow."""

    #: Schema of the rows in a block: the columns after the route, without kind and checkpoint.
    schema: pa.Schema
    #: Reporter of the event time of each channel, and its route; None if times are not reported.
    report: TimeReport | None = None
    #: Combines buffered rows before they are packed; None if all rows travel.
    combine: Combine | None = None
    #: Number of the operator's input, written into the blocks' sequence.
    number: int = 0
    #: Routes that each get a copy of each block, instead of the rows' own route; empty for most inputs.
    copies: tuple[int, ...] = ()
    #: Routes to call if a task has rows; see :class:`RouteCalls`.
    calls: RouteCalls | None = None
    #: Greatest number of buffered rows, plus or minus one of Spark's batches.
    rows: int = PACKED_ROWS

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        run = Packing(self)
        for batch in batches:
            yield from run.take(batch)
        yield from run.finish()

    def pack(self, held: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        rows = pa.concat_batches(held)
        blocks = pack_rows(rows if self.combine is None else self.combine(rows), self.schema, self.number)
        if not self.copies:
            return blocks
        routes = np.repeat(np.array(self.copies, dtype=np.int32), blocks.num_rows)
        copied = pa.concat_batches([blocks] * len(self.copies))
        return copied.set_column(0, _PACKED.field(0), pa.array(routes, pa.int32()))

    def divide(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Divide a batch into records with routes, and control rows; None without control rows."""
        if C.KIND not in batch.schema.names:
            return batch, None
        is_record = batch.column(C.KIND).to_numpy() == _RECORD
        records = batch.drop_columns([C.KIND, C.CHECKPOINT])
        if is_record.all():
            return records, None
        control = batch.filter(pa.array(~is_record))
        columns = [control.column(name) for name in (C.ROUTE, *CONTROL.names[:-1])]
        # The sequence of a barrier is the number of its input, like that of a block.
        is_barrier = control.column(C.KIND).to_numpy() == int(C.Kind.BARRIER)
        columns.append(pa.array(np.where(is_barrier, self.number, control.column(C.SEQUENCE).to_numpy())))
        nothing = pa.array([b""] * control.num_rows, pa.binary())
        rows = pa.RecordBatch.from_arrays([*columns, nothing], schema=_PACKED)
        return records.filter(pa.array(is_record)), rows


class Packing:
    """The rows that a packer has buffered in one task."""

    def __init__(self, packer: BlockPacker) -> None:
        self._packer = packer
        self._held: list[pa.RecordBatch] = []
        self._count, self._is_called = 0, False
        #: By channel, the latest event time or watermark of a user's generator; and the number of records.
        self._latest_ms: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Buffer rows; yield control rows, and blocks if the buffer is full."""
        packer = self._packer
        records, control = packer.divide(batch)
        if control is not None:
            yield control
        if records.num_rows and packer.report is not None:
            self._note_times(records)
        places = records.column(C.SEQUENCE) if C.SEQUENCE in records.schema.names else None
        if places is not None and places.null_count:
            # Rows without a sequence carry only a time; see `worker/time.py`.
            records = records.filter(places.is_valid())
        if records.num_rows:
            self._held.append(records.drop_columns([C.MARK]) if C.MARK in records.schema.names else records)
            self._count += records.num_rows
        if self._count >= packer.rows:
            yield packer.pack(self._held)
            self._held, self._count, self._is_called = [], 0, True

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the blocks of buffered rows, then calls and reports."""
        packer = self._packer
        if self._held:
            yield packer.pack(self._held)
        if packer.calls is not None and (self._is_called or self._held):
            routes, numbers = packer.calls.routes, (0, packer.calls.operator, C.BROADCAST_CALL)
            yield _control_rows(routes, int(C.Kind.WAKE), [[one] * len(routes) for one in numbers])
        if packer.report is not None and self._latest_ms:
            # A report per channel: the latest time, and the number of records.
            channels, report = list(self._latest_ms), packer.report
            by_channel = list(self._latest_ms.values()), channels, [self._counts[one] for one in channels]
            yield _control_rows([report.route] * len(channels), C.FIRST_REPORT + report.reporter, by_channel)

    def _note_times(self, records: pa.RecordBatch) -> None:
        """Update the latest time of each channel, ignoring rows without a time."""
        name = C.MARK if C.MARK in records.schema.names else C.TIME
        times = records.column(name)
        timed = records.filter(times.is_valid()) if times.null_count else records
        # The times of dropped records have no sequence.
        is_record = timed.column(C.SEQUENCE).is_valid().to_numpy(zero_copy_only=False)
        channels, ms = timed.column(C.CHANNEL).to_numpy(), timed.column(name).to_numpy()
        for channel in np.unique(channels).tolist():
            own = ms[channels == channel]
            self._latest_ms[channel] = max(int(own.max()), self._latest_ms.get(channel, int(own[0])))
            self._counts[channel] = self._counts.get(channel, 0) + int(is_record[channels == channel].sum())


def pack_rows(rows: pa.RecordBatch, schema: pa.Schema, number: int = 0) -> pa.RecordBatch:
    """Pack rows whose first column is the route into blocks; `number` is that of their input."""
    routes = rows.column(0).to_numpy()
    # Numpy sorts 16-bit numbers by radix, several times as fast; an operator's routes usually fit.
    least = routes.min(initial=routes[0])
    is_narrow = routes.max(initial=routes[0]) - least < 1 << 16
    order = np.argsort((routes - least).astype(np.uint16) if is_narrow else routes, kind="stable")
    ordered = routes[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    ends = np.append(begins[1:], len(ordered))
    own = pa.RecordBatch.from_arrays(rows.columns[1:], names=schema.names)
    payload = as_schema(own, schema).take(pa.array(order))
    blocks = [
        to_block(payload.slice(begin, end - begin))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    count = len(blocks)
    columns = [
        pa.array(ordered[begins], pa.int32()),
        pa.array(np.full(count, _RECORD, dtype=np.int32)),
        *[pa.array(np.full(count, value, dtype=np.int64)) for value in (0, 0, number)],
        pa.array(blocks, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PACKED)


def sort_blocks(blocks: Iterable[bytes | memoryview], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of blocks in canonical order: by channel, then by sequence."""
    # A shuffle delivers blocks in any order; rows within a block are usually sorted already.
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
    """Unpacks the blocks of an operator into rows with control columns. For mapInArrow."""

    #: Columns of the main output, then of each side output, with unique names; of operators that share tasks
    #: one operator after the other. A row has the columns of all outputs, null but for its own, after the
    #: number of its output if there are several.
    outputs: tuple[T.StructType, ...]
    #: By output, whether rows in a block begin with their event time; the time is null for other outputs.
    timed: tuple[bool, ...]

    @property
    def with_times(self) -> bool:
        return any(self.timed)

    @property
    def columns(self) -> T.StructType:
        extra = [T.StructField(C.TIME, T.LongType())] if self.with_times else []
        extra += [T.StructField(C.SIDE, T.IntegerType())] if len(self.outputs) > 1 else []
        return T.StructType([*CONTROL, *extra, *(field for one in self.outputs for field in one)])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Unpack blocks into few batches, since each batch costs the reader time."""
        out = arrow_schema(self.columns)
        timed = zip(self.outputs, self.timed, strict=True)
        blocks = [make_block_schema(one, with_times=with_times) for one, with_times in timed]
        for batch in batches:
            is_record = batch.column(C.KIND).to_numpy() == _RECORD
            held, counts = dict[int, list[_Block]](), dict[int, int]()
            for at in np.flatnonzero(is_record).tolist():
                side, channel, first = (
                    batch.column(name)[at].as_py() for name in (C.SIDE, C.CHANNEL, C.SEQUENCE)
                )
                rows = from_block(batch.column(C.BLOCK)[at].as_buffer(), blocks[side])
                held.setdefault(side, []).append((rows, channel, first))
                counts[side] = counts.get(side, 0) + rows.num_rows
                if counts[side] >= UNPACKED_ROWS:
                    yield self._rows(side, held.pop(side), out)
                    counts[side] = 0
            for side, own in held.items():
                yield self._rows(side, own, out)
            if not is_record.all():
                yield self._control(batch.filter(pa.array(~is_record)), out)

    def _rows(self, side: int, held: Sequence[_Block], out: pa.Schema) -> pa.RecordBatch:
        blocks, channels, firsts = zip(*held, strict=True)
        rows = blocks[0] if len(blocks) == 1 else pa.concat_batches(blocks)
        counts = [one.num_rows for one in blocks]
        own, count = rows.columns, rows.num_rows
        control: list[Any] = [
            np.full(count, _RECORD, dtype=np.int32),
            np.zeros(count, dtype=np.int64),
            np.repeat(np.array(channels, dtype=np.int64), counts),
            np.concatenate(
                [np.arange(first, first + length) for first, length in zip(firsts, counts, strict=True)]
            ),
        ]
        times = [own.pop(0)] if self.timed[side] else []
        arrays = list(map(pa.array, control))
        if self.with_times:
            arrays += times or [pa.nulls(count, pa.int64())]
        if len(self.outputs) > 1:
            arrays.append(pa.array(np.full(count, side, dtype=np.int32)))
        for number, fields in enumerate(self.outputs):
            arrays += own if number == side else [pa.nulls(count, f.type) for f in arrow_schema(fields)]
        return pa.RecordBatch.from_arrays(arrays, schema=out)

    def _control(self, rows: pa.RecordBatch, out: pa.Schema) -> pa.RecordBatch:
        # A control row also has an output's number: each operator that shares tasks has its own control rows.
        own = {name: rows.column(name) for name in (*_CONTROL.names, C.SIDE)}
        arrays = [own.get(field.name, pa.nulls(rows.num_rows, field.type)) for field in out]
        return pa.RecordBatch.from_arrays(arrays, schema=out)


class GroupRows:
    """The few rows of one group as plain lists, which are cheaper than a pandas frame."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._kinds, self._sequences = frame[C.KIND].tolist(), frame[C.SEQUENCE].tolist()
        self._blocks = frame[C.BLOCK].tolist()

    def select_kind(self, wanted: C.Kind) -> list[tuple[int, Any]]:
        kind = int(wanted)
        rows = zip(self._kinds, self._sequences, self._blocks, strict=True)
        return [(sequence, block) for own, sequence, block in rows if own == kind]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row that an operator emits: a block of records, or a control row; see :data:`EMITTED`."""

    kind: int
    checkpoint: int
    channel: int
    sequence: int
    block: bytes = b""
    side: int = 0


def to_frame(rows: list[BlockRow], first_output: int = 0) -> pd.DataFrame:
    # Imported by workers only: it takes a quarter of a second, and drivers and planners need no frame.
    import pandas as pd

    numbers = np.array([[r.side, r.kind, r.checkpoint, r.channel, r.sequence] for r in rows], dtype=np.int64)
    numbers[:, 0] += first_output
    columns: dict[str, Any] = {name: numbers[:, at] for at, name in enumerate(EMITTED.names[:-1])}
    columns[C.BLOCK] = [row.block for row in rows]
    return pd.DataFrame(columns)
