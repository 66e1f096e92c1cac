"""Hashes of whole columns: the partition of a key, and the digest of a set of rows.

Both read a column's bytes as one array of machine words, each value padded to a whole number of
words with zeros, so that numpy works on all values at once. Rules of this file:

- The partition of a key is that of Kafka's Java client and of every client that follows it.
- A digest is a stored fact: the same rows give the same number in every process and version, in
  whatever order they come and however they are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.errors import SchemaError
from flinkish_spark.kafka.record_batch import Column, Int64s, binary, extents, joined, lengths

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]

_WORD_BYTES = 8
#: MurmurHash2's constants, with the seed that Kafka chose.
_SEED = np.uint32(0x9747B28C)
_FACTOR = np.uint32(0x5BD1E995)
#: The finalizer of MurmurHash3 and the golden ratio, for digests. Changing one changes every digest.
_FIRST_FACTOR = np.uint64(0xFF51AFD7ED558CCD)
_SECOND_FACTOR = np.uint64(0xC4CEB9FE1A85EC53)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x6E756C6C6E756C6C)


def partitions_for_keys(keys: Column, partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition of each key, -1 for a null key, which may go anywhere.

    Equal to what the Java producer's built-in partitioner and Spark's Kafka sink choose for a
    topic of `partitions` partitions.

    Raises
    ------
    SchemaError
        If `keys` is neither a binary nor a string column.
    """
    keys = binary(keys)
    chosen = ((murmur2(keys) & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)).astype(np.int32)
    chosen[lengths(keys) < 0] = -1
    return chosen


def murmur2(keys: Column) -> UInt32s:
    """Return the MurmurHash2 of each key as Kafka computes it; that of a null key means nothing."""
    keys = binary(keys)
    sizes = np.maximum(lengths(keys), 0)
    # Longest first: the keys that still have a word to mix in are then a leading part.
    order = np.argsort(-sizes, kind="stable")
    sizes = sizes[order]
    data, begins = _words(keys)
    halves = data.view(np.dtype("<u4"))
    firsts = begins[:-1][order] * 2
    whole = sizes // 4
    mixed = halves * _FACTOR
    mixed ^= mixed >> np.uint32(24)
    mixed *= _FACTOR
    hashed = _SEED ^ sizes.astype(np.uint32)
    for word, longer in enumerate((len(whole) - np.cumsum(np.bincount(whole)))[:-1].tolist()):
        hashed[:longer] *= _FACTOR
        hashed[:longer] ^= mixed[firsts[:longer] + word]
    tailed = np.flatnonzero(sizes % 4)
    hashed[tailed] = (hashed[tailed] ^ halves[(firsts + whole)[tailed]]) * _FACTOR
    hashed ^= hashed >> np.uint32(13)
    hashed *= _FACTOR
    hashed ^= hashed >> np.uint32(15)
    in_order = np.empty_like(hashed)
    in_order[order] = hashed
    return in_order


def row_digest(columns: Sequence[Column]) -> int:
    """Return the sum of :func:`row_hashes` modulo 2**64.

    The digest of rows is the sum of the digests of their parts, whatever the order, and that of
    no rows is 0. It finds loss, duplication and change by accident; it is no signature.
    """
    return int(row_hashes(columns).sum(dtype=np.uint64)) if columns else 0


def row_hashes(columns: Sequence[Column]) -> UInt64s:
    """Return a 64-bit hash of each row.

    Equal for equal rows only, but for chance: null is not empty, a value does not run over into
    the next column, and the order of the columns counts. Widths do not: int32 and int64, string
    and binary of the same bytes hash alike.

    Parameters
    ----------
    columns
        At least one; binary, string, integer, boolean or timestamp columns, and lists and
        structs of these, such as Kafka's headers.

    Raises
    ------
    SchemaError
        If a column is of another type, or the columns differ in length.
    """
    # Not zero, so that a row of nothing but empty values and zeros counts in a digest.
    hashes = np.full(len(columns[0]), _STEP, np.uint64)
    for column in columns:
        if len(column) != len(hashes):
            raise SchemaError(f"Columns of {len(hashes)} and of {len(column)} rows are no rows together")
        whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        hashes = _mixed(hashes + _column_hashes(whole))
    return hashes


def _column_hashes(column: Any) -> UInt64s:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        counts = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
        begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        hashes = _folded(_column_hashes(column.flatten()), begins) + counts.astype(np.uint64)
    elif pa.types.is_struct(kind):
        hashes = row_hashes(column.flatten())
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_timestamp(kind):
        hashes = column.cast(pa.int64(), safe=False).fill_null(0).to_numpy().view(np.uint64).copy()
    else:
        column = binary(column)
        hashes = _folded(*_words(column)) + lengths(column).astype(np.uint64)
    hashes = _mixed(hashes)
    if column.null_count:
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashes


def _words(column: Any) -> tuple[UInt64s, Int64s]:
    """Return the words of all values of a ``pa.LargeBinaryArray``, and where those of each begin."""
    zeros = pa.array([bytes(size) for size in range(_WORD_BYTES)], pa.large_binary())
    missing = -np.maximum(lengths(column), 0) % _WORD_BYTES
    padded = joined(column, zeros.take(pa.array(missing)))
    begins = extents(padded)
    data = np.frombuffer(padded.buffers()[2] or b"", np.dtype("<u8"), count=int(begins[-1]) // _WORD_BYTES)
    return data, begins // _WORD_BYTES


def _folded(words: UInt64s, begins: Int64s) -> UInt64s:
    """Hash together the words from each begin to the next; the place of a word counts."""
    places = np.arange(len(words)) - np.repeat(begins[:-1], np.diff(begins))
    total = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(_mixed(words + places.astype(np.uint64) * _STEP), out=total[1:])
    return np.diff(total[begins])


def _mixed(words: UInt64s) -> UInt64s:
    """Spread every bit of each word over all of its bits, in place."""
    words ^= words >> np.uint64(33)
    words *= _FIRST_FACTOR
    words ^= words >> np.uint64(33)
    words *= _SECOND_FACTOR
    words ^= words >> np.uint64(33)
    return words
