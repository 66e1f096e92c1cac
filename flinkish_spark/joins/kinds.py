"""Words that joins share."""

from __future__ import annotations

import enum


class JoinType(enum.Enum):
    """Which elements come out without a partner: none, those of one side, or those of both."""

    INNER = "INNER"
    LEFT = "LEFT"
    RIGHT = "RIGHT"
    FULL = "FULL"

    @property
    def keeps_left(self) -> bool:
        """Whether a left element without a partner comes out, with None for the right one."""
        return self in (JoinType.LEFT, JoinType.FULL)

    @property
    def keeps_right(self) -> bool:
        """Whether a right element without a partner comes out, with None for the left one."""
        return self in (JoinType.RIGHT, JoinType.FULL)


class Side(enum.IntEnum):
    """Which input; its number is that of the input, and is stored."""

    LEFT = 0
    RIGHT = 1


class Bound(enum.Enum):
    """Whether a bound belongs to the interval that it bounds."""

    INCLUSIVE = "INCLUSIVE"
    EXCLUSIVE = "EXCLUSIVE"
