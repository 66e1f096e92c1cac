"""Nexmark in Quix Streams, exactly once: one process of several, run by the Python of its own environment.

State is kept by the key of Kafka's records, so a query by another key goes through a topic in between, which
is part of the same transactions.
"""

from __future__ import annotations

import json
import sys
import time

from quixstreams import Application

GAP_MS, CATEGORY = 10_000, 10
#: How far the partitions may be apart when they are read.
GRACE_MS = 30_000
#: Behind so long without an event all of them have been read, on a busy machine too.
_IDLE_S = 10.0
_BID = ("auction", "bidder", "price", "dateTime", "extra")


def statistics(bid, state):
    price = bid["price"]
    total, one, two, three, least, most, summed = state.get("kept", (0, 0, 0, 0, price, price, 0))
    now = (
        total + 1,
        one + (price < 10_000),
        two + (10_000 <= price < 1_000_000),
        three + (price >= 1_000_000),
        min(least, price),
        max(most, price),
        summed + price,
    )
    state.set("kept", now)
    day = time.strftime("%Y-%m-%d", time.gmtime(bid["dateTime"] // 1_000))
    names = ("total_bids", "rank1_bids", "rank2_bids", "rank3_bids", "min_price", "max_price", "sum_price")
    return {
        "auction": bid["auction"],
        "day": day,
        **dict(zip(names, now, strict=True)),
        "avg_price": now[6] // now[0],
    }


def last(bid, state):
    """Return a bid that is the newest of its key; older ones that come later are left out."""
    if bid["dateTime"] < state.get("at", 0):
        return None
    state.set("at", bid["dateTime"])
    return bid


def joined(event, state):
    """Return the joined rows of a bid or an auction."""
    if "category" in event:
        state.set("auction", event)
        waiting = state.get("waiting", [])
        state.delete("waiting")
        return [with_auction(bid, event) for bid in waiting]
    auction = state.get("auction")
    if auction is not None:
        return [with_auction(event, auction)]
    state.set("waiting", [*state.get("waiting", []), event])
    return []


def with_auction(bid, auction):
    more = {name: value for name, value in auction.items() if name not in ("id", "dateTime", "extra")}
    return {**bid, **more, "auctionDateTime": auction["dateTime"], "auctionExtra": auction["extra"]}


def results(bids, events, query):
    """Return the frame of a query's results, and what its records are keyed by."""
    if query == "q0":
        return bids.apply(lambda bid: {name: bid[name] for name in _BID})
    if query == "q11":
        sessions = bids.apply(lambda bid: {"bidder": bid["bidder"]}).group_by("bidder")
        sessions = (
            sessions.session_window(GAP_MS, grace_ms=GRACE_MS).count().final(closing_strategy="partition")
        )
        return sessions.apply(
            lambda one, key, *_: {
                "bidder": key,
                "bid_count": one["value"],
                "starttime": one["start"],
                # Here a session ends a millisecond behind its last event.
                "endtime": one["end"] - 1 + GAP_MS,
            },
            metadata=True,
        )
    if query == "q17":
        needed = bids.apply(lambda bid: {name: bid[name] for name in ("auction", "price", "dateTime")})
        return needed.group_by("auction").apply(statistics, stateful=True)
    if query == "q18":
        keyed = bids.group_by(lambda bid: f"{bid['bidder']} {bid['auction']}", name="pair")
        return keyed.apply(last, stateful=True).filter(lambda bid: bid is not None)
    read = events.filter(
        lambda event: event["event_type"] == 2 or event.get("auction", {}).get("category") == CATEGORY
    ).apply(lambda event: event.get("bid") or event["auction"])
    keyed = read.group_by(lambda one: one["auction"] if "auction" in one else one["id"], name="auction")
    return keyed.apply(joined, stateful=True, expand=True)


def main():
    request = json.loads(sys.argv[1])
    seen, first, share = 0, None, request["batch"] / request["processes"]

    def noted(event):
        nonlocal seen, first
        seen += 1
        if first is None and seen >= share:
            first = time.monotonic()
        return event

    app = Application(
        broker_address=request["bootstrap_servers"],
        consumer_group=request["sink"],
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=request["checkpoint_ms"] / 1_000,
        state_dir=f"{request['folder']}/{request['process']}",
        consumer_poll_timeout=0.2,
        producer_extra_config={"linger.ms": 20, "batch.size": 262_144},
        loglevel="WARNING",
    )
    times = ("person", "auction", "bid")
    source = app.topic(
        request["source"],
        value_deserializer="json",
        timestamp_extractor=lambda value, headers, at, kind: value[times[value["event_type"]]]["dateTime"],
    )
    sink = app.topic(request["sink"], key_serializer="json", value_serializer="json")
    events = app.dataframe(source).apply(noted)
    query = request["query"]
    bids = None
    if query != "q20":
        bids = events.filter(lambda event: event["event_type"] == 2).apply(lambda event: event["bid"])
    results(bids, events, query).to_topic(sink)
    if not request["bounded"]:
        app.run()
        return
    app.run(timeout=_IDLE_S, collect=False)
    # It has waited for more in vain; what it wrote before was committed then.
    print(json.dumps({"first": first, "over": time.monotonic() - _IDLE_S, "read": seen}), flush=True)


if __name__ == "__main__":
    main()
