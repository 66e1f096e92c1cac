"""Words that operators share: times, timers, side outputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flinkish_spark.runtime.hinted_types import OutputType

#: Before any watermark was seen: nothing is late.
MIN_WATERMARK_MS = -(1 << 63)
#: No element comes any more: the end of a bounded input. Fires every event-time timer.
MAX_WATERMARK_MS = (1 << 63) - 1


class TimeDomain(enum.Enum):
    """Which clock a timer goes by."""

    EVENT_TIME = "EVENT_TIME"
    PROCESSING_TIME = "PROCESSING_TIME"

    #: Enum's own is a function in Python, and every call about a timer looks its queue up by its clock.
    __hash__ = object.__hash__


class Timer(NamedTuple):
    """A call that a key asked for; unique by all three.

    `namespace` tells a key's timers apart: a window, or None where a function has set it.
    """

    time_ms: int
    key: Any
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
    """Return the name of the side output that a function emits to.

    Raises
    ------
    TypeError
        It is no OutputTag.
    """
    try:
        return tag.name
    except AttributeError:
        raise TypeError(
            f"output() got a {type(tag).__name__} as its tag; give it the OutputTag that get_side_output() "
            "is called with: ctx.output(tag, row)"
        ) from None
