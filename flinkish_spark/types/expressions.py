"""Expressions over Arrow columns that give the same values as Spark for every input.

Expressions that may raise an error in Spark, depend on a setting of the session or compare by Spark's own
rules are not supported. Spark might not raise such an error: it does not evaluate unused columns, rows that a
later filter drops, and control rows.
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

#: Types that Arrow and Spark compare in the same way.
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
    @abstractmethod
    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        """Return an array, or a scalar that stands for an array of equal values."""

    def names(self) -> frozenset[str]:
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
    """The remainder of a whole number divided by a constant, with the number's sign."""

    number: Expression
    #: Neither 0, which is an error in Spark, nor -1, which overflows in Arrow.
    divisor: Constant

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        number, divisor = self.number.evaluate(columns), self.divisor.evaluate(columns)
        return pc.subtract(number, pc.multiply(pc.divide(number, divisor), divisor))


@dataclass(frozen=True)
class UnixTime(Expression):
    """The number of whole units from 1970 to a time, rounded down."""

    time: Expression
    micros: int

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        times = self.time.evaluate(columns)
        if isinstance(times, pa.Scalar):
            return self._count(pa.array([times.value], times.type))[0]
        return self._count(times)

    def _count(self, times: pa.Array) -> pa.Array:
        # Arrow rounds towards zero.
        counts = times.view(pa.int64()).fill_null(0).to_numpy() // self.micros
        return pa.array(counts, mask=times.is_null().to_numpy(zero_copy_only=False))


#: Pattern letters of dates that are the same in all locales, each with its least number of digits.
DATE_LETTERS = {"yyyy": 4, "MM": 2, "dd": 2}


@dataclass(frozen=True)
class FormattedDay(Expression):
    """The text of a time's day in UTC."""

    time: Expression
    #: Keys of `DATE_LETTERS`, and texts without letters between them.
    parts: tuple[str, ...]

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        times = self.time.evaluate(columns)
        if isinstance(times, pa.Scalar):
            times = pa.array([times.value], times.type)
            return self._texts(times)[0]
        return self._texts(times)

    def _texts(self, times: pa.Array) -> pa.Array:
        days = np.floor_divide(times.cast(pa.int64()).fill_null(0).to_numpy(), MICROS_OF["DAY"])
        # A stream has few distinct days, and formatting costs more than finding them.
        found = pa.array(days, mask=times.is_null().to_numpy(zero_copy_only=False)).dictionary_encode()
        texts = pa.array([self._text(day) for day in found.dictionary.to_pylist()], pa.string())
        return texts.take(found.indices)

    def _text(self, day: int) -> str:
        numbers = dict(zip(DATE_LETTERS, find_date(day), strict=True))
        return "".join(
            write_number(numbers[one], DATE_LETTERS[one]) if one in numbers else one for one in self.parts
        )
