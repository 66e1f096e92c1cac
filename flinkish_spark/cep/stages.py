"""The parts of a pattern: stages in their order, and the matches that a match puts an end to."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flinkish_spark.cep.conditions import ALWAYS, Condition
from flinkish_spark.core.errors import PatternError
from flinkish_spark.core.suggestions import closest
from flinkish_spark.protocol.choices import Choice

#: Parts the name of a state from its number, so no stage has it in its name.
DELIMITER = ":"


class WithinType(Choice):
    """Between which events a window is measured."""

    FIRST_AND_LAST = "FIRST_AND_LAST"
    PREVIOUS_AND_CURRENT = "PREVIOUS_AND_CURRENT"


class Contiguity(enum.Enum):
    """Which events may stand between those of a pattern."""

    #: None.
    STRICT = "next"
    #: Those that do not fit.
    RELAXED = "followed by"
    #: All; each that fits is taken and passed over as well.
    RELAXED_ANY = "followed by any"
    #: The very next event must not fit.
    NOT_NEXT = "not next"
    #: No event must fit until what follows is found, or the window is over.
    NOT_FOLLOWED_BY = "not followed by"

    @property
    def is_negation(self) -> bool:
        return self in (Contiguity.NOT_NEXT, Contiguity.NOT_FOLLOWED_BY)


class Skip(enum.Enum):
    """The place from which a search goes on after a match."""

    NONE = "NONE"
    TO_NEXT = "TO_NEXT"
    PAST_LAST = "PAST_LAST"
    TO_FIRST = "TO_FIRST"
    TO_LAST = "TO_LAST"


@dataclass(frozen=True, slots=True)
class AfterMatchSkip:
    """Which other matches a match puts an end to: those that have begun before some event of it.

    Made by its methods; a :class:`Pattern` takes one where it begins.

    Examples
    --------
    >>> AfterMatchSkip.past_last_event()
    AfterMatchSkip(kind=<Skip.PAST_LAST: 'PAST_LAST'>, name=None, raises=False)
    """

    kind: Skip = Skip.NONE
    name: str | None = None
    raises: bool = False

    @staticmethod
    def no_skip() -> AfterMatchSkip:
        """Emit every match."""
        return AfterMatchSkip()

    @staticmethod
    def to_next() -> AfterMatchSkip:
        """Put an end to those that have begun with the same event."""
        return AfterMatchSkip(Skip.TO_NEXT)

    @staticmethod
    def past_last_event() -> AfterMatchSkip:
        """Put an end to those that have begun up to the last event of the match."""
        return AfterMatchSkip(Skip.PAST_LAST)

    @staticmethod
    def to_first(name: str) -> AfterMatchSkip:
        """Put an end to those that have begun before the first event of a name."""
        return AfterMatchSkip(Skip.TO_FIRST, name)

    @staticmethod
    def to_last(name: str) -> AfterMatchSkip:
        """Put an end to those that have begun before the last event of a name."""
        return AfterMatchSkip(Skip.TO_LAST, name)

    def raise_on_miss(self) -> AfterMatchSkip:
        """Stop the job at a match without an event of that name, or that begins with it."""
        if self.name is None:
            raise PatternError(
                f"{self.kind.value} cannot miss",
                why="it skips to no event of a name",
                what_to_do="leave raise_on_miss() out, or use to_first(name) or to_last(name)",
            )
        return replace(self, raises=True)


class Overflow(Choice):
    """The consequence when more partial matches of a key are open than may be."""

    #: The job stops.
    FAIL = "FAIL"
    #: Those that began first are given up.
    DISCARD_OLDEST = "DISCARD_OLDEST"
    #: Those that began last are given up.
    DISCARD_NEWEST = "DISCARD_NEWEST"


@dataclass(frozen=True, slots=True)
class OpenMatches:
    """How many partial matches of one key and pattern may be open, and what happens when there are more.

    Parameters
    ----------
    most
        From 1.

    Raises
    ------
    PatternError
        It is no such number, or `overflow` none of :class:`Overflow`.
    """

    most: int
    overflow: Overflow = Overflow.FAIL

    def __post_init__(self) -> None:
        if type(self.most) is not int or self.most < 1:
            raise PatternError(
                f"{self.most!r} partial matches may be open",
                why="it must be a whole number, 1 or more",
                what_to_do="give one, as OpenMatches(10_000)",
            )
        if not isinstance(self.overflow, Overflow):
            raise PatternError(
                f"{self.overflow!r} is to happen when more partial matches are open",
                why=closest(str(self.overflow), Overflow.__members__),
                what_to_do="give Overflow.FAIL, Overflow.DISCARD_OLDEST or Overflow.DISCARD_NEWEST",
            )


@dataclass(frozen=True, slots=True)
class Times:
    #: Numbers of times; `most` None: any number more.
    least: int = 1
    most: int | None = 1
    #: How much time may lie between two of them; None: any.
    window_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One name of a pattern, or a group of names, with its conditions and repetitions."""

    name: str
    contiguity: Contiguity
    #: The pattern in place of a condition; None for a name.
    group: Stages | None = None
    condition: Condition = ALWAYS
    until: Condition | None = None
    #: None for what comes once.
    times: Times | None = None
    #: Which events may stand between its own.
    inner: Contiguity = Contiguity.RELAXED
    is_optional: bool = False
    is_greedy: bool = False
    #: From the pattern's first event to its last; from the event before to this one.
    first_to_last_ms: int | None = None
    from_previous_ms: int | None = None

    @property
    def is_loop(self) -> bool:
        return self.times is not None and self.times.most is None

    def __str__(self) -> str:
        return f"'{self.name}'" if self.group is None else f"the group {self.group.names}"


@dataclass(frozen=True, slots=True)
class Stages:
    """Stages in their order, and what a match puts an end to: all that is compiled."""

    stages: tuple[Stage, ...]
    skip: AfterMatchSkip = AfterMatchSkip()

    @property
    def names(self) -> list[str]:
        """Names in their order, with those of groups."""
        return [stage.name for stage in self.all_stages() if stage.group is None]

    def all_stages(self) -> Iterator[Stage]:
        """Yield the stages in their order; a group, and then what is in it."""
        for stage in self.stages:
            yield stage
            if stage.group is not None:
                yield from stage.group.all_stages()
