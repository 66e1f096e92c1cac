"""The examples of docs/cep.md and of the modules about patterns do what they say."""

from __future__ import annotations

import doctest

from tests.support.pages import check_page

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def test_the_examples_on_the_page_do_what_they_say() -> None:
    check_page("cep.md", at_least=8, flags=FLAGS)
