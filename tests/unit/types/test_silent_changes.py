"""Values that Arrow would change without a word are refused in rows and in states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flinkish_spark import FlatMapFunction, KeyedProcessFunction, ValueStateDescriptor
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.exact_columns import exact_cast
from flinkish_spark.types.to_arrow import ColumnTooLarge, ValueMismatch, strict_array

_FLOATS = pa.list_(pa.float32())
_TEXTS = pa.list_(pa.string())


@pytest.mark.parametrize(
    ("kind", "good", "wrong"),
    [
        (pa.float32(), [1.5, math.inf, -math.inf, math.nan, None, 3.4e38], 1e300),
        (pa.float32(), [np.float64(2), np.float32("inf")], np.float64(-1e39)),
        (_FLOATS, [[1.0, math.inf], None, [None]], [1.0, 1e300]),
        (pa.map_(pa.string(), pa.float32()), [{"a": math.inf}, {}, None], {"a": 1.0, "b": 1e300}),
        (pa.map_(pa.float32(), pa.string()), [{math.inf: "a"}], {1e300: "a"}),
        (pa.struct([("a", pa.float64()), ("b", pa.float32())]), [(1e300, math.inf), None], {"b": 1e300}),
        (pa.list_(pa.struct([("a", _FLOATS)])), [[([1.0],)]], [([1e300],)]),
    ],
)
def test_a_number_beyond_a_float_is_refused_at_any_depth(kind: Any, good: list[Any], wrong: Any) -> None:
    assert len(strict_array(good, kind)) == len(good)
    with pytest.raises(ValueMismatch, match="beyond what a FLOAT can be") as refused:
        strict_array([*good, wrong, *good], kind)
    assert refused.value.value is wrong


@pytest.mark.parametrize(
    ("kind", "good", "wrong"),
    [
        (_TEXTS, [["abc"], None, (), np.array(["a"])], "abc"),
        (_TEXTS, [["a"]], ""),
        (pa.list_(pa.binary()), [[b"a"]], "abc"),
        (pa.list_(_TEXTS), [[["a"], None], None], [["a"], "abc"]),
        (pa.map_(pa.string(), _TEXTS), [{"abc": ["a"]}, [("a", ["b"])], None], {"a": "abc"}),
        (pa.struct([("n", pa.int64()), ("a", _TEXTS)]), [(1, ["a"]), None, {"n": 1}], {"n": 1, "a": "abc"}),
        (pa.list_(pa.struct([("a", _TEXTS)])), [[(["a"],)], [None]], [(["a"],), ("abc",)]),
    ],
)
def test_a_text_is_refused_where_a_list_is_declared_at_any_depth(
    kind: Any, good: list[Any], wrong: Any
) -> None:
    assert len(strict_array(good, kind)) == len(good)
    with pytest.raises(ValueMismatch, match="a text is no list") as refused:
        strict_array([*good, wrong], kind)
    assert refused.value.value is wrong


@pytest.mark.parametrize(("kind", "wrong"), [(_TEXTS, 5), (pa.list_(_TEXTS), [5]), (_TEXTS, [5])])
def test_what_is_neither_a_list_nor_a_text_is_refused_as_ever(kind: Any, wrong: Any) -> None:
    with pytest.raises(ValueMismatch, match="cannot hold"):
        strict_array([wrong], kind)


def test_a_slice_of_a_column_is_cast_as_its_own_rows() -> None:
    column = pa.array([[1e300], [1.0, math.inf], None, [math.inf]], pa.list_(pa.float64()))
    maps = pa.array([{"a": 1e300}, {"b": math.inf}], pa.map_(pa.string(), pa.float64()))
    assert exact_cast(column.slice(1), _FLOATS).to_pylist() == [[1.0, math.inf], None, [math.inf]]
    assert exact_cast(maps.slice(1), pa.map_(pa.string(), pa.float32())).to_pylist() == [[("b", math.inf)]]
    for whole, kind in ((column, _FLOATS), (maps, pa.map_(pa.string(), pa.float32()))):
        with pytest.raises(pa.ArrowInvalid, match="beyond what a FLOAT can be"):
            exact_cast(whole, kind)


class Emits(FlatMapFunction):
    def __init__(self, row: Any) -> None:
        self.row = row

    def flat_map(self, value: Any) -> Any:
        yield self.row


class Keeps(KeyedProcessFunction):
    def __init__(self, kind: str, value: Any) -> None:
        self.kind, self.value = kind, value

    def open(self, context: Any) -> None:
        self.kept = context.get_state(ValueStateDescriptor("kept", self.kind))

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.kept.update(self.value)


@pytest.mark.parametrize(("kind", "value"), [("FLOAT", 1e300), ("ARRAY<STRING>", "abc")])
def test_the_error_names_operator_field_and_value(kind: str, value: Any) -> None:
    rows = ProgramHarness(
        lambda orders: orders.flat_map(Emits((value,)), output=f"made {kind}"), "user STRING"
    )
    with pytest.raises(Exception, match=f"field 'made' of .*{value!r}".replace("+", r"\+")):
        rows.push(("ann",))
    state = ProgramHarness.of(Keeps(kind, value), "user STRING", key="user", output="n LONG", uid="totals")
    with pytest.raises(UserFunctionError) as refused:
        state.push(("ann",))
    for part in ("'totals'", "state 'kept'", "key 'ann'", repr(value)):
        assert part in str(refused.value)


#: One object many times over: as a column it takes more than Arrow's offsets can say.
_PIECE = bytes(1 << 24)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (pa.binary(), [_PIECE] * 129),
        (pa.struct([("a", pa.binary())]), [(_PIECE,)] * 129),
        (pa.map_(pa.int64(), pa.binary()), [{n: _PIECE for n in range(129)}]),
    ],
)
def test_a_column_that_arrow_cannot_hold_is_named(kind: pa.DataType, column: list[Any]) -> None:
    with pytest.raises(ColumnTooLarge, match="more than 2 GiB together"):
        strict_array(column, kind)


def test_errors_show_the_beginning_of_a_long_value() -> None:
    with pytest.raises(ValueMismatch) as caught:
        strict_array(["x" * 1_000_000], pa.int64())
    assert len(str(caught.value)) < 600 and "(1,000,000 characters)" in str(caught.value)
