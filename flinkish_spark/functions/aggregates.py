"""Specifications of running aggregates of a keyed stream: sum, min, max, min_by, max_by."""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.core.validation import instance_of, unusable
from flinkish_spark.protocol.choices import Choice


class Emit(Choice):
    """When a running aggregate is emitted.

    PER_ELEMENT: after each element, as in Flink. PER_KEY: once per micro-batch for each key that had
    elements, with what they all have made of it; computed over columns, most of it before the shuffle.
    """

    PER_ELEMENT = "PER_ELEMENT"
    PER_KEY = "PER_KEY"


def check_emit(emit: object) -> None:
    """Raise ConfigError unless it is an Emit: a text would choose one of the two silently."""
    instance_of("emit", emit, Emit, what_to_do="give Emit.PER_ELEMENT or Emit.PER_KEY")


class Fold(Choice):
    """An aggregate of one field over several elements."""

    #: That of the first element.
    FIRST = "FIRST"
    #: Nulls are left out; null if there is nothing else. An overflow of the field's type is an error.
    SUM = "SUM"
    #: Nulls are left out. NaN is greater than all numbers, as in Spark.
    MIN = "MIN"
    MAX = "MAX"
    #: How many are not null; a LONG.
    COUNT = "COUNT"


class Ties(Choice):
    """The choice among several elements with the same value."""

    FIRST = "FIRST"
    LAST = "LAST"


@dataclass(frozen=True)
class FieldAggregate:
    """The first element of a key, with one field replaced by the sum, least or greatest of all."""

    fold: Fold
    field: str

    def __post_init__(self) -> None:
        if self.fold not in (Fold.SUM, Fold.MIN, Fold.MAX):
            raise unusable(
                "fold", self.fold, wanted="Fold.SUM, Fold.MIN or Fold.MAX", what_to_do="give one of these"
            )
        instance_of("field", self.field, str, what_to_do="give the name of a field")


@dataclass(frozen=True)
class ElementChoice:
    """The element of a key with the least or greatest value of a field; nulls count only if all are null."""

    fold: Fold
    field: str
    #: Which of several that are equal; the first by default, as in Flink.
    ties: Ties = Ties.FIRST

    def __post_init__(self) -> None:
        if self.fold not in (Fold.MIN, Fold.MAX):
            raise unusable("fold", self.fold, wanted="Fold.MIN or Fold.MAX", what_to_do="give one of these")
        instance_of("field", self.field, str, what_to_do="give the name of a field")
        instance_of("ties", self.ties, Ties, what_to_do="give Ties.FIRST or Ties.LAST")


@dataclass(frozen=True)
class AggregateColumn:
    """One column of a table of aggregates: its name, the fold, and the field that is folded.

    Parameters
    ----------
    field
        Name of the field; None for COUNT of all elements.
    """

    name: str
    fold: Fold
    field: str | None = None


#: Running aggregates whose results are elements.
ElementAggregate = FieldAggregate | ElementChoice
