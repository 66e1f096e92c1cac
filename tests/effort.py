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
    return sampled(range(full), least)


def sampled(parameters: Iterable[Any], least: int = 1) -> list[Any]:
    """Return parameters that are further cases of each other; the first of them are run by day, too."""
    found = list(parameters)
    by_day = max(least, math.ceil(len(found) / SHARE))
    return [
        one if number < by_day else pytest.param(one, marks=pytest.mark.nightly)
        for number, one in enumerate(found)
    ]
