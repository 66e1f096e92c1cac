"""Words to choose from, and lengths of time as milliseconds, timedelta or text."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from flinkish_spark.protocol.choices import Choice, closest
from flinkish_spark.protocol.durations import milliseconds
from flinkish_spark.protocol.limits import UnusableValueError


class Policy(Choice):
    FAIL = "fail"
    DROP = "drop"


def test_a_misspelt_member_says_which_one_was_meant() -> None:
    assert Policy.DROP.value == "drop" and closest("DORP", Policy.__members__) == "Did you mean 'DROP'?"
    with pytest.raises(
        AttributeError, match=r"^Policy has no DORP\. Did you mean 'DROP'\? To do: choose from"
    ):
        Policy.DORP  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Policy has no banana\. To do: choose from FAIL, DROP\.$"):
        Policy.banana  # noqa: B018
    with pytest.raises(AttributeError, match=r"^_nothing$"):
        Policy._nothing  # noqa: B018


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (7, 7), (None, None), (timedelta(seconds=2.5), 2_500), ("10 seconds", 10_000), ("5 min", 300_000),
        ("1h 30 min", 5_400_000), ("500ms", 500), ("-5 min", -300_000), ("1.5 s", 1_500),
        ("2 days", 172_800_000),
    ],
)  # fmt: skip
def test_lengths_of_time_are_milliseconds(given: Any, found: Any) -> None:
    assert milliseconds("timeout_ms", given) == found


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("10", "a whole number of milliseconds"),
        ("soon", "a whole number of milliseconds"),
        ("10 secnds", r"Did you mean 'seconds'\?$"),
        ("10 bananas", '"500 ms"$'),
        ("0.5 ms", "whole milliseconds$"),
        (timedelta(microseconds=1), "whole milliseconds$"),
    ],
)
def test_texts_that_are_no_length_of_time_are_refused(given: Any, wanted: str) -> None:
    with pytest.raises(UnusableValueError) as refused:
        milliseconds("timeout_ms", given)
    assert refused.value.name == "timeout_ms" and refused.value.value == given
    assert re.search(wanted, refused.value.wanted)
