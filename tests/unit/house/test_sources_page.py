"""The examples of docs/sources.md and of the source modules do what they say."""

from __future__ import annotations

import doctest

import pytest

from flinkish_spark.connectors import collection, generator, hybrid, rates, splits
from flinkish_spark.connectors import generator as generated
from flinkish_spark.connectors import socket as socket_connection
from flinkish_spark.connectors import socket as socket_text
from flinkish_spark.connectors import splits as split_positions
from flinkish_spark.connectors.files import source as files
from flinkish_spark.connectors.kafka import offsets as kafka_ends
from flinkish_spark.connectors.kafka import split_source as kafka_records
from tests.support.pages import check_page

MODULES = [
    *(collection, files, generated, generator, hybrid, kafka_ends, kafka_records, rates),
    *(socket_connection, socket_text, split_positions, splits),
]


def test_the_examples_of_the_page_run() -> None:
    check_page("sources.md", at_least=8)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    assert doctest.testmod(module, extraglobs=vars(module)).failed == 0
