"""Whole numbers that are checked, and limits that may be absent.

"No limit" is a value of its own, :data:`UNLIMITED`: no number means it, and None does not either.
"""

from __future__ import annotations

import enum
from typing import Any


class Unlimited(enum.Enum):
    """There is no limit. One value, so that it can stand beside `int` in an annotation."""

    UNLIMITED = "UNLIMITED"


UNLIMITED = Unlimited.UNLIMITED

#: How many at most; a count equal to the limit is still allowed.
Limit = int | Unlimited


def exceeds(count: int, limit: Limit) -> bool:
    """Whether `count` is above `limit`; never, if there is none.

    Examples
    --------
    >>> exceeds(3, 3), exceeds(4, 3), exceeds(4, UNLIMITED)
    (False, True, False)
    """
    return isinstance(limit, int) and count > limit


def checked_whole(name: str, value: Any, least: int) -> int:
    """Return `value` if it is a whole number of at least `least`, else raise ValueError.

    Examples
    --------
    >>> checked_whole("delay_ms", 5, least=0)
    5
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return value


def checked_limit(name: str, value: Any, least: int) -> Limit:
    """Return `value` if it is UNLIMITED or a whole number of at least `least`, else raise ValueError."""
    return value if isinstance(value, Unlimited) else checked_whole(name, value, least)


def checked_factor(name: str, value: Any, least: float, most: float) -> float:
    """Return `value` if it is a number from `least` to `most`, else raise ValueError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is refused, too.
    if not is_number or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}, got {value!r}")
    return float(value)
