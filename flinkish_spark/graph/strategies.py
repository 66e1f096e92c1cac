"""What a watermark strategy must be before a program can use it."""

from __future__ import annotations

from pyspark.sql import Column

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.declared import check_can_be_sent
from flinkish_spark.watermark_strategy import WatermarkStrategy


def check_strategy(strategy: object, method: str, uid: str) -> None:
    """Refuse what is no watermark strategy, or cannot be sent to the workers.

    Parameters
    ----------
    uid
        Of the source that it is for.

    Raises
    ------
    GraphError, UserFunctionError
        With what to do.
    """
    if not isinstance(strategy, WatermarkStrategy):
        raise GraphError(
            f"{method} got a {type(strategy).__name__} as its watermark strategy",
            what_to_do="give it a strategy: WatermarkStrategy.for_bounded_out_of_orderness(5_000)",
        )
    for function in (strategy.timestamps, strategy.generator):
        if callable(function) and not isinstance(function, Column):
            check_can_be_sent(function, "of the watermark strategy", uid)
