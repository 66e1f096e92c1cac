"""Checks of a setting's values: whole numbers, factors, choices, limits.

"No limit" is a value of its own, :data:`UNLIMITED`; neither a number nor None means it. Nothing is
converted: True is not a number, 5.0 is not a whole number, and a choice's name is not a choice.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

_EnumT = TypeVar("_EnumT", bound=enum.Enum)


class NoLimit(enum.Enum):
    """Type of :data:`UNLIMITED`, for annotations such as `int | NoLimit`."""

    UNLIMITED = "UNLIMITED"


UNLIMITED = NoLimit.UNLIMITED

#: An inclusive limit: a count equal to it is allowed.
Limit = int | NoLimit

#: The longest time of a setting: 365 days. More is a slip, and a clock cannot wait for any time.
MOST_MS = 365 * 24 * 3_600_000


class UnusableValueError(ValueError):
    def __init__(self, name: str, value: object, wanted: str, choices: tuple[str, ...] = ()) -> None:
        super().__init__(name, value, wanted, choices)
        self.name, self.value, self.wanted, self.choices = name, value, wanted, choices

    def __str__(self) -> str:
        return f"{self.name} must be {self.wanted}, got {self.value!r}"


def exceeds(count: int, limit: Limit) -> bool:
    return isinstance(limit, int) and count > limit


def check_whole(name: str, value: Any, least: int, most: Limit = UNLIMITED) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or exceeds(value, most):
        raise UnusableValueError(name, value, _describe_range(least, most))
    return value


def check_limit(name: str, value: Any, least: int, most: Limit = UNLIMITED) -> Limit:
    if isinstance(value, NoLimit):
        return value
    try:
        return check_whole(name, value, least, most)
    except UnusableValueError as wrong:
        raise UnusableValueError(name, value, f"{wrong.wanted}, or UNLIMITED") from None


def check_factor(name: str, value: Any, least: float, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, so it is refused.
    if not is_number or not least <= value <= most:
        raise UnusableValueError(name, value, f"a number from {least} to {most}")
    return float(value)


def check_choice(name: str, value: Any, choices: type[_EnumT]) -> _EnumT:
    if not isinstance(value, choices):
        names = tuple(f"{choices.__name__}.{one.name}" for one in choices)
        raise UnusableValueError(name, value, f"one of {', '.join(names)}", names)
    return value


def _describe_range(least: int, most: Limit) -> str:
    return f"a whole number from {least} to {most}" if isinstance(most, int) else f"a whole number >= {least}"
