"""Joins of streams: what a program says about them.

`flinkish_spark/operators/` runs them; docs/joins.md explains them.
"""

from flinkish_spark.joins.lookup import LookupCache, LookupJoin, LookupTable, SqliteTable
from flinkish_spark.joins.spec import (
    Bound,
    CoGroupFunction,
    Concatenate,
    IntervalJoin,
    JoinContext,
    JoinType,
    ProcessJoinFunction,
    Side,
    TemporalJoin,
    WindowCoGroup,
    WindowJoin,
)

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
