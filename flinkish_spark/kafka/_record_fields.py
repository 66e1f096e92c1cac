"""Where the fields of records lie in the body of a record batch, and their columns.

One plain loop finds where each record begins, for each length says where the next one is; numpy
reads all else from all records at once, and Arrow copies the fields out. Rules of this file:

- Bytes are believed only as far as they were checked: a field ends within its record, a record
  within its batch, and nothing is followed before that is known.
- A varint may be read beyond the end of its record, for it is checked only then; zeros behind
  the last record end it, so that this never leaves the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flinkish_spark.kafka.record_batch import HEADERS_TYPE, Int64s

#: Length, attributes, two deltas, two lengths and a count.
LEAST_RECORD_BYTES = 7

_LEAST_HEADER_BYTES = 2
#: The longest varints of 32 and of 64 bits.
_INT_BYTES = 5
_LONG_BYTES = 10
_PADDING = bytes(64)
#: Records with more headers are read one by one: numpy gains nothing from a few rows.
_MANY_HEADERS = 32


class Misfit(ValueError):
    """A record or field that does not fit into what holds it, in the batch of this number."""

    def __init__(self, batch: int, why: str) -> None:
        self.batch, self.why = batch, why
        super().__init__(f"batch {batch}: {why}")


class Spans(NamedTuple):
    """Where one field of each record lies; a negative length is null."""

    begins: Int64s
    lengths: Int64s
    ends: Int64s


class RecordFields:
    """The records of some batches in one piece of memory, and where their fields lie in it.

    Parameters
    ----------
    bodies
        The uncompressed records of each batch, less than 2 GiB in all.
    counts
        How many records each batch has; a body has at least :data:`LEAST_RECORD_BYTES` for each.

    Attributes
    ----------
    batch
        The number of each record's batch.
    timestamp_deltas, offset_deltas
        As the records have them, relative to their batch.

    Raises
    ------
    Misfit
        From the constructor and from :meth:`headers`.
    """

    def __init__(self, bodies: Sequence[bytes | memoryview], counts: Sequence[int]) -> None:
        self._data = b"".join((*bodies, _PADDING))
        self._bytes = np.frombuffer(self._data, np.uint8)
        self.batch = np.repeat(np.arange(len(bodies)), counts)
        bounds = _bounds(self._data, [len(body) for body in bodies], counts)
        starts, self._ends = bounds[:-1], bounds[1:]
        self._rows = np.arange(len(starts))

        lengths, at = self._varints(self._rows, starts, _INT_BYTES)
        self.require(at + lengths == self._ends, "a record has a negative length")
        # One byte of attributes, which mean nothing so far.
        self.timestamp_deltas, at = self._varints(self._rows, at + 1, _LONG_BYTES)
        self.offset_deltas, at = self._varints(self._rows, at, _INT_BYTES)
        # After the key comes at least the value's length, after the value the number of headers.
        self._keys = self._spans(self._rows, at, bytes_after=2)
        self._values = self._spans(self._rows, self._keys.ends, bytes_after=1)
        self._header_counts, at = self._varints(self._rows, self._values.ends, _INT_BYTES)
        counted, room = self._header_counts, self._ends - at
        fits = (counted > 0) & (counted * _LEAST_HEADER_BYTES <= room) | (counted == 0) & (room == 0)
        self.require(fits, "a record does not end with its headers")
        self._headers_begin = at

    def require(self, fits: npt.NDArray[np.bool_], why: str, rows: Int64s | None = None) -> None:
        """Raise :class:`Misfit` for the first record that does not fit; `rows` if not all were asked."""
        if not fits.all():
            misfit = int(np.argmin(fits))
            raise Misfit(int(self.batch[misfit if rows is None else rows[misfit]]), why)

    def _varints(self, rows: Int64s, at: Int64s, most_bytes: int) -> tuple[Int64s, Int64s]:
        """Return the signed varint of each of `rows`, and where it ends."""
        byte = self._bytes[at]
        coded = (byte & 0x7F).astype(np.uint64)
        ends = at + 1
        unfinished = np.flatnonzero(byte > 0x7F)
        for septet in range(1, most_bytes):
            if not len(unfinished):
                break
            byte = self._bytes[ends[unfinished]]
            coded[unfinished] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * septet)
            ends[unfinished] += 1
            unfinished = unfinished[byte > 0x7F]
        if len(unfinished):
            raise Misfit(int(self.batch[rows[unfinished[0]]]), "a number has no end")
        return (coded >> np.uint64(1)).view(np.int64) ^ -(coded & np.uint64(1)).view(np.int64), ends

    def _spans(self, rows: Int64s, at: Int64s, *, bytes_after: int) -> Spans:
        """Return where the field lies whose length is `at`; so many bytes have to follow it."""
        lengths, begins = self._varints(rows, at, _INT_BYTES)
        ends = begins + np.maximum(lengths, 0)
        self.require(ends + bytes_after <= self._ends[rows], "a field is longer than its record", rows)
        return Spans(begins, lengths, ends)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return both as ``pa.BinaryArray``, copied."""
        return _columns(self._data, self._keys, self._values)

    def headers(self) -> Any:
        """Return the headers as a column of ``HEADERS_TYPE``, copied; null where a record has none."""
        counts = self._header_counts
        firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        names, values = (Spans(*np.zeros((3, firsts[-1]), np.int64)) for _ in range(2))
        few = np.flatnonzero((counts > 0) & (counts <= _MANY_HEADERS))
        self._read_few_headers(few, firsts, names, values)
        for row in np.flatnonzero(counts > _MANY_HEADERS):
            self._read_many_headers(int(row), int(firsts[row]), names, values)
        name_column, value_column = _columns(self._data, names, values)
        fields = list(HEADERS_TYPE.value_type)
        entries = pa.StructArray.from_arrays([_text(name_column), value_column], fields=fields)
        offsets, mask = pa.array(firsts, pa.int32()), pa.array(counts == 0)
        return pa.ListArray.from_arrays(offsets, entries, type=HEADERS_TYPE, mask=mask)

    def _read_few_headers(self, rows: Int64s, firsts: Int64s, names: Spans, values: Spans) -> None:
        """Read the first header of all `rows` at once, then the second of those that have it .."""
        at, number = self._headers_begin[rows], 0
        while len(rows):
            name = self._spans(rows, at, bytes_after=1)
            self.require(name.lengths >= 0, "a header has no name", rows)
            value = self._spans(rows, name.ends, bytes_after=0)
            slots = firsts[rows] + number
            for column, found in zip((*names, *values), (*name, *value), strict=True):
                column[slots] = found
            number += 1
            goes_on = self._header_counts[rows] > number
            fits = goes_on | (value.ends == self._ends[rows])
            self.require(fits, "a record does not end with its headers", rows)
            rows, at = rows[goes_on], value.ends[goes_on]

    def _read_many_headers(self, row: int, first: int, names: Spans, values: Spans) -> None:
        at, end = int(self._headers_begin[row]), int(self._ends[row])
        for slot in range(first, first + int(self._header_counts[row])):
            for column in (names, values):
                try:
                    coded, begin = _varint(self._data, at)
                except IndexError:
                    raise Misfit(int(self.batch[row]), "a number has no end") from None
                length = (coded >> 1) ^ -(coded & 1)
                at = begin + max(length, 0)
                if at > end or (length < 0 and column is names):
                    raise Misfit(int(self.batch[row]), "a header is longer than its record or has no name")
                column.begins[slot], column.lengths[slot], column.ends[slot] = begin, length, at
        if at != end:
            raise Misfit(int(self.batch[row]), "a record does not end with its headers")


def _bounds(data: bytes, sizes: Sequence[int], counts: Sequence[int]) -> Int64s:
    """Return where each record starts, and where the last ends."""
    starts, end = array("q"), 0
    for batch, (size, records) in enumerate(zip(sizes, counts, strict=True)):
        begin, end = end, end + size
        try:
            reached = _walk(data, begin, records, starts)
        except IndexError:
            reached = len(data)
        if reached != end:
            raise Misfit(batch, "its records do not end where it does")
    starts.append(end)
    return np.frombuffer(starts, np.int64)


def _walk(data: bytes, position: int, records: int, starts: array[int]) -> int:
    """Append where each record starts; return where the last ends.

    Raises IndexError at the end of `data`, or at a length without end.
    """
    append = starts.append
    for _ in range(records):
        append(position)
        length = data[position]
        position += 1
        # Two bytes are the common case, and worth saving a call for.
        if length > 0x7F:
            second = data[position]
            if second > 0x7F:
                length, position = _varint(data, position - 1)
            else:
                length += (second - 1) << 7
                position += 1
        # A negative length is odd here. It leads ahead like any other, and is found out later.
        position += length >> 1
    return position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint of at most 32 bits at `position`, its sign not decoded, and where it ends."""
    number = 0
    for shift in range(0, 7 * _INT_BYTES, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise IndexError("a length is longer than 32 bits")


def _columns(data: bytes, first: Spans, second: Spans) -> tuple[Any, Any]:
    """Copy two fields that take turns in `data` into binary columns of their own.

    Arrow copies from a column over `data` itself, in which what lies between two fields is a
    value too: so its offsets only ascend.
    """
    if not len(first.begins):
        return pa.array([], pa.binary()), pa.array([], pa.binary())
    borders = np.stack((first.begins, first.ends, second.begins, second.ends), axis=1).astype(np.int32)
    buffers = [None, pa.py_buffer(borders), pa.py_buffer(data)]
    pieces = pa.BinaryArray.from_buffers(pa.binary(), borders.size - 1, buffers)
    places = np.arange(0, borders.size, 4)
    return (
        pieces.take(pa.array(places, mask=first.lengths < 0)),
        pieces.take(pa.array(places + 2, mask=second.lengths < 0)),
    )


def _text(names: Any) -> Any:
    """Return names as strings; what is not UTF-8 is replaced, as Java does."""
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())
