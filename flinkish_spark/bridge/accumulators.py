"""A Spark accumulator with what the tasks of one query start report besides their rows."""

from __future__ import annotations

from pyspark.sql import SparkSession

from flinkish_spark.core.accumulators import (
    ACCUMULATORS_PROPERTY,
    Tally,
    TallyParam,
    merge_metrics,
    sum_counts,
)
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.protocol.accumulators import AccumulatorValues
from flinkish_spark.protocol.user_metrics import UserMetrics


class TaskTallies:
    """The accumulator of one query start; reports of earlier starts' tasks are lost."""

    # Spark's thread adds a task's report before the Spark job of the task ends.

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._carrier = self._context.accumulator(Tally(), TallyParam())

    def begin(self) -> None:
        self._carrier.value = Tally()
        self._context.setLocalProperty(ACCUMULATORS_PROPERTY, str(self._carrier.aid))

    def collect(self) -> AccumulatorValues:
        """Return the accumulator values that tasks have added since :meth:`begin`, by name."""
        try:
            return sum_counts(self._carrier.value)
        except ValueError as error:
            raise UserFunctionError(str(error), what_to_do="give one of them another name") from None

    def bases(self) -> tuple[str, ...]:
        """Return the files of big key groups that tasks have written in a bucket since :meth:`begin`."""
        return tuple(sorted(self._carrier.value.bases))

    def metrics(self) -> UserMetrics:
        """Return the metrics that functions have reported since :meth:`begin`, by uid and name."""
        return merge_metrics(self._carrier.value)
