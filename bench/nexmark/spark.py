"""Nexmark in Spark's own ways: native, at least once, and its three ways to keep state in Python."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout

from bench.groups import LATE_MS
from bench.nexmark.ours import FIELDS, ranked
from bench.nexmark.queries import CATEGORY, GAP_MS, SLIDE_MS, WINDOW_MS
from bench.spark_kafka import READER_DEFAULTS

_WINDOW = f"{WINDOW_MS} milliseconds"
#: Queries that update their results instead of closing them.
UPDATING = ("q17", "q18")


def rows(spark, args, query, engine):
    """Return the streaming frame of a query's results."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", args.bootstrap_servers)
    reader = reader.option("subscribe", args.source).option("startingOffsets", "earliest")
    reader = reader.option("maxOffsetsPerTrigger", args.batch).options(**READER_DEFAULTS)
    value = F.from_json(F.col("value").cast("string"), FIELDS[query]).alias("e")
    events = reader.load().select(value).select("e.*")
    if engine == "native":
        return _NATIVE[query](events)
    return _in_python(events, query, engine)


def _timed(bids, at="dateTime"):
    return bids.withColumn("at", F.timestamp_millis(at)).withWatermark("at", f"{LATE_MS} milliseconds")


def _bids(events):
    return events.where("bid IS NOT NULL").select("bid.*")


def _bounds(df, *columns):
    starts, ends = F.unix_millis("window.start"), F.unix_millis("window.end")
    return df.select(*columns, starts.alias("starttime"), ends.alias("endtime"))


# -- in the JVM ----------------------------------------------------------------------------------------
def _q5(events):
    hops = F.window("at", _WINDOW, f"{SLIDE_MS} milliseconds").alias("window")
    counts = _timed(_bids(events)).groupBy(hops, "auction").agg(F.count("*").alias("num"))
    found = counts.groupBy("window").agg(F.collect_list(F.struct("num", "auction")).alias("all"))
    greatest = F.expr("filter(all, one -> one.num = array_max(all).num)")
    found = found.select("window", F.explode(greatest).alias("one"))
    return _bounds(found, "one.auction", "one.num")


def _q7(events):
    same = _timed(_bids(events)).groupBy(F.window("at", _WINDOW).alias("window"), "price")
    same = same.agg(F.collect_list(F.struct("auction", "bidder", "dateTime", "extra")).alias("bids"))
    highest = same.groupBy("window").agg(F.max(F.struct("price", "bids")).alias("highest"))
    return highest.select("highest.price", F.explode("highest.bids").alias("bid")).select("price", "bid.*")


def _q8(events):
    at = F.coalesce("person.dateTime", "auction.dateTime")
    read = events.where("person IS NOT NULL OR auction IS NOT NULL")
    read = read.select(
        F.coalesce("person.id", "auction.seller").alias("id"), "person.name", "auction.seller", at.alias("ms")
    )
    both = _timed(read, "ms").groupBy(F.window("at", _WINDOW).alias("window"), "id")
    found = both.agg(F.max("name").alias("name"), F.count("seller").alias("auctions"))
    return _bounds(found.where("name IS NOT NULL AND auctions > 0"), "id", "name")


def _q11(events):
    session = F.session_window("at", f"{GAP_MS} milliseconds").alias("window")
    counts = _timed(_bids(events)).groupBy(session, "bidder").agg(F.count("*").alias("bid_count"))
    return _bounds(counts, "bidder", "bid_count")


def _q17(events):
    found = ranked(_bids(events)).groupBy("auction", "day")
    found = found.agg(
        F.count("*").alias("total_bids"),
        *(F.count(f"rank{n}").alias(f"rank{n}_bids") for n in (1, 2, 3)),
        F.min("price").alias("min_price"),
        F.max("price").alias("max_price"),
        F.sum("price").alias("sum_price"),
    )
    return found.withColumn("avg_price", F.expr("sum_price DIV total_bids"))


def _q18(events):
    rest = F.struct("price", "channel", "url", "dateTime", "extra")
    found = _bids(events).groupBy("bidder", "auction").agg(F.max_by(rest, "dateTime").alias("last"))
    return found.select("auction", "bidder", "last.*")


def _q20(events):
    auctions = events.where(f"auction.category = {CATEGORY}").select("auction.*")
    auctions = auctions.withColumnsRenamed({"dateTime": "auctionDateTime", "extra": "auctionExtra"})
    return _bids(events).join(auctions, F.col("auction") == F.col("id")).drop("id")


_NATIVE = {
    "q0": _bids,
    "q5": _q5,
    "q7": _q7,
    "q8": _q8,
    "q11": _q11,
    "q17": _q17,
    "q18": _q18,
    "q20": _q20,
}


# -- in Python: one value state per key, read and written once per key and micro-batch ------------------
class _Sessions:
    """Of a key the open session: input is in order, so there is one."""

    OUTPUT = "bidder LONG, bid_count LONG, starttime LONG, endtime LONG"
    STATE = "starttime LONG, endtime LONG, bid_count LONG"

    @staticmethod
    def step(opened, columns):
        """Return the sessions that are over, and the one that is open."""
        closed = []
        for at in np.sort(columns["dateTime"]).tolist():
            if opened is not None and at > opened[1]:
                closed.append((opened[2], opened[0], opened[1]))
                opened = None
            begins, _, count = opened or (at, at, 0)
            opened = (begins, at + GAP_MS, count + 1)
        return closed, opened

    @staticmethod
    def due(opened):
        return opened[1]

    @staticmethod
    def over(opened):
        return [(opened[2], opened[0], opened[1])]


class _Statistics:
    OUTPUT = (
        "auction LONG, day STRING, total_bids LONG, rank1_bids LONG, rank2_bids LONG, rank3_bids LONG, "
        "min_price LONG, max_price LONG, avg_price LONG, sum_price LONG"
    )
    STATE = "total LONG, rank1 LONG, rank2 LONG, rank3 LONG, least LONG, most LONG, sum LONG"

    @staticmethod
    def step(before, columns):
        prices = np.asarray(columns["price"])
        low, high = int((prices < 10_000).sum()), int((prices >= 1_000_000).sum())
        total, rank1, rank2, rank3, least, most, summed = before or (0, 0, 0, 0, 1 << 62, 0, 0)
        now = (
            total + len(prices),
            rank1 + low,
            rank2 + len(prices) - low - high,
            rank3 + high,
            min(least, int(prices.min())),
            max(most, int(prices.max())),
            summed + int(prices.sum()),
        )
        return [(*now[:6], now[6] // now[0], now[6])], now


class _Last:
    OUTPUT = "bidder LONG, auction LONG, price LONG, channel STRING, url STRING, dateTime LONG, extra STRING"
    STATE = "price LONG, channel STRING, url STRING, dateTime LONG, extra STRING"

    @staticmethod
    def step(before, columns):
        last = int(np.argmax(columns["dateTime"]))
        now = tuple(
            getattr(columns[name][last], "item", lambda value=columns[name][last]: value)()
            for name in ("price", "channel", "url", "dateTime", "extra")
        )
        now = before if before is not None and before[3] > now[3] else now
        return [now], now


_WORK = {"q11": (_Sessions, ["bidder"]), "q17": (_Statistics, ["auction", "day"])}
_WORK["q18"] = (_Last, ["bidder", "auction"])


def _frame(work, key, results):
    names = [one.split()[0] for one in work.OUTPUT.split(", ")]
    return pd.DataFrame([(*key, *one) for one in results], columns=names)


def _per_key(work):
    def step(key, frames, state):
        if state.hasTimedOut:
            over = work.over(state.get)
            state.remove()
            yield _frame(work, key, over)
            return
        frame = pd.concat(list(frames))
        columns = {name: frame[name].to_numpy() for name in frame.columns if name != "at"}
        results, now = work.step(state.getOption, columns)
        state.update(now)
        if hasattr(work, "due"):
            state.setTimeoutTimestamp(work.due(now))
        if results:
            yield _frame(work, key, results)

    return step


class _Rows(StatefulProcessor):
    """A key's state in transformWithState, with rows."""

    def __init__(self, work):
        self.work = work
        self.names = [one.split()[0] for one in work.OUTPUT.split(", ")]

    def init(self, handle):
        self.handle, self.state = handle, handle.getValueState("state", self.work.STATE)

    def handleInputRows(self, key, rows, timers):
        before = self.state.get()
        results, now = self.work.step(before, self.columns(rows))
        if hasattr(self.work, "due"):
            if before is not None:
                self.handle.deleteTimer(self.work.due(before))
            self.handle.registerTimer(self.work.due(now))
        self.state.update(now)
        yield from self.made(key, results)

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        opened = self.state.get()
        self.state.clear()
        yield from self.made(key, self.work.over(opened))

    def columns(self, rows):
        rows = list(rows)
        return {name: [row[name] for row in rows] for name in rows[0].__fields__}

    def made(self, key, results):
        for one in results:
            yield Row(**dict(zip(self.names, (*key, *one), strict=True)))

    def close(self):
        pass


class _Frames(_Rows):
    """The same with pandas."""

    def columns(self, rows):
        frame = pd.concat(list(rows))
        return {name: frame[name].to_numpy() for name in frame.columns}

    def made(self, key, results):
        if results:
            yield _frame(self.work, key, results)


def _in_python(events, query, engine):
    work, keys = _WORK[query]
    bids = _bids(events)
    if query == "q17":
        bids = ranked(bids).select("auction", "day", "price")
    if query == "q11":
        bids = _timed(bids)
        # transformWithState takes its watermark from in front; a number costs Python less than a time.
        bids = bids if engine == "per-key" else bids.select("bidder", "dateTime")
    mode, by_time = ("append", "EventTime") if query == "q11" else ("update", "None")
    grouped = bids.groupBy(*keys)
    if engine == "per-key":
        timeout = GroupStateTimeout.EventTimeTimeout if query == "q11" else GroupStateTimeout.NoTimeout
        return grouped.applyInPandasWithState(_per_key(work), work.OUTPUT, work.STATE, mode, timeout)
    if engine == "tws-row":
        return grouped.transformWithState(_Rows(work), work.OUTPUT, mode, by_time)
    return grouped.transformWithStateInPandas(_Frames(work), work.OUTPUT, mode, by_time)
