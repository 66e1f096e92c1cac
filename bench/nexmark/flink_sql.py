"""Nexmark in Flink SQL: the statements of each query, for Flink from Java, and for PyFlink."""

from __future__ import annotations

from bench.nexmark.ours import FIELDS
from bench.nexmark.queries import CATEGORY, COLUMNS, UPDATES

#: Queries that go by event time.
_TIMED = ("q5", "q7", "q8", "q11", "q18")
_KINDS = ("person", "auction", "bid")


def _rows(query):
    """Return the columns of the input that a query needs, as Flink's rows."""
    fields = dict.fromkeys(_KINDS, "")
    for one in FIELDS[query].split(">, "):
        kind, _, inner = one.rstrip(">").partition(" STRUCT<")
        fields[kind] = ", ".join(
            f"`{name}` {'BIGINT' if of == 'LONG' else of}"
            for name, of in (f.split(": ") for f in inner.split(", "))
        )
    if query in _TIMED:
        # Each event has a time, or else there is none to make a watermark of.
        for kind in _KINDS:
            if "`dateTime`" not in fields[kind]:
                fields[kind] = ", ".join(filter(None, (fields[kind], "`dateTime` BIGINT")))
    return ", ".join(f"{kind} ROW<{inner}>" for kind, inner in fields.items() if inner)


def _ms(time):
    return (
        f"CAST(TIMESTAMPDIFF(SECOND, TIMESTAMP '1970-01-01 00:00:00', {time}) AS BIGINT) * 1000 "
        f"+ EXTRACT(MILLISECOND FROM {time})"
    )


def _view(columns):
    return f"CREATE TEMPORARY VIEW bids AS SELECT {columns} FROM events WHERE event_type = 2"


_BOUNDS = f"{_ms('window_start')} AS starttime, {_ms('window_end')} AS endtime"
_BID = "bid.auction AS auction, bid.bidder AS bidder, bid.price AS price"
_TEXTS = "bid.channel AS channel, bid.url AS url"
_EVENT = "bid.`dateTime` AS `dateTime`, bid.extra AS extra"
_HOPS = """
    SELECT auction, count(*) AS num, window_start, window_end
    FROM TABLE(HOP(TABLE bids, DESCRIPTOR(rowtime), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
    GROUP BY auction, window_start, window_end
"""
_TUMBLE = "TABLE(TUMBLE(TABLE {of}, DESCRIPTOR({time}), INTERVAL '10' SECOND))"
#: Views of the input, and the query on them.
_QUERIES = {
    "q0": ("", f"SELECT {_BID}, {_EVENT} FROM events WHERE event_type = 2"),
    "q5": (
        _view("bid.auction AS auction, rowtime"),
        f"""
        SELECT a.auction, a.num, {_BOUNDS.replace("window_", "a.window_")} FROM ({_HOPS}) a
        JOIN (SELECT max(num) AS num, window_start, window_end FROM ({_HOPS})
              GROUP BY window_start, window_end) m
        ON a.window_start = m.window_start AND a.window_end = m.window_end AND a.num >= m.num
        """,
    ),
    "q7": (
        _view(f"{_BID}, {_EVENT}, rowtime"),
        f"""
        SELECT b.auction, b.bidder, b.price, b.`dateTime`, b.extra
        FROM (SELECT * FROM {_TUMBLE.format(of="bids", time="rowtime")}) b
        JOIN (SELECT max(price) AS price, window_start, window_end
              FROM {_TUMBLE.format(of="bids", time="rowtime")} GROUP BY window_start, window_end) m
        ON b.window_start = m.window_start AND b.window_end = m.window_end AND b.price = m.price
        """,
    ),
    "q8": (
        """
        CREATE TEMPORARY VIEW persons AS
            SELECT person.id AS id, person.name AS name, rowtime FROM events WHERE event_type = 0;
        CREATE TEMPORARY VIEW auctions AS
            SELECT auction.seller AS seller, rowtime FROM events WHERE event_type = 1
        """,
        f"""
        SELECT p.id, p.name, {_BOUNDS.replace("window_", "p.window_")}
        FROM (SELECT id, name, window_start, window_end FROM {_TUMBLE.format(of="persons", time="rowtime")}
              GROUP BY id, name, window_start, window_end) p
        JOIN (SELECT seller, window_start, window_end FROM {_TUMBLE.format(of="auctions", time="rowtime")}
              GROUP BY seller, window_start, window_end) a
        ON p.id = a.seller AND p.window_start = a.window_start AND p.window_end = a.window_end
        """,
    ),
    "q11": (
        _view("bid.bidder AS bidder, rowtime"),
        f"""
        SELECT bidder, count(*) AS bid_count, {_BOUNDS}
        FROM TABLE(SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(rowtime), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end
        """,
    ),
    "q12": (
        _view("bid.bidder AS bidder, proctime"),
        f"""
        SELECT bidder, count(*) AS bid_count, {_BOUNDS} FROM {_TUMBLE.format(of="bids", time="proctime")}
        GROUP BY bidder, window_start, window_end
        """,
    ),
    "q17": (
        """
        CREATE TEMPORARY VIEW bids AS SELECT bid.auction AS auction, bid.price AS price,
            DATE_FORMAT(TO_TIMESTAMP_LTZ(bid.`dateTime`, 3), 'yyyy-MM-dd') AS `day`
            FROM events WHERE event_type = 2
        """,
        """
        SELECT auction, `day`, count(*) AS total_bids, count(*) FILTER (WHERE price < 10000) AS rank1_bids,
               count(*) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2_bids,
               count(*) FILTER (WHERE price >= 1000000) AS rank3_bids,
               min(price) AS min_price, max(price) AS max_price, avg(price) AS avg_price,
               sum(price) AS sum_price
        FROM bids GROUP BY auction, `day`
        """,
    ),
    "q18": (
        _view(f"{_BID}, {_TEXTS}, {_EVENT}, rowtime"),
        """
        SELECT auction, bidder, price, channel, url, `dateTime`, extra FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY rowtime DESC) AS place
            FROM bids)
        WHERE place <= 1
        """,
    ),
    "q20": (
        f"""
        CREATE TEMPORARY VIEW bids AS SELECT {_BID}, {_TEXTS}, {_EVENT} FROM events WHERE event_type = 2;
        CREATE TEMPORARY VIEW auctions AS
            SELECT auction.id AS id, auction.itemName AS itemName, auction.description AS description,
                auction.initialBid AS initialBid, auction.reserve AS reserve,
                auction.`dateTime` AS auctionDateTime, auction.expires AS expires, auction.seller AS seller,
                auction.category AS category, auction.extra AS auctionExtra
            FROM events WHERE event_type = 1
        """,
        f"""
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.`dateTime`, b.extra, a.itemName,
               a.description, a.initialBid, a.reserve, a.auctionDateTime, a.expires, a.seller, a.category,
               a.auctionExtra
        FROM bids b JOIN auctions a ON b.auction = a.id WHERE a.category = {CATEGORY}
        """,
    ),
}


def _source(request, bootstrap_servers, topic):
    query, columns = request["query"], ["event_type INT", _rows(request["query"])]
    if query in _TIMED:
        columns += [
            "rowtime AS TO_TIMESTAMP_LTZ(CASE event_type WHEN 0 THEN person.`dateTime` "
            "WHEN 1 THEN auction.`dateTime` ELSE bid.`dateTime` END, 3)",
            "WATERMARK FOR rowtime AS rowtime - INTERVAL '1' SECOND",
        ]
    if query == "q12":
        columns.append("proctime AS PROCTIME()")
    options = {
        "connector": "kafka",
        "topic": topic,
        "properties.bootstrap.servers": bootstrap_servers,
        "properties.group.id": request["sink"],
        "scan.startup.mode": "earliest-offset",
        "format": "json",
    }
    # Windows by the clock would not come out at the end of what is bounded.
    if request["bounded"] and query != "q12":
        options["scan.bounded.mode"] = "latest-offset"
    return f"CREATE TABLE events ({', '.join(columns)}) WITH ({_options(options)})"


def _sink(request, bootstrap_servers):
    query = request["query"]
    columns = [f"`{name}` {'BIGINT' if of == 'BIGINT' else 'STRING'}" for name, of in COLUMNS[query].items()]
    options = {
        "topic": request["sink"],
        "properties.bootstrap.servers": bootstrap_servers,
        "properties.linger.ms": "20",
        "properties.batch.size": "262144",
        "properties.transaction.timeout.ms": "600000",
        "sink.delivery-guarantee": "exactly-once",
        "sink.transactional-id-prefix": request["sink"],
    }
    if query in UPDATES:
        keys = ", ".join(f"`{key}`" for key in UPDATES[query][0])
        columns.append(f"PRIMARY KEY ({keys}) NOT ENFORCED")
        options |= {"connector": "upsert-kafka", "key.format": "json", "value.format": "json"}
    else:
        options |= {"connector": "kafka", "format": "json"}
    return f"CREATE TABLE results ({', '.join(columns)}) WITH ({_options(options)})"


def _options(options):
    return ", ".join(f"'{name}' = '{value}'" for name, value in options.items())


def statements(request, bootstrap_servers, topic):
    """Return what has to be run for a query, the INSERT last."""
    views, query = _QUERIES[request["query"]]
    made = [_source(request, bootstrap_servers, topic), _sink(request, bootstrap_servers)]
    made += [view.strip() for view in views.split(";\n") if view.strip()]
    return [*made, f"INSERT INTO results {query}"]


def settings(request, cores, port):
    """Return Flink's configuration for a run: the same for Java and Python."""
    return {
        "parallelism.default": str(cores),
        "rest.port": str(port),
        "rest.bind-port": str(port),
        "rest.address": "localhost",
        "metrics.fetcher.update-interval": "50",
        "execution.checkpointing.interval": f"{request['checkpoint_ms']} ms",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.dir": f"file://{request['folder']}",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "execution.checkpointing.min-pause": "0",
        "state.backend.type": "hashmap",
        "pipeline.object-reuse": "true",
        "restart-strategy.type": "disable",
        "table.local-time-zone": "UTC",
        # Aggregates without windows: many records of a key at once, as Flink's guide to tuning says.
        "table.exec.mini-batch.enabled": "true",
        "table.exec.mini-batch.allow-latency": "1 s",
        "table.exec.mini-batch.size": "5000",
        "table.exec.state.ttl": "0",
    }
