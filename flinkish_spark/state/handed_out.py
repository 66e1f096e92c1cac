"""What functions are handed of a state, by declared types: can it be changed in place, its names, its form.

A value that can be changed in place (a list, a dict, an instance) belongs to the state: what a function does
to it counts, whether or not it puts the value back. Values that cannot be changed cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.runtime.ddl import ddl_of, is_field_list, parse_ddl
from flinkish_spark.runtime.hinted_types import hints_of, is_record, without_none
from flinkish_spark.runtime.named_rows import RowError, RowForm, element_class
from flinkish_spark.state.stored_forms import StoredForm, changes

_NESTED = (T.ArrayType, T.MapType, T.StructType)


class Naming:
    """Gives values that are declared by fields the names of these; they are tuples still.

    Parameters
    ----------
    names
        Of the fields, in their order.

    Examples
    --------
    >>> named = Naming(["total", "n"])
    >>> named((5, 2)), named({"n": 2, "total": 5}).total
    (Record(total=5, n=2), 5)
    """

    __slots__ = ("_form", "_make", "_width", "kind")

    def __init__(self, names: list[str]) -> None:
        #: The class of named values.
        self.kind: Any = element_class(names)
        self._make, self._form, self._width = self.kind._make, RowForm(names), len(names)

    def __call__(self, value: Any) -> Any:
        """Return a row under its names; as it is if it has other fields, which is said when it is stored."""
        kind = type(value)
        if kind is self.kind:
            return value
        if kind is not tuple:
            try:
                value = self._form.tuple_of(value)
            except RowError:
                return value
        return self._make(value) if len(value) == self._width else value


class FormedNaming(Naming):
    """The same where fields are of types that make other values of some.

    Parameters
    ----------
    fields
        In their order.
    """

    __slots__ = ("_forms",)

    def __init__(self, fields: T.StructType) -> None:
        super().__init__(list(fields.names))
        self._forms = [(at, StoredForm(field.dataType)) for at, field in enumerate(fields) if _changes(field)]

    def __call__(self, value: Any) -> Any:
        """Return a row under its names, its fields as they will be read."""
        row = super().__call__(value)
        if type(row) is not self.kind:
            return row
        fields = list(row)
        for at, form in self._forms:
            fields[at] = form(fields[at])
        return self._make(fields)


#: From what a function puts into a state to what it is handed: in the next micro-batch, and from now on.
HandedOut = Naming | StoredForm


def naming_of(ddl: str) -> HandedOut | None:
    """Return what makes of values of a declared type what functions are handed.

    None where that is what they put: of most single types, and of a class of the user's.

    Examples
    --------
    >>> naming_of("n LONG, price FLOAT")({"n": 1, "price": 0.1})
    Record(n=1, price=0.10000000149011612)
    >>> naming_of("LONG") is None
    True
    """
    return None if getattr(ddl, "hint", None) is not None else _naming(str(ddl))


@functools.lru_cache(maxsize=256)
def _naming(ddl: str) -> HandedOut | None:
    kind = parse_ddl(ddl)
    if not isinstance(kind, T.StructType) or not is_field_list(ddl):
        return StoredForm(kind) if changes(kind) else None
    return FormedNaming(kind) if any(map(_changes, kind)) else Naming(list(kind.names))


def _changes(field: T.StructField) -> bool:
    return changes(field.dataType)


def as_fields(ddl: str) -> str:
    """Return the type of a single value; a STRUCT is a tuple there, as a list of fields is.

    Examples
    --------
    >>> as_fields("STRUCT<a: LONG>"), as_fields("LONG")
    ('a bigint', 'LONG')
    """
    if getattr(ddl, "hint", None) is not None:
        return ddl
    kind = parse_ddl(ddl)
    return ddl_of(kind) if isinstance(kind, T.StructType) else ddl


def may_change(ddl: str) -> bool:
    """Return whether values of a declared type, as they are read from what is stored, can change in place.

    Examples
    --------
    >>> [may_change(one) for one in ("LONG", "a LONG, b STRING", "ARRAY<LONG>", "a MAP<STRING, LONG>")]
    [False, False, True, True]
    """
    hint = getattr(ddl, "hint", None)
    if hint is not None:
        return _instance_may_change(hint)
    kind = parse_ddl(ddl)
    if isinstance(kind, T.StructType) and is_field_list(ddl):
        return any(isinstance(field.dataType, _NESTED) for field in kind)
    return isinstance(kind, _NESTED)


def _instance_may_change(hint: Any) -> bool:
    hint = without_none(hint)
    if is_record(hint):
        if dataclasses.is_dataclass(hint) and not hint.__dataclass_params__.frozen:  # type: ignore[union-attr]
            return True
        return any(map(_instance_may_change, hints_of(hint).values()))
    if typing.get_origin(hint) is tuple:
        return any(map(_instance_may_change, typing.get_args(hint)))
    return typing.get_origin(hint) is not None


def same(one: Any, other: Any) -> bool:
    """Return whether two values, as states hold them, would be stored alike.

    More than equality: a field that a class does not compare is stored, too; NaN is NaN.

    Examples
    --------
    >>> same([float("nan")], [float("nan")]), same([1], [True]), same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    (True, False, False)
    """
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _all_same(one, other)
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is list:
        return _all_same(one, other)
    if kind is dict:
        return list(one) == list(other) and _all_same(one.values(), other.values())
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return all(same(getattr(one, name, None), getattr(other, name, None)) for name in names)
    if kind is float:
        return bool(one == other or (one != one and other != other))
    try:
        return bool(one == other)
    except Exception:
        # What cannot be compared is stored.
        return False


def _all_same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(map(same, ones, others))
