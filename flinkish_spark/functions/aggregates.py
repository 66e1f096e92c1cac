"""Specifications of running aggregates of a keyed stream: sum, min, max, min_by, max_by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.validation import unusable
from flinkish_spark.protocol.choices import Choice


class Emit(Choice):
    """When a running aggregate is emitted.

    PER_ELEMENT: after each element, as in Flink. PER_KEY: once per micro-batch for each key that had
    elements, with the aggregate of all of them; computed over columns, mostly before the shuffle.
    """

    PER_ELEMENT = "PER_ELEMENT"
    PER_KEY = "PER_KEY"


class Fold(Choice):
    """An aggregate of one field over several elements."""

    #: The value of the first element.
    FIRST = "FIRST"
    #: Ignores nulls; null if all are null. An overflow of the field's type is an error.
    SUM = "SUM"
    #: Ignores nulls. NaN is greater than all numbers, as in Spark.
    MIN = "MIN"
    MAX = "MAX"
    #: The number of values that are not null; a LONG.
    COUNT = "COUNT"


class Ties(Choice):
    """The choice among several elements with the same value."""

    FIRST = "FIRST"
    LAST = "LAST"


@dataclass(frozen=True)
class FieldAggregate:
    """The first element of a key, with one field replaced by the sum, minimum or maximum of all."""

    fold: Fold
    field: str

    def __post_init__(self) -> None:
        if self.fold not in (Fold.SUM, Fold.MIN, Fold.MAX):
            raise unusable("fold", self.fold, wanted="Fold.SUM, Fold.MIN or Fold.MAX", what_to_do="give one")
        check_fields(self, field="give the name of a field")


@dataclass(frozen=True)
class ElementChoice:
    """The element of a key with the least or greatest value of a field; nulls count only if all are null."""

    fold: Fold
    field: str
    #: Chooses among equal elements; by default the first, as in Flink.
    ties: Ties = Ties.FIRST

    def __post_init__(self) -> None:
        if self.fold not in (Fold.MIN, Fold.MAX):
            raise unusable("fold", self.fold, wanted="Fold.MIN or Fold.MAX", what_to_do="give one")
        check_fields(self, field="give the name of a field")


@dataclass(frozen=True)
class AggregateColumn:
    """One column of a table of aggregates: name, aggregate, and field; None for COUNT of all elements."""

    name: str
    fold: Fold
    field: str | None = None


def check_columns(columns: Sequence[object], uid: str) -> None:
    if not columns or not all(isinstance(column, AggregateColumn) for column in columns):
        raise ConfigError(
            f"fold() of '{uid}' got {columns!r}",
            what_to_do='give it columns: AggregateColumn("total", Fold.SUM, "amount")',
        )


#: Running aggregates whose results are elements.
ElementAggregate = FieldAggregate | ElementChoice
