"""Nexmark in Bytewax, at least once: one process of several, run by the Python of its own environment."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

WINDOW_MS, SLIDE_MS, GAP_MS, CATEGORY = 10_000, 2_000, 10_000, 10
_BID = ("auction", "bidder", "price", "dateTime", "extra")
_ZERO = datetime(1970, 1, 1, tzinfo=UTC)
#: Each key has a clock, which runs on by the clock on the wall; what is later than this is dropped.
#: So windows close at the end of the input, and nothing is lost, whichever partition is read first.
_PATIENCE = timedelta(days=3650)


def event_clock(name):
    return win.EventClock(
        ts_getter=lambda one: _ZERO + timedelta(milliseconds=one[name]), wait_for_system_duration=_PATIENCE
    )


def most(name):
    """Return how to keep those whose field is the greatest."""

    def folded(kept, one):
        if not kept or one[name] > kept[0][name]:
            return [one]
        return [*kept, one] if one[name] == kept[0][name] else kept

    return folded


def greatest(step, keyed, name, time_name, size_ms):
    windower = win.TumblingWindower(align_to=_ZERO, length=timedelta(milliseconds=size_ms))
    found = win.fold_window(
        step, keyed, event_clock(time_name), windower, list, most(name), lambda a, b: a + b, ordered=False
    )
    return op.flat_map(f"{step}-each", found.down, lambda one: one[1][1])


def counted(step, keyed, clock, windower):
    """Return `(key, (window, count, first time, last time))`."""

    def folded(kept, one):
        count, first, last = kept
        at = one["dateTime"]
        return count + 1, min(first, at), max(last, at)

    def merged(one, other):
        return one[0] + other[0], min(one[1], other[1]), max(one[2], other[2])

    start = lambda: (0, 1 << 62, 0)  # noqa: E731
    return win.fold_window(step, keyed, clock, windower, start, folded, merged, ordered=False).down


def statistics(kept, bid):
    price = bid["price"]
    total, one, two, three, least, m, summed = kept or (0, 0, 0, 0, price, price, 0)
    now = (
        total + 1,
        one + (price < 10_000),
        two + (10_000 <= price < 1_000_000),
        three + (price >= 1_000_000),
        min(least, price),
        max(m, price),
        summed + price,
    )
    names = ("total_bids", "rank1_bids", "rank2_bids", "rank3_bids", "min_price", "max_price", "sum_price")
    day = time.strftime("%Y-%m-%d", time.gmtime(bid["dateTime"] // 1_000))
    row = {"auction": bid["auction"], "day": day, **dict(zip(names, now, strict=True))}
    return now, {**row, "avg_price": now[6] // now[0]}


def joined(kept, event):
    auction, waiting = kept or (None, [])
    if "category" in event:
        return (event, []), [with_auction(bid, event) for bid in waiting]
    if auction is not None:
        return (auction, waiting), [with_auction(event, auction)]
    return (None, [*waiting, event]), []


def with_auction(bid, auction):
    more = {name: value for name, value in auction.items() if name not in ("id", "dateTime", "extra")}
    return {**bid, **more, "auctionDateTime": auction["dateTime"], "auctionExtra": auction["extra"]}


def results(events, query):
    """Return the stream of a query's results."""
    if query == "q8":
        return new_users(events)
    if query == "q20":
        wanted = lambda one: one["event_type"] == 2 or one.get("auction", {}).get("category") == CATEGORY  # noqa: E731
        read = op.filter("wanted", events, wanted)
        read = op.map("inner", read, lambda event: event.get("bid") or event["auction"])
        keyed = op.key_on("by", read, lambda one: str(one["auction"] if "auction" in one else one["id"]))
        return op.key_rm("rows", op.stateful_flat_map("join", keyed, joined))
    bids = op.filter_map("bids", events, lambda event: event.get("bid"))
    if query == "q0":
        return op.map("columns", bids, lambda bid: {name: bid[name] for name in _BID})
    if query == "q5":
        hops = win.SlidingWindower(
            align_to=_ZERO, length=timedelta(milliseconds=WINDOW_MS), offset=timedelta(milliseconds=SLIDE_MS)
        )
        counts = counted(
            "counts", op.key_on("by", bids, lambda bid: str(bid["auction"])), event_clock("dateTime"), hops
        )
        rows = op.map(
            "bounds",
            counts,
            lambda one: {
                "auction": int(one[0]),
                "num": one[1][1][0],
                "starttime": one[1][0] * SLIDE_MS,
                "endtime": one[1][0] * SLIDE_MS + WINDOW_MS,
            },
        )
        keyed = op.key_on("window", rows, lambda one: str(one["starttime"]))
        return greatest("hottest", keyed, "num", "starttime", SLIDE_MS)
    if query == "q7":
        keyed = op.key_on("window", bids, lambda bid: str(bid["dateTime"] // WINDOW_MS))
        rows = greatest("highest", keyed, "price", "dateTime", WINDOW_MS)
        return op.map("columns", rows, lambda bid: {name: bid[name] for name in _BID})
    if query in ("q11", "q12"):
        return sessions_or_clock(op.key_on("by", bids, lambda bid: str(bid["bidder"])), query)
    if query == "q17":
        keyed = op.key_on("by", bids, lambda bid: str(bid["auction"]))
        return op.key_rm("rows", op.stateful_map("statistics", keyed, statistics))
    keyed = op.key_on("by", bids, lambda bid: f"{bid['bidder']} {bid['auction']}")

    def last(at, bid):
        return (at, []) if bid["dateTime"] < (at or 0) else (bid["dateTime"], [bid])

    return op.key_rm("rows", op.stateful_flat_map("last", keyed, last))


def sessions_or_clock(keyed, query):
    if query == "q11":
        windower = win.SessionWindower(gap=timedelta(milliseconds=GAP_MS))
        found = counted("sessions", keyed, event_clock("dateTime"), windower)
        bounds = lambda window, kept: (kept[1], kept[2] + GAP_MS)  # noqa: E731
    else:
        windower = win.TumblingWindower(align_to=_ZERO, length=timedelta(milliseconds=WINDOW_MS))
        found = counted("windows", keyed, win.SystemClock(), windower)
        bounds = lambda window, kept: (window * WINDOW_MS, (window + 1) * WINDOW_MS)  # noqa: E731

    def row(one):
        key, (window, kept) = one
        begins, ends = bounds(window, kept)
        return {"bidder": int(key), "bid_count": kept[0], "starttime": begins, "endtime": ends}

    return op.map("bounds", found, row)


def new_users(events):
    def read(event):
        if event["event_type"] == 0:
            person = event["person"]
            return {"id": person["id"], "name": person["name"], "dateTime": person["dateTime"]}
        if event["event_type"] == 1:
            return {"id": event["auction"]["seller"], "name": None, "dateTime": event["auction"]["dateTime"]}
        return None

    def folded(kept, one):
        return (one["name"], kept[1]) if one["name"] is not None else (kept[0], True)

    keyed = op.key_on("by", op.filter_map("both", events, read), lambda one: str(one["id"]))
    windower = win.TumblingWindower(align_to=_ZERO, length=timedelta(milliseconds=WINDOW_MS))
    found = win.fold_window(
        "windows", keyed, event_clock("dateTime"), windower, lambda: (None, False), folded,
        lambda a, b: (a[0] or b[0], a[1] or b[1]), ordered=False,
    )  # fmt: skip

    def row(one):
        key, (window, (name, has_auction)) = one
        if name is None or not has_auction:
            return None
        begins = window * WINDOW_MS
        return {"id": int(key), "name": name, "starttime": begins, "endtime": begins + WINDOW_MS}

    return op.filter_map("new", found.down, row)


def main():
    request = json.loads(sys.argv[1])
    seen, first, share = 0, None, request["batch"] / request["processes"]

    def parsed(message):
        nonlocal seen, first
        seen += 1
        if first is None and seen >= share:
            first = time.monotonic()
        return json.loads(message.value)

    flow = Dataflow("nexmark")
    brokers = [request["bootstrap_servers"]]
    # By the clock windows close only while the flow runs.
    tail = not request["bounded"] or request["query"] == "q12"
    read = op.input("read", flow, KafkaSource(brokers, [request["source"]], tail=tail, batch_size=5_000))
    found = results(op.map("parse", read, parsed), request["query"])
    written = op.map("json", found, lambda row: KafkaSinkMessage(None, json.dumps(row).encode()))
    settings = {"linger.ms": "20", "batch.size": "262144"}
    op.output("write", written, KafkaSink(brokers, request["sink"], add_config=settings))
    recovery = Path(request["folder"]) / "recovery"
    if request["process"] == 0 and not recovery.exists():
        recovery.mkdir(parents=True)
        init_db_dir(recovery, request["processes"])
    while not any(recovery.glob("part-*.sqlite3")):
        time.sleep(0.05)
    cluster_main(
        flow, request["addresses"], request["process"],
        epoch_interval=timedelta(milliseconds=request["checkpoint_ms"]),
        recovery_config=RecoveryConfig(str(recovery)),
    )  # fmt: skip
    print(json.dumps({"first": first, "over": time.monotonic(), "read": seen}), flush=True)


if __name__ == "__main__":
    main()
