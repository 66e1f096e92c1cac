"""Conversion of rows to tuples in the declared order of fields.

Fields of a dict, a dataclass, a NamedTuple and a Row are matched by name; those of a tuple, a list and a Row
without names by position. A missing field is null, as with Spark's `createDataFrame`; an undeclared field is
an error.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from pyspark.sql import Row

_IS_ELEMENT, _NONE = "_fs_is_element", type(None)

AsTuple = Callable[[Any], tuple[Any, ...]]


class RowError(ValueError):
    """A value is no row, or its fields differ from the declared ones; the message names them."""


class NoRowError(RowError):
    """A value is no row."""


def element_class(names: Sequence[str]) -> Any:
    """Return the named tuple class of a stream's elements."""
    made = _make_tuple_class(names)
    own = made._fields
    if own != tuple(names):
        # Python's named tuples do not allow names that begin with an underscore, keywords and the like.
        renamed = [at for at, name in enumerate(names) if own[at] != name]
        for at in renamed:
            delattr(made, own[at])
        for at in renamed:
            if not hasattr(made, names[at]):
                setattr(made, names[at], property(itemgetter(at)))
        made._fields = tuple(names)
        made.__repr__ = _describe
    # An element that is emitted unchanged may be declared with other names there.
    setattr(made, _IS_ELEMENT, True)
    return made


def _make_tuple_class(names: Sequence[str]) -> Any:
    return namedtuple("Record", list(names), rename=True)


def _describe(element: Any) -> str:
    fields = (f"{name}={value!r}" for name, value in zip(element._fields, element, strict=True))
    return f"Record({', '.join(fields)})"


class RowForm:
    def __init__(self, names: Sequence[str], required: Collection[str] = ()) -> None:
        self._names, self._known, self._required = tuple(names), frozenset(names), tuple(required)
        self._of_class: dict[type, AsTuple] = {tuple: _same, list: tuple, Row: self._from_row}
        #: For dicts with all names; None for a single name, for which itemgetter returns no tuple.
        self._pick: AsTuple | None = itemgetter(*names) if len(self._names) > 1 else None
        self._of_names: dict[tuple[str, ...], AsTuple] = {}

    def tuples(self, rows: list[Any]) -> list[Any]:
        """Return rows as tuples; those matched by position keep their length."""
        kinds = set(map(type, rows))
        if kinds <= {tuple}:
            return rows
        if kinds == {dict} and self._pick is not None and set(map(len, rows)) == {len(self._names)}:
            try:
                return list(map(self._pick, rows))
            except KeyError:
                pass  # The code below raises an error that names the field.
        make = self._maker(kinds.pop()) if len(kinds) == 1 else self.tuple_of
        if make is _same:
            return rows
        made = list(map(make, rows))
        # A property that raises StopIteration ends the map early; called one by one, it raises.
        return made if len(made) == len(rows) else [make(row) for row in rows]

    def keeps(self, kinds: Iterable[type]) -> bool:
        """Return if rows of these classes, or None, need no conversion."""
        try:
            return all(kind is tuple or kind is _NONE or self._maker(kind) is _same for kind in kinds)
        except RowError:
            return False

    def tuple_of(self, row: Any) -> tuple[Any, ...]:
        return self._maker(type(row))(row)

    def _maker(self, kind: type) -> AsTuple:
        make = self._of_class.get(kind)
        if make is None:
            make = self._of_class[kind] = self._new_maker(kind)
        return make

    def _new_maker(self, kind: type) -> AsTuple:
        if issubclass(kind, dict):
            return self._from_dict
        if issubclass(kind, Row):
            return self._from_row
        if issubclass(kind, tuple):
            own = getattr(kind, "_fields", None)
            if own is None:
                return _same
            return self._pick_by_place(tuple(own), is_element=kind.__dict__.get(_IS_ELEMENT) is True)
        if dataclasses.is_dataclass(kind):
            return self._pick_by_attribute(tuple(field.name for field in dataclasses.fields(kind)))
        if issubclass(kind, list):
            return tuple
        raise NoRowError(f"a {kind.__name__}; a row is a tuple, Row, dict or dataclass")

    def _from_dict(self, row: dict[str, Any]) -> tuple[Any, ...]:
        if row.keys() != self._known:
            self._check(row)
        return tuple(map(row.get, self._names))

    def _from_row(self, row: Any) -> tuple[Any, ...]:
        own = getattr(row, "__fields__", None)
        if own is None:
            return tuple(row)
        names = tuple(own)
        if names not in self._of_names:
            self._of_names[names] = self._pick_by_place(names, is_element=False)
        return self._of_names[names](row)

    def _pick_by_place(self, own: tuple[str, ...], *, is_element: bool) -> AsTuple:
        if own == self._names or (is_element and self._is_in_place(own)):
            return _same
        self._check(own)
        places = [own.index(name) if name in own else None for name in self._names]
        if None in places or len(places) < 2:
            return lambda row: tuple(None if place is None else row[place] for place in places)
        return itemgetter(*places)

    def _pick_by_attribute(self, own: tuple[str, ...]) -> AsTuple:
        self._check(own)
        if set(own) == self._known and len(own) > 1:
            return attrgetter(*self._names)
        names = [name if name in own else None for name in self._names]
        return lambda row: tuple(None if name is None else getattr(row, name) for name in names)

    def _is_in_place(self, own: tuple[str, ...]) -> bool:
        """Return if an element is matched by position: no declared name is at another position in it."""
        if set(own) == self._known:
            return False
        ours = [(at, name) for at, name in enumerate(own) if name in self._known]
        return all(at < len(self._names) and self._names[at] == name for at, name in ours)

    def _check(self, own: Collection[str]) -> None:
        """Raise RowError for an undeclared field, and for a missing field that is required."""
        strange = [name for name in own if name not in self._known]
        if strange:
            raise RowError(f"the field {strange[0]!r}, but the declared fields are {', '.join(self._names)}")
        missing = [name for name in self._required if name not in own]
        if missing:
            raise RowError(f"no field {missing[0]!r}, which must not be null")


def _same(row: Any) -> Any:
    return row
