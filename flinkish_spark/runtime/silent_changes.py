"""Columns to other types, and what Arrow would change of them without a word: numbers beyond a FLOAT."""

from __future__ import annotations

import functools

import pyarrow as pa
import pyarrow.compute as pc

BEYOND_FLOAT = "it is beyond what a FLOAT can be: declare DOUBLE"


def exact_cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column as another type of its kind.

    Raises
    ------
    pyarrow.ArrowException
        A value would be another one.
    """
    made = column.cast(kind)
    # A cast refuses what is cut or does not fit, but not this.
    if has_floats(kind) and infinities(made) > infinities(column):
        raise pa.ArrowInvalid(BEYOND_FLOAT)
    return made


@functools.lru_cache(maxsize=256)
def has_floats(kind: pa.DataType) -> bool:
    """Return whether a type has a FLOAT somewhere in it.

    Examples
    --------
    >>> has_floats(pa.list_(pa.float32())), has_floats(pa.float64())
    (True, False)
    """
    return bool(pa.types.is_float32(kind)) or any(map(has_floats, _parts(kind)))


def infinities(array: pa.Array) -> int:
    """Return how many numbers in an array, at any depth, are infinite."""
    kind = array.type
    if pa.types.is_floating(kind):
        return int(pc.sum(pc.is_inf(array)).as_py() or 0)
    if pa.types.is_struct(kind):
        return sum(map(infinities, array.flatten()))
    if pa.types.is_map(kind):
        # Arrow has no flatten() for it; of a slice, keys and items are those of the whole array.
        first, last = (int(array.offsets[at].as_py()) for at in (0, -1))
        return sum(infinities(part.slice(first, last - first)) for part in (array.keys, array.items))
    return infinities(array.flatten()) if _parts(kind) else 0


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(at).type for at in range(kind.num_fields)]
