"""Reading what a DataFrame function does, where there is no plan to read."""

from __future__ import annotations

from typing import Any

from flinkish_spark.bridge.plans import NotRowByRow, row_plan


class Remote:
    """A DataFrame of a session that has no JVM of its own."""


def test_without_a_jvm_of_its_own_nothing_is_known_to_be_by_row() -> None:
    frame: Any = Remote()
    found = row_plan(frame, frame, ("user",), "made_")
    assert isinstance(found, NotRowByRow) and "the session has no JVM of its own" in found.what
