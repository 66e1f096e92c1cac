"""Functions on Arrow columns: values at any depth, out-of-range years, reading in slices, Arrow UDFs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import arrow_udf

#: Days since 1970 of the years 1 to 9999; Arrow has other years, but Python's date does not.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_PER_DAY = {unit: 86_400 * 10**digits for unit, digits in (("s", 0), ("ms", 3), ("us", 6), ("ns", 9))}


def find_beyond_years(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return a mask of dates and times outside the years 1 to 9999 in UTC; empty for other types."""
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


def find_gaps(column: pa.Array) -> pa.Array | None:
    return column.is_null() if column.null_count else None


@functools.lru_cache(maxsize=512)
def has_type(kind: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Return if a type or a part of it, at any depth, satisfies `is_one`."""
    return bool(is_one(kind)) or any(has_type(kind.field(at).type, is_one) for at in range(kind.num_fields))


def leaves(column: pa.Array) -> Iterator[pa.Array]:
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


#: Number of parts into which a slice is divided if it cannot be read at once, and the least records of a
#: part.
_PARTS, SMALLEST_PART = 16, 64


def read_in_parts(
    values: pa.Array,
    at_once: Callable[[pa.Array], pa.Array | None] | None,
    each: Callable[[pa.Array], pa.Array],
) -> Iterator[pa.Array]:
    """Yield the results for values: of the slice at once, else of its parts, else one by one by `each`."""
    found = None if at_once is None or not len(values) else at_once(values)
    if found is not None:
        yield found
    elif at_once is None or len(values) <= SMALLEST_PART:
        yield each(values)
    else:
        # One bad record makes the whole slice fail, so its parts are tried.
        size = max(-(-len(values) // _PARTS), SMALLEST_PART)
        for at in range(0, len(values), size):
            yield from read_in_parts(values.slice(at, size), at_once, each)


def to_column_function(
    function: Callable[[pa.Array], pa.Array], kind: T.DataType
) -> Callable[[Column], Column]:
    """Return an Arrow UDF that Spark evaluates once for each row."""
    # The kind of UDF is inferred from type hints, since PySpark warns if it is given. Non-deterministic,
    # since Spark would also evaluate a deterministic UDF before a filter.
    made: Any = arrow_udf(function, kind)  # type: ignore[call-overload]
    column: Callable[[Column], Column] = made.asNondeterministic()
    return column
