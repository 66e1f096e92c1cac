"""JSON as columns: a value is what stands there or its record is bad, at once or record by record."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.plain_formats import parse_fields
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.json_columns import JsonReader
from tests.support.json_cases import BAD, EXACT, NEVER, NOT_ONE, SCHEMA, Case

#: A line each: a text, and the fields that are not null, or null for a bad one.
JUDGED = Path(__file__).parents[2] / "support" / "json_judged.jsonl"
READER = JsonReader(parse_ddl(SCHEMA))
TYPES = {
    **{"t": "TINYINT", "sh": "SMALLINT", "i": "INT", "l": "LONG", "f": "FLOAT", "d": "DOUBLE", "s": "STRING"},
    **{"n": "DECIMAL(10,2)", "n0": "DECIMAL(20,0)", "bo": "BOOLEAN", "day": "DATE", "at": "TIMESTAMP"},
    **{"wall": "TIMESTAMP_NTZ", "a": "ARRAY<DECIMAL(4,1)>", "aa": "ARRAY<ARRAY<DATE>>"},
    "x": "STRUCT<f: FLOAT, s: STRING, at: TIMESTAMP, q: ARRAY<STRUCT<l: LONG>>>",
}
VALUES = (
    *sorted({case.value for case in EXACT} | {value for _, value in (*BAD, *NEVER)}),
    *("null", "1", "0", "-0", "-1", "1.5", "1e2", "1E-2", "16777217", "3.4028235677973366e38", "1e-400"),
    *("4.9e-324", "1e999", "1e-99", "1e99", "0." + "0" * 46 + "1", "9" * 38, "12345678901234567890123456789"),
    *("true", "false", '""', '"text"', '"a,b}c"', '"}{"', '"}"', '"\\\\"', '"\\""', '"\\n"', '"é中😀"'),
    *('"1e999"', '"3e71234"', '"12"', '"+1"', '".5"', '"1."', '" 1"', '"1e5"', '"-"', '"2026-01-31"'),
    *('"2026-01-31T12:00:00Z"', '"2026-01-31 12:00:00.5Z"', '"2026-01-31T12:00Z"', '"2026-01-31T12+0530"'),
    *('"2026-01-31T12:00:00+05:30"', '"2026-01-31T12:00:00-19:00"', '"2026-01-31T12:00:00"', '"2024-02-29"'),
    *('"2026-01-31T12:00:60Z"', '"0000-01-01T00:00:00Z"', '"2026-02-29"', '"2026-1-3"', "[]", "[1,2.5]"),
    *("[null]", '["2026-01-31"]', '[["2026-01-31",null],null,[]]', "{}", '{"f":1.5,"s":"x"}', '{"q":[]}'),
    *(
        '{"more":[1,{"a":{}}]}',
        '{"f":null,"at":"2026-01-31T12:00:00Z","q":[{"l":1},null,{"l":null,"more":2}]}',
    ),
)
PIECES = (*'{}[]:,"1-\\é \n\t\r\x00', '"s"', "null", "e9")


def read(reader: JsonReader, *values: bytes | None) -> list[Any]:
    return reader.read(pa.array(values, pa.binary())).to_pylist()


def shown(value: Any) -> Any:
    """Return a value in a form in which NaN is itself, and 0 is not -0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (value, math.copysign(1, value))
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, list) else value


def drawn(chance: random.Random, columns: list[str]) -> str:
    names = chance.sample(columns, chance.randrange(len(columns) + 1))
    names += [chance.choice(["u1", "u2", "é", 'q\\"', ""])] * (chance.random() < 0.3)
    names += names[:1] * (chance.random() < 0.03)
    fields = [f'"{name}":{chance.choice(["", "", " "])}{chance.choice(VALUES)}' for name in names]
    letters = [*("{" + chance.choice([",", ", "]).join(fields) + "}")]
    for _ in range(chance.choice([0, 0, 0, 0, 0, 0, 1, 2])):
        at = chance.randrange(len(letters) + 1)
        if chance.random() < 0.5:
            del letters[at : at + 1]
        else:
            letters.insert(at, chance.choice(PIECES))
    return "".join(letters)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.record)
def test_exact_values_pass(case: Case) -> None:
    (found,) = read(READER, case.record.encode())
    assert found is not None and found[case.column] is not None


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ('{"t": -128}', {"t": -128}),
        ('{"l": 9223372036854775807}', {"l": 2**63 - 1}),
        ('{"d": "-INF", "s": 1.10}', {"d": -math.inf, "s": "1.10"}),
        ('{"b": "AAEC"}', {"b": b"\x00\x01\x02"}),
        ('{"months": "INTERVAL \'-1-2\' YEAR TO MONTH"}', {"months": -14}),
        (
            '{"s": {"k" : [1.10, 1e400, "q\\u001f"], "n": null}}',
            {"s": '{"k":[1.10,1e400,"q\\u001F"],"n":null}'},
        ),
        (' {"l": 1}\n', {"l": 1}),
    ],
)
def test_a_value_is_what_stands_there(record: str, wanted: dict[str, Any]) -> None:
    (found,) = read(READER, record.encode())
    assert {name: one for name, one in found.items() if one is not None} == wanted


def as_said(value: Any, kind: T.DataType) -> Any:
    """Return a value as the file of judged texts has it, which a parser in Java wrote."""
    match kind:
        case _ if value is None:
            return None
        case T.StructType():
            found = {one.name: as_said(value[one.name], one.dataType) for one in kind}
            return {name: one for name, one in found.items() if one is not None}
        case T.ArrayType():
            return [as_said(one, kind.elementType) for one in value]
        case T.MapType():
            return {name: as_said(one, kind.valueType) for name, one in value}
        case T.BinaryType():
            return base64.b64encode(value).decode()
        case T.TimestampType():
            text = str(value.replace(tzinfo=None))
            return text.rstrip("0") if "." in text else text
        case T.DateType():
            return str(value)
        case T.DecimalType() | T.DoubleType() | T.FloatType() if math.isfinite(value):
            return float(f"{value:.7g}" if isinstance(kind, T.FloatType) else value)
        case T.DoubleType() | T.FloatType():
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def test_texts_are_what_another_parser_made_of_them() -> None:
    """Of Java, over Jackson and Spark's own types; it is no more, but what it said of these is kept."""
    kind = parse_ddl(
        "s STRING, l LONG, i INT, d DOUBLE, f FLOAT, b BOOLEAN, t TIMESTAMP, n DECIMAL(10,2), "
        "x STRUCT<a: STRING, c: ARRAY<INT>>, m MAP<STRING,DOUBLE>, by BINARY, da DATE"
    )
    judged = [json.loads(line) for line in JUDGED.read_text().splitlines()]
    found = read(JsonReader(kind), *(text.encode("utf-8", "surrogatepass") for text, _ in judged))
    different = [
        (text, wanted, one)
        for (text, wanted), row in zip(judged, found, strict=True)
        if (one := as_said(row, kind)) != wanted
    ]
    assert different == [] and sum(wanted is not None for _, wanted in judged) > 500


@pytest.mark.parametrize(
    ("zone", "ahead_s"),
    [
        *(("Z", 0), ("+0", 0), ("+00", 0), ("+0000", 0), ("+000000", 0), ("GMT0", 0), ("+0:2", 120)),
        *(("+1", 3600), ("+01", 3600), ("+1:2", 3720), ("+1:02", 3720), ("+01:2", 3720), ("+01:02", 3720)),
        *(("+0123", 4980), ("+012345", 5025), ("+01:02:03", 3723), ("+1:02:03", 3723), ("-0130", -5400)),
        *(("UTC+1", 3600), ("UTC+01:2", 3720), ("UTC+0102", 3720), ("UT+1", 3600), ("GMT+1:2", 3720)),
        *(("+18", 64800), ("+18:00", 64800), ("+1800", 64800), ("+180000", 64800)),
        *(("+000", None), ("+020", None), ("-020", None), ("+012", None), ("+00000", None), ("+01234", None)),
        *(("+01:0203", None), ("+0102:03", None), ("+1:0203", None), ("+012:3", None), ("+01:02:3", None)),
        *(("+1:2:3", None), ("+01:", None), ("+1:023", None), ("UTC+010", None), ("UTC+1:2:3", None)),
        *(("UTC0", None), ("Z+1", None), ("z", None), ("1:02", None), ("+18:00:01", None), ("+02:000", None)),
    ],
)
def test_the_forms_of_an_offset_are_those_of_spark(zone: str, ahead_s: int | None) -> None:
    (found,) = read(JsonReader(parse_ddl("at TIMESTAMP")), f'{{"at":"2026-01-01 10:00:00{zone}"}}'.encode())
    wanted = (
        None if ahead_s is None else dt.datetime(2026, 1, 1, 10, tzinfo=dt.UTC) - dt.timedelta(0, ahead_s)
    )
    assert found == (None if wanted is None else {"at": wanted})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"\xff", "is no UTF-8: invalid start byte"),
        (b"not json", "is no JSON object"),
        (b"", "is no JSON object"),
        (b"[1]", "is no JSON object"),
        (b"1", "is no JSON object"),
        (b'{"l": 1}{"l": 2}', "is more than one JSON object"),
        (b'{"l": 1} 2', "is more than one JSON object"),
        (b'{"l": }', "cannot be read: Expecting value: line 1 column 7 (char 6)"),
        (b'{"l": 1, "l": 2}', "cannot be read: two fields of an object have one name"),
        (
            b'{"l": "many"}',
            "cannot be read: its field 'l' is \"many\", which is no bigint: it is no whole number",
        ),
        (b'{"l": null}', ""),
        (b'{"l": 1}', ""),
    ],
)
def test_a_reason_says_what_is_wrong_and_where(value: bytes, why: str) -> None:
    assert JsonReader(parse_ddl("l LONG")).why_bad(value) == why


def test_a_reason_is_short() -> None:
    reader = JsonReader(parse_ddl(f"x STRUCT<{', '.join(f'field{n}: INT' for n in range(200))}>"))
    why = reader.why_bad(b'{"x": "' + b"long" * 10_000 + b'"}')
    assert why.startswith("cannot be read: its field 'x' is \"longlong") and len(why) < 250


@pytest.mark.parametrize(("column", "value"), (*BAD, *NEVER))
def test_what_a_type_does_not_hold_is_bad(column: str, value: str) -> None:
    kind = T.StructType([parse_ddl(SCHEMA)[column]])
    record = f'{{"{column}": {value}}}'.encode()
    assert read(READER, record) == [None]
    # In a slice, in which others are good.
    assert read(JsonReader(kind), *[b"{}"] * 200, record)[-2:] == [{column: None}, None]


@pytest.mark.parametrize("text", NOT_ONE)
def test_more_or_less_than_one_object_is_bad(text: str) -> None:
    assert read(READER, text.encode()) == [None]
    good = b'{"l":1}'
    assert read(JsonReader(parse_ddl("l LONG")), good, text.encode(), good) == [{"l": 1}, None, {"l": 1}]


def test_a_slice_at_once_is_what_its_records_are_one_by_one() -> None:
    """Whatever is in it, and without an end of the process: Arrow has some of those."""
    chance, at_once = random.Random(11), 0
    for _ in range(1_500):
        columns = chance.sample([*TYPES], chance.randrange(1, 4))
        reader = JsonReader(parse_ddl(", ".join(f"{name} {TYPES[name]}" for name in columns)))
        records = [drawn(chance, columns).encode() for _ in range(chance.choice([1, 1, 2, 3]))]
        # Not at the beginning of a buffer, as in a batch of which a part is read.
        values = pa.array([b'{"in front":1}', *records]).slice(1)
        assert reader._columns is not None
        found = reader._columns.read(values)
        if found is not None:
            at_once += 1
            found.validate(full=True)
            wanted = pa.array([reader.record(one) for one in records], reader.type)
            assert shown(found.to_pylist()) == shown(wanted.to_pylist()), (columns, records)
    assert at_once > 200


def test_a_bad_record_spoils_no_other() -> None:
    values = [f'{{"l":{number}}}'.encode() for number in range(5_000)]
    values[1_234], values[1_235] = b'{"l":1.5}', None
    found = read(JsonReader(parse_ddl("l LONG")), *values)
    assert [at for at, one in enumerate(found) if one is None] == [1_234, 1_235]
    assert [one["l"] for one in found if one] == [one for one in range(5_000) if one not in (1_234, 1_235)]


def test_fields_that_nobody_declared_are_passed_over_at_once() -> None:
    """Whatever their names, types and number, and if two have one name: nothing of them is read."""
    reader = JsonReader(parse_ddl("l LONG"))
    assert reader._columns is not None
    others = (
        '"more":{"k%d":1}',
        '"k%d":{"a":[1.5],"b":null}',
        '"more":"k%d"',
        '"x":{"l":1,"l":2},"k%d":1',
        '"x":1,"x":[]',
    )
    for other in others:
        values = [f'{{"l":{at},{other.replace("%d", str(at))}}}'.encode() for at in range(500)]
        found = reader._columns.read(pa.array(values))
        assert found is not None and found.to_pylist() == [{"l": at} for at in range(500)], other
        assert [reader.record(one) for one in values] == found.to_pylist(), other
        assert [reader.why_bad(one) for one in values[:3]] == [""] * 3, other


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("x STRING", b'{"x":{"a":1,"a":2}}'),
        ("x STRING", b'{"x":[{"b":{"a":1,"a":2}}]}'),
        ("x MAP<STRING, LONG>", b'{"x":{"a":1,"a":2}}'),
        ("x STRUCT<a: LONG>", b'{"x":{"a":1,"b":3,"a":2}}'),
        ("x ARRAY<STRUCT<a: LONG>>", b'{"x":[{"a":1},{"a":1,"a":null}]}'),
    ],
)
def test_of_two_declared_fields_with_one_name_none_is_lost(kind: str, value: bytes) -> None:
    reader = JsonReader(parse_ddl(kind))
    assert read(reader, value) == [None] and read(reader, *[b"{}"] * 200, value)[-1] is None
    assert reader.why_bad(value).endswith("two fields of an object have one name")


def test_no_text_is_bad_and_null_is_null() -> None:
    assert (
        read(READER, b'{"s":"\xff"}', None, b'{"unknown":' + b"[" * 5_000 + b"]" * 5_000 + b"}") == [None] * 3
    )
    assert read(READER) == []


def test_what_is_too_deep_to_be_written_is_bad_and_no_error() -> None:
    """Python 3.12 and later read it all the same."""
    deep = b"[" * 1_200 + b"]" * 1_200
    reader = JsonReader(parse_ddl("s STRING"))
    assert read(reader, b'{"s":' + deep + b"}", b'{"more":' + deep + b',"s":"1"}') == [None, None]


@pytest.mark.parametrize(
    "kind",
    [
        *("MAP<BINARY, STRING>", "MAP<INT, STRING>", "MAP<TIMESTAMP, INT>", "ARRAY<MAP<DATE, INT>>"),
        *("INTERVAL", "VARIANT", "STRUCT<a: MAP<DECIMAL(4,1), INT>>", "VOID", "CHAR(3)", "VARCHAR(3)"),
    ],
)
def test_types_without_json_are_refused_when_they_are_declared(kind: str) -> None:
    with pytest.raises(SchemaError, match="JSON"):
        parse_fields(f"a {kind}")


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
        ("2026-03-29T02:30:00 PST", "UTC", True),
        ("2026-03-29T02:30:00+19:00", "UTC", False),
        ("2026-03-29T02", "UTC", True),
        ("2026-03-29T", "UTC", False),
        ("2026-03-29T02:30Z", "UTC", False),
        ("2026-10-25T02:30:00", "Europe/Berlin", True),
        # In Brazil clocks were set at midnight.
        ("2018-11-04", "America/Sao_Paulo", False),
        ("2018-11-05", "America/Sao_Paulo", True),
    ],
)
def test_a_time_that_no_clock_has_shown_is_bad(text: str, zone: str, is_good: bool) -> None:
    reader = JsonReader(parse_ddl("at TIMESTAMP, wall TIMESTAMP_NTZ, all ARRAY<STRUCT<at: TIMESTAMP>>"), zone)
    for record in (f'{{"at":"{text}"}}', f'{{"all":[{{"at":"{text}"}}]}}'):
        assert (read(reader, record.encode()) != [None]) is is_good
    assert read(reader, b'{"wall":"2026-03-29T02:30:00"}') != [None], "it is of no zone"


def test_a_time_zone_that_python_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not know the session's time zone 'Nowhere/Town'"):
        JsonReader(parse_ddl("at TIMESTAMP"), "Nowhere/Town")


@pytest.mark.parametrize("levels", [490, 520, 700])
def test_a_record_of_many_levels_is_bad_or_a_text_and_ends_no_task(levels: int) -> None:
    value = b'{"a":' + b"[" * levels + b'1,"x",{"b":null}' + b"]" * levels + b"}"
    number = JsonReader(parse_ddl("a LONG"))
    assert number.record(value) is None
    assert number.why_bad(value).startswith("cannot be read: its field 'a' is [[[")
    text = JsonReader(parse_ddl("a STRING"))
    assert text.record(value) == {"a": value[5:-1].decode()}
