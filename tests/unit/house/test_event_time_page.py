"""The examples of docs/event-time.md, run as they stand."""

from __future__ import annotations

from tests.support.pages import check_page


def test_the_examples_of_the_page_run() -> None:
    check_page("event-time.md", at_least=2)
