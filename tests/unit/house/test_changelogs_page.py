"""The examples of docs/changelogs.md and of its modules do what they say."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from flinkish_spark.core import changelogs
from flinkish_spark.operators import changelogs as operators
from tests.support.pages import check_page


def test_the_examples_of_the_page_run() -> None:
    check_page("changelogs.md", at_least=2)


@pytest.mark.parametrize("module", [changelogs, operators])
def test_the_examples_in_the_modules_do_what_they_say(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
