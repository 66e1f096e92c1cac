"""User functions on streams without a key: with and without operator state.

A function object is serialised once and sent to the Python workers. One with operator state is opened once
per copy there, any other in each task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from flinkish_spark.functions.keyed import RichFunction, UnkeyedContext, name_contexts


class KeySelector(RichFunction, ABC):
    """A function that makes the key of each record, and can be opened.

    Examples
    --------
    >>> class Region(KeySelector):
    ...     def open(self, context):
    ...         self.regions = {"DE": "EU", "FR": "EU", "JP": "ASIA"}
    ...     def get_key(self, value) -> str:
    ...         return self.regions[value.country]
    """

    @abstractmethod
    def get_key(self, value: Any) -> Any:
        """Return the key of a record: one value, or a tuple for a key of several parts; None is a key, too.

        Must be the same for the same record at every call, since state is found by it. An exception stops the
        job with the record's topic, partition and offset.
        """


class Partitioner(ABC):
    """A function that chooses the task of a record, for `DataStream.partition_custom`.

    Examples
    --------
    >>> class ByLength(Partitioner):
    ...     def partition(self, key, num_partitions):
    ...         return len(key) % num_partitions
    """

    @abstractmethod
    def partition(self, key: Any, num_partitions: int) -> int:
        """Return a number from 0 to ``num_partitions - 1``; the same for the same key, in every process.

        Python's `hash` of a text differs between processes; `zlib.crc32` does not.
        """


class ProcessContext(UnkeyedContext, Protocol):
    """Given to :meth:`ProcessFunction.process_element`; valid only inside the call."""

    def timestamp(self) -> int | None:
        """Return the record's event time in milliseconds.

        None if the stream has no timestamps, and after a keyed operator, where records come without theirs.
        """

    def current_watermark(self) -> int:
        """Return the least watermark of the job's operators; `MIN_WATERMARK_MS` before the first.

        A function without state is no operator of the plan and has no watermark of its own. The returned one
        is never ahead of the watermark of a later operator.
        """


class CoProcessFunction(RichFunction, ABC):
    """A function over two connected streams without a key: any number of rows of each record.

    It has no state and no timers: sharing data between the inputs needs a key, or broadcast state. So each
    input has a copy of the function, and does not see attributes of the other copy.

    Examples
    --------
    >>> class Amounts(CoProcessFunction):
    ...     def process_element1(self, order, ctx):
    ...         yield order.user, order.amount
    ...     def process_element2(self, refund, ctx):
    ...         yield refund.payer, -refund.amount
    """

    @abstractmethod
    def process_element1(self, value: Any, ctx: ProcessContext) -> Iterable[Any] | None:
        """Process a record of the first stream; as :meth:`ProcessFunction.process_element`."""

    @abstractmethod
    def process_element2(self, value: Any, ctx: ProcessContext) -> Iterable[Any] | None:
        """Process a record of the second stream."""


class CoMapFunction(RichFunction, ABC):
    """A map function over two connected streams, with a method for each.

    After ``connect(...).key_by(...)`` both methods share the states that `open` requests. Without a key there
    is no state, and each input has a copy of the function.

    Examples
    --------
    >>> class Signed(CoMapFunction):
    ...     def map1(self, order):
    ...         return order.user, order.amount
    ...     def map2(self, refund):
    ...         return refund.payer, -refund.amount
    """

    @abstractmethod
    def map1(self, value: Any) -> Any:
        """Return the row for a record of the first stream."""

    @abstractmethod
    def map2(self, value: Any) -> Any:
        """Return the row for a record of the second stream."""


class CoFlatMapFunction(RichFunction, ABC):
    """A flat-map function over two connected streams; see :class:`CoMapFunction`.

    Examples
    --------
    >>> from flinkish_spark import ValueStateDescriptor
    >>> class Unblocked(CoFlatMapFunction):
    ...     def open(self, context):
    ...         self.is_blocked = context.get_state(ValueStateDescriptor("blocked", "BOOLEAN"))
    ...     def flat_map1(self, order):
    ...         if not self.is_blocked.value():
    ...             yield order
    ...     def flat_map2(self, control):
    ...         self.is_blocked.update(control.is_blocked)
    """

    @abstractmethod
    def flat_map1(self, value: Any) -> Iterable[Any] | None:
        """Return or yield the rows for a record of the first stream."""

    @abstractmethod
    def flat_map2(self, value: Any) -> Iterable[Any] | None:
        """Return or yield the rows for a record of the second stream."""


class ProcessFunction(RichFunction, ABC):
    """A function over the records of a stream without a key: any number of rows of each, to several outputs.

    It has no state and no timers, which belong to keys. It must be deterministic per record: it is called
    once for each output that is read, and again when a task is repeated.

    Examples
    --------
    >>> from flinkish_spark import OutputTag
    >>> REFUSED = OutputTag("refused", "user STRING, amount LONG")
    >>> class Checked(ProcessFunction):
    ...     def process_element(self, value, ctx):
    ...         if value.amount < 0:
    ...             ctx.output(REFUSED, value)
    ...         else:
    ...             yield value
    """

    @abstractmethod
    def process_element(self, value: Any, ctx: ProcessContext) -> Iterable[Any] | None:
        """Process one record, a named tuple; `yield` emits a tuple, named tuple, Row, dict or dataclass."""


class CheckpointedContext(UnkeyedContext, Protocol):
    """Given to :meth:`CheckpointedProcessFunction.process_element`; valid only inside the call."""


class CheckpointedProcessFunction(RichFunction, ABC):
    """A function over the records of a stream without a key, with state of each partition.

    The records of a channel, such as a Kafka partition, come to the same partition, in order. The state takes
    part in checkpoints and savepoints. A restore with another number of partitions redistributes the items as
    each descriptor defines; a start from the job's own checkpoint leaves them where they are.
    """

    def open(self, context: Any) -> None:
        """Declare state with ``context.get_operator_list_state(...)``; called once per copy."""

    @abstractmethod
    def process_element(self, value: Any, ctx: CheckpointedContext) -> Iterable[Any] | None:
        """Process one record, a named tuple; `yield` emits a tuple, named tuple, Row, dict or dataclass."""


name_contexts(ProcessFunction, CoProcessFunction, Context=ProcessContext)
