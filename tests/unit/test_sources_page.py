"""The examples of docs/sources.md and of the source modules do what they say."""

from __future__ import annotations

import doctest

import pytest

from flinkish_spark.sources import (
    collection,
    files,
    generated,
    generator,
    hybrid,
    kafka_ends,
    kafka_records,
    rates,
    socket_connection,
    socket_text,
    split_positions,
    splits,
)
from tests.pages import check_page

MODULES = [
    *(collection, files, generated, generator, hybrid, kafka_ends, kafka_records, rates),
    *(socket_connection, socket_text, split_positions, splits),
]


def test_the_examples_of_the_page_run() -> None:
    check_page("sources.md", at_least=8)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    assert doctest.testmod(module, extraglobs=vars(module)).failed == 0
