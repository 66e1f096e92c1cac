"""Folds of columns: of groups of rows to one row each, and of two columns element by element.

Sums are exact: of whole numbers and decimals an overflow is an error, never another number. Sums of floats
are made in double precision, in the order of the rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.aggregates import Fold
from flinkish_spark.operators.key_index import Array

_LIMIT = 1 << 63
#: Whole numbers below this are exact as doubles.
_EXACT = 1 << 53
_LOW_BITS = 32


class AggregateOverflow(OverflowError):
    """A sum does not fit the type of its field."""

    def __init__(self, name: str, kind: pa.DataType) -> None:
        super().__init__(
            f"the sum of the field '{name}' leaves its type {kind}; cast the field to a wider type before "
            "the aggregate"
        )


def fold_groups(fold: Fold, name: str, values: pa.Array, groups: Array, first: Array) -> pa.Array:
    """Return one value per group.

    Parameters
    ----------
    name
        Of the field, for errors.
    groups
        Number of each row's group; shape (rows,).
    first
        First row of each group; shape (groups,).

    Raises
    ------
    AggregateOverflow
        A sum does not fit the type of the values.
    """
    if fold is Fold.FIRST:
        return values.take(pa.array(first))
    if fold is Fold.COUNT:
        present = values.is_valid().to_numpy(zero_copy_only=False)
        return pa.array(np.bincount(groups, weights=present, minlength=len(first)).astype(np.int64))
    if pa.types.is_duration(values.type):
        # Arrow groups no intervals; as whole numbers of microseconds they are the same.
        return fold_groups(fold, name, values.cast(pa.int64()), groups, first).cast(values.type)
    if (plain := _plain(values)) is not None and len(first):
        if fold is not Fold.SUM:
            return _best_of(fold, plain, values.type, groups, first)
        if (sums := _small_sums(plain, groups, len(first))) is not None:
            return _narrowed(name, sums, values.type)
    if fold is Fold.SUM:
        return _narrowed(name, _sums(values, groups, len(first)), values.type)
    best = _grouped(values, groups, "min" if fold is Fold.MIN else "max", len(first))
    if fold is Fold.MAX and pa.types.is_floating(values.type):
        best = _nan_where(best, _grouped(pc.is_nan(values), groups, "any", len(first)))
    return best


def fold_pairs(fold: Fold, name: str, before: pa.Array, now: pa.Array) -> pa.Array:
    """Return the fold of two columns, of which the first is what was there before; null is nothing.

    For FIRST use :func:`pyarrow.compute.if_else` with what is known of existence: there null is a value.

    Raises
    ------
    AggregateOverflow
        A sum does not fit the type of the columns.
    """
    if fold in (Fold.SUM, Fold.COUNT):
        return pc.coalesce(_narrowed(name, _sum_of_two(name, before, now), now.type), before, now)
    choose = pc.min_element_wise if fold is Fold.MIN else pc.max_element_wise
    kind = _compared_as(now.type)
    best = choose(before.cast(kind), now.cast(kind), skip_nulls=True).cast(now.type)
    if fold is Fold.MAX and pa.types.is_floating(now.type):
        is_nan = pc.or_(pc.fill_null(pc.is_nan(before), False), pc.fill_null(pc.is_nan(now), False))
        best = _nan_where(best, is_nan)
    return best


def same_values(left: pa.Array, right: pa.Array) -> pa.Array:
    """Return where two columns are the same; null is the same as null, and NaN as NaN."""
    same = pc.or_(pc.fill_null(pc.equal(left, right), False), pc.and_(left.is_null(), right.is_null()))
    if pa.types.is_floating(left.type):
        nans = pc.and_(pc.fill_null(pc.is_nan(left), False), pc.fill_null(pc.is_nan(right), False))
        same = pc.or_(same, nans)
    return same


def _plain(values: pa.Array) -> Array | None:
    """Return numbers without a null or NaN as they lie in memory; None if they are not such numbers.

    Numpy folds these at a fraction of what a plan of Arrow's costs, which small batches are mostly made of.
    """
    kind = values.type
    if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_float64(kind)):
        return None
    numbers: Array = values.to_numpy()
    return None if numbers.dtype.kind == "f" and np.isnan(numbers).any() else numbers


def _small_sums(numbers: Array, groups: Array, count: int) -> pa.Array | None:
    """Return the sums of groups if doubles hold them exactly, or are what is asked for; else None."""
    if numbers.dtype.kind == "f":
        return pa.array(np.bincount(groups, weights=numbers, minlength=count))
    most = max(-int(numbers.min()), int(numbers.max()))
    if most * len(numbers) >= _EXACT:
        return None
    return pa.array(np.bincount(groups, weights=numbers, minlength=count).astype(np.int64))


def _best_of(fold: Fold, numbers: Array, kind: pa.DataType, groups: Array, first: Array) -> pa.Array:
    """Return the least or greatest of each group."""
    best = numbers[first]
    (np.minimum if fold is Fold.MIN else np.maximum).at(best, groups, numbers)
    return pa.array(best, kind)


def _compared_as(kind: pa.DataType) -> pa.DataType:
    """Return a type of the same order, of which Arrow compares whole columns."""
    if pa.types.is_boolean(kind):
        return pa.uint8()
    return pa.int64() if pa.types.is_timestamp(kind) else kind


def _sums(values: pa.Array, groups: Array, count: int) -> pa.Array:
    """Return the sums of groups in the widest type of their kind."""
    kind = values.type
    if pa.types.is_integer(kind):
        least, greatest = (bound.as_py() or 0 for bound in pc.min_max(values).values())
        if max(-least, greatest) * len(values) >= _LIMIT:
            return _wide_sums(values, groups, count)
    elif pa.types.is_decimal(kind) and kind.precision + len(str(len(values))) > 38:
        values = values.cast(pa.decimal256(kind.precision, kind.scale))
    return _grouped(values, groups, "sum", count)


def _wide_sums(values: pa.Array, groups: Array, count: int) -> pa.Array:
    """Return sums of integers that may leave 64 bits, as decimals: upper and lower halves on their own."""
    whole = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    upper, lower = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(upper, groups, whole >> _LOW_BITS)
    np.add.at(lower, groups, whole & ((1 << _LOW_BITS) - 1))
    there = np.zeros(count, dtype=bool)
    there[groups[values.is_valid().to_numpy(zero_copy_only=False)]] = True
    exact = [(high << _LOW_BITS) + low for high, low in zip(upper.tolist(), lower.tolist(), strict=True)]
    fits = [-_LIMIT <= total < _LIMIT for total in exact]
    if not all(fits):
        # One that does not fit is told by whoever narrows it.
        return pa.array(
            [total if is_there else None for total, is_there in zip(exact, there, strict=True)],
            pa.decimal128(38, 0),
        )
    return pa.array(np.array(exact, dtype=np.int64), mask=~there)


def _sum_of_two(name: str, before: pa.Array, now: pa.Array) -> pa.Array:
    kind = now.type
    if pa.types.is_integer(kind):
        try:
            return pc.add_checked(before.cast(pa.int64()), now.cast(pa.int64()))
        except pa.ArrowInvalid as error:
            raise AggregateOverflow(name, kind) from error
    if pa.types.is_decimal(kind):
        wide = pa.decimal256(kind.precision, kind.scale)
        return pc.add(before.cast(wide), now.cast(wide))
    if pa.types.is_floating(kind):
        return pc.add(before.cast(pa.float64()), now.cast(pa.float64()))
    return pc.add(before, now)


def _narrowed(name: str, sums: pa.Array, kind: pa.DataType) -> pa.Array:
    if sums.type == kind:
        return sums
    try:
        return sums.cast(kind)
    except pa.ArrowInvalid as error:
        raise AggregateOverflow(name, kind) from error


def _grouped(values: pa.Array, groups: Array, function: str, count: int) -> pa.Array:
    """Return an aggregate per group, by the group's number; nulls are left out."""
    table = pa.table([pa.array(groups), values], names=["group", "value"])
    found = table.group_by("group", use_threads=False).aggregate([("value", function)])
    numbers, column = (found.column(at).combine_chunks() for at in (0, 1))
    ordered = numbers.to_numpy()
    if len(ordered) != count:
        raise ValueError(f"{count} groups were said, {len(ordered)} are there")
    if np.array_equal(ordered, np.arange(count)):
        return column
    places = np.empty(count, dtype=np.int64)
    places[ordered] = np.arange(count)
    return column.take(pa.array(places))


def _nan_where(values: pa.Array, is_nan: pa.Array) -> pa.Array:
    if not pc.any(is_nan).as_py():
        return values
    return pc.if_else(pc.fill_null(is_nan, False), pa.scalar(float("nan"), values.type), values)
