"""Asynchronous calls to external systems: `AsyncDataStream.ordered_wait(stream, function, 1_000)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from flinkish_spark.async_io.functions import (
    NO_LIMITS,
    NO_RETRY_STRATEGY,
    AsyncBatchFunction,
    AsyncFunction,
    AsyncRetryStrategy,
    CallLimits,
    check_is_async,
)
from flinkish_spark.async_io.transform import make_async_calls
from flinkish_spark.async_io.wait import AsyncSpec
from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.datastream.keyed_stream import KeyedStream
from flinkish_spark.planning.stream_graph import TransformNode
from flinkish_spark.protocol.durations import Duration, Milliseconds

_STREAM = "give it the stream with the elements to call the function with"
# In PyFlink the strategy comes before the capacity.
_CAPACITY = "say capacity=100, and retry_strategy=... after it"
_RETRY = "make one: AsyncRetryStrategy.fixed_delay(3, 500)"


class AsyncDataStream:
    """Factory of streams that call async functions for elements; names as in PyFlink.

    A worker has up to `capacity` open calls at once; further elements wait. No call is open at the end of a
    micro-batch, so no checkpoint completes over a call. For the same reason keeping the order of elements
    costs nothing: `unordered_wait`, `unordered_wait_with_retry` and `unordered_wait_batch` do the same as
    their ordered namesakes; they exist as in PyFlink.

    Examples
    --------
    >>> class Rated(AsyncFunction):
    ...     async def open(self, context):
    ...         self.client = ...
    ...     async def async_invoke(self, value) -> list[tuple[str, float]]:
    ...         return [(value.currency, await self.client.rate(value.currency))]
    >>> rated = AsyncDataStream.ordered_wait(  # doctest: +SKIP
    ...     orders, Rated(), timeout_ms=2_000, capacity=50, uid="rates", record_answers=True
    ... )
    """

    @staticmethod
    def ordered_wait(
        stream: DataStream | KeyedStream,
        async_function: AsyncFunction,
        timeout_ms: Duration,
        capacity: int = 100,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        record_answers: bool = False,
        limits: CallLimits = NO_LIMITS,
    ) -> DataStream:
        """Call a function for each element; results come in the order of the elements.

        Parameters
        ----------
        stream
            Elements of a keyed stream are taken as they come; the result has no key, as in Flink.
        async_function
            An instance of a subclass of :class:`~flinkish_spark.AsyncFunction`.
        timeout_ms
            How long all calls for an element may take together, with retries and the waits between them.
        capacity
            The most elements with open calls at once, in each worker.
        output
            Fields of the rows; by default those in the type hint of `async_invoke`.
        uid
            Stable name by which recorded answers are found, and which errors and statistics show; by default
            it is derived from the place in the program.
        record_answers
            Whether to store each answer before it is used, until its checkpoint is confirmed. A repeated
            task, a micro-batch that runs again and a replay then read the stored answer; a crash repeats only
            the open calls. So the function need not be deterministic. If several sinks or paths read the
            operator, answers are always recorded.
        limits
            Limits of the rate of calls.

        Raises
        ------
        ConfigError
            Something cannot be used, or the function is not async.
        GraphError
            The uid cannot be used or is taken.
        SchemaError
            The output is not known.
        UserFunctionError
            The function cannot be sent to the workers.
        """
        return AsyncDataStream.ordered_wait_with_retry(
            stream,
            async_function,
            timeout_ms,
            capacity,
            NO_RETRY_STRATEGY,
            output=output,
            uid=uid,
            record_answers=record_answers,
            limits=limits,
        )

    @staticmethod
    @check_arguments("async_function", stream=_STREAM, capacity=_CAPACITY, retry_strategy=_RETRY)
    def ordered_wait_with_retry(
        stream: DataStream | KeyedStream,
        async_function: AsyncFunction,
        timeout_ms: Annotated[Milliseconds, Range(1)],
        capacity: Annotated[int, Range(1)],
        retry_strategy: AsyncRetryStrategy,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        record_answers: bool = False,
        limits: CallLimits = NO_LIMITS,
    ) -> DataStream:
        """Do the same as :meth:`ordered_wait`, and retry calls by a strategy.

        Parameters
        ----------
        retry_strategy
            When a call is repeated, and how long to wait before. In PyFlink this argument comes before the
            capacity.
        """
        check_is_async(async_function, AsyncFunction, "async_invoke")
        spec = AsyncSpec(async_function, timeout_ms, capacity, retry_strategy, limits)
        return _add_async_operator(stream, spec, output, uid, record_answers)

    @staticmethod
    @check_arguments("async_batch_function", stream=_STREAM, capacity=_CAPACITY, retry_strategy=_RETRY)
    def ordered_wait_batch(
        stream: DataStream | KeyedStream,
        async_batch_function: AsyncBatchFunction,
        timeout_ms: Annotated[Milliseconds, Range(1)],
        batch_size: Annotated[int, Range(1)],
        batch_timeout_ms: Annotated[Milliseconds, Range(0)] | None = None,
        capacity: Annotated[int, Range(1)] = 100,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        record_answers: bool = False,
        retry_strategy: AsyncRetryStrategy = NO_RETRY_STRATEGY,
        limits: CallLimits = NO_LIMITS,
    ) -> DataStream:
        """Call a function with several elements at a time; results come in the order of the elements.

        Parameters
        ----------
        async_batch_function
            An instance of a subclass of :class:`~flinkish_spark.AsyncBatchFunction`.
        batch_size
            The most elements of a call.
        batch_timeout_ms
            How long a call waits for further elements, in Flink. Here all elements of a micro-batch are
            there, so a call that is not full is the last one, and never waits.
        capacity
            The most elements with open calls at once (elements, not calls).
        """
        check_is_async(async_batch_function, AsyncBatchFunction, "async_invoke_batch")
        spec = AsyncSpec(async_batch_function, timeout_ms, capacity, retry_strategy, limits, batch_size)
        return _add_async_operator(stream, spec, output, uid, record_answers)

    # A micro-batch waits for all of its results, so keeping their order costs nothing.
    unordered_wait = ordered_wait
    unordered_wait_with_retry = ordered_wait_with_retry
    unordered_wait_batch = ordered_wait_batch


def _add_async_operator(
    stream: DataStream | KeyedStream,
    spec: AsyncSpec,
    output: OutputType | None,
    uid: str | None,
    record_answers: bool,
) -> DataStream:
    environment = stream._environment
    spec = replace(spec, is_recorded=record_answers)
    node = stream._entry.parent if isinstance(stream, KeyedStream) else stream._node
    known = environment.graph.add_async_uid(uid, node)
    return DataStream(environment, TransformNode(node, make_async_calls(spec, output, known)))
