"""Spark's `xxhash64` over columns: assigns keys to key groups, and compares micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import types as T

_Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]

#: The primes of XXH64.
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
#: Spark's own seed.
_SEED = np.uint64(42)
#: Decimals up to this precision are hashed as their unscaled LONG, larger ones as bytes.
_LONG_DECIMAL_DIGITS = 18
_STRIPE, _WORD, _HALF = 32, 8, 4


#: Types whose values can be hashed like Spark does.
_HASHED = (
    *(T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType),
    *(T.DateType, T.TimestampType, T.TimestampNTZType, T.DayTimeIntervalType),
    *(T.DecimalType, T.BinaryType),
)


def can_hash(kind: T.DataType) -> bool:
    """Return whether values of a type can be hashed here: not maps, VARIANT, or strings with a collation."""
    if isinstance(kind, T.StructType):
        return all(can_hash(one.dataType) for one in kind)
    if isinstance(kind, T.ArrayType):
        return can_hash(kind.elementType)
    return kind == T.StringType() or type(kind) in _HASHED


def hash_keys(columns: Sequence[pa.Array], count: int) -> npt.NDArray[np.int64]:
    """Return the hash of each row's values, as `F.xxhash64` computes it; a row of no columns hashes to 0."""
    if not columns:
        return np.zeros(count, dtype=np.int64)
    hashes = np.full(count, _SEED)
    for column in columns:
        hashes = _fold(column, hashes)
    return hashes.view(np.int64)


def _fold(column: pa.Array, seeds: _Words) -> _Words:
    """Return the hashes of values, seeded by the hashes of preceding columns; a null keeps its seed."""
    if column.null_count == len(column):
        return seeds
    if not column.null_count:
        return _fold_valid(column, seeds)
    valid = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    folded = seeds.copy()
    folded[valid] = _fold_valid(column.take(pa.array(valid)), seeds[valid])
    return folded


def _fold_valid(column: pa.Array, seeds: _Words) -> _Words:
    kind = column.type
    if any(is_kind(kind) for is_kind in _OF_BYTES):
        return _hash_bytes(*_to_bytes(column), seeds)
    if pa.types.is_decimal128(kind):
        if kind.precision > _LONG_DECIMAL_DIGITS:
            # As Java's BigInteger encodes them: big-endian two's complement in as few bytes as possible.
            numbers = _to_unscaled(column)
            bits = ((number if number >= 0 else ~number).bit_length() for number in numbers)
            pairs = zip(numbers, bits, strict=True)
            said = [number.to_bytes(own // 8 + 1, "big", signed=True) for number, own in pairs]
            return _fold_valid(pa.array(said, pa.binary()), seeds)
        # The lower halves of 128-bit numbers.
        words = np.frombuffer(column.buffers()[1], dtype=np.uint64)
        return _hash_long(words[2 * column.offset :: 2][: len(column)], seeds)
    if pa.types.is_struct(kind):
        for part in column.flatten():
            seeds = _fold(part, seeds)
        return seeds
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _fold_lists(column, seeds)
    for is_kind, hash_values in _BY_KIND:
        if is_kind(kind):
            return hash_values(column, seeds)
    raise TypeError(f"values of type {kind} have no hash")


def _fold_lists(column: pa.Array, seeds: _Words) -> _Words:
    """Fold the first elements of all lists, then the second ones."""
    begins = column.offsets.to_numpy()[:-1]
    lengths, folded = np.diff(column.offsets.to_numpy()), seeds.copy()
    for place in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > place)
        folded[rows] = _fold(column.values.take(pa.array(begins[rows] + place)), folded[rows])
    return folded


_OF_BYTES = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)


def _to_unscaled(column: pa.Array) -> list[int]:
    words = np.frombuffer(column.buffers()[1], dtype=np.uint64)[2 * column.offset :][: 2 * len(column)]
    high = words[1::2].view(np.int64).tolist()
    return [(upper << 64) | lower for upper, lower in zip(high, words[::2].tolist(), strict=True)]


def _hash_as_int(column: pa.Array, seeds: _Words) -> _Words:
    return _hash_int(_to_numbers(column, pa.int32()).astype(np.uint32).astype(np.uint64), seeds)


def _hash_as_long(column: pa.Array, seeds: _Words) -> _Words:
    return _hash_long(_to_numbers(column, pa.int64()).view(np.uint64), seeds)


def _to_numbers(column: pa.Array, kind: pa.DataType) -> npt.NDArray[Any]:
    if pa.types.is_integer(column.type):
        found: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False).astype(kind.to_pandas_dtype())
        return found
    if pa.types.is_boolean(column.type) or column.type.bit_width != kind.bit_width:
        column = column.cast(kind)
    return column.view(kind).to_numpy()  # type: ignore[no-any-return]


def _to_bits(column: pa.Array, words: type[Any]) -> _Words:
    # There is one zero, and one NaN.
    values = column.to_numpy(zero_copy_only=False) + 0.0
    values[np.isnan(values)] = np.nan
    return values.view(words).astype(np.uint64, copy=False)  # type: ignore[no-any-return]


#: Hash functions of the other types.
_BY_KIND: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, _Words], _Words]], ...] = (
    (pa.types.is_boolean, _hash_as_int),
    (lambda kind: pa.types.is_signed_integer(kind) and kind.bit_width < 64, _hash_as_int),
    (pa.types.is_date32, _hash_as_int),
    (pa.types.is_int64, _hash_as_long),
    (pa.types.is_float32, lambda column, seeds: _hash_int(_to_bits(column, np.uint32), seeds)),
    (pa.types.is_float64, lambda column, seeds: _hash_long(_to_bits(column, np.uint64), seeds)),
    (lambda kind: kind in (pa.duration("us"), pa.time64("us")), _hash_as_long),
    (lambda kind: pa.types.is_timestamp(kind) and kind.unit == "us", _hash_as_long),
)


def _rotate(words: _Words, bits: int) -> _Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _mix(hashes: _Words) -> _Words:
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _P2
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _P3
    return hashes ^ (hashes >> np.uint64(32))


def _consume_int(hashes: _Words, values: _Words) -> _Words:
    return _rotate(hashes ^ (values * _P1), 23) * _P2 + _P3


def _consume_word(hashes: _Words, values: _Words) -> _Words:
    return _rotate(hashes ^ _round(np.uint64(0), values), 27) * _P1 + _P4


def _round(hashes: _Words | np.uint64, values: _Words) -> _Words:
    return _rotate(hashes + values * _P2, 31) * _P1


def _hash_int(values: _Words, seeds: _Words) -> _Words:
    return _mix(_consume_int(seeds + _P5 + np.uint64(_HALF), values))


def _hash_long(values: _Words, seeds: _Words) -> _Words:
    return _mix(_consume_word(seeds + _P5 + np.uint64(_WORD), values))


def _to_bytes(column: pa.Array) -> tuple[npt.NDArray[np.uint8], _Places, _Places]:
    """Return the bytes of values with some padding, and the begin and length of each value."""
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    places = np.frombuffer(offsets, dtype=np.int64 if is_large else np.int32)[column.offset :][
        : len(column) + 1
    ].astype(np.int64)
    own = np.zeros(int(places[-1] - places[0]) + _WORD, dtype=np.uint8)
    if data is not None:
        own[:-_WORD] = np.frombuffer(data, dtype=np.uint8)[places[0] : places[-1]]
    return own, places[:-1] - places[0], np.diff(places)


def _hash_bytes(data: npt.NDArray[np.uint8], starts: _Places, lengths: _Places, seeds: _Words) -> _Words:
    """Return the XXH64 of byte strings, step by step for all strings that are long enough."""
    words = np.ndarray((len(data) - _WORD + 1,), dtype="<u8", buffer=data, strides=(1,))
    hashes = seeds + _P5
    stripes = lengths // _STRIPE
    for_long = np.flatnonzero(stripes)
    if len(for_long):
        hashes[for_long] = _hash_stripes(words, starts[for_long], stripes[for_long], seeds[for_long])
    hashes += lengths.astype(np.uint64)
    at, left = starts + stripes * _STRIPE, lengths % _STRIPE

    def take(rows: _Places | slice, step: Callable[[_Words, _Words], _Words], bits: int) -> None:
        values = words[at[rows]]
        hashes[rows] = step(hashes[rows], values if bits == 64 else values & np.uint64((1 << bits) - 1))
        at[rows] += bits // 8
        left[rows] -= bits // 8

    while (rows := _find_rows(left >= _WORD)) is not None:
        take(rows, _consume_word, 64)
    if (rows := _find_rows(left >= _HALF)) is not None:
        take(rows, _consume_int, 32)
    while (rows := _find_rows(left > 0)) is not None:
        take(rows, lambda own, values: _rotate(own ^ (values * _P5), 11) * _P1, 8)
    return _mix(hashes)


def _find_rows(chosen: npt.NDArray[np.bool_]) -> _Places | slice | None:
    """Return the positions of a mask: all as a slice, which needs no copies; None if there are none."""
    if chosen.all():
        return slice(None) if len(chosen) else None
    found = np.flatnonzero(chosen)
    return found if len(found) else None


def _hash_stripes(words: _Words, starts: _Places, stripes: _Places, seeds: _Words) -> _Words:
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for stripe in range(int(stripes.max())):
        rows = np.flatnonzero(stripes > stripe)
        at = starts[rows] + stripe * _STRIPE
        for number, lane in enumerate(lanes):
            lane[rows] = _round(lane[rows], words[at + number * _WORD])
    hashes = sum(
        (_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)), np.uint64(0)
    )
    for lane in lanes:
        hashes = (hashes ^ _round(np.uint64(0), lane)) * _P1 + _P4
    return np.asarray(hashes, dtype=np.uint64)
