"""Expressions over Arrow columns that have the value which Spark gives them, at every input.

What may raise an error in Spark, depends on a setting of the session or compares by rules of Spark's own is
none of them. Of an error Spark may never know: it computes neither what nobody reads nor rows that a filter
behind drops, and no barrier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.text_values import MICROS_OF, find_date, write_number

#: Types of which Arrow and Spark compare two values alike.
COMPARED: tuple[type[T.DataType], ...] = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)


class Expression(ABC):
    """A value for each row."""

    @abstractmethod
    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        """Return an array, or the scalar that it would repeat."""

    def names(self) -> frozenset[str]:
        """Return the columns that it needs: those of all expressions that it is made of."""
        return frozenset[str]().union(*(one.names() for one in _find_expressions(tuple(vars(self).values()))))


def _find_expressions(part: Any) -> Iterator[Expression]:
    if isinstance(part, Expression):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from _find_expressions(one)


@dataclass(frozen=True)
class ColumnReference(Expression):
    name: str

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        return columns[self.name]

    def names(self) -> frozenset[str]:
        return frozenset({self.name})


@dataclass(frozen=True)
class Constant(Expression):
    value: bool | int | str | None
    kind: T.DataType

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        return pa.scalar(self.value, arrow_type(self.kind))


@dataclass(frozen=True)
class FieldOf(Expression):
    struct: Expression
    place: int

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        return pc.struct_field(self.struct.evaluate(columns), [self.place])


@dataclass(frozen=True)
class Call(Expression):
    """A function of Arrow's compute module."""

    function: str
    arguments: tuple[Expression, ...]

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        return getattr(pc, self.function)(*(one.evaluate(columns) for one in self.arguments))


@dataclass(frozen=True)
class Choice(Expression):
    """CASE WHEN: the value of the first condition that is true, else the last value."""

    branches: tuple[tuple[Expression, Expression], ...]
    otherwise: Expression

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        found = self.otherwise.evaluate(columns)
        for condition, value in reversed(self.branches):
            is_so = pc.fill_null(condition.evaluate(columns), False)
            found = pc.if_else(is_so, value.evaluate(columns), found)
        return found


@dataclass(frozen=True)
class Remainder(Expression):
    """What is left of a whole number divided by a constant, with the number's sign."""

    number: Expression
    #: Neither 0 nor -1, of which Spark makes errors and Arrow overflows.
    divisor: Constant

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        number, divisor = self.number.evaluate(columns), self.divisor.evaluate(columns)
        return pc.subtract(number, pc.multiply(pc.divide(number, divisor), divisor))


#: Letters of a day's format that mean the same in all locales, and how many digits each is at least.
DATE_LETTERS = {"yyyy": 4, "MM": 2, "dd": 2}


@dataclass(frozen=True)
class FormattedDay(Expression):
    """The text of a time's day in UTC."""

    time: Expression
    #: Some of `DATE_LETTERS`, and texts without letters between them.
    parts: tuple[str, ...]

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        times = self.time.evaluate(columns)
        if isinstance(times, pa.Scalar):
            times = pa.array([times.value], times.type)
            return self._texts(times)[0]
        return self._texts(times)

    def _texts(self, times: pa.Array) -> pa.Array:
        days = np.floor_divide(times.cast(pa.int64()).fill_null(0).to_numpy(), MICROS_OF["DAY"])
        # A stream has few days, and a text costs more than to find out which they are.
        found = pa.array(days, mask=times.is_null().to_numpy(zero_copy_only=False)).dictionary_encode()
        texts = pa.array([self._text(day) for day in found.dictionary.to_pylist()], pa.string())
        return texts.take(found.indices)

    def _text(self, day: int) -> str:
        numbers = dict(zip(DATE_LETTERS, find_date(day), strict=True))
        return "".join(
            write_number(numbers[one], DATE_LETTERS[one]) if one in numbers else one for one in self.parts
        )
