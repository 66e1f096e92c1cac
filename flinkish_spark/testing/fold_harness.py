"""Runs folds of windows over columns step by step, without Spark: with the combiner, as in a job."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.aggregates import AggregateColumn, ElementChoice
from flinkish_spark.graph.keyed_input import Sent, Transport, folding_windows
from flinkish_spark.graph.operator_factories import FoldingWindows
from flinkish_spark.operators.elements import MIN_WATERMARK_MS, TimeDomain
from flinkish_spark.operators.group_run import Progress
from flinkish_spark.operators.group_state import BasePolicy, GroupState
from flinkish_spark.operators.vectorized_windows import WindowFold
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.group_runners import InputShape, OutRows, RowShape
from flinkish_spark.runtime.row_blocks import BEHIND, BlockPacker, arrow_schema, in_order
from flinkish_spark.runtime.window_runner import WindowRunner
from flinkish_spark.testing.operator_harness import MemoryBases, Output, Snapshot
from flinkish_spark.windows.spec import WindowSpec

#: An element and its event time.
Timed = tuple[tuple[Any, ...], int | None]


class FoldHarness:
    """Folds of windows with all their key groups.

    Parameters
    ----------
    spec
        Which windows.
    columns
        The folds, or which elements come out.
    input_type
        Fields of the elements, as DDL.
    key
        Name of the field that is the key.
    max_parallelism, restore, policy, bases
        As of :class:`~flinkish_spark.testing.operator_harness.OperatorHarness`.

    Examples
    --------
    >>> from flinkish_spark.aggregates import AggregateColumn, Fold
    >>> from flinkish_spark.windows import TumblingEventTimeWindows, WindowSpec
    >>> total = AggregateColumn("total", Fold.SUM, "amount")
    >>> spec = WindowSpec(TumblingEventTimeWindows(10))
    >>> run = FoldHarness(spec, [total], "user STRING, amount LONG", key="user")
    >>> run.push_all([(("ann", 1), 3), (("ann", 2), 9)])
    >>> run.watermark(9)
    >>> [(user, total) for user, total, *_ in run.take().rows]
    [('ann', 3)]
    """

    def __init__(
        self,
        spec: WindowSpec,
        columns: Sequence[AggregateColumn] | ElementChoice,
        input_type: str,
        key: str,
        *,
        uid: str = "operator",
        max_parallelism: int = 16,
        restore: Snapshot | None = None,
        policy: BasePolicy | None = None,
        bases: MemoryBases | None = None,
    ) -> None:
        schema = parse_ddl(input_type)
        assert isinstance(schema, T.StructType)
        self._fields, self._key, self._groups = schema, schema.names.index(key), max_parallelism
        self.transport = _transport(schema, self._key)
        computed = columns if isinstance(columns, ElementChoice) else tuple(columns)
        self.sent: Sent = folding_windows(FoldingWindows(spec, computed), uid, schema, [key], self.transport)
        folded = self.sent.folded
        assert folded is not None
        assert isinstance(folded.operator, WindowFold)
        late = spec.late_output
        self._side_names = () if late is None else (late.name,)
        self._runner = WindowRunner(
            folded.operator,
            uid,
            max_parallelism,
            RowShape(
                (self._input_shape(folded.fields),),
                self.transport.key_types,
                (folded.output, *([] if late is None else [schema])),
                self._side_names,
                with_times=True,
            ),
        )
        self._policy = BasePolicy() if policy is None else policy
        self.bases = MemoryBases() if bases is None else bases
        self._values = {} if restore is None else dict(restore.values)
        self._watermark_ms = MIN_WATERMARK_MS if restore is None else restore.watermark_ms
        self._time_ms = 0 if restore is None else restore.processing_time_ms
        self._output = Output()

    # -- input ----------------------------------------------------------------------------------
    def push_all(self, elements: Sequence[Timed]) -> None:
        """Process elements as one micro-batch: (value, event time)."""
        self.micro_batch(elements)

    def watermark(self, time_ms: int) -> None:
        """Let event time advance; a watermark that does not is ignored."""
        self.micro_batch((), watermark_ms=time_ms)

    def processing_time(self, time_ms: int) -> None:
        """Let processing time advance."""
        self._time_ms = time_ms
        self.micro_batch(())

    def micro_batch(
        self, behind: Sequence[Timed], before: Sequence[Timed] = (), watermark_ms: int | None = None
    ) -> None:
        """Process elements before the watermark and behind it; all key groups with due windows are called."""
        reached_ms = max(self._watermark_ms, self._watermark_ms if watermark_ms is None else watermark_ms)
        progress = Progress(self._watermark_ms, reached_ms, self._time_ms)
        blocks = self._blocks(behind, before)
        for group in sorted(blocks.keys() | set(self._due(progress))):
            state = GroupState(self._runner.layout, self._values.get(group), self.bases)
            rows = (
                in_order(blocks[group], arrow_schema(self.sent.transport.schema)) if group in blocks else None
            )
            for out in self._runner.process([rows], state, progress):
                self._collect(out)
            for name, count in self._runner.counts.items():
                self._output.counts[name] = self._output.counts.get(name, 0) + count
            if state.is_changed:
                self._values[group] = state.dump(group, self._policy, progress.processing_time_ms)
        self._watermark_ms = reached_ms

    # -- output ---------------------------------------------------------------------------------
    def take(self) -> Output:
        """Return what was emitted since the last call."""
        output, self._output = self._output, Output()
        return output

    # -- state ----------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """Return the state as it is stored."""
        return Snapshot(dict(self._values), self._watermark_ms, self._time_ms)

    def next_due_ms(self, clock: TimeDomain) -> int | None:
        """Return when an operator in a job would be called next, by a clock; None for never."""
        found = [self._group(group).next_due_ms(clock) for group in self._values]
        return min((due_ms for due_ms in found if due_ms is not None), default=None)

    def entries(self, state: str) -> dict[Any, Any]:
        """Return all entries of a state, by (key, window)."""
        return {row.slot: row.value for group in self._values for row in self._group(group).rows(state)}

    # -- parts ----------------------------------------------------------------------------------
    def _group(self, group: int) -> GroupState:
        return GroupState(self._runner.layout, self._values[group], self.bases)

    def _due(self, progress: Progress) -> list[int]:
        """Return the key groups that have to be called: only those, as in a job."""
        due = []
        for group in self._values:
            state = self._group(group)
            times = [(state.next_due_ms(clock), limit_ms) for clock, limit_ms in progress.limits_ms.items()]
            if any(due_ms is not None and due_ms <= limit_ms for due_ms, limit_ms in times):
                due.append(group)
        return due

    def _input_shape(self, fields: tuple[str, ...]) -> InputShape:
        transport = self.sent.transport
        schema = arrow_schema(transport.schema)
        return InputShape(schema, fields, transport.field_names, transport.key_names, is_behind_operator=True)

    def _blocks(self, behind: Sequence[Timed], before: Sequence[Timed]) -> dict[int, list[bytes]]:
        """Return the blocks of each key group, as the packer of a task makes them."""
        folded = self.sent.folded
        packer = BlockPacker(
            arrow_schema(self.sent.transport.schema), combine=None if folded is None else folded.combiner
        )
        found: dict[int, list[bytes]] = {}
        for packed in packer(iter([self.rows(behind, BEHIND), self.rows(before, 0)])):
            pairs = zip(packed.column(C.ROUTE).to_pylist(), packed.column(C.BLOCK).to_pylist(), strict=True)
            for group, block in pairs:
                found.setdefault(group, []).append(block)
        return found

    def rows(self, elements: Sequence[Timed], first: int) -> pa.RecordBatch:
        """Return elements as they come to a packer, behind their route, with sequences from `first` on."""
        hashes = [stable_hash(value[self._key]) for value, _ in elements]
        columns: list[Sequence[Any]] = [
            [hashed % self._groups for hashed in hashes],
            hashes,
            [0] * len(elements),
            range(first, first + len(elements)),
            [time_ms for _, time_ms in elements],
            *([value[at] for value, _ in elements] for at in range(len(self._fields))),
        ]
        schema = arrow_schema([T.StructField(C.ROUTE, T.IntegerType()), *self.transport.schema])
        arrays = [pa.array(list(column), one.type) for column, one in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _collect(self, out: OutRows) -> None:
        times, *columns = [column.to_pylist() for column in out.rows.columns]
        rows = list(zip(*columns, strict=True))
        if out.side:
            self._output.side.setdefault(self._side_names[out.side - 1], []).extend(rows)
        else:
            self._output.rows += rows
            self._output.times_ms += times


def _transport(schema: T.StructType, key: int) -> Transport:
    """Return how whole records travel; the key is one of their fields."""
    control = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE, C.TIME)]
    names = tuple(f"c{at}" for at in range(len(schema)))
    fields = [T.StructField(name, one.dataType) for name, one in zip(names, schema, strict=True)]
    return Transport((), T.StructType([*control, *fields]), names, (names[key],), (schema[key].dataType,))


def stable_hash(key: Any) -> int:
    """Return the hash of a key in the harness; a job has another one."""
    return zlib.crc32(repr(key).encode())
