"""What a Kafka sink writes of a value says all of it, whatever the session's zone, and is read back equal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark import Avro, Json, Raw
from flinkish_spark.connectors.kafka.record_encoder import MISFIT
from flinkish_spark.connectors.kafka.records import Decoding
from flinkish_spark.connectors.kafka.sink import KafkaSink
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.types.ddl import ddl_of
from tests.support.encoded import encoded_records

#: In Berlin both are half past two of the same night; the others are apart by a microsecond.
TIMES = (
    *(
        "2026-10-25 00:30:00",
        "2026-10-25 01:30:00",
        "2026-01-01 00:00:00.123456",
        "2026-01-01 00:00:00.123457",
    ),
    *("0001-01-01 00:00:00", "1883-11-18 17:00:00", "9999-12-31 23:59:59.999999"),
)
WRITTEN = (
    *("2026-10-25T00:30:00.000000Z", "2026-10-25T01:30:00.000000Z"),
    *("2026-01-01T00:00:00.123456Z", "2026-01-01T00:00:00.123457Z"),
    *("0001-01-01T00:00:00.000000Z", "1883-11-18T17:00:00.000000Z", "9999-12-31T23:59:59.999999Z"),
)


@pytest.fixture(params=["Europe/Berlin", pytest.param("America/New_York", marks=pytest.mark.nightly)])
def zoned(spark: Any, request: pytest.FixtureRequest) -> Any:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield spark
    spark.conf.set("spark.sql.session.timeZone", before)


def sink(**arguments: Any) -> KafkaSink:
    return KafkaSink("localhost:9092", "out", **arguments)


def part(frame: DataFrame, name: str, **arguments: Any) -> list[str]:
    made = encoded_records(sink(**arguments), frame.orderBy("n"))
    return [row[0] for row in made.select(F.col(name).cast("string")).collect()]


def test_times_are_written_in_utc_with_their_microseconds(zoned: Any) -> None:
    rows = [f"SELECT {n} AS n, TIMESTAMP'{time} UTC' AS at" for n, time in enumerate(TIMES)]
    frame = zoned.sql(" UNION ALL ".join(rows)).withColumn(
        "wall", F.lit("2026-03-29 02:30:00").cast("timestamp_ntz")
    )
    as_json = [f'{{"at":"{text}"}}' for text in WRITTEN]
    assert part(frame, "key", key="at", value=Raw("n")) == list(WRITTEN)
    assert part(frame, "key", key=Json("at TIMESTAMP"), value=Raw("n")) == as_json
    assert part(frame, "value", value=Json("at TIMESTAMP")) == as_json
    assert set(part(frame, "value", value=Raw("wall"))) == {"2026-03-29T02:30:00.000000"}
    nested = frame.select("n", F.array("at").alias("a"), F.create_map(F.lit("k"), "at").alias("m"))
    assert part(nested, "key", key="a", value=Raw("n")) == [f'["{text}"]' for text in WRITTEN]
    assert part(nested, "key", key="m", value=Raw("n")) == [f'{{"k":"{text}"}}' for text in WRITTEN]


def test_microseconds_are_not_cut_off_by_an_avro_schema_of_milliseconds(zoned: Any) -> None:
    """.123456 and .123457 would be one key: Spark's encoder writes milliseconds where nothing says micros."""
    times = ("0001-01-01 00:00:00", "1969-12-31 23:59:59.999", "2026-01-01 00:00:00.123456", "")
    rows = [f"SELECT {n} AS n, CAST(NULLIF('{t}', '') AS TIMESTAMP_NTZ) AS wall" for n, t in enumerate(times)]
    frame = zoned.sql(" UNION ALL ".join(rows))
    frame = frame.select("*", F.col("wall").cast("timestamp").alias("at"), F.array("wall").alias("all"))
    for name, logical, of_list in (
        ("at", "timestamp-millis", False),
        ("at", "", False),
        ("at", "other-micros", False),
        ("wall", "local-timestamp-millis", False),
        ("all", "local-timestamp-millis", True),
    ):
        one: Any = {"type": "long", "logicalType": logical} if logical else "long"
        form = [{"type": "array", "items": ["null", one]}, "null"] if of_list else [one, "null"]
        fields = [{"name": name, "type": form}]
        avro = Avro(json.dumps({"type": "record", "name": "R", "fields": fields}))
        for column in ({"value": avro}, {"key": avro, "value": Raw("n")}):
            made = encoded_records(sink(**column), frame.orderBy("n"))
            found = [row[0] for row in made.select(MISFIT).collect()]
            assert [why is None for why in found] == [True, True, False, True], (name, logical, found)
            assert "has microseconds" in found[2]
    micros = [{"name": "at", "type": [{"type": "long", "logicalType": "timestamp-micros"}, "null"]}]
    avro = Avro(json.dumps({"type": "record", "name": "R", "fields": micros}))
    assert MISFIT not in encoded_records(sink(value=avro), frame).columns


RED: Any = {"type": "enum", "name": "Color", "symbols": ["RED"]}
BLUE = {**RED, "symbols": ["BLUE"]}
MEMBERS = "u STRUCT<member0: INT, member1: STRING>"


def lists(depth: int) -> tuple[Any, str, Any]:
    """Return a list of records with lists of records: its schema, its column and a value with one null."""
    names = [f"f{n}" for n in range(8)]
    if not depth:
        return "int", "INT", None
    within, column, value = lists(depth - 1)
    fields = [{"name": name, "type": "int"} for name in names] + [{"name": "l", "type": within}]
    record = {"type": "record", "name": f"L{depth}", "fields": fields}
    columns = ", ".join(f"{name}: INT" for name in names)
    return (
        {"type": "array", "items": record},
        f"ARRAY<STRUCT<{columns}, l: {column}>>",
        [(*range(8), value)],
    )


DEEP, DEEP_COLUMN, DEEP_VALUE = lists(5)
#: By name: types of fields, columns, rows, and of each row why it does not fit.
AVRO: dict[str, tuple[dict[str, Any], str, list[tuple[Any, ...]], list[str | None]]] = {
    "a union with null": (
        {"u": ["null", "int", "string"]},
        MEMBERS,
        [((1, None),), ((None, "x"),), ((None, None),), (None,), ((1, "x"),)],
        [None, None, None, None, "of the union 'u' more than one member is set"],
    ),
    "a union without null": (
        {"u": ["int", RED]},
        MEMBERS,
        [((1, None),), ((None, "RED"),), ((None, None),), (None,), ((None, "x"),)],
        [None, None, "no member is set", "'u' is null", "'u.member1' is no symbol"],
    ),
    "unions in a list": (
        {"l": {"type": "array", "items": ["int", RED]}},
        "l ARRAY<STRUCT<member0: INT, member1: STRING>>",
        [([(1, None), (None, "RED")],), ([],), ([(1, "RED")],), ([(None, "x")],)],
        [None, None, "'l[]' more than one member", "'l[].member1' is no symbol"],
    ),
    "a union of one": ({"a": [{"type": "null"}, "int"]}, "a INT", [(1,), (None,)], [None, None]),
    "a full name": (
        {"a": RED, "b": "shop.Color", "c": {"type": "Color"}},
        "a STRING, b STRING, c STRING",
        [("RED", "RED", "RED"), ("RED", "x", "RED"), ("RED", "RED", "x")],
        [None, "'b' is no symbol", "'c' is no symbol"],
    ),
    "a name in two namespaces": (
        {
            "a": RED,
            "r": {"type": "record", "name": "p.R", "fields": [{"name": "e", "type": BLUE}]},
            "b": "Color",
            "c": "p.Color",
        },
        "a STRING, r STRUCT<e: STRING>, b STRING, c STRING",
        [("RED", ("BLUE",), "RED", "BLUE"), ("RED", ("BLUE",), "BLUE", "BLUE")],
        [None, "'b' is no symbol"],
    ),
    "a record within itself": (
        {"v": "int", "next": ["null", "Row"]},
        "v INT, next STRUCT<v: INT>",
        [(1, (2,)), (1, None), (1, (None,))],
        [None, None, "'next.v' is null"],
    ),
    # All that can be wrong was once looked at anew for each of it, and that at each depth: this took hours.
    "lists in lists": (
        {"l": DEEP},
        f"l {DEEP_COLUMN}",
        [([],), (DEEP_VALUE,), (None,)],
        [None, "'l[].l[].l[].l[].l[].l' is null", "'l' is null"],
    ),
    "names in other letters": (
        {"r": {"type": "record", "name": "R", "fields": [{"name": "Color", "type": RED}]}},
        "r STRUCT<color: STRING>",
        [(("RED",),), (("x",),), ((None,),)],
        [None, "'r.color' is no symbol", "'r.color' is null"],
    ),
}


@pytest.mark.parametrize("name", AVRO)
def test_a_row_that_does_not_fit_an_avro_schema_ends_no_task(spark: Any, name: str) -> None:
    kinds, columns, rows, reasons = AVRO[name]
    fields = [{"name": one, "type": kind} for one, kind in kinds.items()]
    schema = {"type": "record", "name": "Row", "namespace": "shop", "fields": fields}
    frame = spark.createDataFrame(rows, columns).coalesce(1)
    avro = Avro(json.dumps(schema))
    avro.check_start(spark, frame.schema, "the value")
    made = encoded_records(sink(value=avro), frame)
    told = F.col(MISFIT) if MISFIT in made.columns else F.lit(None)
    java = spark._jvm.org.apache.avro
    reader = java.generic.GenericDatumReader(getattr(java, "Schema$Parser")().parse(avro.schema))
    found = made.select("value", told.alias("why")).collect()
    for (data, why), reason, row in zip(found, reasons, rows, strict=True):
        assert (why is None) == (reason is None) and (reason or "") in (why or ""), (row, why)
        if why is None:
            decoder = java.io.DecoderFactory.get().binaryDecoder(bytes(data), None)
            reader.read(None, decoder)
            assert decoder.isEnd()


def test_old_times_are_not_written_by_another_calendar(spark: Any) -> None:
    frame = spark.sql("SELECT ARRAY(DATE'1500-01-01') AS days, 1 AS date")
    calendar = "spark.sql.avro.datetimeRebaseModeInWrite"
    avro = Avro('{"type": "record", "name": "R", "fields": [{"name": "date", "type": "int"}]}')
    for mode in ("LEGACY", "EXCEPTION"):
        spark.conf.set(calendar, mode)
        try:
            with pytest.raises(ConfigError, match=f"{calendar}={mode}"):
                Avro().check_start(spark, frame.schema, "the value")
            avro.check_start(spark, frame.schema, "the value")
        finally:
            spark.conf.unset(calendar)
    Avro().check_start(spark, frame.schema, "the value")


def test_what_goes_out_comes_back_equal(zoned: Any) -> None:
    limits = """SELECT 0 AS n, TINYINT(-128) AS t, 9223372036854775807 AS l, FLOAT(3.4028235E38) AS f,
        DOUBLE(4.9E-324) AS d, CAST('-0.00000000000000000000000000000000000001' AS DECIMAL(38,38)) AS p,
        'a\\u0000\\u001f"\\\\ä😀' AS s, X'00FF80' AS b, DATE'0001-01-01' AS day,
        TIMESTAMP'0001-01-01 00:00:00 UTC' AS at, TIMESTAMP_NTZ'2026-03-29 02:30:00.000001' AS wall,
        INTERVAL '-1 02:03:04.000005' DAY TO SECOND AS span, INTERVAL '-1-2' YEAR TO MONTH AS months,
        ARRAY(1.5BD, NULL) AS a, MAP('k', TIMESTAMP'2026-10-25 00:30:00 UTC', '', NULL) AS m,
        NAMED_STRUCT('f', FLOAT('NaN'), 's', '') AS x
        UNION ALL SELECT 1, TINYINT(127), -9223372036854775808, FLOAT('-Infinity'), DOUBLE('Infinity'),
        CAST('0' AS DECIMAL(38,38)), '', X'', DATE'9999-12-31', TIMESTAMP'9999-12-31 23:59:59.999999 UTC',
        TIMESTAMP_NTZ'9999-12-31 23:59:59.999999', INTERVAL '106751991 04:00:54.775807' DAY TO SECOND,
        INTERVAL '178956970-7' YEAR TO MONTH, ARRAY(), MAP(), NULL
        UNION ALL SELECT 2, NULL, NULL, FLOAT('NaN'), -0.0D, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, NAMED_STRUCT('f', NULL, 's', NULL)"""
    frame = zoned.sql(limits)
    texts = encoded_records(sink(value=Json()), frame).select(F.col("value").cast("string"))

    def shown(rows: DataFrame) -> list[str]:
        # Exact and without a zone: microseconds, bytes and bits.
        columns = [
            F.col(field.name).cast("string")
            if field.name not in ("b", "at", "m")
            else {
                "b": F.hex("b"),
                "at": F.unix_micros("at").cast("string"),
                "m": F.transform_values("m", lambda _, at: F.unix_micros(at)).cast("string"),
            }[field.name]
            for field in frame.schema
        ]
        return [str(tuple(row)) for row in rows.select(*columns).collect()]

    columns = ("CAST(value AS BINARY) AS value", "'t' AS topic", "0 AS partition", "0L AS offset")
    made = Decoding(Json(ddl_of(frame.schema))).deserializer("in", NO_JOB, ["t"])
    read = made.rows(texts.selectExpr(*columns), ["t"], []).localCheckpoint()
    assert shown(read) == shown(frame)
