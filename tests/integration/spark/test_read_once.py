"""A job with one source reads each record once, whatever is done to records and control rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    AggregateColumn,
    Fold,
    Json,
    KafkaSink,
    KafkaSource,
    WatermarkStrategy,
)
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import GraphError
from flinkish_spark.planning.planner import Planner
from tests.support.jobs import environment


def scans_of(frame: Any) -> list[str]:
    """Return the names of the sources in a plan, once for each place in it."""
    found, waiting = [], [frame._jdf.queryExecution().analyzed()]
    while waiting:
        node = waiting.pop()
        if node.getClass().getSimpleName() == "StreamingRelationV2":
            found.append(node.sourceName())
        children = node.children()
        waiting += [children.apply(at) for at in range(children.size())]
    return found


def timed(assigner: Any) -> Any:
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(assigner)
    return lambda stream: stream.assign_timestamps_and_watermarks(strategy)


def keyed(*keys: Any) -> Any:
    return lambda stream: stream.key_by(*keys).fold(AggregateColumn("n", Fold.COUNT), uid="counts")


def twice(name: str) -> Any:
    return F.udf(lambda value: value * 2, "LONG")(name)


def ways() -> dict[str, list[Callable[[Any], Any]]]:
    # Expressions need a session.
    return {
        "rows that are dropped": [lambda s: s.transform(lambda df: df.where("bid IS NOT NULL"))],
        "fields that are chosen": [lambda s: s.transform(lambda df: df.select("bid.*")), keyed("a")],
        "fields that are computed": [
            lambda s: s.transform(lambda df: df.withColumn("b", F.col("bid.a") + 1))
        ],
        "a function of single records": [
            lambda s: s.map(lambda one: (one.bid.a,), output="a LONG"),
            lambda s: s.filter(lambda one: one.a > 0),
            keyed("a"),
        ],
        "a time that is computed": [timed(F.col("bid.p") * 1), keyed(F.col("bid.a"))],
        "times of dropped records": [
            timed("at"),
            lambda s: s.transform(lambda df: df.where("at > 1")),
            lambda s: s.flat_map(lambda one: [(one.at,)], output="at LONG"),
            keyed("at"),
        ],
        "a time that a function gives": [timed(lambda one, _: one.at), keyed("at")],
        "a key that is computed": [keyed(F.col("bid.a") % 2)],
        "a key that a function gives": [
            lambda s: s.key_by(lambda one: one.at, key="at LONG").fold(
                AggregateColumn("n", Fold.COUNT), uid="counts"
            )
        ],
        "a time and a key that Python computes": [timed(twice("at")), keyed(twice("at"))],
        # What moves rows, or looks at several, must not get control rows, which come beside them then.
        "rows that move": [lambda s: s.rebalance(), keyed("at")],
        "numbers of rows": [
            lambda s: s.transform(lambda df: df.withColumn("i", F.monotonically_increasing_id()))
        ],
    }


WAYS = [
    "a time and a key that Python computes",
    "rows that are dropped",
    "fields that are chosen",
    "fields that are computed",
    "a function of single records",
    "a time that is computed",
    "times of dropped records",
    "a time that a function gives",
    "a key that is computed",
    "a key that a function gives",
    "rows that move",
    "numbers of rows",
]


@pytest.mark.parametrize("way", WAYS)
def test_a_record_is_read_once(spark: Any, tmp_path: Path, way: str) -> None:
    env = environment(spark, tmp_path / "job")
    fields = Json("bid STRUCT<a: LONG, p: LONG>, at LONG")
    stream = env.from_source(KafkaSource("localhost:9", ["in"], value=fields), uid="in")
    for step in ways()[way]:
        stream = step(stream)
    stream.sink_to(KafkaSink("localhost:9", "out", value=Json()), uid="out")
    planned = Planner(spark, NO_JOB, 2).plan(env.graph)
    found = scans_of(planned.frame)
    assert found.count("flinkish-kafka") == 1
    apart = ("rows that move", "numbers of rows", "a time and a key that Python computes")
    assert len(found) == (2 if way in apart else 1)


def test_a_key_that_calls_python_is_refused_behind_an_operator(spark: Any, tmp_path: Path) -> None:
    """Spark calls such a function for barriers, too, whatever condition stands around it."""
    env = environment(spark, tmp_path / "job")
    stream = env.from_source(KafkaSource("localhost:9", ["in"], value=Json("at LONG")), uid="in")
    counts = keyed("at")(stream).key_by(twice("n")).fold(AggregateColumn("m", Fold.COUNT), uid="again")
    counts.sink_to(KafkaSink("localhost:9", "out", value=Json()), uid="out")
    with pytest.raises(GraphError, match="is an expression that calls a func"):
        Planner(spark, NO_JOB, 2).plan(env.graph)
