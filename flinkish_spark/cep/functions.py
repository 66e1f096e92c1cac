"""User functions on matches of patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.cep.expressions import Expression, Frame
from flinkish_spark.core.elements import OutputTag
from flinkish_spark.functions.keyed import RichFunction

#: The events of a match by name in the pattern, in the order of the names' first events.
Match = Mapping[str, Sequence[Any]]


class PatternContext(Protocol):
    """Given to a function for one match; valid only inside the call."""

    def get_current_key(self) -> Any:
        """Return the key: a scalar for one key column, else a tuple; 0 for a stream without a key."""

    def pattern_name(self) -> str:
        """Return the name of the pattern if there are several, else an empty text."""

    def pattern_version(self) -> int:
        """Return the version of the pattern's rule; 0 for a pattern of the program."""

    def timestamp(self) -> int:
        """Return the time of emitted rows, in milliseconds.

        For a match: the time of the event that completed it, or when a forbidden event could no longer come.
        For a timed-out partial match: the end of its window.
        """

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row, with the time of the match, to a side output."""


class PatternProcessFunction(RichFunction, ABC):
    """A function that makes rows of matches; `open` gets the same as in any keyed function, also keyed state.

    Examples
    --------
    >>> class Alarm(PatternProcessFunction):
    ...     def process_match(self, match, ctx):
    ...         yield ctx.get_current_key(), match["second"][0].value
    """

    @abstractmethod
    def process_match(self, match: Match, ctx: PatternContext) -> Iterable[Any] | None:
        """Return the rows of a match; `yield` emits.

        Parameters
        ----------
        match
            By name in the pattern: the events of the match, as named tuples, in order. A name without events
            is missing.

        Notes
        -----
        Called once per match of each committed micro-batch.
        """

    def process_timed_out_match(self, match: Match, ctx: PatternContext) -> Iterable[Any] | None:
        """Return the rows of a partial match whose window has ended; typically it goes to a side output.

        Parameters
        ----------
        match
            As for `process_match`, with the names that have events so far.
        """
        return None


class MeasuredMatches(PatternProcessFunction):
    def __init__(
        self, text: str, lost: PatternProcessFunction | None, measures: Sequence[Expression] = ()
    ) -> None:
        self.text, self.lost, self.measures = text, lost, tuple(measures)

    def process_match(self, match: Match, ctx: PatternContext) -> Iterable[Any]:
        frame = Frame.of(match)
        return (tuple(one.value(frame, None) for one in self.measures),)

    def process_timed_out_match(self, match: Match, ctx: PatternContext) -> Iterable[Any] | None:
        return None if self.lost is None else self.lost.process_timed_out_match(match, ctx)


def tells_of_lost(function: PatternProcessFunction) -> bool:
    if isinstance(function, MeasuredMatches):
        return function.lost is not None
    kind = type(function).process_timed_out_match
    return kind is not PatternProcessFunction.process_timed_out_match


def open_matches(stored: pa.ListArray) -> int:
    """Return the number of open partial matches in stored lists by key, without held ones."""
    rows = stored.flatten()
    is_held = pc.fill_null(rows.field(2), False)
    return int(pc.sum(pc.and_not(rows.field(1).is_valid(), is_held)).as_py() or 0)
