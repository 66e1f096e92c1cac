"""The examples of docs/sources.md and of the source modules do what they say."""

from __future__ import annotations

from tests.support.pages import check_page


def test_the_examples_of_the_page_run() -> None:
    check_page("sources.md", at_least=8)
