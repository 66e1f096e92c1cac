"""Lines of CSV: what each becomes, and why a line is none."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark.connectors.formats.csv import CsvReader
from flinkish_spark.connectors.formats.reader import Unreadable
from flinkish_spark.types.ddl import parse_ddl

FIELDS = parse_ddl("a STRING, b INT, d DECIMAL(10,2), f DOUBLE").json()
TEXTS = parse_ddl("a STRING, b STRING, c STRING").json()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"x,1,01.50,1.0E10", '{"a":"x","b":1,"d":1.50,"f":1.0E10}'),
        (b'"a,""b",,+.5,NaN\r\n', '{"a":"a,\\"b","b":null,"d":0.5,"f":"NaN"}'),
        (b'"",-0,2.,-Infinity', '{"a":"","b":-0,"d":2.0,"f":"-Infinity"}'),
        (b",,,", '{"a":null,"b":null,"d":null,"f":null}'),
        ('"ä\nb",1,1,1'.encode(), '{"a":"ä\\nb","b":1,"d":1,"f":1}'),
    ],
)
def test_a_line_as_json_of_its_fields(line: bytes, text: str) -> None:
    assert CsvReader(FIELDS, ",").opened()(line) == text


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"x", "the line has 1 values, and there are 4 fields"),
        (b"x,1,1,1,", "the line has 5 values, and there are 4 fields"),
        (b'"x,1,1,1', "value 1 has a quote that nothing closes, or text behind it"),
        (b'"x"y,1,1,1', "value 1 has a quote that nothing closes, or text behind it"),
        (b'x"y,1,1,1', "value 1 has a quote or the end of a line, and no quotes around it"),
        (b"x,1,1,1\nx,1,1,1", "it is more than one line"),
        (b"\xff,1,1,1", "the line is no UTF-8: invalid start byte"),
        (b"x,1.0,1,1", "the field 'b' is no int: '1.0'"),
        (b"x, 1,1,1", "the field 'b' is no int: ' 1'"),
        (b"x,1,1_0,1", "the field 'd' is no decimal(10,2): '1_0'"),
        (b"x,1,1,nan", "the field 'f' is no double: 'nan'"),
    ],
)
def test_a_line_that_is_none_has_a_reason(line: bytes, why: str) -> None:
    with pytest.raises(Unreadable) as refused:
        CsvReader(FIELDS, ",").opened()(line)
    assert str(refused.value) == why


@given(st.lists(st.text(alphabet='a;"\r\n ä', max_size=6), min_size=3, max_size=3))
def test_what_pythons_own_module_writes_is_read(values: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=";", quoting=csv.QUOTE_ALL, lineterminator="").writerow(values)
    found = json.loads(CsvReader(TEXTS, ";").opened()(out.getvalue().encode()))
    assert list(found.values()) == values
