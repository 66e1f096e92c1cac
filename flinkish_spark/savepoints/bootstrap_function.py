"""What a user writes to fill states and timers of a savepoint from rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from flinkish_spark.functions import RichFunction

if TYPE_CHECKING:
    from flinkish_spark.functions import Context


class KeyedStateBootstrapFunction(RichFunction, ABC):
    """Fills the states and timers of keys from the rows of a DataFrame, one at a time.

    Called once per row, in tasks, while a savepoint is written; a task that is run again calls it again for
    the same rows. States and timers are declared and used as in a
    :class:`~flinkish_spark.KeyedProcessFunction`, by the same names and types as in the job. Nothing is
    emitted, and no timer fires: those that are due fire in the job.

    Examples
    --------
    >>> from flinkish_spark import ValueStateDescriptor
    >>> class Totals(KeyedStateBootstrapFunction):
    ...     def open(self, context):
    ...         self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))
    ...     def process_element(self, value, ctx):
    ...         self.total.update(self.total.value() + value.amount)
    ...         ctx.timer_service().register_processing_time_timer(1_900_000_000_000)
    """

    @abstractmethod
    def process_element(self, value: Any, ctx: Context) -> None:
        """Take one row.

        Parameters
        ----------
        value
            The row as a named tuple, as a job's functions get records.
        ctx
            The current key; the row's time, if the rows have one; the timer service. Its watermark is
            `MIN_WATERMARK_MS`, its processing time the wall clock when the savepoint was begun.
        """
