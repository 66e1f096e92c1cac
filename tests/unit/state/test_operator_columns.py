"""State of many keys as columns, against a dict."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from flinkish_spark.operators.process import GroupRun, KeyedProcessOperator
from flinkish_spark.state.key_group import BasePolicy, GroupLayout, GroupState
from flinkish_spark.state.layered import KeyIndex
from tests.support.effort import examples
from tests.support.operator_harness import MemoryBases
from tests.unit.state.test_operator_state import Commands

TINY = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=2)
RUN = GroupRun(KeyedProcessOperator(Commands()), "op", 4)
LAYOUT = GroupLayout.of(RUN.states, [T.LongType(), T.StringType()])
KEYS = st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", None]))
BATCHES = st.lists(st.tuples(KEYS, st.integers(0, 9)), min_size=1, max_size=8)


def index_of(keys, *, collide):
    # Three hashes for fifteen keys: collisions all the time, which real hashes have in a lifetime or never.
    hashes = np.array([(n % 3 if collide else n * 31 + ord(s or "z")) for n, s in keys], dtype=np.int64)
    return KeyIndex.of(hashes, [pa.array([n for n, _ in keys]), pa.array([s for _, s in keys], pa.string())])


def names_of(index):
    return list(zip(*(key.to_pylist() for key in index.keys), strict=True))


@settings(max_examples=examples(200), deadline=None)
@given(BATCHES, st.booleans())
def test_equal_keys_get_one_number(rows, collide) -> None:
    keys = [key for key, _ in rows]
    index = index_of(keys, collide=collide)
    names = names_of(index)
    assert [names[number] for number in index.of_row.tolist()] == keys
    assert len(set(names)) == len(names) == len(index)
    assert [keys[place] for place in index.first.tolist()] == names
    assert sorted(index.hashes.tolist()) == index.hashes.tolist()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(BATCHES, st.booleans()), max_size=10), st.booleans())
def test_columns_do_what_a_dict_does(batches, collide) -> None:
    bases, value, model = MemoryBases(), None, {}
    for rows, is_removal in batches:
        keys = [key for key, _ in rows]
        index = index_of(keys, collide=collide)
        state = GroupState(LAYOUT, value, bases)
        columns = state.columns("value", index, now_ms=0)
        names = names_of(index)
        assert columns.exists.tolist() == [name in model for name in names]
        assert columns.column().to_pylist() == [model.get(name) for name in names]
        assert columns.numbers(absent=-1).tolist() == [model.get(name, -1) for name in names]
        if is_removal:
            columns.remove(np.array([number % 2 == 0 for number in range(len(index))]))
            for name in names[::2]:
                model.pop(name, None)
        else:
            sums = columns.numbers() + np.bincount(index.of_row, [n for _, n in rows]).astype(np.int64)
            where = np.array([total % 5 != 0 for total in sums.tolist()])
            columns.put([sums], where)
            model.update({name: t for name, t in zip(names, sums.tolist(), strict=True) if t % 5 != 0})
        assert columns.column().to_pylist() == [model.get(name) for name in names]
        if state.is_changed:
            value = state.dump(0, TINY, 0)
    found = {} if value is None else {r.slot: r.value for r in GroupState(LAYOUT, value, bases).rows("value")}
    assert found == model
