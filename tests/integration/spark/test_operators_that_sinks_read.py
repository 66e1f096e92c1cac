"""What an operator makes for a sink and for other operators: it runs once, and nobody sees a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from flinkish_spark import Emit, VectorizedProcessFunction
from flinkish_spark.job import preflight
from flinkish_spark.protocol import restore as protocol
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.restore import begin_chain
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.integration.spark.test_shared_tasks import BY_EXPRESSION, all_of, layout, run, truth
from tests.support import effort
from tests.support.two_ways import ODD, TOTALS, Big, totals_of

pytestmark = pytest.mark.timeout(600)


class Untimed(VectorizedProcessFunction):
    """Rows that have no event times, beside others that have."""

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        yield batch.select(["user", "total"])


@cache
def totals(orders: Any) -> Any:
    return totals_of(orders, "totals")


def odd(orders: Any) -> Any:
    return totals(orders).get_side_output(ODD)


@cache
def sums(orders: Any) -> Any:
    return totals(orders).key_by("user").sum("total", uid="sums", emit=Emit.PER_ELEMENT)


def large(orders: Any) -> Any:
    """A function in front of a sink."""
    return totals(orders).filter(Big()).map(lambda row: (row.user.upper(), row.total), output=TOTALS)


def windows(orders: Any) -> Any:
    """Functions between two operators, of which the first has a sink, too."""
    by_user = totals(orders).filter(Big()).key_by("user").window(TumblingEventTimeWindows(5))
    return by_user.reduce(lambda a, b: (a.user, a.total + b.total), uid="windows")


def both(orders: Any) -> Any:
    """Ways that meet again, and a sink on each."""
    by_user, summed = totals(orders).key_by("user"), sums(orders).key_by("user")
    return by_user.interval_join(summed, lower_ms=-4, upper_ms=4, uid="both")


def united(orders: Any) -> Any:
    """A sink that reads two operators, of which one reads the other."""
    return totals(orders).union(sums(orders))


def untimed(orders: Any) -> Any:
    return totals(orders).key_by("user").process(Untimed(), output=TOTALS, uid="untimed")


def framed(orders: Any) -> Any:
    """A DataFrame function between two operators; the division fails in each row that it drops."""
    parts = totals(orders).transform(
        lambda df: df.where("total <> 3").withColumn("total", F.expr("120 div (total - 3)"))
    )
    return parts.key_by("user").sum("total", uid="framed", emit=Emit.PER_ELEMENT)


def parts_by_function(orders: Any) -> Any:
    """What `framed` computes."""
    some = totals(orders).filter(lambda row: row.total != 3)
    parts = some.map(lambda row: (row.user, 120 // (row.total - 3)), output=TOTALS)
    return parts.key_by("user").sum("total", uid="framed", emit=Emit.PER_ELEMENT)


def framed_and_mapped(orders: Any) -> Any:
    some = totals(orders).transform(
        lambda df: df.where(df.total > 10).select(F.upper("user").alias("who"), "total")
    )
    made = some.map(lambda row: (row.who, -row.total), output=TOTALS)
    return made.key_by(lambda row: row.user[:1], key="STRING").sum(
        "total", uid="framed-and-mapped", emit=Emit.PER_ELEMENT
    )


def mapped(orders: Any) -> Any:
    """What `framed_and_mapped` computes."""
    some = totals(orders).filter(lambda row: row.total > 10)
    made = some.map(lambda row: (row.user.upper(), -row.total), output=TOTALS)
    return made.key_by(lambda row: row.user[:1], key="STRING").sum(
        "total", uid="mapped", emit=Emit.PER_ELEMENT
    )


BY_EXPRESSION.update({framed: parts_by_function, framed_and_mapped: mapped})


def of_odd(orders: Any) -> Any:
    """Behind a side output that a sink reads, with a source of its own besides."""
    plain = orders.map(lambda order: (order.user, -order.amount), output=TOTALS)
    by_user = odd(orders).map(lambda row: (row.who, row.amount), output=TOTALS).union(plain).key_by("user")
    return by_user.window(TumblingEventTimeWindows(5)).sum("total", uid="of-odd")


PROGRAMS = (totals, odd, sums, large, windows, both, united, untimed, of_odd, framed, framed_and_mapped)
OPERATORS = {"totals", "sums", "windows", "both", "untimed", "of-odd", "framed", "framed-and-mapped"}
BY_DAY = (
    (totals, odd, sums, large, both, untimed, framed_and_mapped),
    {"totals", "sums", "both", "untimed", "framed-and-mapped"},
)


def test_what_sinks_read_passes_the_operators_behind(spark: Any, tmp_path: Path) -> None:
    """Over a savepoint that is restored with another number of partitions; by night over a restart, too."""
    programs, operators = (PROGRAMS, OPERATORS) if effort.is_night else BY_DAY
    first = run(spark, tmp_path, "first", 1, savepoint="savepoint", programs=programs)
    began = layout(tmp_path / "first")
    assert Counter(one.uid for one in began.operators) == dict.fromkeys(operators, 1)
    assert len({one.chain for one in began.operators}) == 1
    second = run(spark, tmp_path, "second", 2, restore="savepoint", programs=programs)
    assert all_of(first, second) == truth(2, programs)


@pytest.mark.nightly
def test_a_restart_goes_on_with_what_each_operator_knows(spark: Any, tmp_path: Path) -> None:
    run(spark, tmp_path, "job", 1, programs=PROGRAMS)
    run(spark, tmp_path, "job", 2, programs=PROGRAMS)
    sinks = run(spark, tmp_path, "job", 3, programs=PROGRAMS)
    assert all_of(sinks) == truth(3, PROGRAMS)


@pytest.mark.nightly
@pytest.mark.parametrize("stood", ["at one place", "at different places"])
def test_a_job_goes_on_with_the_chains_that_it_has_begun_with(
    spark: Any, tmp_path: Path, monkeypatch: Any, stood: str
) -> None:
    """A savepoint of it begins a job with one chain, unless its chains stood at different places."""
    with monkeypatch.context() as before:
        before.setattr(preflight, "find_begun_chains", lambda *given: frozenset(OPERATORS))
        run(spark, tmp_path, "first", 1, programs=PROGRAMS)
    second = run(spark, tmp_path, "first", 2, savepoint="savepoint", programs=PROGRAMS)
    began = layout(tmp_path / "first")
    assert Counter(one.uid for one in began.operators)["totals"] == len(OPERATORS)
    if stood != "at one place":
        monkeypatch.setattr(protocol, "begin_chain", differing)
    third = run(spark, tmp_path, "second", 3, restore="savepoint", programs=PROGRAMS)
    runs = Counter(one.uid for one in layout(tmp_path / "second").operators)
    assert runs["totals"] == (1 if stood == "at one place" else len(OPERATORS))
    assert all_of(second, third) == truth(3, PROGRAMS)


def differing(chain: Chain, *given: Any) -> Any:
    """Begin a chain, if it has one end: as if those of a savepoint had stood at different places."""
    if len(chain.operators) == len(OPERATORS):
        raise ValueError("they stood at different places")
    return begin_chain(chain, *given)
