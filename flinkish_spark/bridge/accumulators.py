"""Spark's accumulator that carries what tasks of one start of a query say beside their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flinkish_spark.core.accumulators import ACCUMULATORS_PROPERTY, Tally, TallyParam, counted, measured
from flinkish_spark.core.errors import UserFunctionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.protocol.accumulators import Accumulated
    from flinkish_spark.protocol.user_metrics import UserMetrics


class NoTallies:
    """Carries nothing: where there is no Spark."""

    def begin(self) -> None: ...

    def collect(self) -> Accumulated:
        return {}

    def bases(self) -> tuple[str, ...]:
        return ()

    def metrics(self) -> UserMetrics:
        return {}


NO_TALLIES = NoTallies()


class TaskTallies(NoTallies):
    """Made for each start of a query, so that tasks of an earlier one reach nobody."""

    # Spark's own thread puts in what a task sends before the job that waits for the task is done.

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._carrier = self._context.accumulator(Tally(), TallyParam())

    def begin(self) -> None:
        self._carrier.value = Tally()
        self._context.setLocalProperty(ACCUMULATORS_PROPERTY, str(self._carrier.aid))

    def collect(self) -> Accumulated:
        """Return what tasks have added since :meth:`begin`, by name."""
        try:
            return counted(self._carrier.value)
        except ValueError as error:
            raise UserFunctionError(
                str(error),
                why="what functions add under one name is one number of the job",
                what_to_do="give one of them another name",
            ) from None

    def bases(self) -> tuple[str, ...]:
        """Return the files of big key groups that tasks have written in a bucket since :meth:`begin`."""
        return tuple(sorted(self._carrier.value.bases))

    def metrics(self) -> UserMetrics:
        """Return what functions have measured in tasks since :meth:`begin`, by uid and name."""
        return measured(self._carrier.value)
