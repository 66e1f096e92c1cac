"""Texts of changes as values: what is none makes its record bad, and ends no task."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from flinkish_spark import DecimalHandling, EpochUnit
from flinkish_spark.connectors.formats.changelog import _row
from flinkish_spark.connectors.formats.changelog_texts import DocumentTexts, Texts
from flinkish_spark.types.ddl import parse_ddl

PRECISE = Texts(True, {"at": EpochUnit.NANOSECONDS}, DecimalHandling.PRECISE)
DEEP = '{"a":' * 5_000 + "1" + "}" * 5_000


def read(texts: Texts, ddl: str, text: str) -> tuple[Any, bool]:
    name = ddl.split()[0]
    row, is_wrong = _row(texts.parser(parse_ddl(ddl), "UTC"), [(name, text)])
    return row.get(name), is_wrong


@pytest.mark.parametrize(
    ("ddl", "text", "value"),
    [
        ("v DECIMAL(10,3)", '{"scale":3,"value":"A+k="}', Decimal("1.001")),
        ("v DECIMAL(10,2)", "/w==", Decimal("-0.01")),
        ("v DATE", "-719162", -719_162),
        ("at TIMESTAMP", "1767225600000001000", 1_767_225_600_000_001),
    ],
)
def test_a_text_is_what_stands_there(ddl: str, text: str, value: Any) -> None:
    assert read(PRECISE, ddl, text) == (value, False)


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("v DECIMAL(10,3)", '{"scale":3,"value":5}'),
        ("v DECIMAL(10,3)", '{"scale":1.5,"value":"A+k="}'),
        ("v DECIMAL(10,3)", '{"scale":true,"value":"A+k="}'),
        ("v DECIMAL(10,3)", '{"scale":Infinity,"value":"A+k="}'),
        ("v DECIMAL(10,3)", '{"value":"A+k="}'),
        ("v DECIMAL(10,3)", "ä"),
        ("v DECIMAL(10,3)", ""),
        ("v DECIMAL(10,3)", DEEP),
        ("v DATE", "-719163"),
        ("v INT", "1" * 5_000),
        ("v BINARY", "ä"),
        ("at TIMESTAMP", "1767225600000000001"),
    ],
)
def test_a_text_that_is_no_value_ends_no_task(ddl: str, text: str) -> None:
    assert read(PRECISE, ddl, text) == (None, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"$binary":{"base64":"AAEC","subType":"00"}}', (b"\x00\x01\x02", False)),
        ('{"$binary":"AAEC","$type":"00"}', (b"\x00\x01\x02", False)),
        ('{"$binary":{"subType":"00"}}', (None, True)),
        # The letters of "None" are base64 of something.
        ('{"$binary":null}', (None, True)),
        ('{"$binary":5}', (None, True)),
        ("[]", (None, True)),
        (DEEP, (None, True)),
    ],
)
def test_a_binary_of_mongodb(text: str, value: tuple[Any, bool]) -> None:
    assert read(DocumentTexts(), "v BINARY", text) == value
