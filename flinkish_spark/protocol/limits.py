"""Values that are checked when a setting is made: whole numbers, factors, choices, limits that may be absent.

"No limit" is a value of its own, :data:`UNLIMITED`: no number means it, and None does not either.
Nothing is converted: True is no number, 5.0 no whole number, and the name of a choice no choice.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

_EnumT = TypeVar("_EnumT", bound=enum.Enum)


class Unlimited(enum.Enum):
    """There is no limit. One value, so that it can stand beside `int` in an annotation."""

    UNLIMITED = "UNLIMITED"


UNLIMITED = Unlimited.UNLIMITED

#: How many at most; a count equal to the limit is still allowed.
Limit = int | Unlimited

#: The longest time that a setting may name: 365 days. More is a slip, and clocks cannot wait for any number.
MOST_MS = 365 * 24 * 3_600_000


class UnusableValueError(ValueError):
    """A setting has a value that it cannot have."""

    def __init__(self, name: str, value: object, wanted: str, choices: tuple[str, ...] = ()) -> None:
        super().__init__(name, value, wanted, choices)
        self.name, self.value, self.wanted, self.choices = name, value, wanted, choices

    def __str__(self) -> str:
        return f"{self.name} must be {self.wanted}, got {self.value!r}"


def exceeds(count: int, limit: Limit) -> bool:
    return isinstance(limit, int) and count > limit


def checked_whole(name: str, value: Any, least: int, most: Limit = UNLIMITED) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or exceeds(value, most):
        raise UnusableValueError(name, value, _whole(least, most))
    return value


def checked_limit(name: str, value: Any, least: int) -> Limit:
    if isinstance(value, Unlimited):
        return value
    try:
        return checked_whole(name, value, least)
    except UnusableValueError as wrong:
        raise UnusableValueError(name, value, f"{wrong.wanted}, or UNLIMITED") from None


def checked_factor(name: str, value: Any, least: float, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is refused, too.
    if not is_number or not least <= value <= most:
        raise UnusableValueError(name, value, f"a number from {least} to {most}")
    return float(value)


def checked_choice(name: str, value: Any, choices: type[_EnumT]) -> _EnumT:
    if not isinstance(value, choices):
        names = tuple(f"{choices.__name__}.{one.name}" for one in choices)
        raise UnusableValueError(name, value, f"one of {', '.join(names)}", names)
    return value


def _whole(least: int, most: Limit) -> str:
    return f"a whole number from {least} to {most}" if isinstance(most, int) else f"a whole number >= {least}"
