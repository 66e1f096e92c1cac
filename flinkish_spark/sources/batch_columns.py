"""Columns of a source's batches with their declared types, and what is within them.

Arrow casts more than another width of the same: a text becomes a number, a number a time in microseconds or a
text, 2 becomes true. What a function emits as columns is refused then, and so is what a source yields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

#: The days since 1970 of the years 1 to 9999; Arrow takes others, of which Python makes no date.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_PER_DAY = {unit: 86_400 * 10**digits for unit, digits in (("s", 0), ("ms", 3), ("us", 6), ("ns", 9))}


def as_declared(column: pa.Array, field: pa.Field) -> pa.Array:
    """Return a column with a field's type.

    Raises
    ------
    ValueError
        It is of another type, or a value of it would be another one.

    Examples
    --------
    >>> import pyarrow as pa
    >>> as_declared(pa.array([1], pa.int8()), pa.field("n", pa.int64())).type
    DataType(int64)
    >>> as_declared(pa.array(["1"]), pa.field("n", pa.int64()))
    Traceback (most recent call last):
    ValueError: the column 'n' is string, declared is int64: '1'
    """
    import pyarrow as pa

    from flinkish_spark.runtime.silent_changes import exact_cast

    if column.type == field.type:
        return column
    if not _is_the_same(column.type, field.type):
        there = column.drop_null()
        value = f": {there[0].as_py()!r:.200}" if len(there) else ""
        raise ValueError(f"the column {field.name!r} is {column.type}, declared is {field.type}{value}")
    try:
        return exact_cast(column, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"the column {field.name!r} does not fit {field.type}: {error}") from error


def _is_the_same(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a cast changes a type's width only.

    Of a struct the declared fields are taken, as of the batch itself. Texts may come as the bytes of them.
    """
    import pyarrow as pa

    from flinkish_spark.runtime.arrow_values import is_of_kind

    kinds = pa.types
    if kinds.is_null(given):
        return True
    if kinds.is_struct(given) and kinds.is_struct(wanted):
        there = {field.name: field.type for field in given}
        return all(_is_the_same(there.get(field.name, pa.null()), field.type) for field in wanted)
    if kinds.is_map(given) and kinds.is_map(wanted):
        pairs = (given.key_type, wanted.key_type), (given.item_type, wanted.item_type)
        return all(_is_the_same(*pair) for pair in pairs)
    if kinds.is_list(wanted):
        forms = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
        is_list = any(is_one(given) for is_one in forms)
        return is_list and _is_the_same(given.value_type, wanted.value_type)
    if kinds.is_fixed_size_binary(given) or kinds.is_binary_view(given) or kinds.is_string_view(given):
        given = pa.string() if kinds.is_string_view(given) else pa.binary()
    return is_of_kind(given, wanted) or (is_of_kind(given, pa.binary()) and is_of_kind(wanted, pa.string()))


def beyond_years(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which dates and times are in no year from 1 to 9999, by UTC; nothing for another type.

    Examples
    --------
    >>> import pyarrow as pa
    >>> beyond_years(pa.array([-719_163, -719_162, None, 2_932_897], pa.date32())).tolist()
    [True, False, False, True]
    """
    import numpy as np
    import pyarrow as pa

    kind = column.type
    if pa.types.is_date32(kind):
        per_day, whole = 1, column.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        per_day, whole = _PER_DAY[kind.unit], column.cast(pa.int64())
    else:
        return np.zeros(0, np.bool_)
    days = whole.fill_null(0).to_numpy(zero_copy_only=False) // per_day
    beyond: npt.NDArray[np.bool_] = (days < _FIRST_DAY) | (days > _LAST_DAY)
    return beyond


def leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Yield a column, or of one with parts their values, at any depth.

    Examples
    --------
    >>> import pyarrow as pa
    >>> column = pa.array([[("k", [1, 2])]], pa.map_(pa.string(), pa.list_(pa.int8())))
    >>> [leaf.to_pylist() for leaf in leaves(column)]
    [['k'], [1, 2]]
    """
    import pyarrow as pa

    if pa.types.is_map(column.type):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        for part in (column.keys, column.items):
            yield from leaves(part.slice(first, last - first))
    elif pa.types.is_struct(column.type):
        for part in column.flatten():
            yield from leaves(part)
    elif pa.types.is_nested(column.type):
        yield from leaves(column.flatten())
    else:
        yield column
