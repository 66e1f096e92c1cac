"""Values in files of JSON lines and of CSV are exactly what stands there, or the file cannot be read."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.files import task_files
from flinkish_spark.connectors.files.input_formats import (
    BadLine,
    CsvFiles,
    CsvHeader,
    JsonLines,
    json_batches,
)
from flinkish_spark.connectors.files.output_formats import (
    FileFormat,
    check_columns,
    check_options,
    has_header,
)
from flinkish_spark.core.errors import BAD_RECORD_MARKER, BadRecordError, ConfigError, SchemaError
from flinkish_spark.types.ddl import parse_ddl

MONEY = pa.decimal128(10, 2)
MOMENT = pa.timestamp("us", "UTC")


def json_value(kind: pa.DataType, text: str) -> Any:
    (batch,) = json_batches(f'{{"a":{text}}}'.encode(), pa.schema([("a", kind)]))
    return batch.to_pylist()[0]["a"]


def csv_value(folder: Path, kind: pa.DataType, text: str) -> Any:
    (folder / "x.csv").write_text(f"{text}\n")
    batches = CsvFiles(CsvHeader.NONE).batches(str(folder / "x.csv"), pa.schema([("a", kind)]))
    return next(row["a"] for batch in batches for row in batch.to_pylist())


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (MONEY, "12.340", Decimal("12.34")),
        (MONEY, "99999999.99", Decimal("99999999.99")),
        (pa.float32(), "3.4028235e38", 3.4028234663852886e38),
        (pa.float64(), '"Infinity"', math.inf),
        (pa.float32(), '"-Infinity"', -math.inf),
        (pa.list_(pa.float32()), '["+INF", null, 0.5]', [math.inf, None, 0.5]),
        (pa.struct([("x", pa.float64())]), '{"x": "-INF"}', {"x": -math.inf}),
        (pa.binary(), '"AAEC"', b"\x00\x01\x02"),
        (pa.binary(), '""', b""),
        (
            pa.list_(pa.struct([("b", pa.binary()), ("d", pa.date32())])),
            '[{"b": "/w==", "d": "2026-01-31"}, {"b": null}, null]',
            [{"b": b"\xff", "d": dt.date(2026, 1, 31)}, {"b": None, "d": None}, None],
        ),
    ],
)
def test_a_value_of_a_json_line_is_what_stands_there(kind: pa.DataType, text: str, value: Any) -> None:
    assert json_value(kind, text) == value


def test_a_text_of_nan_is_a_number_only_where_one_is_wanted() -> None:
    schema = pa.schema([("x", pa.float64()), ("s", pa.string())])
    (batch,) = json_batches(b'{"x":"NaN","s":"NaN"}\n\n{"x":1,"s":"Infinity"}\n', schema)
    first, second = batch.to_pylist()
    assert math.isnan(first["x"]) and first["s"] == "NaN"
    assert second == {"x": 1.0, "s": "Infinity"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((MONEY, text) for text in ("12.345", "1e-9", "100000000", '"1,5"')),
        # Arrow makes 0.448.. of the one, and ends the process at the other.
        (pa.decimal128(38, 38), "1767225600000"),
        (MONEY, "1e-999999999"),
        (pa.float32(), "1e39"),
        (pa.list_(pa.float32()), "[1, -1e39]"),
        (pa.float64(), "1e400"),
        (pa.float64(), '"much"'),
        (pa.binary(), '"?"'),
        (pa.binary(), '"QQ"'),
        (pa.int8(), "200"),
        (pa.string(), '"\\ud83d"'),
        (MOMENT, '"2026-01-01T00:00:00.1234567Z"'),
        (MOMENT, "1767225600000"),
        (pa.date32(), '"2026-01-01T10:00:00"'),
    ],
)
def test_what_a_type_does_not_hold_is_named_with_its_line(kind: pa.DataType, text: str) -> None:
    with pytest.raises(BadLine, match="line 2 "):
        list(json_batches(f'{{"a":null}}\n{{"a":{text}}}\n'.encode(), pa.schema([("a", kind)])))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (MONEY, "12.340", Decimal("12.34")),
        (pa.float32(), "3.4028235E38", 3.4028234663852886e38),
        (pa.float64(), "-Infinity", -math.inf),
        (pa.float64(), " 1.5 ", 1.5),
        (pa.float64(), '""', None),
        (pa.int8(), "-128", -128),
        (pa.int16(), "+007", 7),
        (pa.int64(), " 5\t", 5),
        (pa.int64(), '"5"', 5),
        (pa.int64(), '""', None),
        (pa.date32(), "0001-01-01", dt.date(1, 1, 1)),
        (pa.date32(), "9999-12-31", dt.date(9999, 12, 31)),
        (MOMENT, "9999-12-31T23:59:59.999999Z", dt.datetime(9999, 12, 31, 23, 59, 59, 999999, dt.UTC)),
        (MOMENT, "0001-01-01T01:00:00+01:00", dt.datetime(1, 1, 1, tzinfo=dt.UTC)),
        (pa.string(), 'a"b', 'a"b'),
        (pa.string(), 'a"b"', 'a"b"'),
        (pa.string(), ' "a"', ' "a"'),
        (MOMENT, "2026-10-25T00:30:00.000001Z", dt.datetime(2026, 10, 25, 0, 30, 0, 1, dt.UTC)),
        (pa.string(), '" a ""b"" "', ' a "b" '),
    ],
)
def test_a_value_of_csv_is_what_stands_there(
    tmp_path: Path, kind: pa.DataType, text: str, value: Any
) -> None:
    assert csv_value(tmp_path, kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((MONEY, text) for text in ("12.345", "1e-9", "100000000")),
        (pa.float32(), "1e39"),
        (pa.float64(), "1e400"),
        (pa.float64(), "much"),
        (pa.int8(), "200"),
        (pa.int8(), "0x80"),
        (pa.int8(), "0xFF"),
        (pa.int32(), "0xFFFFFFFF"),
        (pa.int64(), "0x1F"),
        *((pa.int64(), text) for text in ("0X1F", "1F", "++1", "+-1", "-", "1 2", "1_0", "1.0", "٣", " ")),
        (MOMENT, "2026-01-01T00:00:00.1234567Z"),
    ],
)
def test_what_a_type_does_not_hold_is_no_value_of_csv(tmp_path: Path, kind: pa.DataType, text: str) -> None:
    with pytest.raises((pa.ArrowInvalid, BadLine)):
        csv_value(tmp_path, kind, text)


#: What Arrow takes, and Python and Spark have no such time of.
OTHER_YEARS = [
    (pa.date32(), "0000-01-01"),
    (pa.date32(), "0000-12-31"),
    (MOMENT, "0000-12-31T23:59:59.999999Z"),
    (MOMENT, "0001-01-01T00:59:59+01:00"),
    (MOMENT, "9999-12-31T23:59:59-01:00"),
    (pa.timestamp("us"), "0000-01-01T00:00:00"),
]


@pytest.mark.parametrize(("kind", "text"), OTHER_YEARS)
def test_a_time_in_no_year_from_1_to_9999_is_named_with_its_line(
    tmp_path: Path, kind: pa.DataType, text: str
) -> None:
    (tmp_path / "x.csv").write_text(f'b,a\n"\n",\n\n,{text}\n')
    with pytest.raises(BadLine, match=r"line 5 cannot be read: the field 'a' has .* year from 1 to 9999"):
        list(CsvFiles().batches(str(tmp_path / "x.csv"), pa.schema([("a", kind)])))
    deep = pa.list_(pa.struct([("v", kind), ("bytes", pa.binary())]))
    for form, line in ((kind, f'"{text}"'), (deep, f'[null, {{"v": "{text}", "bytes": ""}}]')):
        with pytest.raises(BadLine, match=r"line 3 cannot be read: .* no year from 1 to 9999"):
            list(json_batches(f'{{"a": null}}\n\n{{"a": {line}}}\n'.encode(), pa.schema([("a", form)])))


@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.int64()), pa.list_(pa.duration("us"))])
def test_json_lines_refuse_what_arrow_does_not_read(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="JSON files cannot hold the field 'a'"):
        JsonLines().check(pa.schema([("a", kind)]))


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (FileFormat.JSON, T.MapType(T.BinaryType(), T.StringType())),
        (FileFormat.JSON, T.MapType(T.TimestampType(), T.StringType())),
        (FileFormat.JSON, T.VariantType()),
        (FileFormat.CSV, T.BinaryType()),
    ],
)
def test_files_refuse_what_has_no_exact_text(form: FileFormat, kind: T.DataType) -> None:
    with pytest.raises(SchemaError, match="cannot write the field 'a'"):
        check_columns(form, T.StructType().add("a", kind), [], "out")


TEXTS = T.StructType([T.StructField(name, T.StringType()) for name in ("a", "b")])


def lines(kind: FileFormat, options: dict[str, str], *rows: tuple[str | None, ...]) -> list[str]:
    check_options(kind, options)
    fields = T.StructType(TEXTS.fields[: len(rows[0])])
    batch = pa.record_batch([pa.array(one, pa.string()) for one in zip(*rows, strict=True)], fields.names)
    texts = task_files.LineTexts(kind, options, fields)
    found: list[str] = texts.of(batch).to_pylist()
    return [*([texts.header().decode()] if has_header(kind, options) else []), *found]


@pytest.mark.parametrize(
    ("options", "rows", "wanted"),
    [
        ({}, [(" x ", None), ("", "-")], [" x ,", '"",-']),
        ({}, [('a"b', "c,d"), ("e\n", "f\r")], ['"a""b","c,d"', '"e\n","f\r"']),
        # A line of blanks only is none for many readers.
        ({}, [(None,), ("",), (" ",), ("\t",)], ['""', '""', '" "', '"\t"']),
        ({"sep": "\t"}, [(None, None), ("a", None)], ['""\t', "a\t"]),
        ({"nullValue": " "}, [(None,), ("a",)], ['" "', "a"]),
        ({"nullValue": "\\N"}, [(None, "\\N "), ("", "N")], ["\\N,\\N ", '"",N']),
        ({"nullValue": "a", "header": "true"}, [("b", None)], ["a,b", "b,a"]),
        ({"QuoteAll": "TRUE", "header": "true"}, [("x", None)], ['"a","b"', '"x",']),
        ({"quote": "'", "delimiter": "::"}, [("it's", "a:b"), ('"', "")], ["'it''s'::'a:b'", "\"::''"]),
        ({"lineSep": "|"}, [("a|b", "c")], ['"a|b",c']),
        ({}, [("\ufeffa", "\ufeff"), ("a\ufeff", "b")], ['"\ufeffa","\ufeff"', "a\ufeff,b"]),
    ],
)
def test_a_line_of_csv_has_all_of_its_values(
    options: dict[str, str], rows: list[tuple[str | None, ...]], wanted: list[str]
) -> None:
    assert lines(FileFormat.CSV, options, *rows) == wanted


@pytest.mark.parametrize("more", [{}, {"quoteAll": "true"}])
@pytest.mark.parametrize(
    ("null", "ddl", "row"),
    [
        ("NULL", "a STRING, b INT", ("NULL", 1)),
        ("0", "a STRING, b INT", ("x", 0)),
        ("1.5", "b DOUBLE", (1.5,)),
    ],
)
def test_a_value_with_the_text_of_a_null_is_refused(
    null: str, ddl: str, row: tuple[object, ...], more: dict[str, str]
) -> None:
    """Readers compare behind the quotes, so that these do not help."""
    fields = parse_ddl(ddl)
    assert isinstance(fields, T.StructType)
    nulls, good = [None] * len(row), ["y", 7][-len(row) :]
    columns = [list(one) for one in zip(nulls, good, row, strict=True)]
    batch = pa.record_batch([pa.array(one) for one in columns], fields.names)
    field = fields.names[[str(one) for one in row].index(null)]
    texts = task_files.LineTexts(FileFormat.CSV, {"nullValue": null, **more}, fields)
    with pytest.raises(BadRecordError, match=f"text of {field} not being nullValue, '{null}'") as caught:
        texts.of(batch)
    assert BAD_RECORD_MARKER in str(caught.value) and str(row[0]) in str(caught.value)
    assert len(texts.of(batch.slice(0, 2))) == 2


def test_a_line_of_json_leaves_nulls_out_or_has_them() -> None:
    row = ("\x1e\n", None)
    assert lines(FileFormat.JSON, {"lineSep": "\x1e"}, row) == ['{"a":"\\u001E\\n"}']
    assert lines(FileFormat.JSON, {"ignoreNullFields": "False"}, row) == ['{"a":"\\u001E\\n","b":null}']


def test_a_large_batch_has_its_texts_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "_TEXTS_BYTES", 100)
    texts = task_files.LineTexts(FileFormat.JSON, {}, TEXTS)
    for kind in (pa.string(), pa.large_string()):
        rows = pa.record_batch([pa.array(["x" * 90, "y"] * 5, kind)] * 2, TEXTS.names)
        found = task_files._texts(texts, rows)
        assert found.type == pa.large_binary()
        assert [len(json.loads(one)["a"]) for one in found.to_pylist()] == [90, 1] * 5
