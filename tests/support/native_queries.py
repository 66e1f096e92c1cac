"""Twelve queries for which Spark keeps state, each as a streaming query and judged by a batch query.

Events are orders and payments in the order of their times, some orders twice. The last event of a run is far
in the future, so that Spark's watermark closes every window before it.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

EVENT = "kind STRING, id LONG, user STRING, amount LONG, ts TIMESTAMP"
BASE = pd.Timestamp("2026-01-01T00:00:00Z")
#: Seconds of events in a file.
FILE_S = 20
FAR_S = 1_000_000
DELAY = "10 seconds"

#: The kinds of events.
KINDS = ("order", "payment")


def write_events(folder: Path, number: int) -> None:
    """Write one more file of events."""
    chance, rows = random.Random(number), []
    for second in range(number * FILE_S, (number + 1) * FILE_S):
        order = {
            "kind": "order",
            "id": second,
            "user": chance.choice("abcd"),
            "amount": chance.randrange(100),
        }
        rows.append((second, order))
        if chance.random() < 0.3:
            rows.append((second, order))
        if second % 3 and second > 4:
            rows.append((second, {**order, "kind": "payment", "id": second - chance.randrange(1, 5)}))
    _write(folder, number, rows)


def write_end(folder: Path, number: int) -> None:
    """Write events that close all windows."""
    # Both kinds in one micro-batch: after a restart Spark's watermark waits for every input anew.
    order = {"kind": "order", "id": -1, "user": "end", "amount": 0}
    paid = {"kind": "payment", "id": -2, "user": "end", "amount": 0}
    _write(folder, number, [(FAR_S, order), (FAR_S, paid)])


def _write(folder: Path, number: int, rows: list[tuple[int, dict[str, Any]]]) -> None:
    at = [{**row, "ts": (BASE + pd.Timedelta(seconds=second)).isoformat()} for second, row in rows]
    hidden = folder / f".{number:04}"
    hidden.write_text("".join(f"{json.dumps(row)}\n" for row in at))
    # Spark reads files in the order of their times, and the order decides which events are late.
    os.utime(hidden, (1_000_000_000 + number,) * 2)
    hidden.rename(folder / f"{number:04}.json")


Frames = Callable[[str], DataFrame]


def _stream(spark: SparkSession, folder: Path) -> Frames:
    events = spark.readStream.schema(EVENT).option("maxFilesPerTrigger", 1).json(str(folder))
    return lambda kind: events.where(F.col("kind") == kind).drop("kind").withWatermark("ts", DELAY)


def _batch(spark: SparkSession, folder: Path) -> Frames:
    events = spark.read.schema(EVENT).json(str(folder)).where("id >= 0")
    return lambda kind: events.where(F.col("kind") == kind).drop("kind")


def _tumbling(of: Frames) -> DataFrame:
    return _flat(
        of("order").groupBy(F.window("ts", "15 seconds"), "user").agg(F.sum("amount").alias("total"))
    )


def _sliding(of: Frames) -> DataFrame:
    return _flat(of("order").groupBy(F.window("ts", "20 seconds", "10 seconds")).agg(F.count("*").alias("n")))


def _session(of: Frames) -> DataFrame:
    found = (
        of("order").groupBy(F.session_window("ts", "4 seconds"), "user").agg(F.sum("amount").alias("total"))
    )
    return _flat(found.withColumnRenamed("session_window", "window"))


def _flat(frame: DataFrame) -> DataFrame:
    return frame.withColumns({"start": F.col("window.start"), "end": F.col("window.end")}).drop("window")


def _distinct_orders(of: Frames) -> DataFrame:
    return of("order").dropDuplicates(["id", "ts"]).select("id", "user", "amount")


def _distinct_within(of: Frames) -> DataFrame:
    orders = of("order")
    if not orders.isStreaming:
        return orders.dropDuplicates(["id"]).select("id", "user", "amount")
    return orders.dropDuplicatesWithinWatermark(["id"]).select("id", "user", "amount")


def _joined(how: str) -> Callable[[Frames], DataFrame]:
    def join(of: Frames) -> DataFrame:
        orders = of("order").selectExpr("id", "ts", "amount")
        paid = of("payment").selectExpr("id AS paid", "ts AS paid_at")
        condition = "id = paid AND paid_at >= ts AND paid_at <= ts + INTERVAL 30 SECONDS"
        return orders.join(paid, F.expr(condition), how).select("id", "ts", "amount", "paid", "paid_at")

    return join


def _two_aggregates(of: Frames) -> DataFrame:
    inner = of("order").groupBy(F.window("ts", "5 seconds"), "user").agg(F.sum("amount").alias("total"))
    outer = inner.groupBy(F.window(F.window_time("window"), "30 seconds")).agg(F.max("total").alias("most"))
    return _flat(outer)


def _distinct_users(of: Frames) -> DataFrame:
    return _flat(
        of("order").groupBy(F.window("ts", "15 seconds")).agg(F.approx_count_distinct("user").alias("users"))
    )


def _top(of: Frames) -> DataFrame:
    found = (
        of("order").groupBy(F.window("ts", "15 seconds")).agg(F.max(F.struct("amount", "id")).alias("top"))
    )
    return _flat(found).selectExpr("start", "top.amount AS amount", "top.id AS id")


def _count_rows(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    seen = state.getOption[0] if state.exists else 0
    for frame in frames:
        amounts = frame.sort_values(["ts", "id"])["amount"]
        totals = seen + amounts.cumsum()
        seen = int(totals.iloc[-1])
        yield pd.DataFrame({"user": key[0], "total": totals})
    state.update((seen,))


def _running_totals(of: Frames) -> DataFrame:
    """A running total of each user's orders, without the doubled ones."""
    orders = of("order").dropDuplicates(["id", "ts"])
    return orders.groupBy("user").applyInPandasWithState(
        _count_rows, "user STRING, total LONG", "total LONG", "append", "NoTimeout"
    )


class _Silence(StatefulProcessor):
    """Tells the number of a user's orders once no order came for five seconds."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n LONG, until LONG")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        count, until = self._count.get() if self._count.exists() else (0, 0)
        told = []
        for row in pd.concat(list(rows)).sort_values(["ts", "id"]).itertuples():
            at = int(row.ts.timestamp() * 1_000)
            if count and at >= until:
                told.append(count)
                count = 0
            count, until = count + 1, at + 5_000
        for timer in self._handle.listTimers():
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(until)
        self._count.update((count, until))
        if told:
            yield pd.DataFrame({"user": [key[0]] * len(told), "orders": told})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        (count, _) = self._count.get()
        self._count.clear()
        yield pd.DataFrame({"user": [key[0]], "orders": [count]})

    def close(self) -> None:
        pass


def _silences(of: Frames) -> DataFrame:
    return (
        of("order")
        .groupBy("user")
        .transformWithStateInPandas(
            _Silence(), outputStructType="user STRING, orders LONG", outputMode="append", timeMode="EventTime"
        )
    )


@dataclass(frozen=True)
class NativeQuery:
    build: Callable[[Frames], DataFrame]
    #: The right rows, made from all orders in the order of their times; None: `build` over a batch.
    judge: Callable[[pd.DataFrame], Iterator[tuple[Any, ...]]] | None = None
    #: The kinds of events that it reads.
    kinds: tuple[str, ...] = ("order",)

    def stream(self, spark: SparkSession, folder: Path) -> DataFrame:
        return self.build(_stream(spark, folder))

    def build_over_streams(self, *frames: DataFrame) -> DataFrame:
        """Return the query over streams of its kinds of events."""
        timed = [frame.drop("kind").withWatermark("ts", DELAY) for frame in frames]
        return self.build(dict(zip(self.kinds, timed, strict=True)).__getitem__)

    def expected(self, spark: SparkSession, folder: Path) -> Counter[tuple[Any, ...]]:
        if self.judge is None:
            return Counter(map(tuple, self.build(_batch(spark, folder)).collect()))
        orders = _batch(spark, folder)("order").toPandas()
        return Counter(self.judge(orders.sort_values(["ts", "id"])))


def _judge_totals(orders: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    for user, own in orders.drop_duplicates(["id", "ts"]).groupby("user"):
        yield from ((user, int(total)) for total in own["amount"].cumsum())


def _judge_silences(orders: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    for user, own in orders.groupby("user"):
        burst = (own["ts"].diff() >= pd.Timedelta(seconds=5)).cumsum()
        yield from ((user, int(count)) for count in burst.value_counts())


QUERIES: Mapping[str, NativeQuery] = {
    "tumbling": NativeQuery(_tumbling),
    "sliding": NativeQuery(_sliding),
    "session": NativeQuery(_session),
    "distinct-orders": NativeQuery(_distinct_orders),
    "distinct-within": NativeQuery(_distinct_within),
    "inner-join": NativeQuery(_joined("inner"), kinds=KINDS),
    "left-join": NativeQuery(_joined("leftOuter"), kinds=KINDS),
    "full-join": NativeQuery(_joined("fullOuter"), kinds=KINDS),
    "two-aggregates": NativeQuery(_two_aggregates),
    "distinct-users": NativeQuery(_distinct_users),
    "top": NativeQuery(_top),
    "running-totals": NativeQuery(_running_totals, _judge_totals),
    "silences": NativeQuery(_silences, _judge_silences),
}
