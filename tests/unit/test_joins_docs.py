"""The examples of docs/joins.md and of the modules about joins and aggregates do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from flinkish_spark import aggregates
from flinkish_spark.joins import functions, interval, lookup, temporal, window
from flinkish_spark.operators import (
    list_state,
    stored_elements,
    tagged_union,
    value_folds,
    vectorized_aggregates,
)
from flinkish_spark.testing import broadcast_harness

PAGE = Path(__file__).resolve().parents[2] / "docs" / "joins.md"
FLAGS = doctest.NORMALIZE_WHITESPACE
MODULES = [
    aggregates,
    functions,
    interval,
    lookup,
    temporal,
    window,
    list_state,
    stored_elements,
    tagged_union,
    value_folds,
    vectorized_aggregates,
    broadcast_harness,
]


def test_the_examples_on_the_page_do_what_they_say() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 12
    example = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("module", MODULES, ids=lambda one: one.__name__)
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    found = doctest.testmod(module, optionflags=FLAGS, extraglobs=vars(module))
    assert found.attempted > 0
    assert found.failed == 0
