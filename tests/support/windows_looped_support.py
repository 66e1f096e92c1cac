"""Windows in one loop beside the operator with states and timers, a key group each, step by step."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import OutputTag, Progress, TimeDomain
from flinkish_spark.operators.window_loop import LoopedWindows, make_looped_windows
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import ElementType, arrow_schema
from flinkish_spark.windows import WindowSpec
from flinkish_spark.worker.loop_runner import LoopedRunner
from flinkish_spark.worker.runners import ElementRunner, InputShape, RowShape
from tests.support.operator_harness import MemoryBases

FIELDS = "user STRING, n LONG"
BOUNDS = "window_start TIMESTAMP, window_end TIMESTAMP"
LATE = OutputTag("late", FIELDS)


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


def both(
    spec: WindowSpec, computations: tuple[Any, Any], output: str, policy: BasePolicy | None = None
) -> list[Group]:
    """Return the operator with states and timers, and the loop; each has its own computation."""
    shape = shape_of(output, late=spec.late_output is not None)
    policy = BasePolicy(1 << 60) if policy is None else policy
    general = ElementRunner(window_operator(spec, computations[0], FIELDS, output), "op", 4, shape)
    operator = make_looped_windows(spec, computations[1], ElementType(FIELDS))
    assert isinstance(operator, LoopedWindows)
    return [Group(general, policy), Group(LoopedRunner(operator, "op", 4, shape), policy)]
