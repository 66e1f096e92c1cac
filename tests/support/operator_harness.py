"""Runs one operator step by step, without Spark: for tests of this package, below declared types.

Users test their functions with :class:`~flinkish_spark.testing.ProgramHarness`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.elements import MIN_WATERMARK_MS, OutputTag, OutputType, Progress, TimeDomain
from flinkish_spark.functions.aggregates import AggregateColumn, ElementChoice
from flinkish_spark.functions.keyed import KeyedBroadcastProcessFunction, KeyedProcessFunction
from flinkish_spark.operators.broadcast import KeyedBroadcastOperator
from flinkish_spark.operators.columnar_windows import WindowFold
from flinkish_spark.operators.process import (
    Elements,
    GroupRun,
    KeyedProcessOperator,
    KeyedStreamOperator,
    OperatorOutput,
)
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.planning.factories import FoldingWindows
from flinkish_spark.planning.sent_columns import SentColumns, Transport, plan_window_fold
from flinkish_spark.state.base_files import Bases
from flinkish_spark.state.codec import BaseRef, Frame, check_frame
from flinkish_spark.state.descriptors import MapStateDescriptor
from flinkish_spark.state.key_group import BasePolicy, GroupLayout, GroupState
from flinkish_spark.state.operator_state import choose_copy
from flinkish_spark.testing.program_harness import Output
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, BlockPacker, Combine, sort_blocks
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.hints import to_data_type
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.to_arrow import strict_array
from flinkish_spark.types.to_python import copy_if_mutable
from flinkish_spark.windows.spec import WindowSpec
from flinkish_spark.worker.columns_runner import ColumnsRunner
from flinkish_spark.worker.runners import (
    GroupRunner,
    InputShape,
    OutputRows,
    RowShape,
)

# State goes through the format in which a job stores it. A snapshot may be taken after any step, and
# restored into other harnesses, each with some of the key groups; whoever wants a crash throws the harness
# away and restores the last snapshot. A step that raises has done nothing, as a micro-batch that fails.


class MemoryBases(Bases):
    """Bases in memory; a base stays as long as the object lives."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}

    def read(self, ref: BaseRef) -> Frame:
        return check_frame(self._frames[ref.file])

    def delete(self, file: str) -> None:
        self._frames.pop(file, None)

    def write(self, group: int, frame: bytes) -> BaseRef:
        name = f"{group}-{len(self._frames)}"
        self._frames[name] = frame
        return BaseRef(name, 0, len(frame))


@dataclass(frozen=True)
class Snapshot:
    """What a harness can be restored from: stored values by key group, and where time stood."""

    values: dict[int, bytes]
    watermark_ms: int
    processing_time_ms: int

    def part(self, groups: Collection[int]) -> Self:
        """Return what a subtask with some of the key groups begins with."""
        return replace(self, values={group: self.values[group] for group in self.values if group in groups})

    @staticmethod
    def together(parts: Iterable[Snapshot]) -> Snapshot:
        """Return the snapshot of an operator whose subtasks had these; all stood at the same time."""
        taken = list(parts)
        if len({(one.watermark_ms, one.processing_time_ms) for one in taken}) != 1:
            raise ValueError("snapshots of subtasks must be of one time")
        groups = [group for one in taken for group in one.values]
        if len(set(groups)) < len(groups):
            raise ValueError("a key group is in two subtasks")
        return replace(taken[0], values={group: one.values[group] for one in taken for group in one.values})


class OperatorHarness:
    """One keyed function with all its key groups, without declared types of its elements and results."""

    def __init__(
        self,
        operator: KeyedStreamOperator | KeyedProcessFunction,
        *,
        key: Callable[[Any], Any],
        key_type: str,
        uid: str = "operator",
        max_parallelism: int = 16,
        restore: Snapshot | None = None,
        policy: BasePolicy | None = None,
        bases: MemoryBases | None = None,
    ) -> None:
        if isinstance(operator, KeyedProcessFunction):
            operator = KeyedProcessOperator(operator)
        self._operator, self._key = operator, key
        self._run = GroupRun(operator, uid, max_parallelism)
        parsed = parse_ddl(key_type)
        kinds = [f.dataType for f in parsed] if isinstance(parsed, T.StructType) else [parsed]
        self._layout = GroupLayout.of(self._run.states, kinds)
        self._groups = max_parallelism
        self._policy = BasePolicy() if policy is None else policy
        self.bases = MemoryBases() if bases is None else bases
        self._values = {} if restore is None else dict(restore.values)
        self._watermark_ms = MIN_WATERMARK_MS if restore is None else restore.watermark_ms
        self._time_ms = 0 if restore is None else restore.processing_time_ms
        self._output = Output()

    # -- input ----------------------------------------------------------------------------------
    def push(self, value: Any, time_ms: int | None = None, source: int = 0) -> None:
        """Process one element of an input, by its number."""
        self.push_all([(value, time_ms)], source)

    def push_all(self, elements: Sequence[tuple[Any, int | None]], source: int = 0) -> None:
        """Process elements as one micro-batch: (value, event time)."""
        by_group: dict[int, list[tuple[Any, int | None]]] = {}
        for value, time_ms in elements:
            by_group.setdefault(self.group_of(self._key(value)), []).append((value, time_ms))
        with self._whole():
            for group, own in sorted(by_group.items()):
                keys = [self._key(value) for value, _ in own]
                # What a function does to an element is not done to the test's.
                values = [copy_if_mutable(value) for value, _ in own]
                given = Elements(keys, values, [time for _, time in own], source)
                self._step(group, [given], self._progress(self._watermark_ms))

    def watermark(self, time_ms: int) -> None:
        """Let event time advance; a watermark that does not is ignored."""
        if time_ms > self._watermark_ms:
            with self._whole():
                progress = self._progress(time_ms)
                self._watermark_ms = time_ms
                self._wake_all(progress)

    def processing_time(self, time_ms: int) -> None:
        """Let processing time advance."""
        if time_ms < self._time_ms:
            raise ValueError(f"processing time is {self._time_ms} and cannot go back to {time_ms}")
        with self._whole():
            self._time_ms = time_ms
            self._wake_all(self._progress(self._watermark_ms))

    # -- output ---------------------------------------------------------------------------------
    def take(self) -> Output:
        """Return what was emitted since the last call."""
        output, self._output = self._output, Output()
        return output

    def side(self, tag: OutputTag) -> list[Any]:
        return self._output.side.get(tag.name, [])

    # -- state ----------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self._values), self._watermark_ms, self._time_ms)

    def entries(self, state: str) -> dict[Any, Any]:
        """Return all entries of a state, by key or by (key, window)."""
        found = {}
        for value in self._values.values():
            stored = GroupState(self._layout, value, self.bases)
            found.update({row.slot: row.value for row in stored.rows(state)})
        return found

    def timer_count(self) -> int:
        return sum(
            GroupState(self._layout, value, self.bases).timer_count() for value in self._values.values()
        )

    def next_timer_ms(self, domain: TimeDomain) -> int | None:
        stored = [GroupState(self._layout, value, self.bases) for value in self._values.values()]
        due_ms = [one.next_due_ms(domain) for one in stored]
        return min((time_ms for time_ms in due_ms if time_ms is not None), default=None)

    def group_of(self, key: Any) -> int:
        return self._hash(key) % self._groups

    # -- parts ----------------------------------------------------------------------------------
    @staticmethod
    def _hash(key: Any) -> int:
        return zlib.crc32(repr(key).encode())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Let a step have done everything, or nothing if it raises."""
        before = dict(self._values), self._watermark_ms, self._time_ms
        emitted, self._output = self._output, Output()
        try:
            yield
            emitted.extend(self._output)
        except BaseException:
            self._values, self._watermark_ms, self._time_ms = before
            raise
        finally:
            self._output = emitted

    def _progress(self, watermark_ms: int) -> Progress:
        return Progress(self._watermark_ms, watermark_ms, self._time_ms)

    def _wake_all(self, progress: Progress) -> None:
        for group in sorted(self._values):
            self._step(group, [], progress)

    def _step(self, group: int, behind: Sequence[Elements], progress: Progress) -> None:
        state = GroupState(self._layout, self._values.get(group), self.bases)
        hash_of = {key: self._hash(key) for elements in behind for key in elements.keys}
        state.clean_up(progress.processing_time_ms)
        self._load(state, hash_of, progress)
        self._collect(self._run.run([], progress, behind))
        if state.store(self._run.states, self._run.timers):
            self._values[group] = state.dump(group, self._policy, progress.processing_time_ms)

    def _load(self, state: GroupState, hash_of: dict[Any, int], progress: Progress) -> None:
        state.load(self._run.states, self._run.timers, hash_of, progress)

    def _collect(self, emitted: OperatorOutput) -> None:
        side = {name: [row for row, _ in rows] for name, rows in emitted.side.items()}
        self._output.extend(Output(emitted.rows, emitted.times_ms, side, emitted.counts))


#: An element and its event time.
TimedRow = tuple[tuple[Any, ...], int | None]


class ColumnsHarness:
    """An operator over columns with all its key groups; made by its subclasses."""

    def __init__(
        self,
        runner: GroupRunner,
        fields: T.StructType,
        key: int,
        travels: Transport,
        combine: Combine | None,
        side_names: Sequence[str],
        *,
        max_parallelism: int,
        restore: Snapshot | None,
        policy: BasePolicy | None,
        bases: MemoryBases | None,
    ) -> None:
        self._runner, self._fields, self._key, self._groups = runner, fields, key, max_parallelism
        self._travels, self._combine, self._side_names = travels, combine, tuple(side_names)
        self.transport = whole_records(fields, key)
        self._policy = BasePolicy() if policy is None else policy
        self.bases = MemoryBases() if bases is None else bases
        self._values = {} if restore is None else dict(restore.values)
        self._watermark_ms = MIN_WATERMARK_MS if restore is None else restore.watermark_ms
        self._time_ms = 0 if restore is None else restore.processing_time_ms
        self._output = Output()

    # -- input ----------------------------------------------------------------------------------
    def push_all(self, elements: Sequence[TimedRow]) -> None:
        """Process elements as one micro-batch: (value, event time)."""
        self.micro_batch(elements)

    def watermark(self, time_ms: int) -> None:
        """Let event time advance; a watermark that does not is ignored."""
        self.micro_batch((), watermark_ms=time_ms)

    def processing_time(self, time_ms: int) -> None:
        self._time_ms = time_ms
        self.micro_batch(())

    def micro_batch(
        self, behind: Sequence[TimedRow], before: Sequence[TimedRow] = (), watermark_ms: int | None = None
    ) -> None:
        """Process elements before the watermark and behind it; all key groups with due windows are called."""
        reached_ms = max(self._watermark_ms, self._watermark_ms if watermark_ms is None else watermark_ms)
        progress = Progress(self._watermark_ms, reached_ms, self._time_ms)
        blocks = self._blocks(behind, before)
        # A step that raises has done nothing, as a micro-batch that fails.
        values, output = dict(self._values), Output()
        for group in sorted(blocks.keys() | set(self._due(progress))):
            state = GroupState(self._runner.layout, values.get(group), self.bases)
            rows = sort_blocks(blocks[group], arrow_schema(self._travels.schema)) if group in blocks else None
            for out in self._runner.process([rows], state, progress):
                self._collect(out, output)
            for name, count in self._runner.counts.items():
                output.counts[name] = output.counts.get(name, 0) + count
            if state.is_changed:
                values[group] = state.dump(group, self._policy, progress.processing_time_ms)
        self._values, self._watermark_ms = values, reached_ms
        self._output.extend(output)

    # -- output ---------------------------------------------------------------------------------
    def take(self) -> Output:
        """Return what was emitted since the last call."""
        output, self._output = self._output, Output()
        return output

    # -- state ----------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self._values), self._watermark_ms, self._time_ms)

    def next_due_ms(self, clock: TimeDomain) -> int | None:
        """Return when an operator in a job would be called next, by a clock; None for never."""
        found = [self._group(group).next_due_ms(clock) for group in self._values]
        return min((due_ms for due_ms in found if due_ms is not None), default=None)

    def entries(self, state: str) -> dict[Any, Any]:
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

    def _blocks(self, behind: Sequence[TimedRow], before: Sequence[TimedRow]) -> dict[int, list[bytes]]:
        """Return the blocks of each key group, as the packer of a task makes them."""
        packer = BlockPacker(arrow_schema(self._travels.schema), combine=self._combine)
        found: dict[int, list[bytes]] = {}
        for packed in packer(iter([self.rows(behind, BEHIND), self.rows(before, 0)])):
            pairs = zip(packed.column(C.ROUTE).to_pylist(), packed.column(C.BLOCK).to_pylist(), strict=True)
            for group, block in pairs:
                found.setdefault(group, []).append(block)
        return found

    def rows(self, elements: Sequence[TimedRow], first: int) -> pa.RecordBatch:
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
        arrays = [strict_array(list(column), one.type) for column, one in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _collect(self, out: OutputRows, output: Output) -> None:
        times, *columns = [column.to_pylist() for column in out.rows.columns]
        rows = list(zip(*columns, strict=True))
        if out.side:
            output.side.setdefault(self._side_names[out.side - 1], []).extend(rows)
        else:
            output.rows += rows
            output.times_ms += times


def whole_records(schema: T.StructType, key: int) -> Transport:
    """Return how whole records travel; the key is one of their fields."""
    control = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE, C.TIME)]
    names = tuple(f"c{at}" for at in range(len(schema)))
    fields = [T.StructField(name, one.dataType) for name, one in zip(names, schema, strict=True)]
    return Transport((), T.StructType([*control, *fields]), names, (names[key],), (schema[key].dataType,))


def input_shape(travels: Transport, fields: Sequence[str]) -> InputShape:
    schema = arrow_schema(travels.schema)
    return InputShape(schema, tuple(fields), travels.field_names, travels.key_names, is_behind_operator=True)


def stable_hash(key: Any) -> int:
    return zlib.crc32(repr(key).encode())


class VectorizedHarness(ColumnsHarness):
    """A vectorised function with all its key groups."""

    def __init__(
        self,
        function: VectorizedProcessFunction,
        input_type: str,
        output: str,
        key: str,
        *,
        side_outputs: Sequence[OutputTag] = (),
        uid: str = "operator",
        max_parallelism: int = 16,
        restore: Snapshot | None = None,
        policy: BasePolicy | None = None,
        bases: MemoryBases | None = None,
    ) -> None:
        schema, *emitted = (
            _fields(ddl) for ddl in (input_type, output, *(tag.output for tag in side_outputs))
        )
        at = schema.names.index(key)
        travels, names = whole_records(schema, at), tuple(tag.name for tag in side_outputs)
        came = input_shape(travels, schema.names)
        shape = RowShape((came,), travels.key_types, tuple(emitted), names, with_times=True)
        super().__init__(
            ColumnsRunner(function, uid, max_parallelism, shape),
            schema,
            at,
            travels,
            None,
            names,
            max_parallelism=max_parallelism,
            restore=restore,
            policy=policy,
            bases=bases,
        )


def _fields(given: OutputType) -> T.StructType:
    parsed = to_data_type(given)
    assert isinstance(parsed, T.StructType)
    return parsed


Timed = tuple[Any, int | None]


@dataclass(frozen=True)
class BroadcastSnapshot(Snapshot):
    """A snapshot with the broadcast state of each partition; None where nothing was stored yet."""

    broadcast: tuple[bytes | None, ...] = ()


class BroadcastHarness(OperatorHarness):
    """One keyed operator with a broadcast input, all its key groups and partitions."""

    def __init__(
        self,
        function: KeyedBroadcastProcessFunction,
        descriptors: Sequence[MapStateDescriptor],
        *,
        key: Callable[[Any], Any],
        key_type: str,
        parallelism: int = 2,
        restore: BroadcastSnapshot | None = None,
        **settings: Any,
    ) -> None:
        self._keyed = KeyedBroadcastOperator(function, descriptors)
        super().__init__(self._keyed, key=key, key_type=key_type, restore=restore, **settings)
        copy = None if restore is None else choose_copy(restore.broadcast)
        self._copies: list[bytes | None] = [copy] * parallelism

    def broadcast(self, value: Any, time_ms: int | None = None) -> None:
        """Process one broadcast element."""
        self.micro_batch([(value, time_ms)], [])

    def push_all(self, elements: Sequence[Timed], source: int = 0) -> None:
        """Process elements of the keyed input as one micro-batch."""
        self.micro_batch([], elements)

    def micro_batch(self, broadcast: Sequence[Timed], elements: Sequence[Timed]) -> None:
        """Process elements of both inputs as one micro-batch."""
        by_group: dict[int, list[Timed]] = {}
        for value, time_ms in elements:
            by_group.setdefault(self.group_of(self._key(value)), []).append((value, time_ms))
        copies = list(self._copies)
        try:
            with self._whole():
                self._micro_batch(broadcast, by_group, self._progress(self._watermark_ms))
        except BaseException:
            self._copies = copies
            raise

    def snapshot(self) -> BroadcastSnapshot:
        """Return the state as it is stored."""
        plain = super().snapshot()
        return BroadcastSnapshot(
            plain.values, plain.watermark_ms, plain.processing_time_ms, tuple(self._copies)
        )

    def copies(self, descriptor: MapStateDescriptor) -> list[dict[Any, Any]]:
        """Return each partition's copy of a broadcast state."""
        found = []
        for value in self._copies:
            self._keyed.side.begin(value)
            found.append(dict(self._keyed.side.readable(descriptor)))
        return found

    # -- parts ----------------------------------------------------------------------------------
    def _micro_batch(
        self, broadcast: Sequence[Timed], by_group: dict[int, list[Timed]], progress: Progress
    ) -> None:
        side = self._keyed.side
        values, times = [value for value, _ in broadcast], [time_ms for _, time_ms in broadcast]
        for partition, copy in enumerate(self._copies):
            side.begin(copy)
            if broadcast:
                own_values = list(map(copy_if_mutable, values))
                given = Elements(values, own_values, times)
                self._collect(side.process((Elements((), ()), given), progress))
            self._copies[partition] = side.dump() or copy
            woken = set(by_group) | (set(self._values) if side.context.applications else set())
            for group in sorted(woken):
                if group % len(self._copies) == partition:
                    own = by_group.get(group, [])
                    keys = [self._key(value) for value, _ in own]
                    given = Elements(
                        keys, [copy_if_mutable(value) for value, _ in own], [time for _, time in own]
                    )
                    self._step(group, [given], progress)

    def _wake_all(self, progress: Progress) -> None:
        self._micro_batch([], {group: [] for group in self._values}, progress)

    def _load(self, state: GroupState, hash_of: dict[Any, int], progress: Progress) -> None:
        run = self._run
        state.load(run.states, run.timers, hash_of, progress, self._keyed.hashes_to_load(state))
        self._keyed.apply(run, progress)


class FoldHarness(ColumnsHarness):
    """Folds of windows with all their key groups."""

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
        at = schema.names.index(key)
        whole = whole_records(schema, at)
        computed = columns if isinstance(columns, ElementChoice) else tuple(columns)
        sent = plan_window_fold(FoldingWindows(spec, computed), uid, schema, [key], whole)
        folded, late = sent.folded, spec.late_output
        assert folded is not None
        assert isinstance(folded.operator, WindowFold)
        side_names = () if late is None else (late.name,)
        shape = RowShape(
            (input_shape(sent.transport, folded.fields),),
            whole.key_types,
            (folded.output, *([] if late is None else [schema])),
            side_names,
            with_times=True,
        )
        self.sent: SentColumns = sent
        super().__init__(
            ColumnsRunner(folded.operator, uid, max_parallelism, shape),
            schema,
            at,
            sent.transport,
            folded.combiner,
            side_names,
            max_parallelism=max_parallelism,
            restore=restore,
            policy=policy,
            bases=bases,
        )
