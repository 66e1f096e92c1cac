"""The examples of docs/joins.md and of the modules about joins and aggregates do what they say."""

from __future__ import annotations

import doctest

import pytest

from flinkish_spark.functions import aggregates
from flinkish_spark.joins import lookup
from flinkish_spark.joins import spec as functions
from flinkish_spark.joins import spec as interval
from flinkish_spark.joins import spec as temporal
from flinkish_spark.joins import spec as window
from flinkish_spark.operators import aggregates as value_folds
from flinkish_spark.operators import columnar_aggregates as vectorized_aggregates
from flinkish_spark.operators import joins as tagged_union
from flinkish_spark.state import operator_state as list_state
from flinkish_spark.testing import _operator_harness as broadcast_harness
from flinkish_spark.types import rows as stored_elements
from tests.support.pages import check_page

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
    check_page("joins.md", at_least=12, flags=FLAGS)


@pytest.mark.parametrize("module", MODULES, ids=lambda one: one.__name__)
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    found = doctest.testmod(module, optionflags=FLAGS, extraglobs=vars(module))
    assert found.attempted > 0
    assert found.failed == 0
