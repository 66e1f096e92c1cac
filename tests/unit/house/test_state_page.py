"""The examples of docs/state.md that need no Spark do what they say."""

from __future__ import annotations

import doctest

from tests.support.pages import check_page

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def test_the_examples_on_the_page_do_what_they_say() -> None:
    check_page("state.md", at_least=4, flags=FLAGS)
