"""Expressions over Arrow columns that have the value which Spark gives them, at every input.

What may raise an error in Spark, depends on a setting of the session or compares by rules of Spark's own is
none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.types.arrow_types import arrow_type

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

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Return the columns that it needs."""


@dataclass(frozen=True)
class Named(Expression):
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

    def names(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class FieldOf(Expression):
    struct: Expression
    place: int

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        return pc.struct_field(self.struct.evaluate(columns), [self.place])

    def names(self) -> frozenset[str]:
        return self.struct.names()


@dataclass(frozen=True)
class Call(Expression):
    """A function of Arrow's compute module."""

    function: str
    arguments: tuple[Expression, ...]

    def evaluate(self, columns: Mapping[str, pa.Array]) -> Any:
        return getattr(pc, self.function)(*(one.evaluate(columns) for one in self.arguments))

    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(one.names() for one in self.arguments))
