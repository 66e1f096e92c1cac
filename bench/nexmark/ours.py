"""Nexmark in this package's DataStream API, as a user would write it.

What each query uses is in `USES`: folds over columns wherever the API has one for it, else a vectorised
function.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from bench.groups import LATE_MS
from bench.nexmark.queries import CATEGORY, GAP_MS, SLIDE_MS, WINDOW_MS
from flinkish_spark import (
    AggregateColumn,
    Emit,
    Fold,
    Json,
    KafkaSource,
    ValueStateDescriptor,
    VectorizedProcessFunction,
    WatermarkStrategy,
)
from flinkish_spark.operators.vectorized import greatest_by_key
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)

#: Which of the API's ways a query takes.
USES = {
    "q0": "transform",
    "q5": "window fold, then vectorised",
    "q7": "vectorised",
    "q8": "window fold",
    "q11": "session fold",
    "q12": "window fold, processing time",
    "q17": "fold",
    "q18": "max_by per key and micro-batch",
    "q20": "vectorised",
}

_PRICED = "auction: LONG, bidder: LONG, price: LONG"
#: What a query reads of the events; no more is parsed.
FIELDS = {
    "q0": f"bid STRUCT<{_PRICED}, dateTime: LONG, extra: STRING>",
    "q5": "bid STRUCT<auction: LONG, dateTime: LONG>",
    "q7": f"bid STRUCT<{_PRICED}, dateTime: LONG, extra: STRING>",
    "q8": "person STRUCT<id: LONG, name: STRING, dateTime: LONG>, "
    "auction STRUCT<seller: LONG, dateTime: LONG>",
    "q11": "bid STRUCT<bidder: LONG, dateTime: LONG>",
    "q12": "bid STRUCT<bidder: LONG>",
    "q17": "bid STRUCT<auction: LONG, price: LONG, dateTime: LONG>",
    "q18": f"bid STRUCT<{_PRICED}, channel: STRING, url: STRING, dateTime: LONG, extra: STRING>",
    "q20": f"bid STRUCT<{_PRICED}, channel: STRING, url: STRING, dateTime: LONG, extra: STRING>, "
    "auction STRUCT<id: LONG, itemName: STRING, description: STRING, initialBid: LONG, reserve: LONG, "
    "dateTime: LONG, expires: LONG, seller: LONG, category: LONG, extra: STRING>",
}
JOINED_OUTPUT = (
    "auction LONG, bidder LONG, price LONG, channel STRING, url STRING, dateTime LONG, extra STRING, "
    "itemName STRING, description STRING, initialBid LONG, reserve LONG, auctionDateTime LONG, expires LONG, "
    "seller LONG, category LONG, auctionExtra STRING"
)


class Greatest(VectorizedProcessFunction):
    """Of the rows of a window, which its key says, those whose field is the greatest: all of them if equal.

    Parameters
    ----------
    by
        The field.
    kept
        Fields that come out beside it, as DDL.
    """

    event_time = "closed"

    def __init__(self, by: str, kept: str) -> None:
        self.by, self.kept = by, kept
        self.names = [one.split()[0] for one in kept.split(", ")]

    def open(self, context):
        fields = ", ".join(one.replace(" ", ": ") for one in self.kept.split(", "))
        context.get_state(ValueStateDescriptor("greatest", f"greatest LONG, rows ARRAY<STRUCT<{fields}>>"))

    def process_batch(self, batch, ctx):
        index, state = ctx.index, ctx.state("greatest")
        values = batch.column(self.by).to_numpy()
        before, new = state.numbers(0, -1), greatest_by_key(index, values)
        moved = new >= before
        chosen = np.flatnonzero(moved[index.of_row] & (values == new[index.of_row]))
        rows = batch.select(self.names).take(pa.array(chosen)).to_pylist()
        # A window and a micro-batch have a handful of rows with the greatest value.
        found = [
            list(old or ()) if value == had else []
            for old, had, value in zip(state.column(1).to_pylist(), before, new, strict=True)
        ]
        for number, row in zip(index.of_row[chosen].tolist(), rows, strict=True):
            found[number].append(row)
        state.put([new[moved], [rows for rows, is_new in zip(found, moved, strict=True) if is_new]], moved)
        begins = index.keys[0].to_numpy()
        ctx.register_event_time_timers(begins + WINDOW_MS - 1)

    def on_timers(self, domain, ctx):
        state = ctx.state("greatest")
        columns = {name: [] for name in ("starttime", self.by, *self.names, "closed")}
        for begins, value, rows in zip(
            ctx.index.keys[0].to_pylist(), state.numbers(0).tolist(), state.column(1).to_pylist(), strict=True
        ):
            for row in rows:
                for name, one in {**row, "starttime": begins, self.by: value}.items():
                    columns[name].append(one)
                columns["closed"].append(begins + WINDOW_MS - 1)
        state.remove(np.ones(len(ctx.index), dtype=bool))
        yield pa.RecordBatch.from_pydict(columns)


_BID = ("auction", "bidder", "price", "channel", "url", "dateTime", "extra")
_AUCTION = (
    "itemName", "description", "initialBid", "reserve", "auctionDateTime", "expires", "seller", "category",
    "auctionExtra",
)  # fmt: skip


class Joined(VectorizedProcessFunction):
    """An auction's bids with the auction, whichever comes first; all of them are kept, as in any join."""

    def open(self, context):
        context.get_state(
            ValueStateDescriptor(
                "auction",
                "itemName STRING, description STRING, initialBid LONG, reserve LONG, auctionDateTime LONG, "
                "expires LONG, seller LONG, category LONG, auctionExtra STRING",
            )
        )
        context.get_state(
            ValueStateDescriptor(
                "bids",
                "ARRAY<STRUCT<auction: LONG, bidder: LONG, price: LONG, channel: STRING, url: STRING, "
                "dateTime: LONG, extra: STRING>>",
            )
        )

    def process_batch(self, batch, ctx):
        of_row, count = ctx.index.of_row, len(ctx.index)
        auctions, waiting = ctx.state("auction"), ctx.state("bids")
        # A record has the columns of a bid, then those of an auction: of its own kind they are not null.
        is_auction = batch.column("bidder").is_null().to_numpy(zero_copy_only=False)
        newest = np.full(count, -1)
        newest[of_row[is_auction]] = np.flatnonzero(is_auction)
        is_new = newest >= 0
        auctions.put([batch.column(name).take(pa.array(newest[is_new])) for name in _AUCTION], is_new)
        is_known = auctions.exists

        lists = waiting.column()
        waits = np.repeat(np.arange(count), pc.list_value_length(lists).fill_null(0).to_numpy())
        old = lists.flatten()
        meets = is_new[waits]
        yield from _joined(auctions, old.filter(pa.array(meets)).flatten(), waits[meets])
        waiting.remove(is_new)

        bids = pa.StructArray.from_arrays([batch.column(name) for name in _BID], fields=list(old.type))
        meets = ~is_auction & is_known[of_row]
        yield from _joined(auctions, bids.filter(pa.array(meets)).flatten(), of_row[meets])

        comes = ~is_auction & ~is_known[of_row]
        grows = np.zeros(count, dtype=bool)
        grows[of_row[comes]] = True
        stays = grows[waits]
        own = np.concatenate([waits[stays], of_row[comes]])
        both = pa.concat_arrays([old.filter(pa.array(stays)), bids.filter(pa.array(comes))])
        ends = np.cumsum(np.bincount(own, minlength=count)[grows])
        offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
        ordered = both.take(pa.array(np.argsort(own, kind="stable")))
        waiting.put([pa.ListArray.from_arrays(offsets, ordered)], grows)


def _joined(auctions, bids, of_key):
    """Yield bids, as columns, with the auctions of their keys."""
    if len(of_key):
        taken = pa.array(of_key)
        own = [auctions.column(at).take(taken) for at in range(len(_AUCTION))]
        yield pa.RecordBatch.from_arrays([*bids, *own], names=[*_BID, *_AUCTION])


def timed(env, source, query):
    """Return a query's events with their times."""
    times = {"q8": ("person.dateTime", "auction.dateTime"), "q20": ("bid.dateTime", "auction.dateTime")}
    of = [F.col(name) for name in times.get(query, ("bid.dateTime",))]
    read = {
        "q8": "person IS NOT NULL OR auction IS NOT NULL",
        # What the query asks of auctions, in front of the join, where every planner puts it.
        "q20": f"bid IS NOT NULL OR auction.category = {CATEGORY}",
    }.get(query, "bid IS NOT NULL")
    events = env.from_source(source, uid="events").transform(lambda df: df.where(read))
    # Without windows nobody asks for times, and q12 goes by the clock.
    if query in ("q0", "q12", "q17", "q18", "q20"):
        return events
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(LATE_MS)
    return events.assign_timestamps_and_watermarks(strategy.with_timestamp_assigner(F.coalesce(*of)))


def source(query, args, **more):
    """Return the Kafka source of a query."""
    return KafkaSource(
        args.bootstrap_servers,
        [args.source],
        value=Json(FIELDS[query]),
        max_offsets_per_trigger=args.batch,
        **more,
    )


def results(events, query):
    """Return the stream of a query's results."""
    return _RESULTS[query](events)


def _bids(events):
    return events.transform(lambda df: df.select("bid.*"))


def _bounds(df, *columns):
    starts, ends = F.unix_millis("window_start"), F.unix_millis("window_end")
    return df.select(*columns, starts.alias("starttime"), ends.alias("endtime"))


def _in_windows(events):
    begins = F.col("dateTime") - F.col("dateTime") % WINDOW_MS
    return _bids(events).transform(lambda df: df.withColumn("starttime", begins)).key_by("starttime")


def _q5(events):
    windows = SlidingEventTimeWindows(WINDOW_MS, SLIDE_MS)
    counts = _bids(events).key_by("auction").window(windows)
    counts = counts.fold(AggregateColumn("num", Fold.COUNT), uid="counts")
    counts = counts.transform(lambda df: _bounds(df, "auction", "num"))
    output = "starttime LONG, num LONG, auction LONG"
    hottest = counts.key_by("starttime").process(
        Greatest("num", "auction LONG"), output=output, uid="hottest"
    )
    ends = F.col("starttime") + WINDOW_MS
    return hottest.transform(lambda df: df.select("auction", "num", "starttime", ends.alias("endtime")))


def _q7(events):
    kept = "auction LONG, bidder LONG, dateTime LONG, extra STRING"
    output = f"starttime LONG, price LONG, {kept}"
    return (
        _in_windows(events)
        .process(Greatest("price", kept), output=output, uid="highest")
        .transform(lambda df: df.drop("starttime"))
    )


def _q8(events):
    # An auction has no name and a person no seller, so one fold tells whether both were there.
    key = F.coalesce("person.id", "auction.seller")
    both = events.transform(
        lambda df: df.select(key.alias("id"), "person.name", F.col("auction.seller").alias("seller"))
    )
    columns = AggregateColumn("name", Fold.MAX, "name"), AggregateColumn("auctions", Fold.COUNT, "seller")
    found = both.key_by("id").window(TumblingEventTimeWindows(WINDOW_MS)).fold(*columns, uid="new-users")
    is_new = "name IS NOT NULL AND auctions > 0"
    return found.transform(lambda df: _bounds(df.where(is_new), "id", "name"))


def _counted(windows):
    def made(events):
        found = _bids(events).key_by("bidder").window(windows)
        found = found.fold(AggregateColumn("bid_count", Fold.COUNT), uid="counts")
        return found.transform(lambda df: _bounds(df, "bidder", "bid_count"))

    return made


def ranked(df):
    """Return bids with their day, and a column that is not null for each of the three ranks of prices."""
    price, day = F.col("price"), F.timestamp_millis("dateTime")
    return df.select(
        "auction",
        F.date_format(day, "yyyy-MM-dd").alias("day"),
        "price",
        F.when(price < 10_000, 1).alias("rank1"),
        F.when(price.between(10_000, 999_999), 1).alias("rank2"),
        F.when(price >= 1_000_000, 1).alias("rank3"),
    )


def _q17(events):
    counts = ("total", None), ("rank1", "rank1"), ("rank2", "rank2"), ("rank3", "rank3")
    columns = [AggregateColumn(f"{name}_bids", Fold.COUNT, field) for name, field in counts]
    folds = ("min", Fold.MIN), ("max", Fold.MAX), ("sum", Fold.SUM)
    columns += [AggregateColumn(f"{name}_price", fold, "price") for name, fold in folds]
    found = _bids(events).transform(ranked).key_by("auction", "day").fold(*columns, uid="statistics")
    average = F.expr("sum_price DIV total_bids")
    return found.transform(lambda df: df.withColumn("avg_price", average))


def _q18(events):
    return _bids(events).key_by("bidder", "auction").max_by("dateTime", emit=Emit.PER_KEY, uid="last")


def _q20(events):
    key = F.coalesce("auction.id", "bid.auction").alias("auction")
    bid = ("bidder", "price", "channel", "url", "dateTime", "extra")
    auction = (
        "itemName",
        "description",
        "initialBid",
        "reserve",
        "dateTime",
        "expires",
        "seller",
        "category",
    )
    columns = [key, *(f"bid.{name}" for name in bid), *(f"auction.{name}" for name in (*auction, "extra"))]
    names = [one.split()[0] for one in JOINED_OUTPUT.split(", ")]
    flat = events.transform(lambda df: df.select(*columns).toDF(*names))
    return flat.key_by("auction").process(Joined(), output=JOINED_OUTPUT, uid="joined")


_RESULTS = {
    "q0": _bids,
    "q5": _q5,
    "q7": _q7,
    "q8": _q8,
    "q11": _counted(EventTimeSessionWindows(GAP_MS)),
    "q12": _counted(TumblingProcessingTimeWindows(WINDOW_MS)),
    "q17": _q17,
    "q18": _q18,
    "q20": _q20,
}
#: What a record of the output is keyed by, so that updates of one result stay in their order.
KEYS = {"q17": "auction", "q18": "bidder"}
