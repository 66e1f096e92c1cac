"""What a program says about a temporal join: each left element with the version that was valid then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flinkish_spark.arguments import instance_of, refuse_if_never_run, unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.joins.checks import element_ddl, one_of, tag_or_none
from flinkish_spark.joins.functions import Concatenate, ProcessJoinFunction
from flinkish_spark.joins.kinds import JoinType
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.state import StateTtl


@dataclass(frozen=True)
class TemporalJoin:
    """Joins each left element with the right one of its key that was the newest at its event time.

    A right element is a version, valid from its event time up to that of the next. Left elements wait until
    the watermark has reached their time; so it does not matter which of the two comes first.

    Parameters
    ----------
    left_type, right_type
        DDL of the elements: fields, or one type.
    join_type
        INNER, or LEFT: then left elements for which there is no version come out with None.
    function
        What is made of a pair; None: the fields of both. Its rows have the time of the left element.
    is_deletion
        Tells right elements that end a version without beginning a new one; None: there are none.
    version_ttl
        How long the versions of a key live after the last one came, by processing time; None: the newest
        one stays for ever.
    late_output
        Where left elements go that came behind the watermark when the version of their time was no longer
        known; None: they are dropped and counted.

    Raises
    ------
    ConfigError
        Something is of another type, or the join would keep right elements.

    Examples
    --------
    >>> rates = TemporalJoin("currency STRING, amount LONG", "currency STRING, rate DOUBLE", JoinType.LEFT)
    >>> rates.join_type.keeps_left
    True
    """

    left_type: str
    right_type: str
    join_type: JoinType = JoinType.INNER
    function: ProcessJoinFunction | None = None
    is_deletion: Callable[[Any], bool] | None = None
    version_ttl: StateTtl | None = None
    late_output: OutputTag | None = None

    def __post_init__(self) -> None:
        element_ddl("left_type", self.left_type)
        element_ddl("right_type", self.right_type)
        one_of("join_type", self.join_type, JoinType)
        tag_or_none("late_output", self.late_output)
        if self.function is not None:
            kind: type = ProcessJoinFunction
            instance_of("function", self.function, kind, what_to_do="give one, or leave it out")
        if self.is_deletion is not None:
            _check_callable("is_deletion", self.is_deletion)
        if self.version_ttl is not None:
            instance_of(
                "version_ttl", self.version_ttl, StateTtl, what_to_do="give a StateTtl, or leave it out"
            )
        if self.join_type.keeps_right:
            raise ConfigError(
                f"a temporal join cannot be a {self.join_type.value} join",
                why="a version is valid until the next one comes, so it is never known to have no partner",
                what_to_do="use JoinType.INNER or JoinType.LEFT",
            )

    @property
    def actual_function(self) -> ProcessJoinFunction:
        """The function, or the one that puts the fields of both together."""
        return Concatenate(self.left_type, self.right_type) if self.function is None else self.function


def _check_callable(name: str, value: object) -> None:
    if not callable(value) or isinstance(value, type):
        raise unusable(name, value, wanted="a function of a right element", what_to_do="give a function")
    refuse_if_never_run(value, f"{name}()")
