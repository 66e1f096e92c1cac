"""Elements as states keep them: plain tuples, which get the names of their fields back when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.runtime.ddl import ddl_of, is_field_list, parse_ddl
from flinkish_spark.runtime.named_rows import element_class

Named = Callable[[Any], Any]


@dataclass(frozen=True)
class ElementType:
    """The type of an input's elements.

    Parameters
    ----------
    ddl
        Fields, for elements that are tuples, or one type.

    Examples
    --------
    >>> ElementType("user STRING, amount LONG").naming()(("ann", 1))
    Record(user='ann', amount=1)
    """

    ddl: str

    @cached_property
    def has_fields(self) -> bool:
        """Whether elements are tuples."""
        return is_field_list(self.ddl)

    @cached_property
    def fields(self) -> tuple[T.StructField, ...]:
        """The fields; one, named `value`, for elements that are none."""
        parsed = parse_ddl(self.ddl)
        if self.has_fields and isinstance(parsed, T.StructType):
            return tuple(parsed.fields)
        return (T.StructField("value", parsed),)

    @property
    def stored_fields(self) -> str:
        """The type as a list of fields, in any case; see :meth:`spread`."""
        return ddl_of(T.StructType(list(self.fields)))

    def spread(self, value: Any) -> tuple[Any, ...]:
        """Return an element as a tuple of its fields."""
        return tuple(value) if self.has_fields else (value,)

    def naming(self) -> Named:
        """Return what gives a plain tuple the names of its fields, and leaves anything else as it is."""
        if not self.has_fields:
            return _same
        make: Named = element_class([field.name for field in self.fields])._make
        return lambda value: make(value) if type(value) is tuple else value

    def gathering(self) -> Named:
        """Return what makes an element of the tuple that :meth:`spread` made."""
        if not self.has_fields:
            return _only
        make: Named = element_class([field.name for field in self.fields])._make
        return make


def _same(value: Any) -> Any:
    return value


def _only(values: Any) -> Any:
    return values[0]
