"""Bad records of a source: the column with the reason, the error, and the count of dropped ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from flinkish_spark.core.errors import UNREADABLE_MARKER
from flinkish_spark.core.formats import BadRecordPolicy, OnBadRecord
from flinkish_spark.types.schemas import PREFIX

REASON = f"{PREFIX}reason"
#: Longest reason of a bad record; it becomes a header of the dead letter.
MOST_REASON = 1_000
#: Name of the observed metric that counts dropped records; the source's topics follow.
DROPPED_METRIC = "flinkish_dropped_"


def name_drop_metric(counted_as: Sequence[str]) -> str:
    """Return the name of the observed metric that counts dropped records; unique per `counted_as`."""
    return DROPPED_METRIC + json.dumps(list(counted_as))


def make_reasons(condition: pa.Array, reason: str) -> pa.Array:
    return pc.if_else(condition, reason, pa.scalar(None, pa.string()))


def raise_unreadable(reason: Column, at: Callable[[str], Column] = F.col) -> Column:
    place = [at(name).alias(name) for name in ("topic", "partition", "offset")]
    told = F.to_json(F.struct(*place, reason.alias("reason")))
    return F.raise_error(F.concat(F.lit(UNREADABLE_MARKER), told))


def drop_bad_records(found: DataFrame, policy: BadRecordPolicy, counted_as: Sequence[str]) -> DataFrame:
    """Return the rows without a :data:`REASON`; Spark counts dropped rows as an observed metric."""
    is_good = F.col(REASON).isNull()
    if policy is OnBadRecord.DROP:
        metric = name_drop_metric(counted_as)
        found = found.observe(metric, F.count(F.when(~is_good, 1)).alias("dropped"))
    return found.where(is_good)
