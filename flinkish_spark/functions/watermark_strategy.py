"""How a stream gets event times and watermarks: what a user writes.

The rules are in `protocol/watermarks.py`; `docs/event-time.md` describes how event time flows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from flinkish_spark.core.errors import ConfigError, UserFunctionError
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.core.iterators import USER_ERRORS
from flinkish_spark.core.validation import (
    can_take,
    check_function,
    check_methods,
    raise_config_errors,
    unusable,
)
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.event_time import (
    Alignment,
    AssignerRules,
    BoundedOutOfOrderness,
    Generation,
    NoWatermarks,
    ReportedWatermarks,
    check_time,
)
from flinkish_spark.protocol.limits import MOST_MS

if TYPE_CHECKING:
    from pyspark.sql import Column

    #: A column's name, a column, or a function of a record and the source's own time of it.
    TimestampAssigner = str | Column | Callable[[Any, int | None], int]


class WatermarkGenerator:
    """Makes watermarks for one channel out of what it brings, in one micro-batch. Runs in workers.

    An object lives for one channel and one micro-batch: it begins knowing nothing, and nothing that it
    keeps in its attributes survives. What does survive is what it has emitted: the greatest watermark of
    each channel is stored with the micro-batch, and a smaller one that is emitted later changes nothing.
    So a micro-batch that runs again, on another worker, emits the same, if the generator looks at nothing
    but the records.

    Examples
    --------
    A source that says itself how far it is:

    >>> class EndOfHour(WatermarkGenerator):
    ...     def on_event(self, event, timestamp_ms):
    ...         return timestamp_ms if event.kind == "hour is over" else None
    >>> strategy = WatermarkStrategy.for_generator(EndOfHour)
    """

    def on_event(self, event: Any, timestamp_ms: int) -> int | None:
        """Return a watermark to emit after a record, or None.

        Called for each record of the channel, in its order.
        """
        return None

    def on_periodic(self) -> int | None:
        """Return a watermark to emit after the last record of the micro-batch, or None.

        Not called for a channel without records in the micro-batch.
        """
        return None


_ALIGNED = 'write with_watermark_alignment("orders", 60_000), for example'


@dataclass(frozen=True, eq=False)
class WatermarkStrategy:
    """A strategy that assigns event times to the records of a stream, and defines its watermarks.

    Made by one of the `for_...` methods or :meth:`no_watermarks`; the `with_...` methods return another
    strategy and leave this one as it is. Without a timestamp assigner a record has the time that its
    source gave it (of Kafka: the record's timestamp).

    Examples
    --------
    >>> strategy = (
    ...     WatermarkStrategy.for_bounded_out_of_orderness(5_000)
    ...     .with_timestamp_assigner("bought_at")
    ...     .with_idleness(60_000)
    ... )
    >>> strategy.timestamps, strategy.idleness_ms
    ('bought_at', 60000)
    """

    generation: Generation
    generator: Callable[[], WatermarkGenerator] | None = None
    timestamps: TimestampAssigner | None = None
    idleness_ms: Milliseconds | None = None
    alignment: Alignment | None = None

    @classmethod
    def for_monotonous_timestamps(cls) -> WatermarkStrategy:
        """Return a strategy for times that never fall within a channel; equal ones may follow each other."""
        return cls(BoundedOutOfOrderness(0))

    @classmethod
    @check_arguments(max_out_of_orderness_ms="give the bound in milliseconds, such as 5_000")
    def for_bounded_out_of_orderness(
        cls, max_out_of_orderness_ms: Annotated[Milliseconds, Range(0, MOST_MS)]
    ) -> WatermarkStrategy:
        """Return a strategy for records that come out of order, up to a bound.

        Parameters
        ----------
        max_out_of_orderness_ms
            How much older than the newest record of its channel a record may be and still be on time.
        """
        return cls(BoundedOutOfOrderness(max_out_of_orderness_ms))

    @classmethod
    def for_generator(cls, factory: Callable[[], WatermarkGenerator]) -> WatermarkStrategy:
        """Return a strategy with watermarks of your own.

        Parameters
        ----------
        factory
            A class derived from :class:`WatermarkGenerator`, or a function without parameters that
            returns an object of one. It travels to the workers, and is called there for each channel and
            micro-batch.
        """
        is_other_class = isinstance(factory, type) and not issubclass(factory, WatermarkGenerator)
        if is_other_class or not callable(factory):
            raise unusable(
                "factory",
                factory,
                wanted="a class derived from WatermarkGenerator, or a function that returns an object of one",
                what_to_do="give the class itself, or a lambda that makes one: channels share no object",
            )
        if isinstance(factory, type):
            check_methods(factory, WatermarkGenerator, f"the class {factory.__name__}")
        else:
            check_function(factory, "the factory of a watermark generator", 0)
        return cls(ReportedWatermarks(), factory)

    @classmethod
    def no_watermarks(cls) -> WatermarkStrategy:
        """Return a strategy that never makes a watermark: for times alone.

        As in Flink this holds event time back for everything after the stream, until the stream is idle
        or has ended.
        """
        return cls(NoWatermarks())

    def with_timestamp_assigner(self, timestamps: TimestampAssigner) -> WatermarkStrategy:
        """Return this strategy with times from somewhere else than the source.

        Parameters
        ----------
        timestamps
            The name of a column, or a column, of type TIMESTAMP or LONG (milliseconds since 1970). Or a
            Python function of a record and of the time that its source gave it (None if it gave none),
            which returns milliseconds; it is slower, since records go through Python for it. A record
            whose time is null fails the job.
        """
        is_name = isinstance(timestamps, str) and timestamps != ""
        if not is_name and not _is_column(timestamps):
            if isinstance(timestamps, type) or not can_take(timestamps, 2):
                raise unusable(
                    "timestamps",
                    timestamps,
                    wanted="the name of a column, a column, or a function (record, milliseconds or None)",
                    what_to_do='write with_timestamp_assigner("bought_at"), for example',
                )
            check_function(timestamps, "the timestamp assigner", 2)
        return replace(self, timestamps=timestamps)

    @check_arguments(idleness_ms="give a time in milliseconds, such as 60_000, or leave the call out")
    def with_idleness(self, idleness_ms: Annotated[Milliseconds, Range(1, MOST_MS)]) -> WatermarkStrategy:
        """Return this strategy with channels that are not waited for while they bring nothing.

        Parameters
        ----------
        idleness_ms
            After this much processing time without a record a channel is idle, until its next one.
        """
        return replace(self, idleness_ms=idleness_ms)

    @check_arguments("group", max_drift_ms=_ALIGNED)
    def with_watermark_alignment(
        self, group: str, max_drift_ms: Annotated[Milliseconds, Range(0, MOST_MS)]
    ) -> WatermarkStrategy:
        """Return this strategy with its source kept close to the other sources of a group.

        A channel that is further ahead than the drift brings no records in the next micro-batch. A
        channel that has brought nothing yet counts as the slowest, so give the sources an idleness too.
        Sources that Spark's JVM reads cannot be held back, and are refused before the job starts.

        Parameters
        ----------
        group
            Name that the sources share; letters, digits, '_', '-', '.'.
        max_drift_ms
            How far a channel may be ahead of the slowest active one of the group. It is looked at between
            micro-batches, so a micro-batch may carry it further.
        """
        if isinstance(self.generation, NoWatermarks):
            raise ConfigError(
                f"a strategy without watermarks is aligned with the group {group!r}",
                why="the others of the group would wait for its watermark, which never comes",
                what_to_do="give it watermarks: for_bounded_out_of_orderness(...), for example",
            )
        with raise_config_errors(_ALIGNED):
            return replace(self, alignment=Alignment(group, max_drift_ms))

    @property
    def uses_own_time(self) -> bool:
        """True if the strategy needs the source's own time of a record: as is, or for a function."""
        if self.timestamps is None:
            return True
        return callable(self.timestamps) and not _is_column(self.timestamps)

    @property
    def rules(self) -> AssignerRules:
        """The rules by which the driver computes watermarks; for the planner."""
        return AssignerRules(self.generation, self.idleness_ms, self.alignment)


class ChannelGenerators:
    """Runs generators over the records of one task; for workers."""

    def __init__(self, factory: Callable[[], WatermarkGenerator], uid: str) -> None:
        self._factory, self._uid = factory, uid
        self._generators: dict[int, WatermarkGenerator] = {}
        self._greatest_ms: dict[int, int | None] = {}

    def on_event(self, channel: int, event: Any, timestamp_ms: int) -> None:
        generator = self._generators.get(channel)
        if generator is None:
            generator = self._make_generator(channel)
        try:
            watermark_ms = generator.on_event(event, timestamp_ms)
            if watermark_ms is not None:
                self._emit(channel, watermark_ms)
        except USER_ERRORS as error:
            raise self._make_failure("on_event()", error) from error

    def greatest(self, channel: int) -> int | None:
        return self._greatest_ms.get(channel)

    def finish(self) -> dict[int, int | None]:
        """Return the greatest watermark by channel, after the last record; None for a channel without one."""
        try:
            for channel, generator in self._generators.items():
                watermark_ms = generator.on_periodic()
                if watermark_ms is not None:
                    self._emit(channel, watermark_ms)
        except USER_ERRORS as error:
            raise self._make_failure("on_periodic()", error) from error
        return dict(self._greatest_ms)

    def _make_generator(self, channel: int) -> WatermarkGenerator:
        try:
            made: object = self._factory()
            check_methods(made, WatermarkGenerator, f"the {type(made).__name__}")
        except USER_ERRORS as error:
            raise self._make_failure("the factory", error) from error
        if not isinstance(made, WatermarkGenerator):
            raise self._make_failure("the factory", TypeError(f"it returned {made!r}, no WatermarkGenerator"))
        self._generators[channel], self._greatest_ms[channel] = made, None
        return made

    def _emit(self, channel: int, watermark_ms: int) -> None:
        check_time("the watermark", watermark_ms)
        before_ms = self._greatest_ms[channel]
        if before_ms is None or watermark_ms > before_ms:
            self._greatest_ms[channel] = watermark_ms

    def _make_failure(self, what: str, error: BaseException) -> UserFunctionError:
        return UserFunctionError(
            f"{what} of the watermark generator of '{self._uid}' failed",
            why=f"{type(error).__name__}: {error}",
            uid=self._uid,
        )


def _is_column(value: object) -> bool:
    from pyspark.sql import Column

    return isinstance(value, Column)
