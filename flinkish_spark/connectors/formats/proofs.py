"""Reading of slices by fast libraries; a record is proven if writing it again gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.connectors.formats.reader import CodecError, SliceConverter, SliceResult
from flinkish_spark.types.arrow_columns import find_gaps


class NoProof(Exception):
    """A slice has a record that the library may have read wrongly."""


@dataclass(frozen=True)
class RoundTripReader:
    """Reads a slice of records without prefix; a record is proven if writing it gives the same bytes."""

    read: Callable[[pa.Array], Any]
    write: Callable[[Any], pa.Array]
    #: Converts the records that were read to rows; raises NoProof.
    rows_of: Callable[[Any], pa.Array]

    def __call__(self, values: pa.Array) -> SliceResult | None:
        # Nulls are replaced by the bytes of another record, since a library may refuse an empty record.
        there = values.drop_null()
        data = values if len(there) == len(values) else values.fill_null(there[0] if len(there) else b"")
        try:
            found = self.read(data)
            return SliceResult(self.rows_of(found), pc.equal(self.write(found), data))
        except (ValueError, TypeError, OverflowError, pa.ArrowException, NoProof):
            return None
        except BaseException as panic:
            # Libraries in Rust panic at some bad records, for example at a length beyond all memory. Python
            # cannot import the panic's class.
            if type(panic).__module__ != "pyo3_runtime":
                raise
            return None


#: Returns the prefix of a record and the converter of records with that prefix, if any; may raise CodecError.
FindPrefix = Callable[[bytes], tuple[bytes, SliceConverter | None]]


def read_after_prefix(front_of: FindPrefix, values: pa.Array) -> SliceResult | None:
    """Read the records that have the same prefix as the first one; the others are not proven."""
    first: list[bytes] = values.drop_null()[:1].to_pylist()
    try:
        front, at_once = front_of(first[0]) if first else (b"", None)
    except CodecError:
        return None
    if at_once is None:
        return None
    has_front = pc.starts_with(values, pattern=front)
    # Not binary_slice: without an end, its computation of the size overflows 64 bits.
    found = at_once(
        pc.if_else(has_front, pc.binary_replace_slice(values, 0, len(front), b""), first[0][len(front) :])
    )
    return (
        None
        if found is None
        else SliceResult(found.rows, pc.and_(found.are_proven, has_front.fill_null(True)))
    )


#: Converts a column that a library made to a type.
Convert = Callable[[Any, pa.DataType], pa.Array]


def cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column.cast(kind)


def rebuild_struct(
    parts: Sequence[tuple[int | None, Convert]], column: pa.StructArray, kind: pa.StructType
) -> pa.Array:
    """Return a struct whose fields are converted from fields of another; None: from the whole struct."""
    made = [
        convert(column if at is None else column.field(at), one.type)
        for (at, convert), one in zip(parts, kind.fields, strict=True)
    ]
    return pa.StructArray.from_arrays(made, fields=kind.fields, mask=find_gaps(column))


def rebuild_list(convert: Convert, column: pa.ListArray, kind: pa.ListType) -> pa.Array:
    made = convert(column.values, kind.value_type)
    return pa.ListArray.from_arrays(column.offsets, made, type=kind, mask=find_gaps(column))


def find_key_order(offsets: pa.Array, keys: pa.Array) -> pa.Array | None:
    """Return the indices that sort a map column's entries by key in each map; None if no map has two."""
    lengths = np.diff(offsets.to_numpy())
    if not len(lengths) or lengths.max() <= 1:
        return None
    owners = np.repeat(np.arange(len(lengths)), lengths)
    known = keys.cast(pa.int8()) if pa.types.is_boolean(keys.type) else keys
    entries = pa.table({"owner": owners, "key": known})
    return pc.sort_indices(entries, sort_keys=[("owner", "ascending"), ("key", "ascending")])


def check_keys(offsets: pa.Array, keys: pa.Array) -> None:
    lengths = np.diff(offsets.to_numpy())
    if len(lengths) and lengths.max() > 1:
        codes = keys.dictionary_encode()
        owners = np.repeat(np.arange(len(lengths)), lengths)
        pairs = owners * len(codes.dictionary) + codes.indices.to_numpy()
        if len(np.unique(pairs)) != len(pairs):
            raise NoProof
