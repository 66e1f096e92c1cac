"""The examples of docs/async.md and of the module about async functions do what they say."""

from __future__ import annotations

import doctest

from tests.support.pages import check_page


def test_the_examples_on_the_page_do_what_they_say() -> None:
    check_page("async.md", at_least=4, flags=doctest.NORMALIZE_WHITESPACE)
