"""The queries of Nexmark as Spark's SQL, in scripts for `flinkish sql`.

Not here, since Spark's SQL has no words for them in a streaming query: q4 and q6 (an aggregate over an
aggregate without windows), q12 (windows by the clock), q15 and q16 (distinct counts), q10 (files by time: a
sink's setting).
"""

from __future__ import annotations

PERSON = "id LONG, name STRING, emailAddress STRING, creditCard STRING, city STRING, state STRING"
AUCTION = (
    "id LONG, itemName STRING, description STRING, initialBid LONG, reserve LONG, expires LONG, seller LONG, "
    "category LONG"
)
BID = "auction LONG, bidder LONG, price LONG, channel STRING, url STRING"
_BID = "auction LONG, bidder LONG, price LONG"
_BOUNDS = "starttime LONG, endtime LONG"
_ALL_BID = f"{BID}, dateTime LONG, extra STRING"

# Spark has one watermark for a job, the least of all streams that declare one, and filters go below it. So
# only queries with windows read the views that declare one.
#: By query: the columns of its result, its keys if it updates results, and the query.
QUERIES: dict[str, tuple[str, str, str]] = {
    "q0": (
        f"{_BID}, dateTime LONG, extra STRING",
        "",
        "SELECT auction, bidder, price, dateTime, extra FROM timed_bids",
    ),
    "q1": (
        "auction LONG, bidder LONG, price DECIMAL(23, 3), dateTime LONG, extra STRING",
        "",
        "SELECT auction, bidder, 0.908 * price, dateTime, extra FROM timed_bids",
    ),
    "q2": (
        "auction LONG, price LONG",
        "",
        "SELECT auction, price FROM timed_bids WHERE MOD(auction, 123) = 0",
    ),
    "q3": (
        "name STRING, city STRING, state STRING, id LONG",
        "",
        """
        SELECT p.name, p.city, p.state, a.id FROM timed_auctions a JOIN timed_persons p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')
        """,
    ),
    "q5": (
        f"auction LONG, num LONG, {_BOUNDS}",
        "",
        """
        SELECT top.auction, top.num, unix_millis(slide.end) - 10000, unix_millis(slide.end)
        FROM (
            SELECT slide, explode(filter(counts, one -> one.num = most)) AS top
            FROM (
                SELECT window(window_time(w), '2 seconds') AS slide,
                       collect_list(struct(auction, num)) AS counts, max(num) AS most
                FROM (SELECT window(ts, '10 seconds', '2 seconds') AS w, auction, count(*) AS num
                      FROM bids GROUP BY window(ts, '10 seconds', '2 seconds'), auction)
                GROUP BY window(window_time(w), '2 seconds')
            )
        )
        """,
    ),
    "q7": (
        f"{_BID}, dateTime LONG, extra STRING",
        "",
        """
        SELECT top.* FROM (
            SELECT explode(filter(all, one -> one.price = most)) AS top FROM (
                SELECT collect_list(struct(auction, bidder, price, dateTime, extra)) AS all,
                       max(price) AS most
                FROM bids GROUP BY window(ts, '10 seconds')
            )
        )
        """,
    ),
    "q8": (
        f"id LONG, name STRING, {_BOUNDS}",
        "",
        """
        SELECT p.id, p.name, unix_millis(p.w.start), unix_millis(p.w.end)
        FROM (SELECT id, name, window(ts, '10 seconds') AS w FROM persons) p
        JOIN (SELECT seller, window(ts, '10 seconds') AS w FROM auctions
              GROUP BY seller, window(ts, '10 seconds')) a
          ON p.id = a.seller AND p.w = a.w
        """,
    ),
    "q9": (
        f"id LONG, {_ALL_BID}",
        "id",
        """
        SELECT id, best.auction, best.bidder, best.price, best.channel, best.url, best.dateTime, best.extra
        FROM (
            SELECT a.id, max_by(struct(b.*), struct(b.price, -b.dateTime)) AS best
            FROM auctions a JOIN bids b
              ON a.id = b.auction AND b.dateTime BETWEEN a.dateTime AND a.expires
            GROUP BY a.id
        )
        """,
    ),
    "q11": (
        f"bidder LONG, bid_count LONG, {_BOUNDS}",
        "",
        """
        SELECT bidder, count(*), unix_millis(session_window.start), unix_millis(session_window.end) - 1
        FROM bids GROUP BY bidder, session_window(ts, '10 seconds 1 millisecond')
        """,
    ),
    "q13": (
        f"{_BID}, dateTime LONG, value STRING",
        "",
        """
        SELECT auction, bidder, price, dateTime, value
        FROM timed_bids JOIN side ON MOD(auction, 100) = side.key
        """,
    ),
    "q14": (
        "auction LONG, bidder LONG, price DECIMAL(23, 3), bidTimeType STRING, c_counts INT",
        "",
        """
        SELECT auction, bidder, 0.908 * price,
               CASE WHEN HOUR(ts) >= 8 AND HOUR(ts) <= 18 THEN 'dayTime'
                    WHEN HOUR(ts) <= 6 OR HOUR(ts) >= 20 THEN 'nightTime' ELSE 'otherTime' END,
               length(extra) - length(replace(extra, 'c', ''))
        FROM timed_bids WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
        """,
    ),
    "q17": (
        "auction LONG, day STRING, total_bids LONG, rank1_bids LONG, rank2_bids LONG, rank3_bids LONG, "
        "min_price LONG, max_price LONG, avg_price LONG, sum_price LONG",
        "auction, day",
        """
        SELECT auction, date_format(ts, 'yyyy-MM-dd') AS day, count(*),
               count(*) FILTER (WHERE price < 10000),
               count(*) FILTER (WHERE price >= 10000 AND price < 1000000),
               count(*) FILTER (WHERE price >= 1000000),
               min(price), max(price), sum(price) DIV count(*), sum(price)
        FROM bids GROUP BY auction, date_format(ts, 'yyyy-MM-dd')
        """,
    ),
    "q18": (
        _ALL_BID,
        "bidder, auction",
        """
        SELECT auction, bidder, last.price, last.channel, last.url, last.dateTime, last.extra FROM (
            SELECT bidder, auction, max_by(struct(price, channel, url, dateTime, extra), dateTime) AS last
            FROM bids GROUP BY bidder, auction
        )
        """,
    ),
    "q19": (
        "auction LONG, rank_number INT, price LONG, dateTime LONG",
        "auction, rank_number",
        """
        SELECT auction, rank + 1, top.price, -top.earlier FROM (
            SELECT auction, posexplode(slice(sort_array(collect_list(struct(price, -dateTime AS earlier)),
                                                        false), 1, 10)) AS (rank, top)
            FROM bids GROUP BY auction
        )
        """,
    ),
    "q20": (
        f"{_ALL_BID}, itemName STRING, description STRING, initialBid LONG, reserve LONG, "
        "auctionDateTime LONG, expires LONG, seller LONG, category LONG, auctionExtra STRING",
        "",
        """
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.dateTime, b.extra, a.itemName,
               a.description, a.initialBid, a.reserve, a.dateTime, a.expires, a.seller, a.category, a.extra
        FROM timed_bids b JOIN timed_auctions a ON b.auction = a.id WHERE a.category = 10
        """,
    ),
    "q21": (
        "auction LONG, bidder LONG, price LONG, channel STRING, channel_id STRING",
        "",
        """
        SELECT * FROM (
            SELECT auction, bidder, price, channel,
                   CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                        WHEN 'baidu' THEN '3'
                        ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id
            FROM timed_bids
        ) WHERE channel_id IS NOT NULL
        """,
    ),
    "q22": (
        f"{_BID}, channel STRING, dir1 STRING, dir2 STRING, dir3 STRING",
        "",
        """
        SELECT auction, bidder, price, channel, get(parts, 3), get(parts, 4), get(parts, 5)
        FROM (SELECT *, split(url, '/') AS parts FROM timed_bids)
        """,
    ),
}
#: Queries that update results; all aggregates of a script have one output mode.
UPDATES = tuple(name for name, (_, keys, _) in QUERIES.items() if keys)
APPENDS = tuple(name for name in QUERIES if name not in UPDATES)


def make_script(folder: str, queries: tuple[str, ...], delay: str = "1 second") -> str:
    """Return the script of some queries, from files of JSON below a folder into Delta tables."""
    parts = []
    for name, columns in (("person", PERSON), ("auction", AUCTION), ("bid", BID)):
        parts.append(
            f"CREATE TABLE raw_{name}s ({columns}, dateTime LONG, extra STRING) "
            f"USING files OPTIONS (path '{folder}/{name}s', format 'json')"
        )
        parts.append(
            f"CREATE TEMPORARY VIEW timed_{name}s AS "
            f"SELECT *, timestamp_millis(dateTime) AS ts FROM raw_{name}s"
        )
        parts.append(
            f"CREATE TEMPORARY VIEW {name}s AS "
            f"SELECT * FROM timed_{name}s WATERMARK ts DELAY OF INTERVAL {delay}"
        )
    for name in queries:
        columns, keys, query = QUERIES[name]
        update = f", keys '{keys}', outputMode 'update'" if keys else ""
        parts.append(f"CREATE TABLE {name} ({columns}) USING delta OPTIONS (path '{folder}/{name}'{update})")
        parts.append(f"INSERT INTO {name} {query.strip()}")
    return ";\n".join(parts)
