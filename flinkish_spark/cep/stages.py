"""The parts of a pattern: its stages in order, and its skip strategy."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from flinkish_spark.cep.conditions import ALWAYS, Condition
from flinkish_spark.core.errors import PatternError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.protocol.choices import Choice

#: Separates the name of a state from its number; not allowed in names of stages.
DELIMITER = ":"


class WithinType(Choice):
    """The events between which a window is measured."""

    FIRST_AND_LAST = "FIRST_AND_LAST"
    PREVIOUS_AND_CURRENT = "PREVIOUS_AND_CURRENT"


class Contiguity(enum.Enum):
    """The contiguity of a stage: which events may come between the previous stage's event and its own."""

    #: None.
    STRICT = "next"
    #: Only events that do not fit.
    RELAXED = "followed by"
    #: All events; one that fits is both taken and ignored.
    RELAXED_ANY = "followed by any"
    #: The next event must not fit.
    NOT_NEXT = "not next"
    #: No event may fit until the next stage's event comes, or the window is over.
    NOT_FOLLOWED_BY = "not followed by"

    @property
    def is_negation(self) -> bool:
        return self in (Contiguity.NOT_NEXT, Contiguity.NOT_FOLLOWED_BY)


class Skip(enum.Enum):
    """The position from which the search continues after a match."""

    NONE = "NONE"
    TO_NEXT = "TO_NEXT"
    PAST_LAST = "PAST_LAST"
    TO_FIRST = "TO_FIRST"
    TO_LAST = "TO_LAST"


@dataclass(frozen=True, slots=True)
class AfterMatchSkip:
    """The skip strategy: a match discards other matches that began before one of its events.

    Created by its methods, and given to `Pattern.begin`.

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
        """Discard other matches that begin with the same event."""
        return AfterMatchSkip(Skip.TO_NEXT)

    @staticmethod
    def past_last_event() -> AfterMatchSkip:
        """Discard other matches that begin up to the last event of the match."""
        return AfterMatchSkip(Skip.PAST_LAST)

    @staticmethod
    def to_first(name: str) -> AfterMatchSkip:
        """Discard other matches that begin before the first event of a name."""
        return AfterMatchSkip(Skip.TO_FIRST, name)

    @staticmethod
    def to_last(name: str) -> AfterMatchSkip:
        """Discard other matches that begin before the last event of a name."""
        return AfterMatchSkip(Skip.TO_LAST, name)

    def raise_on_miss(self) -> AfterMatchSkip:
        """Fail the job at a match that has no event of the name, or begins with it."""
        if self.name is None:
            raise PatternError(
                f"{self.kind.value} cannot miss",
                what_to_do="leave raise_on_miss() out, or use to_first(name) or to_last(name)",
            )
        return replace(self, raises=True)


class Overflow(Choice):
    """The reaction to more open partial matches of a key than allowed."""

    #: Fail the job.
    FAIL = "FAIL"
    #: Discard those that began first.
    DISCARD_OLDEST = "DISCARD_OLDEST"
    #: Discard those that began last.
    DISCARD_NEWEST = "DISCARD_NEWEST"


@dataclass(frozen=True, slots=True)
class OpenMatches:
    """The limit of open partial matches of one key and pattern, and the reaction to more.

    Parameters
    ----------
    most
        From 1.

    """

    most: Annotated[int, Range(1)]
    overflow: Overflow = Overflow.FAIL

    def __post_init__(self) -> None:
        check_fields(self, most="give one, as OpenMatches(10_000)")


@dataclass(frozen=True, slots=True)
class Times:
    #: The numbers of repetitions; `most` None: unlimited.
    least: int = 1
    most: int | None = 1
    #: Maximum time between two of them; None: unlimited.
    window_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One name of a pattern, or a group of names, with its conditions and repetitions."""

    name: str
    contiguity: Contiguity
    #: The pattern of a group; None for a name.
    group: Stages | None = None
    condition: Condition = ALWAYS
    until: Condition | None = None
    #: None for a stage that comes once.
    times: Times | None = None
    #: Contiguity between its repetitions.
    inner: Contiguity = Contiguity.RELAXED
    is_optional: bool = False
    is_greedy: bool = False
    #: Windows: from the pattern's first event to its last; from the previous event to this one.
    first_to_last_ms: int | None = None
    from_previous_ms: int | None = None

    @property
    def is_loop(self) -> bool:
        return self.times is not None and self.times.most is None

    def __str__(self) -> str:
        return f"'{self.name}'" if self.group is None else f"the group {self.group.names}"


@dataclass(frozen=True, slots=True)
class Stages:
    """Stages in order, and the skip strategy: the input of the compiler."""

    stages: tuple[Stage, ...]
    skip: AfterMatchSkip = AfterMatchSkip()

    @property
    def names(self) -> list[str]:
        """Names of the stages in order, with those inside groups."""
        return [stage.name for stage in self.all_stages() if stage.group is None]

    def all_stages(self) -> Iterator[Stage]:
        """Yield the stages in order, each group before its own stages."""
        for stage in self.stages:
            yield stage
            if stage.group is not None:
                yield from stage.group.all_stages()
