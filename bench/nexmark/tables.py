"""Five operators over one topic, each into a Delta table, one of them an upsert: how long a whole job takes.

    python -m bench.nexmark.tables --events 63000

Sliding counts, sessions, statistics by auction, the last bid of each bidder (a MERGE at each checkpoint), and
an interval join of auctions with their bids. The job reads what is there and ends; what counts is the time
of its `execute()`, with the start of its query and the last table visible. Tables are compared with DuckDB.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pandas as pd
from pyspark.sql import functions as F

from bench.groups import LATE_MS
from bench.nexmark.generator import Model, events
from bench.nexmark.measure import PARTITIONS, TOPIC, written
from bench.nexmark.queries import GAP_MS, SLIDE_MS, WINDOW_MS
from bench.start import ROOT, session
from flinkish_spark import (
    AggregateColumn,
    Append,
    CheckpointConfig,
    DeltaSink,
    Fold,
    Json,
    KafkaSource,
    StreamExecutionEnvironment,
    Upsert,
    WatermarkStrategy,
)
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.sources import EndAtLatest
from flinkish_spark.testing.broker import LocalBroker
from flinkish_spark.windows import EventTimeSessionWindows, SlidingEventTimeWindows

FIELDS = (
    "bid STRUCT<auction: LONG, bidder: LONG, price: LONG, dateTime: LONG>, "
    "auction STRUCT<id: LONG, seller: LONG, dateTime: LONG>"
)
#: What each table comes to; of updates the last row of a key counts.
_TRUTH = {
    "hops": f"""
        SELECT auction, starttime, count(*) AS num FROM (SELECT auction, unnest(range(
            "dateTime" - "dateTime" % {SLIDE_MS} - {WINDOW_MS - SLIDE_MS},
            "dateTime" - "dateTime" % {SLIDE_MS} + 1, {SLIDE_MS})) AS starttime FROM bids)
        GROUP BY auction, starttime
    """,
    "sessions": f"""
        WITH apart AS (
            SELECT bidder, "dateTime", coalesce("dateTime" - lag("dateTime") OVER w > {GAP_MS}, true)
                AS begins
            FROM bids WINDOW w AS (PARTITION BY bidder ORDER BY "dateTime")
        ), numbered AS (
            SELECT bidder, "dateTime",
                   sum(begins::INT) OVER (PARTITION BY bidder ORDER BY "dateTime") AS session FROM apart
        )
        SELECT bidder, min("dateTime") AS starttime, count(*) AS num FROM numbered GROUP BY bidder, session
    """,
    "statistics": "SELECT auction, max(price) AS most, count(*) AS num FROM bids GROUP BY auction",
    "last": """
        SELECT bidder, auction, price, "dateTime" FROM bids
        QUALIFY row_number() OVER (PARTITION BY bidder ORDER BY "dateTime" DESC) = 1
    """,
    "joined": f"""
        SELECT a.id, a.seller, b.bidder, b.price, b."dateTime" FROM auctions a JOIN bids b
        ON a.id = b.auction AND b."dateTime" BETWEEN a."dateTime" AND a."dateTime" + {WINDOW_MS}
    """,
}
#: What is read of a table to be compared.
_SHOWN = {
    "statistics": "SELECT auction, max(most) AS most, max(num) AS num FROM shown GROUP BY auction",
    "last": 'SELECT bidder, auction, price, "dateTime" FROM shown',
}


def streams(env, source):
    """Return the stream for each table."""
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(LATE_MS)
    at = F.coalesce("bid.dateTime", "auction.dateTime")
    read = env.from_source(source, uid="events").transform(
        lambda df: df.where("bid IS NOT NULL OR auction IS NOT NULL")
    )
    timed = read.assign_timestamps_and_watermarks(strategy.with_timestamp_assigner(at))
    bids = timed.transform(lambda df: df.where("bid IS NOT NULL").select("bid.*"))
    auctions = timed.transform(
        lambda df: df.where("auction IS NOT NULL").select("auction.id", "auction.seller")
    )
    number = AggregateColumn("num", Fold.COUNT)
    begins = F.unix_millis("window_start").alias("starttime")
    hops = (
        bids.key_by("auction").window(SlidingEventTimeWindows(WINDOW_MS, SLIDE_MS)).fold(number, uid="hops")
    )
    sessions = bids.key_by("bidder").window(EventTimeSessionWindows(GAP_MS)).fold(number, uid="sessions")
    most = AggregateColumn("most", Fold.MAX, "price")
    joined = auctions.key_by("id").interval_join(
        bids.key_by("auction"), lower_ms=0, upper_ms=WINDOW_MS, uid="joined"
    )
    return {
        "hops": hops.transform(lambda df: df.select("auction", begins, "num")),
        "sessions": sessions.transform(lambda df: df.select("bidder", begins, "num")),
        "statistics": bids.key_by("auction").fold(most, number, uid="statistics"),
        "last": bids.key_by("bidder").max_by("dateTime", uid="last"),
        "joined": joined.transform(lambda df: df.select("id", "seller", "bidder", "price", "dateTime")),
    }


def compared(spark, table, name, model):
    """Return how many rows a table has that is right; raise for one that is not."""
    shown = spark.read.format("delta").load(table).toPandas()
    bids, auctions = (
        pd.concat([getattr(part, name) for part in events(model)]) for name in ("bids", "auctions")
    )
    con = duckdb.connect()
    for called, frame in (("shown", shown), ("bids", bids), ("auctions", auctions)):
        con.register(called, frame)
    ours = f"SELECT * FROM ({_SHOWN.get(name, 'SELECT * FROM shown')})"
    right = f"SELECT * FROM ({_TRUTH[name]})"
    both = ((ours, right), (right, ours))
    differing = [len(con.execute(f"{one} EXCEPT ALL {two}").fetchall()) for one, two in both]
    if any(differing):
        raise SystemExit(f"{name}: {differing[0]} rows are wrong, {differing[1]} are missing")
    return len(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--events", type=int, default=63_000)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--interval-ms", type=int, default=5_000)
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-tables"))
    args = parser.parse_args()
    folder = Path(args.directory)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = SimpleNamespace(
        variant="ours", directory=str(folder), event_log="", jars=str(ROOT / "build" / "jars")
    )
    forever = {"log.retention.ms": "-1"}
    jars_dir = ROOT / "build" / "broker-jars"
    with LocalBroker(folder / "broker", jars_dir=jars_dir, extra_properties=forever) as broker:
        with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS)
        model = Model(args.events, active=1_000)
        written(broker.bootstrap_servers, model)
        spark = session(own)
        env = StreamExecutionEnvironment(
            spark,
            job="tables",
            job_dir=str(folder / "job"),
            checkpoint=CheckpointConfig(interval_ms=args.interval_ms),
        )
        source = KafkaSource(
            broker.bootstrap_servers,
            [TOPIC],
            value=Json(FIELDS),
            max_offsets_per_trigger=args.batch,
            ending=EndAtLatest(),
        )
        for name, stream in streams(env, source).items():
            mode = Upsert(("bidder",)) if name == "last" else Append()
            stream.sink_to(DeltaSink(str(folder / name), mode=mode), uid=f"to-{name}")
        began_s = time.monotonic()
        env.execute()
        took_s = time.monotonic() - began_s
        print(f"{args.events:,} events: {took_s:.1f} s", flush=True)
        rows = {name: compared(spark, str(folder / name), name, model) for name in _TRUTH}
        print("none wrong of " + ", ".join(f"{name} {count:,}" for name, count in rows.items()))


if __name__ == "__main__":
    main()
