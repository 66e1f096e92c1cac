"""Joins of streams: what a program says about them.

`flinkish_spark/operators/` runs them; docs/joins.md explains them.
"""

from flinkish_spark.joins.functions import CoGroupFunction, Concatenate, JoinContext, ProcessJoinFunction
from flinkish_spark.joins.interval import IntervalJoin
from flinkish_spark.joins.kinds import Bound, JoinType, Side
from flinkish_spark.joins.lookup import LookupCache, LookupJoin, LookupTable
from flinkish_spark.joins.sqlite_table import SqliteTable
from flinkish_spark.joins.temporal import TemporalJoin
from flinkish_spark.joins.window import WindowCoGroup, WindowJoin

__all__ = [
    "Bound",
    "CoGroupFunction",
    "Concatenate",
    "IntervalJoin",
    "JoinContext",
    "JoinType",
    "LookupCache",
    "LookupJoin",
    "LookupTable",
    "ProcessJoinFunction",
    "Side",
    "SqliteTable",
    "TemporalJoin",
    "WindowCoGroup",
    "WindowJoin",
]
