"""Functions on streams without a key that keep operator list state.

A function object is serialised once, sent to the Python workers, and opened once per copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from flinkish_spark.functions import RichFunction
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.list_state import OperatorListDescriptor


class OperatorItems(Protocol):
    """An operator list state of the partition that has its turn; use it inside `process_element` only."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items."""

    def __len__(self) -> int:
        """Return how many items there are."""

    def get(self) -> list[Any]:
        """Return a copy of the items."""

    def add(self, item: Any) -> None:
        """Append an item; None is refused."""

    def add_all(self, items: Iterable[Any]) -> None:
        """Append items."""

    def update(self, items: Iterable[Any]) -> None:
        """Replace the items."""

    def clear(self) -> None:
        """Remove all items."""


class OperatorStateContext(Protocol):
    """Given to :meth:`CheckpointedProcessFunction.open`."""

    uid: str

    def get_operator_list_state(self, descriptor: OperatorListDescriptor) -> OperatorItems:
        """Return a state, and declare it."""


class CheckpointedContext(Protocol):
    """Given to :meth:`CheckpointedProcessFunction.process_element`; valid only inside the call."""

    def timestamp(self) -> int | None:
        """Return the record's event time in milliseconds; None if the stream has no timestamps."""

    def current_watermark(self) -> int:
        """Return the micro-batch's watermark; `MIN_WATERMARK_MS` before the first."""

    def current_processing_time(self) -> int:
        """Return the micro-batch's processing time: the same if it is run again."""

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output; dropped if nobody reads it."""


class CheckpointedProcessFunction(RichFunction, ABC):
    """A function over the records of a stream without a key, with state of each partition.

    The records of a channel, a Kafka partition for example, come to the same partition, in their order. The
    state takes part in checkpoints and savepoints. A job that is restored with another number of
    partitions deals the items out anew, as each descriptor says; a start from the job's own checkpoint leaves
    them where they are.

    Examples
    --------
    >>> LAST = OperatorListDescriptor("last", "STRING")
    >>> class Repeated(CheckpointedProcessFunction):
    ...     def open(self, context):
    ...         self.last = context.get_operator_list_state(LAST)
    ...
    ...     def process_element(self, value, ctx):
    ...         if value.user in self.last:
    ...             yield (value.user,)
    ...         self.last.update([value.user])
    """

    def open(self, context: Any) -> None:
        """Declare state with ``context.get_operator_list_state(...)``; called once per copy."""

    @abstractmethod
    def process_element(self, value: Any, ctx: CheckpointedContext) -> Iterable[Any] | None:
        """Process one record, a named tuple; `yield` emits a tuple, named tuple, Row, dict or dataclass."""
