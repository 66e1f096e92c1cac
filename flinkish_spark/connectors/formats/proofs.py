"""Slices read by a fast library, each record with a proof: what was read is written as the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.connectors.formats.reader import SliceConverter, Proven, Unreadable
from flinkish_spark.types.arrow_columns import find_gaps


class NoProof(Exception):
    """Something in a slice may be read as something else."""


@dataclass(frozen=True)
class RoundTripReader:
    """Reads a slice of records that have nothing in front of them."""

    read: Callable[[pa.Array], Any]
    #: Writes what was read.
    write: Callable[[Any], pa.Array]
    #: Makes rows of what was read; raises NoProof.
    rows_of: Callable[[Any], pa.Array]

    def __call__(self, values: pa.Array) -> Proven | None:
        # Where there are no bytes, those of another record stand: a library may refuse a record of none.
        there = values.drop_null()
        data = values if len(there) == len(values) else values.fill_null(there[0] if len(there) else b"")
        try:
            found = self.read(data)
            return Proven(self.rows_of(found), pc.equal(self.write(found), data))
        except (ValueError, TypeError, OverflowError, pa.ArrowException, NoProof):
            return None
        except BaseException as panic:
            # Some checks of libraries in Rust end so, those of a length beyond all memory. Python has no name
            # for it.
            if type(panic).__module__ != "pyo3_runtime":
                raise
            return None


#: Returns what is in front of a record, and what reads records behind that, if anything does; or raises
#: Unreadable.
FindPrefix = Callable[[bytes], tuple[bytes, SliceConverter | None]]


def skip_prefixes(front_of: FindPrefix) -> SliceConverter:
    return partial(_read_after_prefix, front_of)


def _read_after_prefix(front_of: FindPrefix, values: pa.Array) -> Proven | None:
    """Read what has the same in front of it as the first record has; nothing else is proven."""
    first: list[bytes] = values.drop_null()[:1].to_pylist()
    try:
        front, at_once = front_of(first[0]) if first else (b"", None)
    except Unreadable:
        return None
    if at_once is None:
        return None
    has_front = pc.starts_with(values, pattern=front)
    # Not binary_slice: without an end it counts the bytes that it needs beyond 64 bits.
    found = at_once(
        pc.if_else(has_front, pc.binary_replace_slice(values, 0, len(front), b""), first[0][len(front) :])
    )
    return None if found is None else Proven(found.rows, pc.and_(found.are_proven, has_front.fill_null(True)))


#: Takes a column as a library makes it, and the type that it gets; returns it in that type.
Convert = Callable[[Any, pa.DataType], pa.Array]


def cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column.cast(kind)


def rebuild_struct(
    parts: Sequence[tuple[int | None, Convert]], column: pa.StructArray, kind: pa.StructType
) -> pa.Array:
    """Return a struct of parts of another one; None for one that is made of all of it."""
    made = [
        convert(column if at is None else column.field(at), one.type)
        for (at, convert), one in zip(parts, kind.fields, strict=True)
    ]
    return pa.StructArray.from_arrays(made, fields=kind.fields, mask=find_gaps(column))


def rebuild_list(convert: Convert, column: pa.ListArray, kind: pa.ListType) -> pa.Array:
    made = convert(column.values, kind.value_type)
    return pa.ListArray.from_arrays(column.offsets, made, type=kind, mask=find_gaps(column))


def find_key_order(offsets: pa.Array, keys: pa.Array) -> pa.Array | None:
    """Return the places of a map column's entries, by key in each map; None if they are in that order."""
    lengths = np.diff(offsets.to_numpy())
    if not len(lengths) or lengths.max() <= 1:
        return None
    owners = np.repeat(np.arange(len(lengths)), lengths)
    known = keys.cast(pa.int8()) if pa.types.is_boolean(keys.type) else keys
    entries = pa.table({"owner": owners, "key": known})
    return pc.sort_indices(entries, sort_keys=[("owner", "ascending"), ("key", "ascending")])


def check_keys(offsets: pa.Array, keys: pa.Array) -> None:
    """Raise NoProof if a map has a key twice: it has one value then."""
    lengths = np.diff(offsets.to_numpy())
    if len(lengths) and lengths.max() > 1:
        codes = keys.dictionary_encode()
        owners = np.repeat(np.arange(len(lengths)), lengths)
        pairs = owners * len(codes.dictionary) + codes.indices.to_numpy()
        if len(np.unique(pairs)) != len(pairs):
            raise NoProof
