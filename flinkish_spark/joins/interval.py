"""What a program says about an interval join."""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.arguments import instance_of
from flinkish_spark.errors import ConfigError
from flinkish_spark.joins.checks import bound_ms, element_ddl, one_of, tag_or_none
from flinkish_spark.joins.functions import Concatenate, ProcessJoinFunction
from flinkish_spark.joins.kinds import Bound, JoinType
from flinkish_spark.operators.elements import OutputTag


@dataclass(frozen=True)
class IntervalJoin:
    """Joins elements of one key whose event times are near: `left + lower <= right <= left + upper`.

    Parameters
    ----------
    left_type, right_type
        DDL of the elements: fields, or one type.
    lower_ms, upper_ms
        How much later than the left element the right one may be, at least and at most; may be negative.
    lower, upper
        Whether the bounds themselves count.
    join_type
        Which elements come out without a partner.
    function
        What is made of a pair; None: the fields of both.
    left_late, right_late
        Where elements go whose time is before the watermark; None: they are dropped and counted.

    Raises
    ------
    ConfigError
        Something is of another type, or no time lies between the bounds.

    Examples
    --------
    >>> IntervalJoin("id LONG", "id LONG", lower_ms=-5_000, upper_ms=0, upper=Bound.EXCLUSIVE).greatest_ms
    -1
    """

    left_type: str
    right_type: str
    lower_ms: int
    upper_ms: int
    lower: Bound = Bound.INCLUSIVE
    upper: Bound = Bound.INCLUSIVE
    join_type: JoinType = JoinType.INNER
    function: ProcessJoinFunction | None = None
    left_late: OutputTag | None = None
    right_late: OutputTag | None = None

    def __post_init__(self) -> None:
        element_ddl("left_type", self.left_type)
        element_ddl("right_type", self.right_type)
        bound_ms("lower_ms", self.lower_ms)
        bound_ms("upper_ms", self.upper_ms)
        one_of("lower", self.lower, Bound)
        one_of("upper", self.upper, Bound)
        one_of("join_type", self.join_type, JoinType)
        tag_or_none("left_late", self.left_late)
        tag_or_none("right_late", self.right_late)
        if self.function is not None:
            kind: type = ProcessJoinFunction
            instance_of("function", self.function, kind, what_to_do="give one, or leave it out")
        if self.least_ms > self.greatest_ms:
            raise ConfigError(
                f"the interval from {self.lower_ms} to {self.upper_ms} ms is empty",
                why=f"the lower bound is {self.lower.value}, the upper one {self.upper.value}",
                what_to_do="give bounds with a whole millisecond between them that counts",
            )

    @property
    def least_ms(self) -> int:
        """The least difference of times that joins."""
        return self.lower_ms + (self.lower is Bound.EXCLUSIVE)

    @property
    def greatest_ms(self) -> int:
        """The greatest difference of times that joins."""
        return self.upper_ms - (self.upper is Bound.EXCLUSIVE)

    @property
    def actual_function(self) -> ProcessJoinFunction:
        """The function, or the one that puts the fields of both together."""
        return Concatenate(self.left_type, self.right_type) if self.function is None else self.function
