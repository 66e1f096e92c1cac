"""Operators without keys that keep operator list state: all records of a partition on its broadcast route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from flinkish_spark.checkpointed_functions import CheckpointedProcessFunction
from flinkish_spark.operators.broadcast_side import ContextFacts
from flinkish_spark.operators.group_run import Check, ElementFailed, Emitted, Progress
from flinkish_spark.operators.group_state import GroupLayout, GroupState
from flinkish_spark.operators.keyed_context import KeyedStates
from flinkish_spark.operators.list_state import (
    OperatorListDescriptor,
    OperatorLists,
    OperatorListState,
    redistribute,
)
from flinkish_spark.operators.operator_values import OperatorValueMismatch
from flinkish_spark.operators.without_keys import KeyedStateWithoutKey, NoKeyedState
from flinkish_spark.runtime.arrow_rows import RowWriter
from flinkish_spark.runtime.broadcast_runners import PartitionDone, place_of, sides_of, written_or_blamed
from flinkish_spark.runtime.group_runners import Distribution, InputRows, OutRows, RowShape, rows_written
from flinkish_spark.state import StateDescriptor


@dataclass(frozen=True)
class Checkpointed:
    """A function without a key that keeps operator list state; travels in the plan."""

    function: CheckpointedProcessFunction


class ListStateRunner:
    """Runs a :class:`Checkpointed`; a partition's copy of the state is a value of its own."""

    #: There are no key groups, so nobody calls them.
    has_applications = False

    def __init__(self, given: Checkpointed, uid: str, max_parallelism: int, shape: RowShape) -> None:
        self.counts: dict[str, int] = {}
        self._function, self._uid, self._shape = given.function, uid, shape
        self._writers = [RowWriter.of(fields) for fields in shape.outputs]
        self.layout = GroupLayout.of(KeyedStates(uid, max_parallelism), ())
        self._context = _Context()
        self._states = _Declaring(uid, max_parallelism)
        given.function.open(self._states)

    def restored(self, values: Sequence[bytes | None], partition: int, partitions: int) -> bytes | None:
        """See :class:`~flinkish_spark.runtime.broadcast_runners.PartitionRunner`."""
        return redistribute(self._uid, self._states.descriptors, values, partitions)[partition]

    def begin(self, value: bytes | None, inputs: InputRows, progress: Progress) -> PartitionDone:
        """See :class:`~flinkish_spark.runtime.broadcast_runners.PartitionRunner`."""

        def run(check: Check | None) -> tuple[Emitted, OperatorLists]:
            lists = self._states.lists = OperatorLists(self._uid, self._states.descriptors, value)
            self._context.check = check
            before, behind = sides_of(self._shape, inputs, Distribution.BY_CHANNEL)
            process = self._function.process_element
            return self._context.process_sides(process, before, behind, progress), lists

        rows, lists = written_or_blamed(partial(rows_written, self._shape, self._writers), run)
        return PartitionDone(rows, lists.dump() if lists.is_changed else None)

    def process(self, inputs: InputRows, group: GroupState, progress: Progress) -> Iterator[OutRows]:
        """Never called."""
        raise AssertionError("an operator without keys has no key groups")

    def row_of(self, inputs: InputRows, failure: ElementFailed) -> tuple[int, int]:
        """See :class:`~flinkish_spark.runtime.group_runners.GroupRunner`."""
        return place_of(self._shape, inputs, Distribution.BY_CHANNEL, failure)


class _Context(ContextFacts):
    """Given to the function for an element."""

    __slots__ = ()


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

    get_state = get_list_state = get_map_state = get_reducing_state = get_aggregating_state = _refuse

    def get_operator_list_state(self, descriptor: OperatorListDescriptor) -> _CurrentItems:
        """Return a state; called in `open` only, which declares it."""
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
        """Return a copy of the items."""
        return self._current.get()

    def add(self, item: Any) -> None:
        """Append an item."""
        self._current.add(item)

    def add_all(self, items: Any) -> None:
        """Append items."""
        self._current.add_all(items)

    def update(self, items: Any) -> None:
        """Replace the items."""
        self._current.update(items)

    def clear(self) -> None:
        """Remove all items."""
        self._current.clear()
