"""Values of nested types with tuples in the places of structs, as Arrow reads them by position.

Arrow does not look at the names of named tuples, takes no dataclass, drops fields of dicts that it does not
know, and takes no column with dicts and tuples. Values that are tuples in order already are only looked at.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from flinkish_spark.runtime.named_rows import RowForm


class Nested(ABC):
    """A type with structs somewhere in it."""

    @abstractmethod
    def is_plain(self, values: Iterable[Any]) -> bool:
        """Return whether values can be left as they are; they may be, too, where the answer is no."""

    @abstractmethod
    def plain(self, value: Any) -> Any:
        """Return a value, which is not None, with tuples for structs.

        Raises
        ------
        RowError, TypeError, ValueError
            It is no such value.
        """

    def plain_all(self, values: Sequence[Any]) -> list[Any]:
        """Return values, some of which may be None; raises as `plain` does."""
        return [None if value is None else self.plain(value) for value in values]


@functools.lru_cache(maxsize=256)
def nested_of(kind: pa.DataType) -> Nested | None:
    """Return what a type has structs in; None if it has none.

    Examples
    --------
    >>> points = nested_of(pa.list_(pa.struct([("x", pa.int64()), ("y", pa.int64())])))
    >>> points.plain([{"y": 2, "x": 1}, (3, 4), None])
    [(1, 2), (3, 4), None]
    """
    if pa.types.is_struct(kind):
        return _Struct(kind)
    if pa.types.is_map(kind):
        key, item = nested_of(kind.key_type), nested_of(kind.item_type)
        return None if key is None and item is None else _Map(key, item)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        each = nested_of(kind.value_type)
        return None if each is None else _List(each)
    return None


class _Struct(Nested):
    def __init__(self, kind: pa.DataType) -> None:
        fields = list(kind)
        required = [field.name for field in fields if not field.nullable]
        self._form, self._width = RowForm([field.name for field in fields], required), len(fields)
        inner = ((at, nested_of(field.type)) for at, field in enumerate(fields))
        self._inner = [(at, one) for at, one in inner if one is not None]

    def is_plain(self, values: Iterable[Any]) -> bool:
        if not self._inner:
            return self._form.keeps(set(map(type, values)))
        rows = list(values)
        if not self._form.keeps(set(map(type, rows))):
            return False
        there = [row for row in rows if row is not None]
        return set(map(len, there)) <= {self._width} and all(
            one.is_plain([row[at] for row in there]) for at, one in self._inner
        )

    def plain_all(self, values: Sequence[Any]) -> list[Any]:
        if self._inner or type(None) in set(map(type, values)):
            return super().plain_all(values)
        return self._form.tuples(list(values))

    def plain(self, value: Any) -> Any:
        row = self._form.tuple_of(value)
        if not self._inner:
            return row
        if len(row) != self._width:
            raise ValueError(f"it has {len(row)} fields, declared are {self._width}")
        made = list(row)
        for at, one in self._inner:
            made[at] = _plain_or_none(one, made[at])
        return tuple(made)


class _List(Nested):
    def __init__(self, each: Nested) -> None:
        self._each = each

    def is_plain(self, values: Iterable[Any]) -> bool:
        lists = [value for value in values if value is not None]
        return set(map(type, lists)) <= {list, tuple} and self._each.is_plain(chain.from_iterable(lists))

    def plain(self, value: Any) -> Any:
        return [_plain_or_none(self._each, one) for one in value]


class _Map(Nested):
    def __init__(self, key: Nested | None, item: Nested | None) -> None:
        self._key, self._item = key, item

    def is_plain(self, values: Iterable[Any]) -> bool:
        maps = [value for value in values if value is not None]
        if not set(map(type, maps)) <= {dict}:
            return False
        items = chain.from_iterable(one.values() for one in maps)
        return (self._key is None or self._key.is_plain(chain.from_iterable(maps))) and (
            self._item is None or self._item.is_plain(items)
        )

    def plain(self, value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else value
        return [(_plain_or_none(self._key, key), _plain_or_none(self._item, item)) for key, item in pairs]


def _plain_or_none(nested: Nested | None, value: Any) -> Any:
    return value if nested is None or value is None else nested.plain(value)
