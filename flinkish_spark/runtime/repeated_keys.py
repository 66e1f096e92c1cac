"""Maps in Arrow arrays that have a key twice, which Python cannot read and Spark does not expect.

A dict has each key once. But two of its keys may be one in the declared type: times of a day for a DATE, 0.1
and what a FLOAT makes of it, a text and its bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa


@functools.lru_cache(maxsize=256)
def has_maps(kind: pa.DataType) -> bool:
    """Return whether a type has a map somewhere in it."""
    return bool(pa.types.is_map(kind)) or any(has_maps(kind.field(at).type) for at in range(kind.num_fields))


def first_repeated(array: pa.Array) -> tuple[int, Any] | None:
    """Return the first row in which a map has a key twice, and that key; None if there is none."""
    if repeated_key(array) is None:
        return None
    rows = ((at, repeated_key(array.slice(at, 1))) for at in range(len(array)))
    return next((at, found[0]) for at, found in rows if found is not None)


def repeated_key(array: pa.Array) -> tuple[Any] | None:
    """Return a key that a map has twice, at any depth of an array; None if there is none.

    NaN is not looked at: whoever reads a map makes one key of it.

    Examples
    --------
    >>> kind = pa.map_(pa.string(), pa.int8())
    >>> repeated_key(pa.array([[("a", 1)], [("a", 1), ("b", 2), ("b", 3)]], kind))
    ('b',)
    """
    if not has_maps(array.type):
        return None
    kind = array.type
    if pa.types.is_struct(kind):
        return _first(array.flatten())
    if pa.types.is_map(kind):
        first, last = (int(array.offsets[at].as_py()) for at in (0, -1))
        keys, items = (part.slice(first, last - first) for part in (array.keys, array.items))
        return _twice(keys, np.diff(array.offsets.to_numpy())) or repeated_key(items)
    return repeated_key(array.flatten())


def _first(arrays: list[pa.Array]) -> tuple[Any] | None:
    return next((found for one in arrays if (found := repeated_key(one)) is not None), None)


def _twice(keys: pa.Array, counts: np.ndarray[Any, Any]) -> tuple[Any] | None:
    """Return a key that is there twice in a map; `counts` says how many keys each map has."""
    if pa.types.is_nested(keys.type):
        return None
    if pa.types.is_floating(keys.type):
        codes = keys.to_numpy(zero_copy_only=False)
    else:
        codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    of_map = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((codes, of_map))
    same = (codes[order][1:] == codes[order][:-1]) & (of_map[order][1:] == of_map[order][:-1])
    found = np.flatnonzero(same)
    return (keys[int(order[found[0]])].as_py(),) if len(found) else None
