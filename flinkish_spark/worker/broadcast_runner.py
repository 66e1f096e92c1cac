"""Operators with a broadcast input, and with operator list state, in a partition.

Spark hands groups to Python in ascending order of their routes, and the broadcast route of a partition is
below all others: what the broadcast side has stored, and what this micro-batch brings to it, is known before
the first key group of the partition is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from flinkish_spark.core.elements import Progress
from flinkish_spark.functions.keyed import BroadcastProcessFunction
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.operators.broadcast import (
    BroadcastElementFailed,
    BroadcastRun,
    ContextFacts,
    KeyedBroadcastOperator,
)
from flinkish_spark.operators.context import KeyedStateWithoutKey, NoKeyedState
from flinkish_spark.operators.process import Check, ElementFailed, Elements, Emitted
from flinkish_spark.state.descriptors import MapStateDescriptor, StateDescriptor
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.operator_state import (
    OperatorListDescriptor,
    OperatorLists,
    OperatorListState,
    OperatorValueMismatch,
    any_copy,
    redistribute,
)
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter
from flinkish_spark.worker.runners import (
    ElementRunner,
    InputRows,
    OutRows,
    PartitionDone,
    PartitionSide,
    RowShape,
    blame_call,
    row_of_element,
    rows_between,
    rows_written,
    runs,
)

Stored = TypeVar("Stored")


@dataclass(frozen=True)
class UnkeyedBroadcast:
    """A function over a broadcast stream and one without keys; travels in the plan."""

    function: BroadcastProcessFunction
    descriptors: tuple[MapStateDescriptor, ...]


class _Side(ABC):
    """A partition's side of an operator; a :class:`.PartitionSide`."""

    has_applications = False

    def __init__(self, shape: RowShape) -> None:
        self._shape = shape
        self._write = partial(rows_written, shape, [RowWriter.of(fields) for fields in shape.outputs])

    @abstractmethod
    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionDone: ...

    def restored(self, values: Sequence[bytes | None], partition: int, partitions: int) -> bytes | None:
        return any_copy(values)

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        is_broadcast = isinstance(failure, BroadcastElementFailed)
        way = Distribution.BROADCAST if is_broadcast else Distribution.BY_CHANNEL
        shape = self._shape
        own = [one if of.distribution is way else None for one, of in zip(inputs, shape.inputs, strict=True)]
        return row_of_element(shape, own, failure)


@runs(KeyedBroadcastOperator)
def keyed_broadcast_runner(
    operator: KeyedBroadcastOperator, uid: str, max_parallelism: int, shape: RowShape
) -> ElementRunner:
    """Return what runs a partition's broadcast elements, and then its key groups."""
    runner = ElementRunner(operator, uid, max_parallelism, shape)
    runner.side = _KeyedSide(shape, operator)
    return runner


class _KeyedSide(_Side):
    def __init__(self, shape: RowShape, operator: KeyedBroadcastOperator) -> None:
        super().__init__(shape)
        self._side = operator.side

    @property
    def has_applications(self) -> bool:  # type: ignore[override]
        return bool(self._side.applications)

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionDone:
        def run(check: Check | None) -> Emitted:
            self._side.begin(value)
            before, behind = sides_of(self._shape, inputs, Distribution.BROADCAST)
            return self._side.process(behind, progress, check, before)

        rows, _ = written_or_blamed(self._write, lambda check: (run(check), None))
        return PartitionDone(rows, self._side.dump())


class PartitionRunner:
    """Runs an operator without keys: its elements are all on the broadcast route of their partition."""

    def __init__(self, side: PartitionSide, uid: str, max_parallelism: int) -> None:
        self.side: PartitionSide | None = side
        self.row_of = side.row_of
        self.counts: dict[str, int] = {}
        self.layout = GroupLayout.of(KeyedStates(uid, max_parallelism), ())

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        raise AssertionError("an operator without keys has no key groups")


@runs(UnkeyedBroadcast)
def unkeyed_broadcast_runner(
    given: UnkeyedBroadcast, uid: str, max_parallelism: int, shape: RowShape
) -> PartitionRunner:
    run = BroadcastRun(given.function, given.descriptors, uid, max_parallelism)
    return PartitionRunner(_UnkeyedSide(shape, run), uid, max_parallelism)


class _UnkeyedSide(_Side):
    def __init__(self, shape: RowShape, run: BroadcastRun) -> None:
        super().__init__(shape)
        self._run = run

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionDone:
        def run(check: Check | None) -> tuple[Emitted, bytes | None]:
            of_broadcast, broadcast = sides_of(self._shape, inputs, Distribution.BROADCAST)
            before, behind = sides_of(self._shape, inputs, Distribution.BY_CHANNEL)
            return self._run.run(value, broadcast, behind, progress, check, of_broadcast, before)

        return PartitionDone(*written_or_blamed(self._write, run))


def written_or_blamed(
    write: Callable[[Emitted], Iterable[OutRows]],
    run: Callable[[Check | None], tuple[Emitted, Stored]],
) -> tuple[tuple[OutRows, ...], Stored]:
    """Run a partition's micro-batch; return the rows that it emits, and what else comes of it."""
    emitted, stored = run(None)
    try:
        return tuple(write(emitted)), stored
    except OutputError:
        blame_call(lambda: run(lambda emitted: [*write(emitted)]))
        raise


def sides_of(shape: RowShape, inputs: InputRows, way: Distribution) -> tuple[Elements, Elements]:
    """Return the rows that come by one way, before the watermark and behind it, as elements without keys."""
    before, behind = (_elements_of(shape, inputs, way, is_before=is_before) for is_before in (True, False))
    return before, behind


def _elements_of(shape: RowShape, inputs: InputRows, way: Distribution, *, is_before: bool) -> Elements:
    values: list[Any] = []
    times: list[int | None] = []
    for given, one in zip(inputs, shape.inputs, strict=True):
        rows = rows_between(given, one, is_before=is_before) if one.distribution is way else None
        if rows is not None:
            values += RowReader(one.fields, one.field_columns, ()).read(rows)[1]
            is_timed = C.TIME in rows.schema.names
            times += rows.column(C.TIME).to_pylist() if is_timed else [None] * rows.num_rows
    return Elements(values, values, times)


@dataclass(frozen=True)
class Checkpointed:
    """A function without a key that keeps operator list state; travels in the plan."""

    function: CheckpointedProcessFunction


@runs(Checkpointed)
def list_state_runner(
    given: Checkpointed, uid: str, max_parallelism: int, shape: RowShape
) -> PartitionRunner:
    states = _Declaring(uid, max_parallelism)
    given.function.open(states)
    return PartitionRunner(_ListSide(shape, given.function, states), uid, max_parallelism)


class _ListSide(_Side):
    """A partition's copy of operator list state is a value of its own."""

    def __init__(self, shape: RowShape, function: CheckpointedProcessFunction, states: _Declaring) -> None:
        super().__init__(shape)
        self._function, self._states, self._context = function, states, ContextFacts()

    def restored(self, values: Sequence[bytes | None], partition: int, partitions: int) -> bytes | None:
        return redistribute(self._states.uid, self._states.descriptors, values, partitions)[partition]

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionDone:
        def run(check: Check | None) -> tuple[Emitted, OperatorLists]:
            lists = self._states.lists = OperatorLists(self._states.uid, self._states.descriptors, value)
            self._context.check = check
            before, behind = sides_of(self._shape, inputs, Distribution.BY_CHANNEL)
            process = self._function.process_element
            return self._context.process_sides(process, before, behind, progress), lists

        rows, lists = written_or_blamed(self._write, run)
        return PartitionDone(rows, lists.dump() if lists.is_changed else None)


class _Declaring(NoKeyedState):
    """Given to `open`; what it hands out shows the items of the partition that has its turn."""

    def __init__(self, uid: str, max_parallelism: int) -> None:
        super().__init__(uid, max_parallelism)
        self.descriptors: list[OperatorListDescriptor] = []
        self.lists: OperatorLists

    def _refuse(self, descriptor: StateDescriptor) -> NoReturn:
        raise KeyedStateWithoutKey(
            f"operator '{self.uid}' asks for the state '{descriptor.name}', but its stream has no key; "
            f'call get_operator_list_state(OperatorListDescriptor("{descriptor.name}", ...)), or put key_by()'
            " before it and use a keyed function"
        )

    def get_operator_list_state(self, descriptor: OperatorListDescriptor) -> _CurrentItems:
        if descriptor.name in {one.name for one in self.descriptors}:
            raise OperatorValueMismatch(f"the operator list state '{descriptor.name}' is declared twice")
        self.descriptors.append(descriptor)
        return _CurrentItems(self, descriptor)


class _CurrentItems:
    """An operator list state: that of the partition which has its turn."""

    __slots__ = ("_declaring", "_descriptor")

    def __init__(self, declaring: _Declaring, descriptor: OperatorListDescriptor) -> None:
        self._declaring, self._descriptor = declaring, descriptor

    @property
    def _current(self) -> OperatorListState:
        return self._declaring.lists.state(self._descriptor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)

    def get(self) -> list[Any]:
        return self._current.get()

    def add(self, item: Any) -> None:
        self._current.add(item)

    def add_all(self, items: Any) -> None:
        self._current.add_all(items)

    def update(self, items: Any) -> None:
        self._current.update(items)

    def clear(self) -> None:
        self._current.clear()
