"""Nexmark in PyFlink, run by the Python of PyFlink's own environment; speaks as `FlinkSql.java` does.

`process` is the DataStream API with functions in Python, in processes beside Flink's. JSON is read and
written, and columns are chosen, in the JVM, by the same tables as in Flink's SQL, so that Python gets what
it needs and no more. `pandas` is SQL with vectorised functions of Python's.
"""

from __future__ import annotations

import json
import re
import sys

from pyflink.common import Configuration, Row, Time, Types
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.datastream.functions import (
    AggregateFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ProcessWindowFunction,
)
from pyflink.datastream.state import ListStateDescriptor, ValueStateDescriptor
from pyflink.datastream.window import (
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
)
from pyflink.table import DataTypes, StreamTableEnvironment
from pyflink.table.udf import udaf, udf

WINDOW_MS, SLIDE_MS, GAP_MS, CATEGORY = 10_000, 2_000, 10_000, 10
# A type keeps its twin in the JVM, with which it cannot be sent to workers: these are for outputs alone.
LONG, STRING = Types.LONG(), Types.STRING()


def row(**columns):
    return Types.ROW_NAMED(list(columns), list(columns.values()))


_EVENT = {"dateTime": LONG, "extra": STRING}
_BID = {"auction": LONG, "bidder": LONG, "price": LONG}
_TEXTS = {"channel": STRING, "url": STRING}
_BOUNDS = {"starttime": LONG, "endtime": LONG}
_AUCTION = {
    "itemName": STRING, "description": STRING, "initialBid": LONG, "reserve": LONG, "auctionDateTime": LONG,
    "expires": LONG, "seller": LONG, "category": LONG, "auctionExtra": STRING,
}  # fmt: skip
_RANKS = ("total_bids", "rank1_bids", "rank2_bids", "rank3_bids")
_PRICES = ("min_price", "max_price", "avg_price", "sum_price")
OUTPUT = {
    "q0": row(**_BID, **_EVENT),
    "q5": row(auction=LONG, num=LONG, **_BOUNDS),
    "q7": row(**_BID, **_EVENT),
    "q8": row(id=LONG, name=STRING, **_BOUNDS),
    "q11": row(bidder=LONG, bid_count=LONG, **_BOUNDS),
    "q12": row(bidder=LONG, bid_count=LONG, **_BOUNDS),
    "q17": row(auction=LONG, day=STRING, **dict.fromkeys((*_RANKS, *_PRICES), LONG)),
    "q18": row(**_BID, **_TEXTS, **_EVENT),
    "q20": row(**_BID, **_TEXTS, **_EVENT, **_AUCTION),
}


# -- functions of windows ------------------------------------------------------------------------------
class Count(AggregateFunction):
    def create_accumulator(self):
        return 0

    def add(self, value, count):
        return count + 1

    def get_result(self, count):
        return count

    def merge(self, one, other):
        return one + other


class OfWindow(ProcessWindowFunction):
    """The key, what was counted, and the window's bounds."""

    def process(self, key, context, elements):
        for count in elements:
            yield Row(key, count, context.window().start, context.window().end)

    def clear(self, context):
        pass


class Most(AggregateFunction):
    """Those of a window whose field is the greatest."""

    def __init__(self, at):
        self.at = at

    def create_accumulator(self):
        return []

    def add(self, value, kept):
        if not kept or value[self.at] > kept[0][self.at]:
            return [tuple(value)]
        return [*kept, tuple(value)] if value[self.at] == kept[0][self.at] else kept

    def get_result(self, kept):
        return kept

    def merge(self, one, other):
        for value in other:
            one = self.add(value, one)
        return one


class Each(ProcessWindowFunction):
    def __init__(self, columns):
        self.columns = columns

    def process(self, key, context, elements):
        for kept in elements:
            for value in kept:
                yield Row(*value[: self.columns])

    def clear(self, context):
        pass


class Both(AggregateFunction):
    """A person's name, and whether there was an auction."""

    def create_accumulator(self):
        return (None, False)

    def add(self, value, both):
        name = value[1]
        return (name, both[1]) if name is not None else (both[0], True)

    def get_result(self, both):
        return both

    def merge(self, one, other):
        return (one[0] or other[0], one[1] or other[1])


class NewUser(ProcessWindowFunction):
    def process(self, key, context, elements):
        for name, has_auction in elements:
            if name is not None and has_auction:
                yield Row(key, name, context.window().start, context.window().end)

    def clear(self, context):
        pass


# -- functions of keys ---------------------------------------------------------------------------------
class Statistics(KeyedProcessFunction):
    def open(self, context):
        self.kept = context.get_state(ValueStateDescriptor("statistics", Types.PICKLED_BYTE_ARRAY()))

    def process_element(self, bid, ctx):
        price = bid[1]
        total, one, two, three, least, most, summed = self.kept.value() or (0, 0, 0, 0, price, price, 0)
        now = (
            total + 1,
            one + (price < 10_000),
            two + (10_000 <= price < 1_000_000),
            three + (price >= 1_000_000),
            min(least, price),
            max(most, price),
            summed + price,
        )
        self.kept.update(now)
        yield Row(bid[0], bid[2], *now[:6], now[6] // now[0], now[6])


class Last(KeyedProcessFunction):
    def open(self, context):
        self.kept = context.get_state(ValueStateDescriptor("at", Types.LONG()))

    def process_element(self, bid, ctx):
        at, before = bid[5], self.kept.value()
        if before is None or at >= before:
            self.kept.update(at)
            yield bid


class Joined(KeyedCoProcessFunction):
    def open(self, context):
        self.auction = context.get_state(ValueStateDescriptor("auction", Types.PICKLED_BYTE_ARRAY()))
        self.waiting = context.get_list_state(ListStateDescriptor("bids", Types.PICKLED_BYTE_ARRAY()))

    def process_element1(self, bid, ctx):
        auction = self.auction.value()
        if auction is None:
            self.waiting.add(tuple(bid))
        else:
            yield Row(*bid, *auction)

    def process_element2(self, auction, ctx):
        kept = tuple(auction)[1:]
        self.auction.update(kept)
        for bid in self.waiting.get():
            yield Row(*bid, *kept)
        self.waiting.clear()


def made(tables, query):
    """Return the stream of a query's results, by functions in Python."""

    def stream(sql):
        return tables.to_data_stream(tables.sql_query(sql))

    out = OUTPUT[query]
    pickled = Types.PICKLED_BYTE_ARRAY()
    if query == "q0":
        bid = "bid.auction AS auction, bid.bidder AS bidder, bid.price AS price"
        bids = stream(
            f"SELECT {bid}, bid.`dateTime` AS `dateTime`, bid.extra AS extra FROM events WHERE event_type = 2"
        )
        return bids.map(lambda one: Row(*one), output_type=out)
    if query == "q5":
        hops = SlidingEventTimeWindows.of(Time.milliseconds(WINDOW_MS), Time.milliseconds(SLIDE_MS))
        counts = stream("SELECT auction, rowtime FROM bids").key_by(lambda bid: bid[0], key_type=Types.LONG())
        counts = counts.window(hops).aggregate(
            Count(), OfWindow(), accumulator_type=Types.LONG(), output_type=out
        )
        tops = counts.key_by(lambda one: one[2], key_type=Types.LONG())
        tops = tops.window(TumblingEventTimeWindows.of(Time.milliseconds(SLIDE_MS)))
        return tops.aggregate(Most(1), Each(4), accumulator_type=pickled, output_type=out)
    if query == "q7":
        bids = stream("SELECT * FROM bids")
        windows = bids.key_by(lambda bid: bid[3] // WINDOW_MS, key_type=Types.LONG())
        windows = windows.window(TumblingEventTimeWindows.of(Time.milliseconds(WINDOW_MS)))
        return windows.aggregate(Most(2), Each(5), accumulator_type=pickled, output_type=out)
    if query == "q8":
        both = stream(
            "SELECT CASE event_type WHEN 0 THEN person.id ELSE auction.seller END AS id, "
            "person.name AS name, rowtime FROM events WHERE event_type < 2"
        )
        windows = both.key_by(lambda one: one[0], key_type=Types.LONG())
        windows = windows.window(TumblingEventTimeWindows.of(Time.milliseconds(WINDOW_MS)))
        return windows.aggregate(Both(), NewUser(), accumulator_type=pickled, output_type=out)
    if query in ("q11", "q12"):
        windows = EventTimeSessionWindows.with_gap(Time.milliseconds(GAP_MS))
        columns = "bidder, rowtime"
        if query == "q12":
            windows, columns = TumblingProcessingTimeWindows.of(Time.milliseconds(WINDOW_MS)), "bidder"
        bids = stream(f"SELECT {columns} FROM bids").key_by(lambda bid: bid[0], key_type=Types.LONG())
        return bids.window(windows).aggregate(
            Count(), OfWindow(), accumulator_type=Types.LONG(), output_type=out
        )
    if query == "q17":
        bids = stream("SELECT auction, price, `day` FROM bids")
        keyed = bids.key_by(
            lambda bid: (bid[0], bid[2]), key_type=Types.TUPLE([Types.LONG(), Types.STRING()])
        )
        return keyed.process(Statistics(), output_type=out)
    if query == "q18":
        bids = stream("SELECT auction, bidder, price, channel, url, `dateTime`, extra FROM bids")
        keyed = bids.key_by(lambda bid: (bid[1], bid[0]), key_type=Types.TUPLE([Types.LONG(), Types.LONG()]))
        return keyed.process(Last(), output_type=out)
    bids = stream("SELECT * FROM bids").key_by(lambda bid: bid[0], key_type=Types.LONG())
    auctions = stream(f"SELECT * FROM auctions WHERE category = {CATEGORY}")
    return bids.connect(auctions.key_by(lambda one: one[0], key_type=Types.LONG())).process(
        Joined(), output_type=out
    )


# -- vectorised ----------------------------------------------------------------------------------------
@udf(result_type=DataTypes.BIGINT(), func_type="pandas")
def same(values):
    return values


@udaf(result_type=DataTypes.BIGINT(), func_type="pandas")
def counted(values):
    return len(values)


@udaf(result_type=DataTypes.BIGINT(), func_type="pandas")
def greatest(values):
    return int(values.max())


def _ms(time):
    return f"CAST(TIMESTAMPDIFF(SECOND, TIMESTAMP '1970-01-01 00:00:00', {time}) AS BIGINT) * 1000"


def with_pandas(query, insert):
    """Return the INSERT of a query with vectorised functions of Python's in it."""
    if query == "q0":
        return insert.replace("bid.price AS price", "same(bid.price) AS price")
    if query == "q20":
        return insert.replace("b.price,", "same(b.price),")
    if query == "q5":
        hop = "rowtime, INTERVAL '2' SECOND, INTERVAL '10' SECOND"
        hops = (
            f"SELECT auction, counted(auction) AS num, HOP_START({hop}) AS window_start, HOP_END({hop}) AS "
            f"window_end, HOP_ROWTIME({hop}) AS rowtime FROM bids GROUP BY auction, HOP({hop})"
        )
        tumble = "rowtime, INTERVAL '2' SECOND"
        return (
            f"INSERT INTO results SELECT a.auction, a.num, {_ms('a.window_start')}, {_ms('a.window_end')} "
            f"FROM ({hops}) a JOIN (SELECT max(num) AS num, TUMBLE_ROWTIME({tumble}) AS rowtime "
            f"FROM ({hops}) GROUP BY TUMBLE({tumble})) m ON a.rowtime = m.rowtime AND a.num = m.num"
        )
    tumble = "rowtime, INTERVAL '10' SECOND" if query == "q7" else "proctime, INTERVAL '10' SECOND"
    starts, ends = f"TUMBLE_START({tumble})", f"TUMBLE_END({tumble})"
    if query == "q12":
        return (
            f"INSERT INTO results SELECT bidder, counted(bidder), {_ms(starts)}, {_ms(ends)} FROM bids "
            f"GROUP BY bidder, TUMBLE({tumble})"
        )
    return (
        "INSERT INTO results SELECT b.auction, b.bidder, b.price, b.`dateTime`, b.extra FROM bids b JOIN "
        f"(SELECT greatest(price) AS price, TUMBLE_ROWTIME({tumble}) AS rowtime FROM bids "
        f"GROUP BY TUMBLE({tumble})) m "
        "ON b.price = m.price AND b.rowtime BETWEEN m.rowtime - INTERVAL '9.999' SECOND AND m.rowtime"
    )


def _appending(statement):
    """Return a sink that takes a row per record: what a function in Python emits has no key for SQL."""
    key = re.search(r", PRIMARY KEY \((.*)\) NOT ENFORCED", statement)
    if key is None:
        return statement
    fields = key[1].replace("`", "").replace(", ", ";")
    plain = statement.replace(key[0], "").replace("'upsert-kafka'", f"'kafka', 'key.fields' = '{fields}'")
    return plain


def run(mode, connector, request):
    settings = Configuration()
    for name, value in {
        **request["settings"],
        "pipeline.jars": f"file://{connector}",
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
        "python.execution-mode": "process",
        "python.fn-execution.bundle.size": "10000",
        "python.fn-execution.bundle.time": "200",
        "python.fn-execution.arrow.batch.size": "10000",
        "python.state.cache-size": "100000",
        # Its marks are watermarks of the clock where a table becomes a stream, so that every record is late.
        "table.exec.mini-batch.enabled": "false",
    }.items():
        settings.set_string(name, value)
    env = StreamExecutionEnvironment.get_execution_environment(settings)
    tables = StreamTableEnvironment.create(env)
    *declared, insert = request["statements"]
    for statement in declared:
        tables.execute_sql(statement if mode == "pandas" else _appending(statement))
    if mode == "pandas":
        for name, function in (("same", same), ("counted", counted), ("greatest", greatest)):
            tables.create_temporary_system_function(name, function)
        insert = with_pandas(request["query"], insert)
    else:
        tables.create_temporary_view("found", made(tables, request["query"]))
        columns = ", ".join(f"`{name}`" for name in OUTPUT[request["query"]].get_field_names())
        insert = f"INSERT INTO results SELECT {columns} FROM found"
    result = tables.execute_sql(insert)
    print(json.dumps({"job": str(result.get_job_client().get_job_id())}), flush=True)
    try:
        result.wait()
        print(json.dumps({"ended": "finished"}), flush=True)
    except Exception as error:  # cancelled by whoever asked, or failed: the log says which
        print(error, file=sys.stderr, flush=True)
        print(json.dumps({"ended": "not finished"}), flush=True)


def main():
    mode, connector = sys.argv[1:]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        run(mode, connector, json.loads(line))


if __name__ == "__main__":
    main()
