"""Versions of Spark: which one may go on with what another has left."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.versions import SparkMinor, VersionStep, find_version_step


@pytest.mark.parametrize(
    ("text", "minor"),
    [("4.2.0", "4.2"), ("4.2", "4.2"), ("4.10.1", "4.10"), ("4.2.0-SNAPSHOT", "4.2"), ("4.3.0.dev1", "4.3")],
)
def test_only_major_and_minor_count(text: str, minor: str) -> None:
    assert str(SparkMinor.of(text)) == minor


@pytest.mark.parametrize("text", ["", "4", "four.two", "v4.2", "4.12345"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no version of Spark"):
        SparkMinor.of(text)


def test_minors_are_ordered_by_number_not_by_name() -> None:
    assert SparkMinor.of("4.9.3") < SparkMinor.of("4.10.0") < SparkMinor.of("5.0.0")


@pytest.mark.parametrize(
    ("running", "before", "step"),
    [
        ("4.2", [], VersionStep.NONE),
        ("4.2", ["4.2"], VersionStep.NONE),
        ("4.3", ["4.2"], VersionStep.FORWARD),
        ("4.3", ["4.2", "4.3"], VersionStep.NONE),
        ("4.2", ["4.2", "4.3"], VersionStep.BACK),
        ("4.2", ["4.3"], VersionStep.BACK),
        ("4.2", ["3.5"], VersionStep.ANOTHER_MAJOR),
        ("4.2", ["4.2", "5.0"], VersionStep.ANOTHER_MAJOR),
    ],
)
def test_which_step_a_start_is(running: str, before: list[str], step: VersionStep) -> None:
    assert find_version_step(SparkMinor.of(running), map(SparkMinor.of, before)) is step
