"""Row patterns that come and go while a job runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flinkish_spark import OutputTag
from flinkish_spark.cep import MATCH_FIELDS, REFUSED_PATTERNS, ROW_PATTERNS, RowPatternsFromStream
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import DdlError

FIELDS = "cell STRING, value LONG"
RISING = "MEASURES LAST(B.value) AS top PATTERN (A B+) DEFINE B AS value > PREV(value)"
FALLING = "MEASURES LAST(B.value) AS bottom PATTERN (A B+) DEFINE B AS value < PREV(value)"
PAIR = "MEASURES MATCH_NUMBER() AS n PATTERN (A B)"


LATE = OutputTag("late", FIELDS)


def started(late: OutputTag | None = None, **more: Any) -> ProgramHarness:
    def program(readings: Any, patterns: Any) -> Any:
        connected = readings.key_by("cell").connect(patterns.broadcast(ROW_PATTERNS))
        return connected.process(RowPatternsFromStream(FIELDS, late), output=MATCH_FIELDS, uid="found")

    settings = {"side_outputs": [REFUSED_PATTERNS, LATE], "parallelism": 2, **more}
    return ProgramHarness(program, FIELDS, "name STRING, text STRING", **settings)


def read(harness: ProgramHarness, *values: int, at: int, cell: str = "u") -> None:
    """Push readings, one a millisecond, and let the watermark reach the last of them."""
    harness.push_all([((cell, value), at + number) for number, value in enumerate(values)])
    harness.watermark(at + len(values) - 1)


def found(harness: ProgramHarness) -> list[tuple[Any, ...]]:
    return [(*row[:3], json.loads(row.measures)) for row in harness.take().rows]


def test_a_pattern_is_searched_for_from_the_next_rows_on() -> None:
    harness = started()
    read(harness, 1, 2, at=0)
    harness.push(("rising", RISING), source=1)
    read(harness, 3, 4, 1, at=2)
    # 1 and 2 came before anybody looked for it.
    assert found(harness) == [("rising", 2, 3, {"top": 4})]


def test_another_text_goes_on_with_the_rows_that_wait() -> None:
    harness = started()
    harness.push(("trend", RISING), source=1)
    read(harness, 9, 1, 2, 3, at=0)
    assert found(harness) == []
    harness = started(restore=harness.snapshot(), parallelism=3)
    harness.push(("trend", FALLING), source=1)
    # 9 was passed over; with 1 a rise has begun, of which the new text knows nothing.
    read(harness, 2, 1, 5, at=4)
    assert found(harness) == [("trend", 3, 5, {"bottom": 1})]


def test_several_patterns_share_the_rows_of_a_key() -> None:
    harness = started()
    for name, text in (("rising", RISING), ("falling", FALLING), ("pair", PAIR)):
        harness.push((name, text), source=1)
    read(harness, 1, 2, 1, 2, at=0)
    # The last rise may go on.
    assert found(harness) == [
        ("falling", 1, 2, {"bottom": 1}),
        ("pair", 0, 1, {"n": 1}),
        ("pair", 2, 3, {"n": 2}),
        ("rising", 0, 1, {"top": 2}),
    ]
    harness.end_of_input()
    assert found(harness) == [("rising", 2, 3, {"top": 2})]


def test_late_rows_go_out_or_are_counted() -> None:
    for late, side in (LATE, [("u", 7)]), (None, []):
        harness = started(late)
        harness.push(("pair", PAIR), source=1)
        read(harness, 1, 2, at=4)
        harness.push_all([(("u", 7), 5)])
        output = harness.take()
        assert [tuple(row) for row in output.side.get("late", [])] == side
        assert output.counts == {"matches": 1, **({} if side else {"late_records_dropped": 1})}


def test_a_pattern_without_a_text_is_gone() -> None:
    harness = started()
    harness.push(("pair", PAIR), source=1)
    read(harness, 1, at=0)
    harness.push(("pair", None), source=1)
    harness.push(("other", None), source=1)
    read(harness, 2, 3, 4, at=1)
    assert found(harness) == []
    harness.push(("pair", PAIR), source=1)
    read(harness, 5, 6, at=4)
    # It begins anew, and so do its numbers.
    assert found(harness) == [("pair", 4, 5, {"n": 1})]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("PATTERN (A", "parentheses"),
        ("PATTERN (A) DEFINE A AS nothing > 1", "There is no field nothing"),
        ("ORDER BY value PATTERN (A)", "leave these out"),
        ("ALL ROWS PER MATCH PATTERN (A)", "leave these out"),
    ],
)
def test_a_text_that_cannot_be_is_told_and_changes_nothing(text: str, why: str) -> None:
    harness = started(parallelism=1)
    harness.push(("pair", PAIR), source=1)
    harness.push(("pair", text), source=1)
    (told,) = harness.take().side["refused_patterns"]
    assert told[:2] == ("pair", text) and why in told.why
    read(harness, 1, 2, at=0)
    assert found(harness) == [("pair", 0, 1, {"n": 1})]


def test_late_rows_are_dropped_and_a_list_of_fields_is_asked_for() -> None:
    harness = started()
    harness.push(("pair", PAIR), source=1)
    read(harness, 1, at=5)
    harness.push(("u", 7), 5)
    read(harness, 2, at=6)
    assert found(harness) == [("pair", 5, 6, {"n": 1})]
    with pytest.raises(DdlError, match="no list of fields"):
        RowPatternsFromStream("LONG")


def test_of_a_key_without_rows_nothing_is_kept() -> None:
    harness = started()
    harness.push(("rise", "PATTERN (A B) DEFINE A AS value > 0, B AS value > A.value"), source=1)
    read(harness, 1, 2, at=0)
    assert len(found(harness)) == 1
    read(harness, 0, at=0, cell="v")
    assert not harness.entries("rows") and harness.timer_count() == 0
