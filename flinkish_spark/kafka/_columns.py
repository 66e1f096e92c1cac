"""Records as Arrow columns: what a writer collects, cuts and joins before they become batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flinkish_spark.errors import SchemaError
from flinkish_spark.kafka.record_batch import Column, CommonHeaders, Int64s, binary, lengths


@dataclass(frozen=True, slots=True)
class Rows:
    """Records without their destination, as columns of one length.

    Attributes
    ----------
    keys, values
        ``pa.LargeBinaryArray``.
    headers
        As :func:`record_batch.encode_batches` takes them, a column in one piece.
    timestamps_ms
        Milliseconds since 1970 of each record.
    """

    keys: Any
    values: Any
    headers: Any
    timestamps_ms: Int64s

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(int(np.maximum(lengths(column), 0).sum()) for column in (self.keys, self.values))

    @property
    def about_bytes(self) -> int:
        """Memory of keys and values, which is about what they take on the wire; quick to tell."""
        return int(self.keys.nbytes + self.values.nbytes)

    def slice(self, start: int, length: int) -> Rows:
        """Return some of the rows, without copying them."""
        return Rows(
            self.keys.slice(start, length),
            self.values.slice(start, length),
            _sliced(self.headers, start, length),
            self.timestamps_ms[start : start + length],
        )

    def take(self, indices: npt.NDArray[Any]) -> Rows:
        """Return the rows at `indices`, copied."""
        at = pa.array(indices)
        return Rows(
            self.keys.take(at), self.values.take(at), _taken(self.headers, at), self.timestamps_ms[indices]
        )


@dataclass(frozen=True, slots=True)
class Addressed:
    """Rows and where they want to go.

    Attributes
    ----------
    topics
        One topic for all, or a string column; None and null stand for the default topic.
    partitions
        None, or a column of type int64; null leaves the choice to the key.
    misfits
        None, or a string column: why a record does not fit its format; null if it does.
    """

    rows: Rows
    topics: Any = None
    partitions: Any = None
    misfits: Any = None

    @classmethod
    def of(
        cls,
        keys: Column | None,
        values: Column,
        headers: Column | CommonHeaders | None,
        topics: Column | str | None,
        partitions: Column | None,
        timestamps_ms: Int64s | int,
        misfits: Column | None = None,
    ) -> Addressed:
        """Return a caller's columns, each in one piece and of the type used here.

        Raises
        ------
        SchemaError
            If a column is of another type, or the columns differ in length.
        """
        if topics is not None and not isinstance(topics, str):
            topics = _cast("The topic", topics, pa.string(), pa.types.is_integer)
        if partitions is not None:
            partitions = _cast("The partition", partitions, pa.int64(), pa.types.is_floating)
        if misfits is not None:
            misfits = _cast("What does not fit", misfits, pa.string(), pa.types.is_integer)
        headers = headers.combine_chunks() if isinstance(headers, pa.ChunkedArray) else headers
        timestamps = np.asarray(timestamps_ms, np.int64)
        keys = pa.nulls(len(values)) if keys is None else keys
        others: list[Any] = [keys, headers, topics, partitions, misfits]
        others.append(timestamps if timestamps.ndim else None)
        for column in others:
            if is_column(column) and len(column) != len(values):
                raise SchemaError(f"{len(values)} values came with a column of {len(column)}")
        rows = Rows(binary(keys), binary(values), headers, np.broadcast_to(timestamps, len(values)))
        return cls(rows, topics, partitions, misfits)

    @property
    def highest_partition(self) -> int:
        """The highest partition that a record names, -1 if none does."""
        if self.partitions is None or self.partitions.null_count == len(self.partitions):
            return -1
        return int(self.partitions.drop_null().to_numpy().max())

    @property
    def _places(self) -> tuple[Any, Any, Any]:
        return (self.topics, self.partitions, self.misfits)

    def slice(self, start: int, length: int) -> Addressed:
        """Return some of the rows, without copying them."""
        parts = [_sliced(one, start, length) for one in self._places]
        return Addressed(self.rows.slice(start, length), *parts)

    def take(self, indices: npt.NDArray[Any]) -> Addressed:
        """Return the rows at `indices`, copied."""
        at = pa.array(indices)
        return Addressed(self.rows.take(indices), *[_taken(one, at) for one in self._places])

    def continues(self, other: Addressed) -> bool:
        """Return whether this can be joined to `other`: each part a like column, or the same value."""
        mine, theirs = (self.rows.headers, *self._places), (other.rows.headers, *other._places)
        return all(
            one.type == another.type if is_column(one) and is_column(another) else _is_same(one, another)
            for one, another in zip(mine, theirs, strict=True)
        )

    @classmethod
    def joined(cls, parts: Sequence[Addressed]) -> Addressed:
        """Return the rows of `parts` in their order; each must continue the one before it."""
        if len(parts) == 1:
            return parts[0]
        rows = Rows(
            _concatenated([part.rows.keys for part in parts]),
            _concatenated([part.rows.values for part in parts]),
            _concatenated([part.rows.headers for part in parts]),
            np.concatenate([part.rows.timestamps_ms for part in parts]),
        )
        return cls(rows, *[_concatenated(list(one)) for one in zip(*(p._places for p in parts), strict=True)])


def is_column(value: Any) -> bool:
    """Return whether `value` has one entry per record; a topic or common headers have not."""
    return isinstance(value, pa.Array | pa.ChunkedArray | np.ndarray)


def _cast(what: str, column: Any, kind: Any, is_refused: Any) -> Any:
    # Arrow would turn numbers into texts and cut fractions off; neither is ever meant.
    refused = is_refused(column.type)
    try:
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if not refused:
            return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        refused = True
    raise SchemaError(f"{what} of a Kafka record must be {kind}, not {column.type}")


def _sliced(column: Any, start: int, length: int) -> Any:
    return column.slice(start, length) if is_column(column) else column


def _taken(column: Any, at: Any) -> Any:
    return column.take(at) if is_column(column) else column


def _concatenated(columns: list[Any]) -> Any:
    return pa.concat_arrays(columns) if is_column(columns[0]) else columns[0]


def _is_same(one: Any, other: Any) -> bool:
    return not is_column(one) and not is_column(other) and bool(one == other)
