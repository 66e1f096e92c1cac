"""What a program says about joins and co-groups within windows."""

from __future__ import annotations

from dataclasses import dataclass

from flinkish_spark.arguments import instance_of
from flinkish_spark.errors import ConfigError
from flinkish_spark.joins.checks import element_ddl, one_of, tag_or_none
from flinkish_spark.joins.functions import CoGroupFunction, Concatenate, ProcessJoinFunction
from flinkish_spark.joins.kinds import JoinType
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.windows import WindowSpec


@dataclass(frozen=True)
class WindowCoGroup:
    """Gives a function the elements of both inputs that are in one window of one key.

    Parameters
    ----------
    left_type, right_type
        DDL of the elements: fields, or one type.
    windows
        Which windows, and when they fire. Where an assigner, trigger or evictor of yours looks at elements,
        it gets a :class:`~flinkish_spark.operators.tagged_union.TaggedElement`: `side` and `value`.
    function
        What is made of a window.
    left_late, right_late
        Where elements go that came too late for all their windows; None: they are dropped and counted.

    Raises
    ------
    ConfigError
        Something is of another type, or `windows` has a `late_output`.
    """

    left_type: str
    right_type: str
    windows: WindowSpec
    function: CoGroupFunction
    left_late: OutputTag | None = None
    right_late: OutputTag | None = None

    def __post_init__(self) -> None:
        _check(self)
        kind: type = CoGroupFunction
        instance_of("function", self.function, kind, what_to_do="give a CoGroupFunction")


@dataclass(frozen=True)
class WindowJoin:
    """Joins each element with all of the other input that are in the same window of the same key.

    Parameters
    ----------
    left_type, right_type, windows, left_late, right_late
        As of a :class:`WindowCoGroup`.
    join_type
        Which elements come out without a partner.
    function
        What is made of a pair; None: the fields of both. Its rows have the time of the window's results.

    Examples
    --------
    >>> from flinkish_spark.windows import TumblingEventTimeWindows
    >>> spec = WindowSpec(TumblingEventTimeWindows(60_000))
    >>> WindowJoin("user STRING, n LONG", "user STRING, m LONG", spec).join_type
    <JoinType.INNER: 'INNER'>
    """

    left_type: str
    right_type: str
    windows: WindowSpec
    join_type: JoinType = JoinType.INNER
    function: ProcessJoinFunction | None = None
    left_late: OutputTag | None = None
    right_late: OutputTag | None = None

    def __post_init__(self) -> None:
        _check(self)
        one_of("join_type", self.join_type, JoinType)
        if self.function is not None:
            kind: type = ProcessJoinFunction
            instance_of("function", self.function, kind, what_to_do="give one, or leave it out")

    @property
    def actual_function(self) -> ProcessJoinFunction:
        """The function, or the one that puts the fields of both together."""
        return Concatenate(self.left_type, self.right_type) if self.function is None else self.function


def _check(one: WindowCoGroup | WindowJoin) -> None:
    element_ddl("left_type", one.left_type)
    element_ddl("right_type", one.right_type)
    instance_of("windows", one.windows, WindowSpec, what_to_do="give a WindowSpec")
    if one.windows.retraction_field is not None:
        raise ConfigError(
            "a join cannot have retractions",
            why="it does not keep the pairs that it has emitted",
            what_to_do="leave retraction_field out, or reduce the joined stream in windows of its own",
        )
    tag_or_none("left_late", one.left_late)
    tag_or_none("right_late", one.right_late)
    if one.windows.late_output is not None:
        raise ConfigError(
            "the windows of a join have a late_output",
            why="the elements of the two inputs are of two types",
            what_to_do="leave it out, and give the join left_late and right_late",
        )
