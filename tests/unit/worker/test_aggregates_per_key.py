"""Reductions and aggregates of the user's once per key and micro-batch, beside the same for each element."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pytest

from flinkish_spark import AggregateFunction, Emit, ReduceFunction, ValueStateDescriptor
from flinkish_spark.core import accumulators, subtask
from flinkish_spark.core.accumulators import Tally
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.operators.columnar_aggregates import ReducedRows
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.transport import columns as C
from flinkish_spark.worker.combiner import Combiner, CombinerStep
from flinkish_spark.worker.keyed_operator import OperatorError
from tests.support.effort import seeds

ORDERS = "user STRING, amount LONG"


@dataclass
class Seen:
    total: int
    orders: int


class Result(NamedTuple):
    mean: float
    orders: int


class Mean(AggregateFunction):
    def create_accumulator(self) -> Seen:
        return Seen(0, 0)

    def add(self, value: Any, accumulator: Seen) -> Seen:
        return Seen(accumulator.total + value.amount, accumulator.orders + 1)

    def get_result(self, accumulator: Seen) -> Result | None:
        assert isinstance(accumulator, Seen)
        return (
            None
            if accumulator.orders < 3
            else Result(accumulator.total / accumulator.orders, accumulator.orders)
        )

    def merge(self, first: Seen, second: Seen) -> Seen:
        return Seen(first.total + second.total, first.orders + second.orders)


class Greatest(ReduceFunction):
    def reduce(self, first: Any, second: Any) -> Any:
        return second if second.amount > first.amount else first


PROGRAMS: dict[str, Callable[..., Any]] = {
    "a reduction": lambda keyed, emit: keyed.reduce(Greatest(), uid="op", emit=emit),
    "a function": lambda keyed, emit: keyed.reduce(
        lambda a, b: (a.user, a.amount + b.amount), uid="op", emit=emit
    ),
    "an aggregate": lambda keyed, emit: keyed.aggregate(Mean(), accumulator=Seen, uid="op", emit=emit),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", seeds(4))
def test_the_last_row_of_a_key_is_the_same(name, seed) -> None:
    rng = random.Random(seed)

    def harness(emit, restore=None):
        return ProgramHarness(
            lambda orders: PROGRAMS[name](orders.key_by("user"), emit), ORDERS, restore=restore
        )

    each, folded = harness(Emit.PER_ELEMENT), harness(Emit.PER_KEY)
    for _ in range(12):
        orders = [
            ((rng.choice("abc"), rng.randrange(100)), rng.randrange(1000)) for _ in range(rng.randrange(8))
        ]
        for one in (each, folded):
            one.push_all(orders)
        expected, found = each.take(), folded.take()
        touched = {user for (user, _), _ in orders}
        assert len(found.rows) <= len(touched)
        if name != "an aggregate":
            assert dict(map(tuple, found.rows)) == dict(map(tuple, expected.rows))
            latest = {user: max(at for (who, _), at in orders if who == user) for user in touched}
            assert {row.user: at for row, at in zip(found.rows, found.times_ms, strict=True)} == latest
        else:
            assert set(found.rows) <= set(expected.rows)
        folded = harness(Emit.PER_KEY, folded.snapshot())


def test_without_merge_an_aggregate_cannot_be_folded() -> None:
    class Unmerged(AggregateFunction):
        create_accumulator = Mean.create_accumulator
        add = Mean.add
        get_result = Mean.get_result

    with pytest.raises(ConfigError, match=r"no merge\(first, second\)"):
        ProgramHarness(
            lambda orders: orders.key_by("user").aggregate(
                Unmerged(), accumulator=Seen, uid="op", emit=Emit.PER_KEY
            ),
            ORDERS,
        )


class Opened(Greatest):
    calls: ClassVar[list[str]] = []

    def open(self, context: Any) -> None:
        self.calls.append(f"open {context.uid}")
        with pytest.raises(TypeError, match="asks for the state"):
            context.get_state(ValueStateDescriptor("seen", "LONG"))

    def close(self) -> None:
        self.calls.append("close")


def test_functions_are_opened_and_closed_with_their_operator_and_in_front_of_the_shuffle() -> None:
    harness = ProgramHarness(
        lambda orders: orders.key_by("user").reduce(Opened(), uid="op", emit=Emit.PER_KEY), ORDERS
    )
    harness.push(("a", 1))
    harness.close()
    assert Opened.calls == ["open op", "close"]
    Opened.calls.clear()
    kept, keys = (C.ROUTE, C.SEQUENCE, "c0"), ("c0",)
    combiner = Combiner(ReducedRows(Opened(), ORDERS), kept, keys, (("c0", "user"), ("c1", "amount")))
    combine = CombinerStep("op", 16, combiner)
    rows = pa.RecordBatch.from_pydict(
        {C.ROUTE: [0, 0], C.KEY_HASH: [7, 7], C.SEQUENCE: [0, 1], "c0": ["a", "a"], "c1": [1, 2]}
    )
    for _ in range(2):
        assert combine(rows).to_pydict() == {
            C.ROUTE: [0],
            C.SEQUENCE: [0],
            "c0": ["a"],
            "p0": ["a"],
            "p1": [2],
        }
    del combine
    assert Opened.calls == ["open op", "close"]


def test_an_error_in_front_of_the_shuffle_names_the_operator() -> None:
    combiner = Combiner(
        ReducedRows(lambda a, b: 1 / 0, ORDERS), ("c0",), ("c0",), (("c0", "user"), ("c1", "amount"))
    )
    rows = pa.RecordBatch.from_pydict(
        {"c0": ["a", "a"], "c1": [1, 2], C.KEY_HASH: [7, 7], C.SEQUENCE: [0, 1]}
    )
    with pytest.raises(OperatorError, match=r'"uid": "totals".*ZeroDivisionError'):
        CombinerStep("totals", 16, combiner)(rows)


def test_what_runs_before_the_shuffle_counts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Opened):
        def open(self, context: Any) -> None:
            self.reduced = context.get_long_counter("reduced")

        def reduce(self, first: Any, second: Any) -> Any:
            self.reduced.add(1)
            return first.user, first.amount + second.amount

    tally = Tally()
    monkeypatch.setattr(accumulators, "tally_of_task", lambda: tally)
    task = SimpleNamespace(partitionId=lambda: 3)
    monkeypatch.setattr(subtask, "TaskContext", SimpleNamespace(get=lambda: task))
    kept, keys = (C.ROUTE, C.SEQUENCE, "c0"), ("c0",)
    combiner = Combiner(ReducedRows(Counting(), ORDERS), kept, keys, (("c0", "user"), ("c1", "amount")))
    rows = pa.RecordBatch.from_pydict(
        {C.ROUTE: [0] * 3, C.KEY_HASH: [7] * 3, C.SEQUENCE: [0, 1, 2], "c0": ["a"] * 3, "c1": [1, 2, 3]}
    )
    CombinerStep("op", 16, combiner, "op/main/input 0")(rows)
    assert tally.counts == {"op/main/input 0/000003": {"reduced": ("LongCounter", 2)}}
    CombinerStep("op", 16, combiner)(rows)
    assert len(tally.counts) == 1, "a second copy in the plan counts"
