"""Values of files of texts, where Arrow would make other ones of them without a word.

Of JSON it takes a day for a number of days, base64 for the bytes of its letters, and the offset away that
a time without a zone has there. A number beyond what a FLOAT can be becomes infinite.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from flinkish_spark.runtime.silent_changes import BEYOND_FLOAT

if TYPE_CHECKING:
    import pyarrow as pa

_BEYOND_DOUBLE = "it is beyond what a DOUBLE can be"
#: Spark's TIME has microseconds, Arrow's that stands for it nanoseconds.
_NANOS_PER_MICRO = 1_000


def written_as(kind: pa.DataType) -> pa.DataType:
    """Return the type as which Arrow is to read a field of JSON; :func:`as_typed` makes the other one of it.

    Examples
    --------
    >>> import pyarrow as pa
    >>> written_as(pa.list_(pa.binary())), written_as(pa.float32()), written_as(pa.int64())
    (ListType(list<item: string>), DataType(double), DataType(int64))
    """
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_list(kind):
        return pa.list_(kind.value_field.with_type(written_as(kind.value_type)))
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(written_as(field.type)) for field in kind])
    if kinds.is_float32(kind):
        return pa.float64()
    is_local_time = kinds.is_timestamp(kind) and kind.tz is None
    return pa.string() if kinds.is_date(kind) or kinds.is_binary(kind) or is_local_time else kind


def as_typed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    r"""Return a column of what a type is written as with the type itself.

    Raises
    ------
    pyarrow.ArrowInvalid
        A value is not of the type, or would be another one.

    Examples
    --------
    >>> import pyarrow as pa
    >>> as_typed(pa.array([["AP8=", None], None]), pa.list_(pa.binary())).to_pylist()
    [[b'\x00\xff', None], None]
    >>> as_typed(pa.array([0.5, 1e300]), pa.float32())
    Traceback (most recent call last):
    pyarrow.lib.ArrowInvalid: 1e+300: it is beyond what a FLOAT can be: declare DOUBLE
    """
    import pyarrow as pa

    if column.type == kind:
        return column
    missing = column.is_null() if column.null_count else None
    if pa.types.is_list(kind):
        elements = as_typed(column.values, kind.value_type)
        return pa.ListArray.from_arrays(column.offsets, elements, type=kind, mask=missing)
    if pa.types.is_struct(kind):
        parts = [as_typed(column.field(at), field.type) for at, field in enumerate(kind)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=missing)
    if pa.types.is_binary(kind):
        return pa.array([_decoded(text) for text in column.to_pylist()], kind)
    return _narrowed(column, kind) if pa.types.is_float32(kind) else column.cast(kind)


def _decoded(text: str | None) -> bytes | None:
    import pyarrow as pa

    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise pa.ArrowInvalid(f"{text!r:.100} is no base64, which stands for BINARY: {error}") from None


def _narrowed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    narrow = column.cast(kind, safe=False)
    beyond = pc.and_(pc.is_inf(narrow), pc.is_finite(column))
    if pc.any(beyond).as_py():
        raise pa.ArrowInvalid(f"{column.filter(beyond)[0].as_py()}: {BEYOND_FLOAT}")
    return narrow


def infinite_fields(batch: pa.RecordBatch) -> list[str]:
    """Return the fields with floats that are infinite: of a text that says so, or beyond the greatest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    floats = [field.name for field in batch.schema if pa.types.is_floating(field.type)]
    return [name for name in floats if pc.any(pc.is_inf(batch.column(name))).as_py()]


def floats_of(texts: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """Return floats of texts that Arrow has read as such already; an empty one is null.

    Raises
    ------
    ValueError
        One is a number that would be infinite.

    Examples
    --------
    >>> import pyarrow as pa
    >>> floats_of(pa.array(["0.5", "", "-inf"]), pa.float64(), "price").to_pylist()
    [0.5, None, -inf]
    >>> floats_of(pa.array(["1e400"]), pa.float64(), "price")
    Traceback (most recent call last):
    ValueError: the field 'price' has 1e400: it is beyond what a DOUBLE can be
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(texts)
    found = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed).cast(kind)
    beyond = pc.and_(pc.is_inf(found), pc.match_substring_regex(trimmed, "[0-9]"))
    if pc.any(beyond).as_py():
        why = BEYOND_FLOAT if pa.types.is_float32(kind) else _BEYOND_DOUBLE
        raise ValueError(f"the field {name!r} has {trimmed.filter(beyond)[0].as_py():.100}: {why}")
    return found


def refuse_nanoseconds(batch: pa.RecordBatch) -> None:
    """Refuse times of day with more digits than a TIME has, which would be cut off later.

    Raises
    ------
    ValueError
        With the field and the time.
    """
    import numpy as np
    import pyarrow as pa

    for field in batch.schema:
        if pa.types.is_time64(field.type):
            nanos = batch.column(field.name).cast(pa.int64()).fill_null(0).to_numpy()
            wrong = np.flatnonzero(nanos % _NANOS_PER_MICRO)
            if len(wrong):
                time = batch.column(field.name)[int(wrong[0])].cast(pa.string()).as_py()
                raise ValueError(f"the field {field.name!r} has {time}: a TIME has no nanoseconds")
