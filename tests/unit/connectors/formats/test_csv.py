"""Lines of CSV: what each becomes, and why a line is none."""

from __future__ import annotations

import csv
import io
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark.connectors.formats.csv import CsvReader
from flinkish_spark.connectors.formats.reader import CodecError
from flinkish_spark.types.ddl import parse_ddl

FIELDS = parse_ddl("a STRING, b INT, d DECIMAL(10,2), f DOUBLE").json()
TEXTS = parse_ddl("a STRING, b STRING, c STRING").json()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (b"x,1,01.50,1.0E10", ("x", 1, Decimal("1.50"), 1.0e10)),
        (b'"a,""b",,+.5,-INF\r\n', ('a,"b', None, Decimal("0.50"), -math.inf)),
        (b'"",-0,2.,-Infinity', ("", 0, Decimal("2.00"), -math.inf)),
        (b",,,", (None, None, None, None)),
        ('"ä\nb",+007,1,1'.encode(), ("ä\nb", 7, Decimal("1.00"), 1.0)),
    ],
)
def test_a_line_as_values_of_its_fields(line: bytes, values: tuple[Any, ...]) -> None:
    assert CsvReader(FIELDS, ",").make_converter()(line) == values


def test_times_of_a_line_are_of_the_session_s_zone() -> None:
    fields = parse_ddl(
        "at TIMESTAMP, day DATE, b BINARY, is BOOLEAN, t TINYINT, i INTERVAL YEAR TO MONTH"
    ).json()
    line = b"2026-01-31T12:00:00,2026-01-31,AAEC,true,-128,INTERVAL '1-2' YEAR TO MONTH"
    found = CsvReader(fields, ",", "Europe/Berlin").make_converter()(line)
    assert found == (1_769_857_200_000_000, 20_484, b"\x00\x01\x02", True, -128, 14)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"x", "the line has 1 values, and there are 4 fields"),
        (b"x,1,1,1,", "the line has 5 values, and there are 4 fields"),
        (b'"x,1,1,1', "value 1 has an open quote, or text after the closing one"),
        (b'"x"y,1,1,1', "value 1 has an open quote, or text after the closing one"),
        (b'x"y,1,1,1', "value 1 has a quote or a line end, and no quotes around it"),
        (b"x,1,1,1\nx,1,1,1", "it is more than one line"),
        (b"\xff,1,1,1", "the line is no UTF-8: invalid start byte"),
        (b"x,1.0,1,1", "the field 'b' is no int: '1.0'"),
        (b"x, 1,1,1", "the field 'b' is no int: ' 1'"),
        (b"x,1,1_0,1", "the field 'd' is no decimal(10,2): '1_0'"),
        (b"x,1,1,nan", "the field 'f' is no double: 'nan'"),
        (b"x,1,1,1e400", "the field 'f' is no double: '1e400'"),
        (b"x,1,1.005,1", "the field 'd' is no decimal(10,2): '1.005'"),
        (b"x,2147483648,1,1", "the field 'b' is no int: '2147483648'"),
        (b"x," + b"1" * 5_000 + b",1,1", f"the field 'b' is no int: '{'1' * 100}'"),
    ],
)
def test_a_line_that_is_none_has_a_reason(line: bytes, why: str) -> None:
    with pytest.raises(CodecError) as refused:
        CsvReader(FIELDS, ",").make_converter()(line)
    assert str(refused.value) == why


def test_a_binary_that_is_no_base64_has_a_reason() -> None:
    for text in ("ä", "?", "QQ"):
        with pytest.raises(CodecError, match=r"^the field 'b' is no binary"):
            CsvReader(parse_ddl("b BINARY").json(), ",").make_converter()(text.encode())


@given(st.lists(st.text(alphabet='a;"\r\n ä', max_size=6), min_size=3, max_size=3))
def test_what_pythons_own_module_writes_is_read(values: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=";", quoting=csv.QUOTE_ALL, lineterminator="").writerow(values)
    assert list(CsvReader(TEXTS, ";").make_converter()(out.getvalue().encode())) == values
