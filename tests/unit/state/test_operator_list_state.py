"""Operator list state: who gets which items when an operator is rescaled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.state.codec import FrameError, StateValueError
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.operator_state import (
    BroadcastTables,
    OperatorListDescriptor,
    OperatorLists,
    Redistribution,
    deal,
    redistribute,
)
from tests.support.effort import examples

SPLIT = OperatorListDescriptor("split", "file STRING, offset LONG")
UNION = OperatorListDescriptor("union", "LONG", Redistribution.UNION)
BOTH = [SPLIT, UNION]


def value_of(split, union):
    lists = OperatorLists("op", BOTH, None)
    lists.state(SPLIT).add_all(split)
    for item in union:
        lists.state(UNION).add(item)
    return lists.dump()


def read(value):
    lists = OperatorLists("op", BOTH, value)
    return lists.state(SPLIT).get(), lists.state(UNION).get()


ITEMS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 99)), max_size=5)
COPIES = st.lists(st.one_of(st.none(), st.tuples(ITEMS, st.lists(st.integers(0, 9), max_size=3))), max_size=5)


@settings(max_examples=examples(100), deadline=None)
@given(COPIES, st.integers(1, 6))
def test_each_split_item_goes_to_one_copy_and_each_union_item_to_all(copies, parallelism) -> None:
    """Behaviour 90: split and united, with copies that stored nothing, or no item."""
    values = [None if one is None else value_of(*one) for one in copies]
    after = [read(value) for value in redistribute("op", BOTH, values, parallelism)]
    split = [item for one in copies if one for item in one[0]]
    union = [item for one in copies if one for item in one[1]]
    assert [item for own, _ in after for item in own] == split
    assert [own for _, own in after] == [union] * parallelism
    sizes = [len(own) for own, _ in after]
    if len(copies) != parallelism:
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
    else:
        assert [own for own, _ in after] == [[] if one is None else one[0] for one in copies]


def test_split_deals_runs_in_order() -> None:
    """Behaviour 90."""
    items = [[1, 2, 3], [], [4, 5], [6, 7]]
    assert deal(items, Redistribution.SPLIT, 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert deal(items, Redistribution.SPLIT, 9) == [[1], [2], [3], [4], [5], [6], [7], [], []]
    assert deal([], Redistribution.SPLIT, 2) == [[], []]
    with pytest.raises(ValueError, match="at least one copy"):
        redistribute("op", BOTH, [], 0)


def test_lists_are_changed_replaced_and_cleared() -> None:
    lists = OperatorLists("op", BOTH, value_of([("a", 1)], [5]))
    state = lists.state(SPLIT)
    assert (list(state), len(state), lists.is_changed) == ([("a", 1)], 1, False)
    state.add(("b", 2))
    for item in state:
        state.add(item)
    assert state.get() == [("a", 1), ("b", 2)] * 2
    state.update([("c", 3)])
    lists.state(UNION).clear()
    assert (read(lists.dump()), lists.is_changed) == (([("c", 3)], []), True)
    with pytest.raises(ValueError, match="takes no None"):
        state.add(None)


def test_what_is_stored_is_checked() -> None:
    value = value_of([("a", 1)], [5])
    with pytest.raises(StateMismatch, match=r"belongs to operator 'op' .*not to 'other'"):
        OperatorLists("other", BOTH, value)
    with pytest.raises(StateMismatch, match="'split' is no longer declared"):
        OperatorLists("op", [UNION], value)
    with pytest.raises(StateMismatch, match="as 'operator list state'"):
        BroadcastTables("op", [], value)
    with pytest.raises(StateMismatch, match=r"stored as .*int64.* but declared as .*string"):
        OperatorLists("op", [SPLIT, OperatorListDescriptor("union", "STRING", Redistribution.UNION)], value)
    with pytest.raises(StateMismatch, match="as UNION operator list state and declared as SPLIT"):
        OperatorLists("op", [SPLIT, OperatorListDescriptor("union", "LONG")], value)
    with pytest.raises(FrameError):
        OperatorLists("op", BOTH, value[:40])
    lists = OperatorLists("op", BOTH, None)
    with pytest.raises(StateMismatch, match="there is no operator list state 'x'"):
        lists.state(OperatorListDescriptor("x", "LONG"))
    lists.state(UNION).add("text")
    with pytest.raises(StateValueError, match="'text'"):
        lists.dump()
