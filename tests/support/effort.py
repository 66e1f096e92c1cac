"""How much the tests with drawn data draw: a share of it in `make test`, all of it in `make nightly`.

A property is tried both times; what is left to the night are further examples of it. What is drawn comes from
seeds, so that every run of `make test` on one commit does the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

#: Of what the night does, `make test` does one in so many.
SHARE = 5
#: Whether this is the night; set once by tests/conftest.py, before a file of tests is imported.
is_night = False


def examples(full: int, least: int = 1) -> int:
    """Return how often to draw, or how long to go on: `full` at night.

    Parameters
    ----------
    least
        What a day has at least: a test that looks for something must find it.
    """
    return full if is_night else max(least, math.ceil(full / SHARE))


def seeds(full: int, least: int = 1) -> list[Any]:
    """Return parameters for a test per seed, of which the night runs `full`."""
    by_day = max(least, math.ceil(full / SHARE))
    return [n if n < by_day else pytest.param(n, marks=pytest.mark.nightly) for n in range(full)]


def stride(by_day: int) -> int:
    """Return the distance between places that are tried: by day one of a few, at night each."""
    return 1 if is_night else by_day


def points(count: int, by_day: int = 3) -> range:
    """Return the places at which something is to be cut off."""
    return range(0, count, stride(by_day))


def sampled(parameters: Iterable[Any], one_in: int) -> list[Any]:
    """Return parameters (or tuples) that are further cases of each other; one of so many is run by day."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.nightly)
        if number % one_in
        else one
        for number, one in enumerate(parameters)
    ]
