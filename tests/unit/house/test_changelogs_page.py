"""The examples of docs/changelogs.md and of its modules do what they say."""

from __future__ import annotations

from tests.support.pages import check_page


def test_the_examples_of_the_page_run() -> None:
    check_page("changelogs.md", at_least=2)
