"""Lengths of time: each is a timedelta, which everything here takes."""

from __future__ import annotations

import datetime
from typing import Any


def _unit(name: str) -> Any:
    return classmethod(lambda cls, amount: cls(**{name: amount}))


class Duration(datetime.timedelta):
    """A length of time: ``Duration.of_seconds(5)``."""

    of_days, of_hours, of_minutes = _unit("days"), _unit("hours"), _unit("minutes")
    of_seconds, of_millis = _unit("seconds"), _unit("milliseconds")

    def to_milliseconds(self) -> int:
        return self // datetime.timedelta(milliseconds=1)


class Time:
    """A length of time by its older name: ``Time.seconds(5)``."""

    days, hours, minutes = Duration.of_days, Duration.of_hours, Duration.of_minutes
    seconds, milliseconds = Duration.of_seconds, Duration.of_millis
