"""Asynchronous calls to external systems: `AsyncDataStream.ordered_wait(stream, function, 1_000)`."""

from __future__ import annotations

from dataclasses import replace

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
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.validation import instance_of, raise_config_errors, to_ms, unusable
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.datastream.keyed_stream import KeyedStream
from flinkish_spark.planning.stream_graph import TransformNode
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.protocol.limits import check_whole


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
    def ordered_wait_with_retry(
        stream: DataStream | KeyedStream,
        async_function: AsyncFunction,
        timeout_ms: Duration,
        capacity: int,
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
        spec = _spec(async_function, timeout_ms, capacity, retry_strategy, limits)
        return _add_async_operator(stream, spec, output, uid, record_answers)

    @staticmethod
    def ordered_wait_batch(
        stream: DataStream | KeyedStream,
        async_batch_function: AsyncBatchFunction,
        timeout_ms: Duration,
        batch_size: int,
        batch_timeout_ms: Duration | None = None,
        capacity: int = 100,
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
        spec = _batch_spec(
            async_batch_function, timeout_ms, batch_size, batch_timeout_ms, capacity, retry_strategy, limits
        )
        return _add_async_operator(stream, spec, output, uid, record_answers)

    # A micro-batch waits for all of its results, so keeping their order costs nothing.
    unordered_wait = ordered_wait
    unordered_wait_with_retry = ordered_wait_with_retry
    unordered_wait_batch = ordered_wait_batch


def _spec(
    function: AsyncFunction | AsyncBatchFunction,
    timeout_ms: Duration,
    capacity: int,
    retry: AsyncRetryStrategy,
    limits: CallLimits,
) -> AsyncSpec:
    if isinstance(capacity, AsyncRetryStrategy):
        raise ConfigError(
            "the capacity is a retry strategy",
            why="in PyFlink the strategy comes before the capacity, here after it",
            what_to_do="say capacity=... and retry_strategy=...",
        )
    timeout_ms = to_ms("timeout_ms", timeout_ms)
    with raise_config_errors("give whole numbers: timeout_ms=2_000, capacity=100"):
        check_whole("timeout_ms", timeout_ms, least=1)
        check_whole("capacity", capacity, least=1)
    instance_of(
        "retry_strategy",
        retry,
        AsyncRetryStrategy,
        what_to_do="make one: AsyncRetryStrategy.fixed_delay(3, 500)",
    )
    instance_of("limits", limits, CallLimits, what_to_do="make one: CallLimits(per_job_per_s=100)")
    return AsyncSpec(function, timeout_ms, capacity, retry, limits)


def _batch_spec(
    function: AsyncBatchFunction,
    timeout_ms: Duration,
    batch_size: int,
    batch_timeout_ms: Duration | None,
    capacity: int,
    retry: AsyncRetryStrategy,
    limits: CallLimits,
) -> AsyncSpec:
    check_is_async(function, AsyncBatchFunction, "async_invoke_batch")
    if batch_timeout_ms is not None:
        batch_timeout_ms = to_ms("batch_timeout_ms", batch_timeout_ms)
    with raise_config_errors("give whole numbers: batch_size=32"):
        check_whole("batch_size", batch_size, least=1)
        if batch_timeout_ms is not None:
            check_whole("batch_timeout_ms", batch_timeout_ms, least=0)
    return replace(_spec(function, timeout_ms, capacity, retry, limits), batch_size=batch_size)


def _add_async_operator(
    stream: DataStream | KeyedStream,
    spec: AsyncSpec,
    output: OutputType | None,
    uid: str | None,
    record_answers: bool,
) -> DataStream:
    if not isinstance(stream, DataStream | KeyedStream):
        raise unusable(
            "stream",
            stream,
            wanted="a DataStream or a KeyedStream",
            what_to_do="give it the stream with the elements to call the function with",
        )
    environment = stream._environment
    instance_of("record_answers", record_answers, bool, what_to_do="say True or False")
    spec = replace(spec, is_recorded=record_answers)
    node = stream._entry.parent if isinstance(stream, KeyedStream) else stream._node
    known = environment.graph.add_async_uid(uid, node)
    return DataStream(environment, TransformNode(node, make_async_calls(spec, output, known)))
