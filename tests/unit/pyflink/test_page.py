"""The page of PyFlink programs lists what the tests of this folder run."""

from __future__ import annotations

from tests.support.pyflink_run import MARKS, PAGE, table


def test_the_page_lists_the_programs() -> None:
    """`python -m tests.support.pyflink_run` writes it."""
    assert f"{MARKS[0]}\n{table()}\n{MARKS[1]}" in PAGE.read_text(encoding="utf-8")
