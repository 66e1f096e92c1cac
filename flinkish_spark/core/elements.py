"""Words that operators share: times, timers, side outputs."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyspark.sql import types as T

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.event_time import MAX_WATERMARK_MS as MAX_WATERMARK_MS
from flinkish_spark.protocol.event_time import MIN_WATERMARK_MS as MIN_WATERMARK_MS

#: A declaration of row fields: DDL, a StructType, a dataclass, a NamedTuple class, a tuple with hints.
OutputType = str | T.StructType | type[Any] | types.GenericAlias

#: Names of what operators count: late records without a side output, and matches of patterns.
LATE_RECORDS_DROPPED, MATCHES = "late_records_dropped", "matches"
TIMED_OUT, DISCARDED = "partial_matches_timed_out", "partial_matches_discarded"
#: Counts of partial matches that a call has opened, and of those that it has closed.
OPENED, CLOSED = "partial_matches_opened", "partial_matches_closed"
#: How many came with the first micro-batch of a log: from a savepoint, or from another number of partitions.
RESTORED = "partial_matches_restored"


class TimeDomain(Choice):
    """Which clock a timer goes by."""

    EVENT_TIME = "EVENT_TIME"
    PROCESSING_TIME = "PROCESSING_TIME"

    #: Enum's own is a function in Python, and every call about a timer looks its queue up by its clock.
    __hash__ = object.__hash__


class Timer(NamedTuple):
    """A call that a key asked for; unique by all three."""

    time_ms: int
    key: Any
    #: A window, or None where a function has set it.
    namespace: Any


@dataclass(frozen=True, slots=True)
class OutputTag:
    """Names a side output and its type.

    Parameters
    ----------
    name
        Unique within the operator that emits to it.
    output
        Fields of the rows: DDL, a StructType, a dataclass or a NamedTuple class.

    Examples
    --------
    >>> OutputTag("late", "user STRING, amount LONG").name
    'late'
    """

    name: str
    output: OutputType


def tag_name(tag: OutputTag) -> str:
    try:
        return tag.name
    except AttributeError:
        raise TypeError(
            f"output() got a {type(tag).__name__} as its tag; give it the OutputTag that get_side_output() "
            "is called with: ctx.output(tag, row)"
        ) from None


@dataclass(frozen=True, slots=True)
class Progress:
    #: The watermark of the last micro-batch.
    watermark_before_ms: int
    #: The watermark of this micro-batch; never less.
    watermark_ms: int
    processing_time_ms: int
    #: The watermark after the elements of the micro-batch, if it is greater.
    drained_to_ms: int = MIN_WATERMARK_MS
    #: Up to when processing-time timers fire; None: up to `processing_time_ms`, as in Flink's harnesses.
    #: In a job, as in Flink, timers of that very millisecond wait, since it may bring more elements.
    processing_timers_to_ms: int | None = None

    @property
    def limits_ms(self) -> dict[TimeDomain, int]:
        return {
            TimeDomain.EVENT_TIME: max(self.watermark_ms, self.drained_to_ms),
            TimeDomain.PROCESSING_TIME: self.processing_limit_ms,
        }

    @property
    def processing_limit_ms(self) -> int:
        limit_ms = self.processing_timers_to_ms
        return self.processing_time_ms if limit_ms is None else limit_ms
