"""The keyed operator, which applyInPandasWithState calls once per bundle of key groups and micro-batch.

A group of Spark's is a bundle, or the rows for a partition as a whole: barriers, reports that pass through,
and broadcast elements. Rows travel as blocks (:mod:`flinkish_spark.transport.blocks`); the state of all keys
of a bundle is one state value (:mod:`flinkish_spark.state.key_group`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.state import GroupState as SparkState

from flinkish_spark.core.accumulators import tell_base
from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.elements import CLOSED, DISCARDED, MAX_WATERMARK_MS, RESTORED, TimeDomain
from flinkish_spark.core.errors import STATE_MARKER, USER_FUNCTION_MARKER, FlinkishError, InternalError
from flinkish_spark.core.iterators import USER_ERRORS
from flinkish_spark.core.micro_batch import MicroBatch, micro_batch_of_task
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.subtask import running_in
from flinkish_spark.core.suggestions import describe_raised
from flinkish_spark.operators.columnar_windows import WindowFold
from flinkish_spark.operators.context import close_operator, close_with
from flinkish_spark.operators.process import ElementError, KeyedStreamOperator, TimerError
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.operators.window_loop import LoopedWindows
from flinkish_spark.protocol.alignment import ExpectedChannels, resolve_expected
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.latency import replace_subtask
from flinkish_spark.protocol.time_plan import COUNTERS
from flinkish_spark.state.base_files import BaseFiles, BaseObjects, Bases, MappedBases, bases_of
from flinkish_spark.state.codec import FrameError, StateValueError
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.group_values import bundle_groups
from flinkish_spark.state.key_group import (
    NO_BASE,
    BasePolicy,
    GroupState,
    NoBases,
)
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BlockRow, GroupRows, sort_blocks, to_block, to_frame
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.routing import place_of
from flinkish_spark.types.rows import OutputError
from flinkish_spark.worker import columns_runner, loop_runner
from flinkish_spark.worker.broadcast_runner import UnkeyedBroadcast, UnkeyedCheckpointedFunction
from flinkish_spark.worker.daemon import freeze_modules
from flinkish_spark.worker.runners import (
    ElementRunner,
    GroupRunner,
    InputRows,
    PartitionSide,
    RowShape,
    make_runner,
)

if TYPE_CHECKING:
    import pandas as pd

StatefulOperator = (
    KeyedStreamOperator
    | VectorizedProcessFunction
    | WindowFold
    | LoopedWindows
    | UnkeyedBroadcast
    | UnkeyedCheckpointedFunction
)

#: Modules whose runners register themselves; those of other operators do so when a worker unpickles these.
_REGISTERED = columns_runner, loop_runner


R = TypeVar("R")

_STATE_FAULTS = (FrameError, StateMismatch)


class OperatorError(RuntimeError):
    """An error of an operator in a worker; reaches the driver as text that starts with a marker."""

    @classmethod
    def from_facts(cls, **facts: Any) -> OperatorError:
        return cls(f"{USER_FUNCTION_MARKER} {json.dumps(facts)}")


@dataclass(frozen=True)
class PassThroughRows:
    """Rows of an upstream operator that pass through to a downstream one, with channels and sequences."""

    #: Schema of the incoming blocks.
    schema: pa.Schema
    #: Names of the columns to pass on.
    columns: tuple[str, ...]
    #: Number of this operator's output for them.
    output: int

    def pass_on(self, blocks: list[Any]) -> Iterator[BlockRow]:
        """Yield the rows of a partition, one block per gapless range of a channel."""
        rows = sort_blocks(blocks, self.schema)
        channels, sequences = (rows.column(name).to_numpy() for name in (C.CHANNEL, C.SEQUENCE))
        follows = (channels[1:] == channels[:-1]) & (sequences[1:] == sequences[:-1] + 1)
        begins = np.concatenate(([0], np.flatnonzero(~follows) + 1, [rows.num_rows])).tolist()
        own = rows.select(self.columns)
        for begin, end in pairwise(begins):
            block = to_block(own.slice(begin, end - begin))
            channel, first = int(channels[begin]), int(sequences[begin])
            yield BlockRow(int(C.Kind.RECORD), 0, channel, first, block, self.output)


@dataclass(frozen=True)
class KeyedOperatorSpec:
    """All that a worker needs to run a keyed operator."""

    #: The operator's stable name, and the bundles of its key groups.
    uid: str
    bundling: Bundling
    #: Runs the user's function; or that function itself, if it works on columns.
    operator: StatefulOperator
    shape: RowShape
    #: By input, the channels whose barriers must each arrive once before this operator emits its own.
    upstream_channels: tuple[ExpectedChannels, ...]
    #: Bundle of key groups by the route that carries its records.
    bundle_of_route: dict[int, int]
    #: Partition by the route that carries its barrier, and reports that pass through.
    barrier_routes: dict[int, int]
    origins: tuple[Origins, ...]
    #: Its number among the reporters to the driver.
    reporter: int = 0
    #: Partition by the route of its broadcast elements.
    broadcast_routes: Mapping[int, int] = field(default_factory=dict)
    base_policy: BasePolicy = field(default_factory=BasePolicy)
    #: Its display name, for errors.
    name: str = ""
    #: Inputs after its own ones whose rows pass through to further outputs.
    passing: tuple[PassThroughRows, ...] = ()
    #: Name under which its accumulators are counted; empty if they are not.
    counts_as: str = ""
    #: Name of its chain; with the uid the identity of its state.
    chain: str = ""
    #: Number of its main output among the outputs of all operators that share its tasks.
    first_output: int = 0


class KeyedOperator:
    """Callable for applyInPandasWithState; pickled into the plan, so a worker opens it at its first call."""

    def __init__(self, spec: KeyedOperatorSpec) -> None:
        self.spec = spec
        self._runner: GroupRunner | None = None
        self._task: tuple[int, MicroBatch] | None = None
        #: The attempt id of the task whose broadcast side has begun.
        self._begun: int | None = None
        #: Location of the bases as the micro-batch gives it, and this operator's bases there.
        self._mapped: tuple[str, MappedBases] | None = None

    def __call__(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: SparkState
    ) -> Iterator[pd.DataFrame]:
        import pandas as pd

        route = int(key[0])
        partition = self.spec.barrier_routes.get(route)
        parts = list(frames)
        frame = parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)
        if partition is not None:
            out = list(self._pass_on(frame, partition))
        else:
            arrived = GroupRows(frame)
            with running_in(len(self.spec.barrier_routes), self.spec.name, self.spec.counts_as):
                if route in self.spec.broadcast_routes:
                    out = self._process_broadcast(self.spec.broadcast_routes[route], arrived, state)
                else:
                    out = self._process_bundle(self.spec.bundle_of_route[route], arrived, state)
        if out:
            yield to_frame(out, self.spec.first_output)

    def _pass_on(self, frame: pd.DataFrame, partition: int) -> Iterator[BlockRow]:
        """Pass reports on, and the barrier if that of each upstream channel has arrived exactly once."""
        # Without the barrier the sinks' count is short, which declines the checkpoint. A latency marker goes
        # on with a report of its time here, which is after all records of the partition.
        kinds = frame[C.KIND].to_numpy()
        if self.spec.passing:
            records = GroupRows(frame).select_kind(C.Kind.RECORD)
            for number, passing in enumerate(self.spec.passing, start=len(self.spec.shape.inputs)):
                blocks = [block for sequence, block in records if sequence == number]
                if blocks:
                    yield from passing.pass_on(blocks)
        is_control = (kinds != int(C.Kind.BARRIER)) & (kinds != int(C.Kind.RECORD))
        passing = frame[is_control][[C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE]]
        for kind, first, channel, second in passing.to_numpy().tolist():
            if kind == int(C.Kind.MARKER):
                place = replace_subtask(channel, partition)
                yield BlockRow(C.FIRST_LATENCY + self.spec.reporter, first, place, wall_ms())
                yield BlockRow(kind, first, place, second)
            else:
                yield BlockRow(kind, first, channel, second)
        barriers = frame[kinds == int(C.Kind.BARRIER)]
        checkpoints = set(barriers[C.CHECKPOINT].to_numpy(dtype=np.int64).tolist())
        if len(checkpoints) == 1 and self._is_complete(barriers):
            (checkpoint,) = checkpoints
            yield BlockRow(int(C.Kind.BARRIER), checkpoint, partition, checkpoint)

    def _is_complete(self, barriers: pd.DataFrame) -> bool:
        """Return whether the barriers of all channels of each input (their sequence) are there."""
        for number, upstream in enumerate(self.spec.upstream_channels):
            own = barriers[C.CHANNEL][barriers[C.SEQUENCE].to_numpy() == number]
            channels = own.to_numpy(dtype=np.int64).tolist()
            if sorted(channels) != sorted(resolve_expected(channels, upstream)):
                return False
        return True

    def _process_bundle(self, bundle: int, arrived: GroupRows, state: SparkState) -> list[BlockRow]:
        spec, runner = self.spec, self._open()
        try:
            stored = self._load_state(bundle, arrived, state)
            records = arrived.select_kind(C.Kind.RECORD)
            if not records and not self._is_called(arrived) and not arrived.select_kind(C.Kind.STATE):
                return []
            bases = self._open_bases()
            entries = GroupState(runner.layout, stored, bases)
            levels = self._count_open_items(runner, entries, arrived)
            due_before = _next_call_ms(entries)
            progress = self._micro_batch().progress(spec.uid)
            entries.clean_up(progress.processing_time_ms)
            if runner.side is not None and self._begun != self._attempt:
                raise InternalError("Spark called a key group before its partition's broadcast side")
            inputs = self._unpack_inputs(records)
            out = self._call_function(runner, inputs, lambda: list(runner.process(inputs, entries, progress)))
            if entries.is_changed:
                policy = NO_BASE if isinstance(bases, NoBases) else self.spec.base_policy
                state.update((entries.dump(bundle, policy, progress.processing_time_ms),))
        except _STATE_FAULTS as error:
            raise OperatorError(f"{STATE_MARKER} operator '{spec.uid}': {error}") from error
        record = int(C.Kind.RECORD)
        emitted = [BlockRow(record, 0, bundle, one.first, to_block(one.rows), one.side) for one in out]
        due = _next_call_ms(entries)
        if due != due_before or due != (MAX_WATERMARK_MS, MAX_WATERMARK_MS):
            emitted.append(BlockRow(C.FIRST_REPORT + spec.reporter, due[0], bundle, due[1]))
        for name, count in levels.items():
            levels[name] = count + runner.counts.get(name, 0)
        for number, name in enumerate(COUNTERS):
            count = levels.get(name, runner.counts.get(name, 0))
            if count or name in levels:
                emitted.append(BlockRow(C.FIRST_LATE + spec.reporter, count, bundle, number))
        return emitted

    @staticmethod
    def _count_open_items(runner: GroupRunner, entries: GroupState, arrived: GroupRows) -> dict[str, int]:
        """Return counts of items in state that was restored or discarded, by name."""
        found: dict[str, int] = {}
        if isinstance(runner, ElementRunner):
            if arrived.select_kind(C.Kind.STATE):
                restored = runner.sum_open_items(entries.living())
                found |= {} if restored is None else {RESTORED: restored}
            elif lost := runner.sum_open_items(entries.given_up.items()):
                found |= {CLOSED: lost, DISCARDED: lost}
        return found

    def _process_broadcast(self, partition: int, arrived: GroupRows, state: SparkState) -> list[BlockRow]:
        """Process the broadcast side of a partition; called before the partition's key groups."""
        side = self._open().side
        assert side is not None
        try:
            seeds = arrived.select_kind(C.Kind.STATE)
            stored = state.get[0] if state.exists else None
            if seeds:
                # The savepoint's partitions in order; a partition without a value has no row.
                kept = {C.FIRST_PARTITION_GROUP - group: bytes(value) for group, value in seeds}
                former = [kept.get(number) for number in range(max(kept) + 1)]
                stored = side.restore(former, partition, len(self.spec.broadcast_routes))
            inputs = self._unpack_inputs(arrived.select_kind(C.Kind.RECORD))
            progress = self._micro_batch().progress(self.spec.uid)
            done = self._call_function(side, inputs, lambda: side.begin(stored, inputs, progress))
        except _STATE_FAULTS as error:
            raise OperatorError(f"{STATE_MARKER} operator '{self.spec.uid}': {error}") from error
        value = done.value if done.value is not None else (stored if seeds else None)
        if value is not None:
            state.update((value,))
        self._begun = self._attempt
        # A channel of its own: no key group has that number.
        channel, record = self.spec.bundling.key_groups + partition, int(C.Kind.RECORD)
        return [BlockRow(record, 0, channel, one.first, to_block(one.rows), one.side) for one in done.rows]

    def _is_called(self, arrived: GroupRows) -> bool:
        """Return whether a bundle without records must run: for timers, or for functions on keyed state."""
        calls = [sequence for sequence, _ in arrived.select_kind(C.Kind.WAKE)]
        side = self._open().side
        if side is not None and side.has_applications:
            return bool(calls)
        return any(call != C.BROADCAST_CALL for call in calls)

    def _load_state(self, bundle: int, arrived: GroupRows, state: SparkState) -> bytes | None:
        """Return the bundle's state; in the first micro-batch of a seeded lineage, store the seed first."""
        # A repeated micro-batch starts without state again, so a seed is stored once per lineage and bundle.
        seeds = arrived.select_kind(C.Kind.STATE)
        if not seeds:
            return state.get[0] if state.exists else None
        values = {int(group): bytes(value) for group, value in seeds}
        if len(values) < len(seeds) or state.exists:
            raise StateMismatch(f"a key group of bundle {bundle} got its state twice")
        others = [group for group in values if self.spec.bundling.bundle_of(group) != bundle]
        if others:
            raise StateMismatch(f"bundle {bundle} got the state of key group {others[0]}")
        # Decode it although no record may need it, so that a changed declaration fails the restore, not a
        # later record.
        value = bundle_groups(self._open().layout, [values[group] for group in sorted(values)])
        state.update((value,))
        return value

    def _unpack_inputs(self, records: list[tuple[int, Any]]) -> list[pa.RecordBatch | None]:
        found: list[pa.RecordBatch | None] = []
        for number, shape in enumerate(self.spec.shape.inputs):
            blocks = [block for sequence, block in records if sequence == number]
            found.append(sort_blocks(blocks, shape.schema) if blocks else None)
        return found

    def _call_function(
        self, runner: GroupRunner | PartitionSide, inputs: InputRows, run: Callable[[], R]
    ) -> R:
        """Call `run`; raise an error of the user's function with the position of its element."""
        try:
            return run()
        except ElementError as failure:
            number, at = runner.find_row(inputs, failure)
            rows = inputs[number]
            assert rows is not None
            channel, sequence = (int(rows.column(name)[at].as_py()) for name in (C.CHANNEL, C.SEQUENCE))
            origin = self.spec.origins[number].describe(channel, sequence)
            raise self._make_error(_describe(failure), **origin) from failure.error
        except TimerError as failure:
            timer, clock = failure.timer, failure.domain.value
            facts = {"key": f"{timer.key!r:.200}", "timer_ms": timer.time_ms, "time_domain": clock}
            raise self._make_error(_describe(failure), **facts) from failure.error
        except OutputError as error:
            raise self._make_error(f"the function {error}") from error
        except StateValueError as error:
            raise self._make_error(str(error)) from error
        except (*_STATE_FAULTS, InternalError):
            raise
        except USER_ERRORS as error:
            raise self._make_error(describe_raised(error)) from error

    def _make_error(self, says: str, **facts: Any) -> OperatorError:
        uid, name = self.spec.uid, self.spec.name
        named = {"what": f"the function of operator '{uid}' ({name})"} if name else {}
        return OperatorError.from_facts(**{"uid": uid, **named, **facts, "error": says})

    def _open(self) -> GroupRunner:
        if self._runner is None:
            # PySpark appends an empty frame to every batch, and pandas warns about each one.
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.sql\.pandas")
            spec = self.spec
            try:
                self._runner = make_runner(spec.operator, spec.uid, spec.bundling.key_groups, spec.shape)
            except (FlinkishError, *_STATE_FAULTS):
                raise
            except USER_ERRORS as error:
                close_operator(spec.operator, spec.uid)
                what = f"open() of operator '{spec.uid}'"
                raise self._make_error(describe_raised(error), what=what) from error
            close_with(self, spec.operator, spec.uid)
            freeze_modules()
        return self._runner

    @property
    def _attempt(self) -> int | None:
        return None if self._task is None else self._task[0]

    def _micro_batch(self) -> MicroBatch:
        """Return the task's micro-batch, cached per task, since the worker outlives it."""
        task = TaskContext.get()
        number = 0 if task is None else int(task.taskAttemptId())
        if task is None or self._task is None or self._task[0] != number:
            self._task = (number, micro_batch_of_task())
        return self._task[1]

    def _open_bases(self) -> Bases:
        here, uid, chain = self._micro_batch(), self.spec.uid, self.spec.chain
        if here.bases is None:
            return NoBases()
        if self._mapped is None or self._mapped[0] != here.bases:
            # Another owner or a replay uses another location.
            place = bases_of(StoreSpec.from_text(here.bases), uid, chain)
            self._mapped = here.bases, MappedBases(place)
        _, mapped = self._mapped
        if mapped.place.is_local:
            return BaseFiles(mapped, here.number, here.pinned)
        return BaseObjects(mapped, here.number, lambda name: tell_base(f"{uid}/{chain}/{name}"))


@dataclass(frozen=True)
class SharedTasks:
    """Callable for applyInPandasWithState: several operators that share tasks, selected by the route."""

    operators: tuple[KeyedOperator, ...]

    def __call__(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: SparkState
    ) -> Iterator[pd.DataFrame]:
        return self.operators[place_of(int(key[0]))](key, frames, state)


def _describe(failure: ElementError | TimerError) -> str:
    error = failure.error
    return f"the function {error}" if isinstance(error, OutputError) else str(failure)


def _next_call_ms(entries: GroupState) -> tuple[int, int]:
    event_ms, processing_ms = map(entries.next_call_ms, (TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME))
    if event_ms == MAX_WATERMARK_MS:
        # In a report MAX means no timer, and the key group would not be called at the end of the input.
        event_ms -= 1
    return (
        MAX_WATERMARK_MS if event_ms is None else event_ms,
        MAX_WATERMARK_MS if processing_ms is None else processing_ms,
    )
