"""What accumulators hold: added, merged, stored, shown."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark.protocol.accumulators import (
    AccumulatorKind,
    AccumulatorValue,
    add_value,
    compute_result,
    merge_accumulators,
    merge_values,
)

K = AccumulatorKind
SHOWN: dict[AccumulatorKind, Any] = {
    K.INT_COUNTER: 6,
    K.LONG_COUNTER: 6,
    K.DOUBLE_COUNTER: 6.0,
    K.AVERAGE: 2.0,
    K.LONG_MINIMUM: 1,
    K.LONG_MAXIMUM: 3,
    K.DOUBLE_MINIMUM: 1.0,
    K.DOUBLE_MAXIMUM: 3.0,
    K.HISTOGRAM: {1: 1, 2: 1, 3: 1},
}
EMPTY: dict[AccumulatorKind, Any] = {
    **dict.fromkeys(K),
    K.INT_COUNTER: 0,
    K.LONG_COUNTER: 0,
    K.DOUBLE_COUNTER: 0.0,
    K.HISTOGRAM: {},
}


def held(kind: AccumulatorKind, values: list[Any]) -> Any:
    found = None
    for value in values:
        found = add_value(kind, found, value)
    return found


@pytest.mark.parametrize("kind", K)
def test_each_kind_shows_what_it_was_given(kind: AccumulatorKind) -> None:
    assert compute_result(kind, held(kind, [3, 1, 2])) == SHOWN[kind]
    assert compute_result(kind, None) == EMPTY[kind]


@pytest.mark.parametrize("kind", K)
@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=20), st.randoms())
def test_parts_in_any_order_hold_what_one_would(
    kind: AccumulatorKind, values: list[int], chance: random.Random
) -> None:
    # Whole numbers that floats hold exactly, so that their sums are exact, too.
    values = [value % 2**30 for value in values]
    parts = [AccumulatorValue.of(kind, held(kind, [value])) for value in values]
    chance.shuffle(parts)
    whole = merge_accumulators([{"n": part} for part in parts])["n"]
    assert whole == AccumulatorValue.of(kind, held(kind, values))
    assert AccumulatorValue.from_json(whole.to_json()) == whole


@pytest.mark.parametrize("kind", K)
@pytest.mark.parametrize("value", [True, "3", None, [1]])
def test_what_is_no_number_is_refused(kind: AccumulatorKind, value: Any) -> None:
    with pytest.raises(TypeError, match=kind.value):
        add_value(kind, None, value)


def test_whole_numbers_are_not_rounded_and_floats_come_back_as_they_were() -> None:
    assert AccumulatorValue.of(K.LONG_COUNTER, 2**90 + 1).value == 2**90 + 1
    with pytest.raises(TypeError, match="whole number"):
        add_value(K.LONG_COUNTER, 1, 1.5)
    for value in (0.1, -0.0, 1e300, 5e-324, float("inf")):
        stored = AccumulatorValue.of(K.DOUBLE_MAXIMUM, value)
        assert str(AccumulatorValue.from_json(stored.to_json()).value) == str(value)


def test_two_kinds_under_one_name_are_refused_by_name() -> None:
    one, other = AccumulatorValue(K.LONG_COUNTER, ("1",)), AccumulatorValue(K.HISTOGRAM, ())
    with pytest.raises(ValueError, match="'n' was added twice: it is a LongCounter and a Histogram"):
        merge_accumulators([{"n": one}, {"m": one}, {"n": other}])
    assert merge_values(K.LONG_COUNTER, None, 3) == merge_values(K.LONG_COUNTER, 3, None) == 3


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (K.LONG_COUNTER, []),
        (K.LONG_COUNTER, ["a"]),
        (K.AVERAGE, ["0x1p0"]),
        (K.HISTOGRAM, ["1"]),
        (K.DOUBLE_COUNTER, ["x"]),
        (K.HISTOGRAM, ["1", "b"]),
        (K.LONG_MAXIMUM, ["1", "2"]),
    ],
)
def test_a_stored_form_that_is_none_is_refused(kind: AccumulatorKind, numbers: list[str]) -> None:
    with pytest.raises(ValueError):
        AccumulatorValue.from_json({"kind": kind.value, "numbers": numbers})
