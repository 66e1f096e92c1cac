"""What Arrow takes without a word and makes something else of: a number beyond a FLOAT, a text for a list."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: Whether a text stands where a list is declared, in any of some values.
HasText = Callable[[Iterable[Any]], bool]

BEYOND_FLOAT = "it is beyond what a FLOAT can be: declare DOUBLE"
NO_LIST = "a text is no list; each of its letters would be an element"


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


def is_beyond_float(column: Sequence[Any], made: pa.Array) -> bool:
    """Return whether a number has become infinite in the array that was made of a column."""
    if not has_floats(made.type) or not infinities(made):
        return False
    return infinities(made) > infinities(pa.array(column, type=_with_doubles(made.type)))


@functools.lru_cache(maxsize=256)
def texts_as_lists(kind: pa.DataType) -> HasText | None:
    """Return what looks for texts in the places of lists; None for a type without lists.

    Structs in the values are tuples.

    Examples
    --------
    >>> found = texts_as_lists(pa.list_(pa.list_(pa.string())))
    >>> found([[["a"], None], []]), found([["a"]])
    (False, True)
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _ListTexts(texts_as_lists(kind.value_type))
    if pa.types.is_map(kind):
        item = texts_as_lists(kind.item_type)
        return None if item is None else _MapTexts(item)
    if pa.types.is_struct(kind):
        found = [(at, one) for at, field in enumerate(kind) if (one := texts_as_lists(field.type))]
        return _StructTexts(found) if found else None
    return None


class _ListTexts:
    def __init__(self, each: HasText | None) -> None:
        self._each = each

    def __call__(self, values: Iterable[Any]) -> bool:
        lists = values if self._each is None else [one for one in values if one is not None]
        if any(issubclass(one, str) for one in set(map(type, lists))):
            return True
        return self._each is not None and self._each(chain.from_iterable(lists))


class _MapTexts:
    def __init__(self, item: HasText) -> None:
        self._item = item

    def __call__(self, values: Iterable[Any]) -> bool:
        maps = (one for one in values if one is not None)
        return self._item(item for one in maps for _, item in (one.items() if isinstance(one, dict) else one))


class _StructTexts:
    def __init__(self, fields: list[tuple[int, HasText]]) -> None:
        self._fields = fields

    def __call__(self, values: Iterable[Any]) -> bool:
        rows = [one for one in values if one is not None]
        return any(has_text([row[at] for row in rows]) for at, has_text in self._fields)


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(at).type for at in range(kind.num_fields)]


@functools.lru_cache(maxsize=256)
def _with_doubles(kind: pa.DataType) -> pa.DataType:
    """Return a type with DOUBLE in the places of FLOAT."""
    if pa.types.is_float32(kind):
        return pa.float64()
    if pa.types.is_map(kind):
        return pa.map_(_with_doubles(kind.key_type), _with_doubles(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_with_doubles(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_doubles(field.type)) for field in kind])
    return kind
