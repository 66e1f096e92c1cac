"""The examples of docs/cep.md and of the modules about patterns do what they say."""

from __future__ import annotations

import doctest

import pytest

from flinkish_spark.cep import pattern, stages
from flinkish_spark.functions import pattern_rules, patterns, row_patterns
from tests.support.pages import check_page

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def test_the_examples_on_the_page_do_what_they_say() -> None:
    check_page("cep.md", at_least=8, flags=FLAGS)


@pytest.mark.parametrize(
    "module", [pattern, stages, patterns, pattern_rules, row_patterns], ids=lambda one: one.__name__
)
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    found = doctest.testmod(module, optionflags=FLAGS, extraglobs=vars(module))
    assert found.attempted > 0
    assert found.failed == 0
