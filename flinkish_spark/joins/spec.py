"""Specifications of joins (interval, temporal, window, co-group), and their functions."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from flinkish_spark.core.elements import MAX_WATERMARK_MS, OutputTag
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Arity, Range, check_fields
from flinkish_spark.core.validation import (
    unusable,
)
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.state.descriptors import StateTtl
from flinkish_spark.types.ddl import DdlError, parse_ddl
from flinkish_spark.types.hints import first_required, unfit_for_rows
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.functions import WindowContext, WindowRuntimeContext
from flinkish_spark.windows.spec import WindowSpec


class JoinContext(Protocol):
    """Given to a join function for one pair; valid only inside the call."""

    def left_timestamp(self) -> int | None:
        """Return the left element's event time; None if there is no left element, or it is a window join."""

    def right_timestamp(self) -> int | None:
        """Return the right element's event time; None as for the left one."""

    def timestamp(self) -> int | None:
        """Return the event time of the emitted rows."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row, with the time of the result, to a side output."""


class ProcessJoinFunction(RichFunction, ABC):
    """A join function, which makes rows of a pair.

    Examples
    --------
    >>> class OrderWithPayment(ProcessJoinFunction):
    ...     def process_element(self, order, payment, ctx):
    ...         yield order.id, payment.amount, ctx.right_timestamp() - ctx.left_timestamp()
    """

    @abstractmethod
    def process_element(self, left: Any, right: Any, ctx: JoinContext) -> Iterable[Any] | None:
        """Return the rows of a pair; `yield` emits. A missing element of an outer join is None."""


class Concatenate(ProcessJoinFunction):
    """A join function that emits the left element's fields, then the right one's; None for a missing element.

    Examples
    --------
    >>> list(Concatenate("a LONG, b LONG", "STRING").process_element((1, 2), None, None))
    [(1, 2, None)]
    """

    def __init__(self, left_type: str, right_type: str) -> None:
        self._left, self._right = ElementType(left_type), ElementType(right_type)
        self._no_left = (None,) * len(self._left.fields)
        self._no_right = (None,) * len(self._right.fields)

    def process_element(self, left: Any, right: Any, ctx: JoinContext) -> Iterable[Any]:
        row = self._no_left if left is None else self._left.to_tuple(left)
        return (row + (self._no_right if right is None else self._right.to_tuple(right)),)


class JoinOfPairs:
    """A join whose function gets pairs."""

    left_type: str
    right_type: str
    join_type: JoinType
    function: ProcessJoinFunction | None

    @property
    def actual_function(self) -> ProcessJoinFunction:
        """The function, or by default one that emits the fields of both."""
        return Concatenate(self.left_type, self.right_type) if self.function is None else self.function


class CoGroupFunction(ABC):
    """A function that makes rows of all elements of both inputs in a key's window; one input may have none.

    Examples
    --------
    >>> class Counts(CoGroupFunction):
    ...     def co_group(self, key, context, lefts, rights):
    ...         yield key, context.window.start, len(lefts), len(rights)
    """

    def open(self, context: WindowRuntimeContext) -> None:
        """Declare state; called once per copy, before any element."""

    @abstractmethod
    def co_group(
        self, key: Any, context: WindowContext, lefts: Sequence[Any], rights: Sequence[Any]
    ) -> Iterable[Any] | None:
        """Return the rows of a window each time it fires; `yield` emits."""

    def clear(self, context: WindowContext) -> None:
        """Clear state of a window at its cleanup."""

    def close(self) -> None:
        """Give back what `open` made."""


class JoinType(Choice):
    """The kind of a join: which sides emit elements without a partner."""

    INNER = "INNER"
    LEFT = "LEFT"
    RIGHT = "RIGHT"
    FULL = "FULL"

    @property
    def keeps_left(self) -> bool:
        """True if a left element without a partner is emitted, with None for the right one."""
        return self in (JoinType.LEFT, JoinType.FULL)

    @property
    def keeps_right(self) -> bool:
        """True if a right element without a partner is emitted, with None for the left one."""
        return self in (JoinType.RIGHT, JoinType.FULL)


class Side(enum.IntEnum):
    """An input of a join; its number is stored."""

    LEFT = 0
    RIGHT = 1


#: What to do about a type of elements that is no text.
_AS_DDL = 'write the type as DDL: "user STRING, amount LONG", or one type'


class Bound(Choice):
    """A bound of an interval, which contains it or not."""

    INCLUSIVE = "INCLUSIVE"
    EXCLUSIVE = "EXCLUSIVE"


#: Larger bounds, added to a time, could exceed 64 bits.
_MOST_MS = MAX_WATERMARK_MS // 2


def check_elements(join: Any) -> None:
    """Check the fields of a join, and the types of its elements."""
    check_fields(join, left_type=_AS_DDL, right_type=_AS_DDL)
    for name in ("left_type", "right_type"):
        value = getattr(join, name)
        try:
            kind = parse_ddl(value)
            required, why = first_required(kind), unfit_for_rows(kind)
            if required is not None:
                why = f"{required!r} is NOT NULL, which counts in what a function emits: leave it away"
        except DdlError as error:
            why = str(error)
        if why is not None:
            raise unusable(name, value, wanted=f"a type as DDL ({why})", what_to_do=_AS_DDL)


@dataclass(frozen=True)
class IntervalJoin(JoinOfPairs):
    """A join of elements of one key whose event times are near: `left + lower <= right <= left + upper`.

    `left_type` and `right_type` are DDL of the elements: fields, or one type. The other arguments are as of
    :meth:`JoinedStreams.interval`.

    Examples
    --------
    >>> IntervalJoin("id LONG", "id LONG", lower_ms=-5_000, upper_ms=0, upper=Bound.EXCLUSIVE).greatest_ms
    -1
    """

    left_type: str
    right_type: str
    lower_ms: Annotated[Milliseconds, Range(-_MOST_MS, _MOST_MS)]
    upper_ms: Annotated[Milliseconds, Range(-_MOST_MS, _MOST_MS)]
    lower: Bound = Bound.INCLUSIVE
    upper: Bound = Bound.INCLUSIVE
    join_type: JoinType = JoinType.INNER
    function: ProcessJoinFunction | None = None
    left_late: OutputTag | None = None
    right_late: OutputTag | None = None

    def __post_init__(self) -> None:
        check_elements(self)
        if self.least_ms > self.greatest_ms:
            raise ConfigError(
                f"the interval from {self.lower_ms} to {self.upper_ms} ms is empty",
                why=f"the lower bound is {self.lower.value}, the upper one {self.upper.value}",
                what_to_do="give bounds with a whole millisecond between them that counts",
            )

    @property
    def least_ms(self) -> int:
        """The least difference of times of a pair."""
        return self.lower_ms + (self.lower is Bound.EXCLUSIVE)

    @property
    def greatest_ms(self) -> int:
        """The greatest difference of times of a pair."""
        return self.upper_ms - (self.upper is Bound.EXCLUSIVE)


@dataclass(frozen=True)
class TemporalJoin(JoinOfPairs):
    """A join of each left element with its key's newest right element at the event time of the left one.

    A right element is a version, valid from its event time up to the time of the next one. Left elements wait
    until the watermark has reached their time, so the order of arrival does not matter.
    Rows have the time of the left element. `left_type` and `right_type` are DDL of the elements: fields, or
    one type; the other arguments are as of :meth:`JoinedStreams.temporal`.

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
    is_deletion: Annotated[Callable[[Any], bool], Arity(1)] | None = None
    version_ttl: StateTtl | None = None
    late_output: OutputTag | None = None

    def __post_init__(self) -> None:
        check_elements(self)
        if self.join_type.keeps_right:
            raise ConfigError(
                f"a temporal join cannot be a {self.join_type.value} join",
                why="a version is valid until the next one comes, so it is never known to have no partner",
                what_to_do="use JoinType.INNER or JoinType.LEFT",
            )


@dataclass(frozen=True)
class WindowCoGroup:
    """A co-group: a function gets all elements of both inputs in a key's window.

    Parameters
    ----------
    left_type, right_type
        DDL of the elements: fields, or one type.
    windows
        The windows, and when they fire. A custom assigner, trigger or evictor gets elements as
        :class:`~flinkish_spark.operators.joins.TaggedElement`, with `side` and `value`.
    left_late, right_late
        Side output of elements that are too late for all their windows; None: they are dropped and counted.
    """

    left_type: str
    right_type: str
    windows: WindowSpec
    function: CoGroupFunction
    left_late: OutputTag | None = None
    right_late: OutputTag | None = None

    def __post_init__(self) -> None:
        check_elements(self)
        _check(self)


@dataclass(frozen=True)
class WindowJoin(JoinOfPairs):
    """A join of each element with all elements of the other input in the same window of the same key.

    Parameters
    ----------
    left_type, right_type, windows, left_late, right_late
        As of a :class:`WindowCoGroup`.
    join_type
        Which sides emit elements without a partner.
    function
        Makes rows of a pair, with the time of the window's results; None: the output is the fields of both.

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
        check_elements(self)
        _check(self)


def _check(one: WindowCoGroup | WindowJoin) -> None:
    if one.windows.retraction_field is not None:
        raise ConfigError(
            "a join cannot have retractions",
            why="it does not keep the pairs that it has emitted",
            what_to_do="leave retraction_field out, or reduce the joined stream in windows of its own",
        )
    if one.windows.late_output is not None:
        raise ConfigError(
            "the windows of a join have a late_output",
            why="the elements of the two inputs are of two types",
            what_to_do="leave it out, and give the join left_late and right_late",
        )
