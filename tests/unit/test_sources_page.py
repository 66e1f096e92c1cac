"""The examples of docs/sources.md and of the source modules do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sources.md"
MODULES = [
    *(collection, files, generated, generator, hybrid, kafka_ends, kafka_records, rates),
    *(socket_connection, socket_text, split_positions, splits),
]


def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    test = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    assert doctest.testmod(module, extraglobs=vars(module)).failed == 0
