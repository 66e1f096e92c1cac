"""Rows with names go by name, into columns and into states."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark import sql
from pyspark.sql import types as T

from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.row_form import RowForm, element_class
from flinkish_spark.types.rows import OutputError, RowWriter, as_row
from flinkish_spark.types.to_arrow import find_nested_type

#: Its own hints know neither names nor values.
Row: Any = sql.Row


class Turned(NamedTuple):
    total: int
    user: str


@dataclasses.dataclass
class Point:
    y: int
    x: int


@dataclasses.dataclass
class Only:
    user: str


def written(ddl: str, *rows: Any) -> list[tuple[Any, ...]]:
    """Return rows as they come out."""
    fields = parse_ddl(ddl)
    assert isinstance(fields, T.StructType)
    return list(zip(*(array.to_pylist() for array in RowWriter.of(fields).write(list(rows))), strict=True))


REQUIRED = T.StructType([T.StructField("user", T.StringType()), T.StructField("total", T.LongType(), False)])


def test_rows_with_names_are_put_in_order_and_others_go_by_position() -> None:
    rows = [Turned(1, "a"), Row(total=2, user="b"), Row("total", "user")(3, "c"), Row("d", 4), ["e", 5]]
    rows += [{"total": 6, "user": "f"}, ("g", 7), namedtuple("Plain", "user total")("h", 8)]
    assert written("user STRING, total LONG", *rows) == list(zip("abcdefgh", range(1, 9), strict=True))
    assert written("user STRING, total LONG", *[Turned(1, "a")] * 2) == [("a", 1)] * 2


def test_a_field_that_is_left_out_is_null() -> None:
    rows = [{"user": "a"}, Row(user="b"), Only("c"), {}]
    assert written("total LONG, user STRING", *rows) == [(None, "a"), (None, "b"), (None, "c"), (None, None)]
    assert written("user STRING", {"user": "a"}, Only("b")) == [("a",), ("b",)]


@pytest.mark.parametrize("row", [{"usr": 1}, Row(usr=1), namedtuple("R", ["usr"])(1), Point(1, 2)])
def test_a_field_that_nobody_declared_is_an_error_with_its_name(row: Any) -> None:
    with pytest.raises(
        OutputError, match=r"emitted the field '(usr|y)', but the declared fields are user, total"
    ) as failed:
        RowWriter.of(REQUIRED).write([("ann", 1), row])
    assert failed.value.row == 1


@pytest.mark.parametrize("row", [{"user": "a"}, Row(user="a"), Only("a")])
def test_a_field_that_must_not_be_null_cannot_be_left_out(row: Any) -> None:
    with pytest.raises(OutputError, match="emitted no field 'total', which must not be null") as failed:
        RowWriter.of(REQUIRED).write([("ann", 1), row])
    assert failed.value.row == 1
    with pytest.raises(OutputError, match="field 'total' is None and must not be null") as failed:
        RowWriter.of(REQUIRED).write([("ann", 1), ("ben", None)])
    assert failed.value.row == 1


def test_an_element_may_go_out_under_other_names_but_never_in_another_order() -> None:
    element = element_class(["user", "amount"])("ann", 1)
    assert as_row(element, ["user", "total"]) == ("ann", 1)
    assert as_row(element, ["amount", "user"]) == (1, "ann")
    with pytest.raises(OutputError, match="the field 'user'"):
        as_row(element, ["amount", "total"])
    with pytest.raises(OutputError, match="the field 'amount'"):
        as_row(element, ["buyer", "user"])


def test_rows_within_rows_go_by_name_too() -> None:
    kind = "STRUCT<x: LONG, y: LONG>"
    ddl = f"at {kind}, all ARRAY<{kind}>, by MAP<STRING, {kind}>"
    point = {"x": 1, "y": 2}
    for one in (Point(y=2, x=1), Row(y=2, x=1), {"y": 2, "x": 1}, (1, 2)):
        expected = [(point, [point, None], [("k", point)]), (None, None, None)]
        assert written(ddl, (one, [one, None], {"k": one}), (None, None, None)) == expected
    assert written(ddl, ({"x": 1}, [], {}), (Point(2, 1), [], {})) == [
        ({"x": 1, "y": None}, [], []),
        (point, [], []),
    ]
    deep = "all ARRAY<STRUCT<of: STRUCT<x: LONG, y: LONG>>>"
    assert written(deep, ([{"of": Point(2, 1)}],)) == [([{"of": point}],)]


@pytest.mark.parametrize("wrong", [{"x": 1, "z": 2}, Row(z=1), (1, 2, 3), "text", 5])
def test_a_wrong_row_within_a_row_is_an_error_of_its_field(wrong: Any) -> None:
    with pytest.raises(
        OutputError, match="field 'at' of type struct<x: int64, y: int64> cannot hold"
    ) as failed:
        written("at STRUCT<x: LONG, y: LONG>", ((1, 2),), (wrong,))
    assert failed.value.row == 1


def test_a_form_learns_each_class_once() -> None:
    form = RowForm(["user", "total"])
    assert form.tuples([]) == [] and form.tuples([("a", 1)]) == [("a", 1)]
    assert [form.tuple_of(row) for row in (Turned(1, "a"), Turned(2, "b"))] == [("a", 1), ("b", 2)]


def test_values_that_are_tuples_in_order_are_left_as_they_are() -> None:
    point = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    kind = pa.struct([("at", point), ("all", pa.map_(pa.string(), pa.list_(point)))])
    nested = find_nested_type(kind)
    assert nested is not None and find_nested_type(pa.list_(pa.string())) is None
    plain = ((1, 2), {"k": [(1, 2), None]})
    assert nested.is_plain([plain, None, (None, None), (None, {"k": None})])
    element = element_class(["x", "y"])(1, 2)
    assert nested.is_plain([((1, 2), {"k": [element]})])
    for other in [(Point(2, 1), None), ((1, 2), {"k": [{"x": 1}]}), ((1, 2), [("k", [])]), ((1, 2),), "no"]:
        assert not nested.is_plain([plain, other])
    assert nested.plain((Point(2, 1), [("k", [Row(y=2, x=1)])])) == ((1, 2), [("k", [(1, 2)])])
