"""Columns written as JSON, as texts and as CSV have the bytes of Spark's own, with times in UTC."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.csv_lines import CsvForm, lines_of_files
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.exact_text import JsonWriter, exact_text
from flinkish_spark.types.json_columns import replace_intervals

#: Under which Spark writes times as they are written here, and texts whole.
TIME_OPTIONS: Mapping[str, str] = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
WHOLE = {"escape": '"', "ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}


def _texts(pattern: str, texts: str) -> list[str]:
    return [pattern.format(text) for text in texts.split("|")]


VALUES: dict[str, list[str]] = {
    "flag": ["true", "false"],
    "tiny": ["TINYINT(-128)"],
    "wide": ["9223372036854775807", "-9223372036854775807L"],
    "single": _texts(
        "FLOAT('{}')", "0|-0.0|1|0.001|0.0009999|9999999|10000000|NaN|Infinity|-Infinity|1.1|0.1"
    ),
    "double": _texts(
        "DOUBLE('{}')",
        "0|-0.0|1|0.001|0.0009999|9999999.999999998|1E7|1.7976931348623157E308|NaN|-Infinity|0.3",
    ),
    "p38_18": _texts("CAST('{}' AS DECIMAL(38,18))", "0|1|0.000001|0.0000001|-0.000000000000000001|12345.6"),
    "p38_0": _texts("CAST('{}' AS DECIMAL(38,0))", "0|99999999999999999999999999999999999999"),
    "p10_2": _texts("CAST('{}' AS DECIMAL(10,2))", "0|-0.01|99999999.99"),
    "p38_38": _texts("CAST('{}' AS DECIMAL(38,38))", "0|0.1|-0.00000000000000000000000000000000000001"),
    "bytes": ["X''", "X'00FF80'"],
    "text": ["''", "'plain'", "'a\\u0000\\u001f\"\\\\ä😀\\t\\n\\r\\f\\b/\\u007f\\u2028'"],
    "day": [
        *_texts("DATE'{}'", "0001-01-01|9999-12-31|1582-10-10"),
        *_texts("DATE_ADD(DATE'0001-01-01', {})", "-1|-400|-4000000|6000000"),
    ],
    "at": [
        *_texts(
            "TIMESTAMP'{}'", "0001-01-01 00:00:00 UTC|9999-12-31 23:59:59.999999 UTC|2026-03-29 02:30:00.1"
        ),
        *_texts("TIMESTAMP_MICROS({})", "253402300800000000|-62135596800000001|-62167219200000001"),
    ],
    "wall": _texts("TIMESTAMP_NTZ'{}'", "0001-01-01 00:00:00|2026-03-29 02:30:00.1"),
    **{
        f"span_{kind.replace(' ', '_')}": _texts(f"INTERVAL '{{}}' {kind}", texts)
        for kind, texts in {
            "DAY": "-1|0|99",
            "DAY TO HOUR": "-1 02|0 00",
            "DAY TO MINUTE": "1 02:03",
            "DAY TO SECOND": "-1 02:03:04.000005|0 00:00:00|1 02:03:40.5|106751991 04:00:54.775807",
            "HOUR": "-5|26",
            "HOUR TO MINUTE": "5:06|-26:00",
            "HOUR TO SECOND": "5:06:07.1|-126:00:00",
            "MINUTE": "5|-1563",
            "MINUTE TO SECOND": "5:06.7|-100:00",
            "SECOND": "5.5|-100|0",
            "YEAR": "1|-3",
            "MONTH": "14|-1|0",
            "YEAR TO MONTH": "1-2|-178956970-7|0-0",
        }.items()
    },
}


@pytest.fixture(scope="module")
def values(spark: Any) -> DataFrame:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    rows = [
        f"SELECT {n} AS n, "
        + ", ".join(f"{(v[n : n + 1] or ['NULL'])[0]} AS {name}" for name, v in VALUES.items())
        for n in range(max(map(len, VALUES.values())) + 1)
    ]
    made = spark.sql(" UNION ALL ".join(rows)).coalesce(1).orderBy("n").localCheckpoint()
    yield made
    spark.conf.set("spark.sql.session.timeZone", before)


def columns_of(frame: DataFrame) -> list[pa.Array]:
    own = [
        replace_intervals(F.col(quote_name(one.name)), one.dataType).alias(one.name) for one in frame.schema
    ]
    return [column.combine_chunks() for column in frame.select(own).toArrow().columns]


def as_json(column: Column, *, null_fields: bool = True) -> Column:
    return F.to_json(column, {**TIME_OPTIONS, "ignoreNullFields": str(not null_fields).lower()})


def check_objects(frame: DataFrame) -> None:
    for null_fields in (True, False):
        fields = F.struct(*map(quote_name, frame.columns))
        wanted = [row[0] for row in frame.select(as_json(fields, null_fields=null_fields)).collect()]
        columns = columns_of(frame)
        writer = JsonWriter(frame.schema, null_fields=null_fields)
        found = writer.write(columns, len(columns[0])).to_pylist()
        assert found == wanted


def test_objects_are_those_of_spark(values: DataFrame) -> None:
    check_objects(values)


def test_values_within_others_are_those_of_spark(values: DataFrame) -> None:
    nested: list[Column] = []
    for name in VALUES:
        own = F.col(name)
        nested += [F.array(own, F.lit(None), own).alias(f"a_{name}")]
        nested += [F.create_map(F.lit('k"'), own, F.lit(""), own).alias(f"m_{name}")]
        nested += [F.when(F.col("n") % 2 == 0, F.struct(own.alias('x"'), own.alias("y"))).alias(f"s_{name}")]
    check_objects(values.select("n", *nested))
    # Slices begin within their buffers, and lists of lists, empty and missing ones.
    deep = F.array(F.struct(F.array("text"), F.create_map(F.lit("q"), F.array("p10_2", "p10_2"))))
    check_objects(
        values.where("n > 2").select(
            "n",
            F.when(F.col("n") % 3 != 0, deep).alias("deep"),
            F.expr("IF(n % 2 = 0, filter(array(n), x -> x < 0), NULL)").alias("list"),
            F.expr("IF(n % 2 = 0, map_filter(map('a', n), (k, v) -> v < 0), NULL)").alias("map"),
            F.expr("struct(IF(n = 3, 1, NULL) AS a, struct(IF(n = 4, 1, NULL) AS b) AS c)").alias("o"),
        )
    )


def test_a_slice_of_columns_is_written_as_itself(values: DataFrame) -> None:
    nested = values.select(
        F.array("text", "text").alias("a"), F.create_map(F.lit("k"), "day").alias("m"), "text"
    )
    columns, writer = columns_of(nested), JsonWriter(nested.schema)
    whole = writer.write(columns, len(columns[0])).to_pylist()
    for at, size in ((0, 2), (1, 3), (len(whole) - 1, 1)):
        part = [one.slice(at, size) for one in columns]
        assert writer.write(part, size).to_pylist() == whole[at : at + size]


def test_texts_are_those_of_spark(values: DataFrame) -> None:
    for one, column in zip(values.schema, columns_of(values), strict=True):
        kind, own = one.dataType, F.col(one.name)
        if isinstance(kind, T.BinaryType):
            own = F.base64(own)
        elif isinstance(kind, T.TimestampType | T.TimestampNTZType):
            own = F.get_json_object(as_json(F.struct(own.alias("t"))), "$.t")
        wanted = [row[0] for row in values.select(own.cast("string")).collect()]
        assert exact_text(kind)(column).to_pylist() == wanted, one.name


def test_lines_of_csv_have_the_values_of_spark_s(values: DataFrame) -> None:
    """Of a decimal with many zeros in front Spark writes an exponent."""
    fields = values.drop("bytes", "n")
    line = F.to_csv(F.struct(*fields.columns), {**TIME_OPTIONS, **WHOLE})
    wanted = [row[0] for row in values.select(line).collect()]
    columns = columns_of(fields)
    found = lines_of_files(fields.schema, columns, CsvForm()).to_pylist()

    def parsed(text: str) -> list[Any]:
        [cells] = csv.reader([text], strict=True)
        kinds = [one.dataType for one in fields.schema]
        return [
            Decimal(cell) if cell and isinstance(kind, T.DecimalType) else cell
            for cell, kind in zip(cells, kinds, strict=True)
        ]

    assert list(map(parsed, found)) == list(map(parsed, wanted))
    plain = fields.drop(*(name for name in fields.columns if name.startswith("p38")), "text")
    line = F.to_csv(F.struct(*plain.columns), {**TIME_OPTIONS, **WHOLE})
    wanted = [row[0] for row in values.select(line).collect()]
    assert lines_of_files(plain.schema, columns_of(plain), CsvForm()).to_pylist() == wanted


def test_a_text_of_a_struct_has_no_fields_that_are_null() -> None:
    kind = T.StructType([T.StructField("a", T.IntegerType()), T.StructField("b", T.IntegerType())])
    given = pa.array(
        [{"a": 1, "b": None}, {"a": None, "b": None}, None], pa.struct([("a", pa.int32()), ("b", pa.int32())])
    )
    assert exact_text(kind)(given).to_pylist() == ['{"a":1}', "{}", None]
    assert JsonWriter(T.StructType([])).write([], 2).to_pylist() == ["{}"] * 2


def test_numbers_of_which_java_writes_other_digits_are_the_same_numbers() -> None:
    """Java 17 writes 2.0E23 as 1.9999999999999998E23, and the least number with a digit more than it has."""
    numbers = [4.9e-324, 2.2250738585072014e-308, 1e23, 2e23, 8.41e21, 5e-324]
    texts = exact_text(T.DoubleType())(pa.array(numbers)).to_pylist()
    assert [float(text) for text in texts] == numbers and texts[3] == "2.0E23"
    (text,) = exact_text(T.FloatType())(pa.array([1.4e-45], pa.float32())).to_pylist()
    assert pa.scalar(float(text), pa.float32()) == pa.scalar(1.4e-45, pa.float32())


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    given = pa.array([b'\xff"', b"a", None]).view(pa.string())
    fields = T.StructType([T.StructField("s", T.StringType())])
    written = JsonWriter(fields).write([given], 3).to_pylist()
    assert list(map(json.loads, written)) == [{"s": '\ufffd"'}, {"s": "a"}, {"s": None}]


@pytest.mark.parametrize("kept", [[0], [1, 2], []])
def test_a_field_that_is_left_out_leaves_no_comma(kept: Sequence[int]) -> None:
    fields = T.StructType([T.StructField(name, T.StringType()) for name in "abc"])
    columns = [pa.array([f"{{,{at}" if at in kept else None], pa.string()) for at in range(3)]
    (text,) = JsonWriter(fields, null_fields=False).write(columns, 1).to_pylist()
    assert json.loads(text) == {"abc"[at]: f"{{,{at}" for at in kept}
