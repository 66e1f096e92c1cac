"""JSON is read alike with the JAR and without it, exactly or not at all."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column
from pyspark.sql import functions as F

from flinkish_spark.bridge.shim import from_json
from flinkish_spark.types.ddl import parse_ddl
from tests.support.json_cases import BAD, EXACT, NEVER, NOT_ONE, TYPES
from tests.support.json_cases import SCHEMA as CASES

SCHEMA = parse_ddl(
    "s STRING, l LONG, i INT, d DOUBLE, f FLOAT, b BOOLEAN, t TIMESTAMP, n DECIMAL(10,2), "
    "x STRUCT<a: STRING, c: ARRAY<INT>>, m MAP<STRING,DOUBLE>, by BINARY, da DATE, corrupt STRING"
)
VALUES = (
    '{"s":"a","l":1}',
    '{"s":{"a" : 1 , "b":[1, 2.0,1e3]},"l":1}',
    '{"s": 1.50}',
    '{"d":"NaN","f":"-INF"}',
    '{"d":NaN}',
    '{"x":{"a":"q","c":[1,2,null]}}',
    '{"m":{"a":1,"b":2.5}}',
    '{"s":"a","s":"b"}',
    '{"t":"2026-01-01 10:00:00"}',
    '{"t":"2026-01-01T10:00:00.123+02:00"}',
    '{"n":12.345,"by":"AQID","da":"2026-02-28"}',
    '{"s":"\\ud83d\\ude00"}',
    '{"s":"\\ud83d"}',
    '{"s":"é ü 中 😀"}',
    '\n {"s":"x"}\t',
    "{}",
)
#: Of which the parts of times are drawn: those that there are, those that there are not.
YEARS = ("0000", "0001", "1582", "1900", "1970", "2000", "2023", "2024", "9999", "12024", "-2024", "+2024")
MONTHS = ("00", "01", "02", "02", "04", "12", "13", "2", "1a")
DAYS = ("00", "01", "15", "28", "29", "30", "31", "32", "5")
TIMES = (
    *("00:00:00", "23:59:59", "24:00:00", "12:60:00", "12:00:60", "12", "1:2:3", "12-00-00", "1\uff12:00:00"),
    *("12:34:56.1", "12:34:56.123456", "12:34:56.1234567", "12:34:56.", "12:34:56.12a", "12:34:56,123", ""),
)
ZONES = ("Z", "Z", "Z", "", "z", "ZZ", "+00:00", "UTC", " Z", "Z ", "Europe/Paris")
ODD = (
    '{"a":1}{"b":2}',
    '{"s":"x"} trailing }',
    "{",
    "}",
    "[]",
    "null",
    "",
    '{\x00"s":1}',
    '\x00{"s":1}',
    '\ufeff{"s":"x"}',
    '{"s":"' + "x" * 70_000 + 'é"}',
    '{"unknown":' + "[" * 1_200 + "]" * 1_200 + ',"s":1}',
    '{"l":' + "1" * 1_200 + "}",
    '{"s":"tab\tin"}',
    '{"\\u0073":"escaped"}',
    '{"S":"another case"}',
)
PIECES = (
    *('"s"', '"x"', '"a"', ":", ",", "{", "}", "[", "]", "1", "1.5", "1e5", "1E400", "-0", "01", '"NaN"'),
    *(
        "NaN",
        "true",
        "null",
        '"\\ud800"',
        '"é"',
        " ",
        "\n",
        "/*c*/",
        "'a'",
        "\x00",
        "\ufeff",
        '""',
        ".5",
        "+1",
    ),
)
SETTINGS = {"columnNameOfCorruptRecord": "corrupt", "allowSingleQuotes": "false"}


def changed(value: str, chance: random.Random) -> str:
    letters = list(value)
    for _ in range(chance.randrange(4)):
        place = chance.randrange(len(letters) + 1)
        if chance.random() < 0.5:
            del letters[place : place + 1]
        else:
            letters.insert(place, chance.choice(PIECES))
    return "".join(letters)


def a_time(chance: random.Random) -> str:
    day = f"{chance.choice(YEARS)}-{chance.choice(MONTHS)}-{chance.choice(DAYS)}"
    if chance.random() < 0.5:
        day = f"{chance.randrange(1, 10_000):04d}-{chance.randrange(1, 13):02d}-{chance.randrange(1, 29):02d}"
    return f"{day}{chance.choice('TTT tx')}{chance.choice(TIMES)}{chance.choice(ZONES)}"


def both_ways(
    spark: Any, monkeypatch: pytest.MonkeyPatch, schema: Any, settings: dict[str, str]
) -> list[Column]:
    """Return what the JAR's parser makes of a text, and what ours in Python does."""
    ours = from_json(spark, F.col("value"), schema, settings)
    with monkeypatch.context() as without:
        without.setattr("flinkish_spark.bridge.shim.has_class", lambda *_: False)
        python = from_json(spark, F.col("value"), schema, settings)
    assert ("read(" in str(ours), "read(" in str(python)) == (False, True)
    return [ours.alias("ours"), python.alias("python")]


def test_every_value_is_read_alike(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    values = [*VALUES, *ODD, *(changed(chance.choice(VALUES), chance) for _ in range(4_000))]
    values += [f'{{"t":"{a_time(chance)}"}}' for _ in range(6_000)]
    frame = spark.createDataFrame([(value,) for value in values], "value STRING")
    settings = {"mode": "PERMISSIVE", **SETTINGS}
    both = frame.select("value", *both_ways(spark, monkeypatch, SCHEMA, settings)).localCheckpoint()
    assert both.schema["ours"].dataType == both.schema["python"].dataType == SCHEMA

    def shown(name: str) -> Column:
        # What is bad may be filled in part; nothing of that is ever used.
        row = F.col(name)
        bad = F.struct(F.lit(True).alias("is_bad"))
        as_text = F.to_json(F.struct(row.alias("row")))
        is_bad = row.isNull() | row["corrupt"].isNotNull()
        return F.when(is_bad, F.to_json(bad)).otherwise(as_text)

    different = both.where(~shown("python").eqNullSafe(shown("ours")))
    found = different.select("value", shown("ours"), shown("python")).take(9)
    assert [tuple(row) for row in found] == []
    good = both.where(F.col("ours").isNotNull() & F.col("ours")["corrupt"].isNull()).count()
    assert 0.15 * len(values) < good < 0.8 * len(values), "both kinds are there"


def test_values_are_exact_or_bad(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = parse_ddl(f"{CASES}, corrupt STRING")
    bad = [f'{{"{column}": {value}}}' for column, value in (*BAD, *NEVER)] + [*NOT_ONE]
    texts = [case.record for case in EXACT] + bad
    settings = {"mode": "PERMISSIVE", **SETTINGS}
    frame = spark.createDataFrame([*enumerate(texts)], "number INT, value STRING")
    both = frame.select("number", *both_ways(spark, monkeypatch, schema, settings)).localCheckpoint()
    columns = [F.col(f"{way}.{name}").cast("string") for way in ("ours", "python") for name in TYPES]
    columns += [F.col(way).isNull() | F.col(way)["corrupt"].isNotNull() for way in ("ours", "python")]
    rows = both.orderBy("number").select(*columns).collect()
    width = len(TYPES)
    for name, at in (("ours", 0), ("python", 1)):
        found = [dict(zip(TYPES, row[at * width : (at + 1) * width], strict=True)) for row in rows]
        is_bad = [row[2 * width + at] for row in rows]
        shown = [
            (case.record, "bad" if wrong else row[case.column])
            for case, row, wrong in zip(EXACT, found, is_bad, strict=False)
        ]
        assert shown == [(case.record, case.shown) for case in EXACT], name
        assert [text for text, one in zip(texts, is_bad, strict=True) if one] == bad, name


#: Seconds since 1970 of texts in Berlin; clocks went from 02:00 to 03:00 in March, back in October.
IN_BERLIN = {
    "2026-03-29T01:59:59": 1774745999,
    "2026-03-29T02:00:00": None,
    "2026-03-29T02:30:00": None,
    "2026-03-29 2:59:59.999999": None,
    "2026-03-29T03:00:00": 1774746000,
    "2026-03-29T02:30:00+01:00": 1774747800,
    "2026-10-25T02:30:00": 1792888200,
    "2026-10-25T02:30:00+01:00": 1792891800,
}


@pytest.fixture
def in_berlin(spark: Any) -> Iterator[None]:
    own = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield
    spark.conf.set("spark.sql.session.timeZone", own)


def test_a_time_that_no_clock_of_the_session_has_shown_is_bad(
    spark: Any, monkeypatch: pytest.MonkeyPatch, in_berlin: None
) -> None:
    frame = spark.createDataFrame([(f'{{"at":"{text}"}}',) for text in IN_BERLIN], "value STRING")
    settings = {"mode": "PERMISSIVE", **SETTINGS}
    ways = both_ways(spark, monkeypatch, parse_ddl("at TIMESTAMP, corrupt STRING"), settings)
    rows = frame.select(*ways).selectExpr("unix_seconds(ours.at)", "unix_seconds(python.at)").collect()
    for way in (0, 1):
        assert [row[way] for row in rows] == list(IN_BERLIN.values())


@pytest.mark.parametrize("value", ['{"l":"text"}', '{"s":', '{"t":"never"}', "[1]"])
def test_bad_values_fail_fast_as_by_spark(spark: Any, value: str) -> None:
    frame, errors = spark.createDataFrame([(value,)], "value STRING"), []
    settings = {"mode": "FAILFAST", "allowSingleQuotes": "false"}
    text = F.col("value")
    for parsed in (F.from_json(text, SCHEMA, settings), from_json(spark, text, SCHEMA, settings)):
        with pytest.raises((PySparkException, Py4JJavaError)) as raised:
            frame.select(parsed.alias("row")).collect()
        errors.append(re.findall(r"\[[A-Z_.]{9,}\]", str(raised.value))[:1])
    assert errors[0] == errors[1] != []
