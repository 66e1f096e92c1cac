"""What of a JSON text is looked at where the JAR's parser is not there."""

from __future__ import annotations

import pytest

from flinkish_spark.connectors.json import json_schema
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.formats import Json
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.exact_json import MALFORMED, exact_text
from tests.support.json_cases import BAD, EXACT, NOT_ONE, SCHEMA, Case

LOOK = exact_text(parse_ddl(SCHEMA))


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.record)
def test_exact_values_pass(case: Case) -> None:
    assert LOOK(case.record.encode()) != MALFORMED


@pytest.mark.parametrize(("column", "value"), BAD)
def test_what_a_type_does_not_hold_is_bad(column: str, value: str) -> None:
    assert LOOK(f'{{"{column}": {value}}}'.encode()) == MALFORMED


@pytest.mark.parametrize("text", NOT_ONE)
def test_more_or_less_than_one_object_is_bad(text: str) -> None:
    assert LOOK(text.encode()) == MALFORMED


def test_no_text_is_bad_and_null_is_null() -> None:
    assert LOOK(b'{"s":"\xff"}') == MALFORMED
    assert LOOK(b'{"unknown":' + b"[" * 5_000 + b"]" * 5_000 + b"}") == MALFORMED
    assert LOOK(None) is None


def test_texts_are_passed_on_as_they_came() -> None:
    text = ' {"n": 12.340, "a": [1.0, null], "m": {"k": 5}, "x": {"s": "a", "more": 1.0}, "more": [1e5]}\n'
    assert LOOK(text.encode()) == text


def test_what_is_too_deep_to_be_written_is_bad_and_no_error() -> None:
    """Python 3.12 and later read it all the same."""
    deep = b"[" * 1_200 + b"]" * 1_200
    look = exact_text(parse_ddl("s STRING"))
    assert look(b'{"s":' + deep + b"}") == MALFORMED
    assert look(b'{"more":' + deep + b',"s":1}') == MALFORMED


def test_what_becomes_a_text_is_written_with_its_own_digits() -> None:
    assert LOOK(b'{"s": 1.10, "l": 7}') == '{"s":"1.10","l":7}'
    assert LOOK(b'{"x": {"s": [1e5, {"k" : "\\n\\u0001"}]}}') == (
        '{"x":{"s":"[1e5,{\\"k\\":\\"\\\\n\\\\u0001\\"}]"}}'
    )
    assert (
        exact_text(parse_ddl("a ARRAY<STRING>, m MAP<STRING, STRING>"))(
            b'{"a": ["t", 1.0, null, true], "m": {"k": 2.0, "l": null}}'
        )
        == '{"a":["t","1.0",null,"true"],"m":{"k":"2.0","l":null}}'
    )


@pytest.mark.parametrize(
    "kind",
    [
        *("MAP<BINARY, STRING>", "MAP<INT, STRING>", "MAP<TIMESTAMP, INT>", "ARRAY<MAP<DATE, INT>>"),
        *("INTERVAL", "VARIANT", "STRUCT<a: MAP<DECIMAL(4,1), INT>>", "VOID", "CHAR(3)", "VARCHAR(3)"),
    ],
)
def test_types_without_json_are_refused_when_they_are_declared(kind: str) -> None:
    with pytest.raises(SchemaError, match="JSON"):
        json_schema(Json(f"a {kind}"))


@pytest.mark.parametrize(
    ("text", "zone", "is_good"),
    [
        ("2026-03-29T02:30:00", "Europe/Berlin", False),
        ("2026-03-29 2:30:0.5", "Europe/Berlin", False),
        ("2026-03-29T02:30:00", "UTC", True),
        ("2026-03-29T02:30:00", "+01:00", True),
        ("2026-03-29T02:30:00Z", "Europe/Berlin", True),
        ("2026-03-29T02:30:00+01:00", "Europe/Berlin", True),
        ("2026-03-29T02:30:00 Asia/Tokyo", "Europe/Berlin", True),
        ("2026-03-29T02:30:00 Nowhere/Town", "UTC", False),
        ("2026-10-25T02:30:00", "Europe/Berlin", True),
        # In Brazil clocks were set at midnight.
        ("2018-11-04", "America/Sao_Paulo", False),
        ("2018-11-05", "America/Sao_Paulo", True),
    ],
)
def test_a_time_that_no_clock_has_shown_is_bad(text: str, zone: str, is_good: bool) -> None:
    look = exact_text(parse_ddl("at TIMESTAMP, wall TIMESTAMP_NTZ, all ARRAY<STRUCT<at: TIMESTAMP>>"), zone)
    for record in (f'{{"at":"{text}"}}', f'{{"all":[{{"at":"{text}"}}]}}'):
        assert (look(record.encode()) != MALFORMED) is is_good
    assert look(b'{"wall":"2026-03-29T02:30:00"}') != MALFORMED, "it is of no zone"


def test_a_time_zone_that_python_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not know the session's time zone 'Nowhere/Town'"):
        exact_text(parse_ddl("at TIMESTAMP"), "Nowhere/Town")
