"""The examples in the modules of formats do what they say."""

from __future__ import annotations

import doctest

import pytest

from flinkish_spark.connectors.formats import json_schema, protobuf, registry
from flinkish_spark.core import formats


@pytest.mark.parametrize(
    "module",
    [formats, json_schema, protobuf, registry],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    found = doctest.testmod(module, extraglobs=vars(module))
    assert found.attempted and not found.failed
