"""The examples of docs/joins.md and of the modules about joins and aggregates do what they say."""

from __future__ import annotations

import doctest

from tests.support.pages import check_page

FLAGS = doctest.NORMALIZE_WHITESPACE


def test_the_examples_on_the_page_do_what_they_say() -> None:
    check_page("joins.md", at_least=10, flags=FLAGS)
