"""Runners of operators with a broadcast input, and with operator list state.

Spark passes groups to Python in ascending order of their routes, and the broadcast route of a partition is
the lowest. So the broadcast side has loaded its state and processed its elements before the first key group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flinkish_spark.core.elements import Progress
from flinkish_spark.functions.keyed import BroadcastProcessFunction
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.operators.broadcast import BroadcastRun, ContextFacts, KeyedBroadcastOperator
from flinkish_spark.operators.context import NoKeyedState
from flinkish_spark.operators.process import Check, OperatorOutput
from flinkish_spark.state.descriptors import MapStateDescriptor
from flinkish_spark.state.key_group import GroupLayout, GroupState
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.state.operator_state import (
    OperatorListDescriptor,
    OperatorLists,
    OperatorListState,
    redistribute,
)
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.worker.runners import (
    ElementRunner,
    GroupRunner,
    InputRows,
    OutputRows,
    PartitionResult,
    PartitionSide,
    RowShape,
    runs,
)


@dataclass(frozen=True)
class UnkeyedBroadcast:
    """A function on a broadcast and an unkeyed stream; pickled into the plan."""

    function: BroadcastProcessFunction
    descriptors: tuple[MapStateDescriptor, ...]


class _KeyedSide(PartitionSide):
    def __init__(self, shape: RowShape, operator: KeyedBroadcastOperator) -> None:
        super().__init__(shape)
        self._side = operator.side

    @property
    def has_applications(self) -> bool:  # type: ignore[override]
        return bool(self._side.context.applications)

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionResult:
        def run(check: Check | None) -> OperatorOutput:
            self._side.begin(value)
            return self._side.process(self.elements(inputs, Distribution.BROADCAST), progress, check)

        return PartitionResult(self.write(run), self._side.dump())


@runs(KeyedBroadcastOperator)
class KeyedBroadcastRunner(ElementRunner):
    """Runs a partition's broadcast elements, and then its key groups."""

    def __init__(
        self, operator: KeyedBroadcastOperator, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        super().__init__(operator, uid, max_parallelism, shape)
        self.side = _KeyedSide(shape, operator)


class _UnkeyedRunner(PartitionSide, GroupRunner):
    """Runs an unkeyed operator: all of its elements take the broadcast route of their partition."""

    def __init__(self, uid: str, max_parallelism: int, shape: RowShape) -> None:
        super().__init__(shape)
        self.counts = {}
        self.layout = GroupLayout.of(KeyedStates(uid, max_parallelism), ())

    @property
    def side(self) -> PartitionSide:  # type: ignore[override]
        return self

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutputRows]:
        raise AssertionError("an operator without keys has no key groups")


@runs(UnkeyedBroadcast)
class UnkeyedBroadcastRunner(_UnkeyedRunner):
    def __init__(self, given: UnkeyedBroadcast, uid: str, max_parallelism: int, shape: RowShape) -> None:
        super().__init__(uid, max_parallelism, shape)
        self._run = BroadcastRun(given.function, given.descriptors, uid, max_parallelism)

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionResult:
        stored: bytes | None = None

        def run(check: Check | None) -> OperatorOutput:
            nonlocal stored
            broadcast = self.elements(inputs, Distribution.BROADCAST)
            elements = self.elements(inputs, Distribution.BY_CHANNEL)
            emitted, stored = self._run.run(value, broadcast, elements, progress, check)
            return emitted

        return PartitionResult(self.write(run), stored)


@dataclass(frozen=True)
class UnkeyedCheckpointedFunction:
    """A function on an unkeyed stream with operator list state; pickled into the plan."""

    function: CheckpointedProcessFunction


@runs(UnkeyedCheckpointedFunction)
class ListStateRunner(_UnkeyedRunner):
    """Runs a function with operator list state; each partition stores a value of its own."""

    def __init__(
        self, given: UnkeyedCheckpointedFunction, uid: str, max_parallelism: int, shape: RowShape
    ) -> None:
        super().__init__(uid, max_parallelism, shape)
        self._function, self._context = given.function, ContextFacts()
        self._states = _Declaring(uid, max_parallelism)
        given.function.open(self._states)
        self._states.is_open = True

    def restore(self, values: Sequence[bytes | None], partition: int, partitions: int) -> bytes | None:
        return redistribute(self._states.uid, self._states.lists.descriptors, values, partitions)[partition]

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionResult:
        def run(check: Check | None) -> OperatorOutput:
            self._states.lists.load(value)
            self._context.check = check
            elements = self.elements(inputs, Distribution.BY_CHANNEL)
            return self._context.process_sides(self._function.process_element, elements, progress)

        rows, lists = self.write(run), self._states.lists
        return PartitionResult(rows, lists.dump() if lists.is_changed else None)


class _Declaring(NoKeyedState):
    """Runtime context for `open`; the states that it returns show the items of the current partition."""

    refusal = (
        "operator '{uid}' asks for the state '{name}', but its stream has no key; call "
        'get_operator_list_state(OperatorListDescriptor("{name}", ...)), or put key_by() before it and use '
        "a keyed function"
    )

    def __init__(self, uid: str, max_parallelism: int) -> None:
        super().__init__(uid, max_parallelism)
        self.lists = OperatorLists(uid, (), None)
        #: Whether `open` has returned; later a state is only found, and none is declared.
        self.is_open = False

    def get_operator_list_state(self, descriptor: OperatorListDescriptor) -> OperatorListState:
        return self.lists.state(descriptor) if self.is_open else self.lists.declare(descriptor)
