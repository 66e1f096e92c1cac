"""Windows in one loop give what the operator with states and timers gives: rows, times, order, calls."""

from __future__ import annotations

import copy
import random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.functions import AggregateFunction
from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, TimeDomain
from flinkish_spark.operators.group_run import Progress
from flinkish_spark.operators.group_state import BasePolicy, GroupState
from flinkish_spark.operators.looped_windows import LoopedWindows, looped_windows
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.window_operator import window_operator
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.group_runners import ElementRunner, InputShape, RowShape
from flinkish_spark.runtime.looped_runner import LoopedRunner
from flinkish_spark.runtime.row_blocks import BEHIND, arrow_schema
from flinkish_spark.testing.operator_harness import MemoryBases
from flinkish_spark.windows import (
    AggregateWindow,
    EventTimeSessionWindows,
    ProcessingTimeSessionWindows,
    ReduceWindow,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowSpec,
    WithKeyAndWindow,
    WithWindow,
)

FIELDS = "user STRING, n LONG"
BOUNDS = "window_start TIMESTAMP, window_end TIMESTAMP"
LATE = OutputTag("late", FIELDS)


class Noting(AggregateFunction):
    """Notes each call; its accumulators change in place, are None at times, and so are its results."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def create_accumulator(self) -> Any:
        self.calls.append("create")
        return []

    def add(self, order: Any, total: Any) -> Any:
        self.calls.append(("add", order.user, order.n, list(total)))
        total.append(order.n)
        return None if order.n == 3 else total

    def get_result(self, total: Any) -> Any:
        self.calls.append(("result", list(total)))
        return None if len(total) % 5 == 4 else sum(total)

    def merge(self, one: Any, other: Any) -> Any:
        self.calls.append(("merge", one, other))
        one.extend(other or [100])
        return one


class Pairs(Noting):
    """Accumulators are rows."""

    def create_accumulator(self) -> Any:
        self.calls.append("create")
        return 0, "-"

    def add(self, order: Any, total: Any) -> Any:
        self.calls.append(("add", order, total, type(total).__name__))
        return total[0] + order.n, total[1] + str(order.n)

    def get_result(self, total: Any) -> Any:
        self.calls.append(("result", total))
        return None if total[0] % 7 == 6 else total[0]

    def merge(self, one: Any, other: Any) -> Any:
        self.calls.append(("merge", one, other))
        return one[0] + other[0], one[1] + "/" + other[1]


def noted_reduce(calls: list[Any]) -> Any:
    def reduce(first: Any, second: Any) -> Any:
        calls.append((first.user, first.n, second.user, second.n))
        return first.user, first.n * 2 + second.n

    return reduce


ASSIGNERS: list[Any] = [
    EventTimeSessionWindows(7),
    EventTimeSessionWindows(1),
    TumblingEventTimeWindows(10, -3),
    SlidingEventTimeWindows(20, 7, 3),
    SlidingEventTimeWindows(21, 7),
    SlidingEventTimeWindows(3, 8, -2),
    ProcessingTimeSessionWindows(7),
    TumblingProcessingTimeWindows(10, 1),
    SlidingProcessingTimeWindows(20, 7),
]


def computed(number: int, calls: list[Any]) -> tuple[Any, str]:
    """Return a computation and the fields that come out."""
    return [
        (
            AggregateWindow(Noting(calls), "ARRAY<LONG>", WithKeyAndWindow()),
            f"user STRING, total LONG, {BOUNDS}",
        ),
        (AggregateWindow(Pairs(calls), "total LONG, path STRING", WithWindow()), f"total LONG, {BOUNDS}"),
        (ReduceWindow(noted_reduce(calls)), FIELDS),
        (ReduceWindow(noted_reduce(calls), WithWindow()), f"{FIELDS}, {BOUNDS}"),
    ][number]


class Group:
    """A key group of one operator, step by step."""

    def __init__(self, runner: Any, policy: BasePolicy) -> None:
        self.runner, self.policy, self.bases = runner, policy, MemoryBases()
        self.value: Any = None

    def step(self, inputs: Any, progress: Progress) -> Any:
        state = GroupState(self.runner.layout, self.value, self.bases)
        out = [
            (one.side, one.first, one.rows.to_pylist())
            for one in self.runner.process(inputs, state, progress)
            if one.rows.num_rows
        ]
        if state.is_changed:
            self.value = state.dump(0, self.policy, progress.processing_time_ms)
        return out, self.runner.counts

    def due(self, clock: TimeDomain) -> Any:
        return GroupState(self.runner.layout, self.value, self.bases).next_due_ms(clock)


def shape_of(output: str, *, late: bool) -> RowShape:
    schema = parse_ddl(FIELDS)
    control = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE, C.TIME)]
    blocks = arrow_schema(T.StructType([*control, *schema]))
    own = InputShape(blocks, ("user", "n"), ("user", "n"), ("user",), is_behind_operator=True)
    sides = [schema] if late else []
    return RowShape(
        (own, own), (T.StringType(),), (parse_ddl(output), *sides), ("late",) if late else (), with_times=True
    )


def rows_of(found: list[tuple[bool, str, int, int]], shape: RowShape) -> Any:
    """Return rows: whether each is before the watermark, its user, number, and time."""
    if not found:
        return None
    before, users, numbers, times = zip(*found, strict=True)
    hashes = [{"a": 5, "b": 5, "c": -3, "d": 9}[user] for user in users]
    places = [at if one else BEHIND + at for at, one in enumerate(before)]
    columns = [hashes, [0] * len(found), places, times, users, numbers]
    schema = shape.inputs[0].schema
    arrays = [pa.array(one, field.type) for one, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def both(spec: WindowSpec, kind: int, policy: BasePolicy) -> tuple[list[Group], list[list[Any]]]:
    calls: list[list[Any]] = [[], []]
    late = spec.late_output is not None
    computation, output = computed(kind, calls[0])
    shape = shape_of(output, late=late)
    general = ElementRunner(window_operator(spec, computation, FIELDS, output), "op", 4, shape)
    operator = looped_windows(spec, computed(kind, calls[1])[0], ElementType(FIELDS))
    assert isinstance(operator, LoopedWindows)
    return [Group(general, policy), Group(LoopedRunner(operator, "op", 4, shape), policy)], calls


def compare(assigner: Any, kind: int, seed: int) -> None:
    rng = random.Random(seed)
    spec = WindowSpec(assigner, late_output=LATE if rng.random() < 0.5 else None)
    policy = BasePolicy(0, 0.3, 2) if rng.random() < 0.5 else BasePolicy(1 << 60)
    groups, calls = both(spec, kind, policy)
    shape = groups[0].runner._shape
    watermark_ms, now_ms = MIN_WATERMARK_MS if rng.random() < 0.3 else 0, 0
    users = "abcd"[: rng.randint(1, 4)]
    for number in range(12):
        spread = rng.choice([5, 20, 60])
        middle = max(watermark_ms, 0)

        def some(middle: int = middle, spread: int = spread) -> Any:
            count = rng.choice([0, 1, 8])
            found = [
                (rng.random() < 0.4, rng.choice(users), rng.randrange(9), middle + rng.randrange(-20, spread))
                for _ in range(count)
            ]
            # An element emitted before the watermark has a time that this watermark reaches.
            return rows_of(sorted(found, key=lambda one: not one[0]), shape)

        inputs = [some(), some()]
        before_ms, watermark_ms = watermark_ms, max(watermark_ms, middle + rng.choice([0, 3, 15, 80]) - 10)
        now_ms += rng.choice([0, 1, 6, 20])
        drained = rng.choice([watermark_ms + 30, MAX_WATERMARK_MS]) if number == 11 else MIN_WATERMARK_MS
        progress = Progress(before_ms, watermark_ms, now_ms, drained, now_ms - rng.choice([0, 1]))
        found = [group.step(inputs, progress) for group in groups]
        assert found[0] == found[1]
        assert calls[0] == calls[1]
        assert groups[0].due(assigner.clock) == groups[1].due(assigner.clock)
        if rng.random() < 0.15:
            # What states and timers have stored goes on in the loop.
            groups[1].value, groups[1].bases = groups[0].value, copy.deepcopy(groups[0].bases)
            assert groups[0].due(assigner.clock) == groups[1].due(assigner.clock)


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda one: f"{type(one).__name__}")
def test_one_loop_gives_what_states_and_timers_give(assigner: Any, kind: int) -> None:
    for seed in range(3):
        compare(assigner, kind, seed)


if __name__ == "__main__":
    import sys

    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for assigner in ASSIGNERS:
            for kind in range(4):
                try:
                    compare(assigner, kind, seed)
                except BaseException:
                    print(type(assigner).__name__, vars(assigner), kind, seed)
                    raise
