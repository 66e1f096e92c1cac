"""Shapes of the graph: chained operators, transforms, several sinks, no operator at all."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections import Counter

import pytest
from pyspark.sql import functions as F

from flinkish_spark import DeltaSink, Json, KafkaSink, KeyedProcessFunction, Raw, ValueStateDescriptor
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    environment,
    expected_totals,
    order,
    orders_source,
    produce,
    read_committed,
    read_delta,
    rows,
    run_until,
    totals_in,
)

AMOUNTS = {f"u{i}": [i + n for n in range(20)] for i in range(15)}


def produce_orders(broker, topic):
    for user, amounts in AMOUNTS.items():
        produce(broker.bootstrap_servers, topic, [order(user, a) for a in amounts], key=user.encode())


class MaxOfTotals(KeyedProcessFunction):
    """Counts what came, over all users of one letter."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", "LONG"))

    def process_element(self, value, ctx):
        count = (self.count.value() or 0) + 1
        self.count.update(count)
        yield ctx.get_current_key(), count


@pytest.mark.nightly
def test_chained_operators_and_sinks_at_every_level(spark, broker, topic, job_dir, tmp_path):
    source, totals_topic, raw_topic = topic(2), topic(2), topic()
    produce_orders(broker, source)
    env = environment(spark, job_dir)
    orders = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    counts = totals.key_by(F.substring("user", 1, 1)).process(
        MaxOfTotals(), output="letter STRING, count LONG", uid="counts"
    )
    doubled = totals.transform(lambda df: df.select("user", (F.col("total") * 2).alias("double")))
    totals.sink_to(KafkaSink(broker.bootstrap_servers, totals_topic, key="user"), uid="kafka")
    counts.sink_to(DeltaSink(str(tmp_path / "counts")), uid="counts-delta")
    doubled.sink_to(DeltaSink(str(tmp_path / "doubled")), uid="doubled-delta")
    orders.transform(lambda df: df.where("amount > 30").select("user")).sink_to(
        KafkaSink(broker.bootstrap_servers, raw_topic, value=Raw("user")), uid="large"
    )
    client = run_until(env, lambda c: rows(c, "counts-delta") >= 300)
    assert client.progress.restarts == 0
    expected = expected_totals(AMOUNTS)
    assert totals_in(broker.bootstrap_servers, totals_topic) == expected
    doubles = Counter((r["user"], r["double"]) for r in read_delta(tmp_path / "doubled"))
    assert doubles == Counter((user, total * 2) for user, total in expected.elements())
    assert sorted(r["count"] for r in read_delta(tmp_path / "counts")) == list(range(1, 301))
    large = Counter(r.value.decode() for r in read_committed(broker.bootstrap_servers, raw_topic))
    assert large == Counter(u for u, amounts in AMOUNTS.items() for a in amounts if a > 30)


class Echo(KeyedProcessFunction):
    """Keeps the newest value of every type and gives it back."""

    def open(self, context):
        self.kept = context.get_state(
            ValueStateDescriptor("kept", "a TIMESTAMP, b DATE, c DECIMAL(9,2), d DOUBLE, e BOOLEAN, f STRING")
        )

    def process_element(self, v, ctx):
        before = self.kept.value()
        self.kept.update((v.at, v.day, v.price, v.ratio, v.flag, v.user))
        newest = before or self.kept.value()
        yield v.user, v.big, *newest[:5], math.nan if v.ratio is None else v.ratio


def test_every_type_travels_exactly_there_and_back(spark, broker, topic, job_dir, tmp_path):
    source = topic()
    schema = "user STRING, big LONG, at TIMESTAMP, day DATE, price DECIMAL(9,2), ratio DOUBLE, flag BOOLEAN"
    first = {
        "user": "ä",
        "big": 2**53 + 1,
        "at": "2026-03-01T12:00:00.123456Z",
        "day": "1969-12-31",
        "price": "12.34",
        "ratio": 0.1,
        "flag": False,
    }
    produce(broker.bootstrap_servers, source, [json.dumps(first).encode(), b'{"user":"\xc3\xa4"}', b"{}"])
    env = environment(spark, job_dir)
    stream = env.from_source(
        orders_source(broker.bootstrap_servers, source, value=Json(schema)), uid="values"
    )
    echo = stream.key_by("user").process(
        Echo(),
        output="user STRING, big LONG, at TIMESTAMP, day DATE, price DECIMAL(9,2), ratio DOUBLE, "
        "flag BOOLEAN, nan DOUBLE",
        uid="echo",
    )
    echo.sink_to(DeltaSink(str(tmp_path / "table")), uid="delta")
    run_until(env, lambda c: rows(c, "delta") >= 3)
    found = {(r["user"], r["big"]): r for r in read_delta(tmp_path / "table")}
    assert found.keys() == {("ä", 2**53 + 1), ("ä", None), (None, None)}
    for key in (("ä", 2**53 + 1), ("ä", None)):
        row = found[key]
        assert row["at"].astimezone(datetime.UTC) == datetime.datetime(
            2026, 3, 1, 12, 0, 0, 123456, tzinfo=datetime.UTC
        )
        assert (row["day"], row["price"]) == (datetime.date(1969, 12, 31), decimal.Decimal("12.34"))
        assert (row["ratio"], row["flag"]) == (0.1, False)
    assert math.isnan(found["ä", None]["nan"])
    assert found["ä", 2**53 + 1]["nan"] == 0.1
    nothing = found[None, None]
    assert [nothing[n] for n in ("at", "day", "price", "ratio", "flag")] == [None] * 5
