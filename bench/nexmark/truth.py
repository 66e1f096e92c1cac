"""What each query of Nexmark comes to, reckoned by DuckDB, and whether an engine has found just that.

The queries are those of Flink's SQL form of Nexmark; windows say when they begin and end, in milliseconds.
Results are compared as sets of rows, each there once. Where a query updates its results (q17, q18) the last
row of each key counts. q12 goes by the clock, so what is in a window differs from run to run: each window of
a bidder is there once, begins at a whole ten seconds, and all of them have all of the bidder's bids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import pandas as pd

from bench.checking import SHOWN, SLACK_MS, DifferentResultsError
from bench.groups import LATE_MS
from bench.nexmark.queries import CATEGORY, COLUMNS, GAP_MS, SLIDE_MS, UPDATES, WINDOW_MS

_TUMBLED = f'"dateTime" - "dateTime" % {WINDOW_MS}'
_HOPS = f"""
    SELECT auction, count(*) AS num, starttime, starttime + {WINDOW_MS} AS endtime
    FROM (SELECT auction, unnest(range(
            "dateTime" - "dateTime" % {SLIDE_MS} - {WINDOW_MS - SLIDE_MS},
            "dateTime" - "dateTime" % {SLIDE_MS} + 1, {SLIDE_MS})) AS starttime FROM bids)
    GROUP BY auction, starttime
"""
_SQL = {
    "q0": 'SELECT auction, bidder, price, "dateTime", extra, "dateTime" AS due FROM bids',
    "q5": f"""
        WITH hops AS ({_HOPS})
        SELECT *, endtime AS due FROM hops QUALIFY num = max(num) OVER (PARTITION BY starttime)
    """,
    "q7": f"""
        SELECT auction, bidder, price, "dateTime", extra, {_TUMBLED} + {WINDOW_MS} AS due FROM bids
        QUALIFY price = max(price) OVER (PARTITION BY {_TUMBLED})
    """,
    "q8": f"""
        WITH p AS (SELECT id, name, {_TUMBLED} AS starttime FROM persons),
             a AS (SELECT DISTINCT seller, {_TUMBLED} AS starttime FROM auctions)
        SELECT id, name, starttime, starttime + {WINDOW_MS} AS endtime, starttime + {WINDOW_MS} AS due
        FROM p JOIN a USING (starttime) WHERE id = seller
    """,
    "q11": f"""
        WITH apart AS (
            SELECT bidder, "dateTime", coalesce("dateTime" - lag("dateTime") OVER w > {GAP_MS}, true)
                AS begins
            FROM bids WINDOW w AS (PARTITION BY bidder ORDER BY "dateTime")
        ), numbered AS (
            SELECT bidder, "dateTime",
                   sum(begins::INT) OVER (PARTITION BY bidder ORDER BY "dateTime") AS session FROM apart
        )
        SELECT bidder, count(*) AS bid_count, min("dateTime") AS starttime,
               max("dateTime") + {GAP_MS} AS endtime, max("dateTime") + {GAP_MS} AS due
        FROM numbered GROUP BY bidder, session
    """,
    "q17": """
        SELECT auction, strftime(make_timestamp("dateTime" * 1000), '%Y-%m-%d') AS day,
               count(*) AS total_bids,
               count(*) FILTER (price < 10000) AS rank1_bids,
               count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2_bids,
               count(*) FILTER (price >= 1000000) AS rank3_bids,
               min(price) AS min_price, max(price) AS max_price,
               (sum(price) // count(*)) AS avg_price, sum(price) AS sum_price, max("dateTime") AS due
        FROM bids GROUP BY ALL
    """,
    "q18": """
        SELECT auction, bidder, price, channel, url, "dateTime", extra, "dateTime" AS due FROM bids
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY "dateTime" DESC) = 1
    """,
    "q20": f"""
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, b."dateTime", b.extra, a."itemName",
               a.description, a."initialBid", a.reserve, a."dateTime" AS "auctionDateTime", a.expires,
               a.seller, a.category, a.extra AS "auctionExtra", greatest(a."dateTime", b."dateTime") AS due
        FROM bids b JOIN auctions a ON b.auction = a.id WHERE a.category = {CATEGORY}
    """,
}
#: Windows that are open when the input ends may come out or not, in engines that do not close them.
_WINDOWED = ("q5", "q7", "q8", "q11")


@dataclass(frozen=True)
class Verdict:
    """How the results of a run differ from what they should be: how many, and some of each kind."""

    compared: int
    missing: int = 0
    duplicated: int = 0
    wrong: int = 0
    examples: str = ""

    @property
    def is_right(self) -> bool:
        return not (self.missing or self.duplicated or self.wrong)

    def or_raise(self, variant: str) -> int:
        """Return how many results were compared, or end the run."""
        if not self.is_right:
            raise DifferentResultsError(f"{variant} has other results than DuckDB: {self.examples}")
        return self.compared


class Truth:
    """The input of a run, asked by SQL.

    Parameters
    ----------
    persons, auctions, bids
        All of each, as the generator's tables.
    """

    def __init__(self, persons: pd.DataFrame, auctions: pd.DataFrame, bids: pd.DataFrame) -> None:
        self._engine = duckdb.connect()
        for name, frame in (("persons", persons), ("auctions", auctions), ("bids", bids)):
            self._engine.register("given", frame)
            self._asked(f"CREATE TABLE {name} AS SELECT * FROM given")
        ((last,),) = self._asked('SELECT max("dateTime") FROM bids')
        #: Up to here every engine has closed its windows, whatever it does at the end of its input.
        self.watermark_ms = last - LATE_MS - SLACK_MS
        self.bids = len(bids)

    def _asked(self, sql: str) -> list[tuple[Any, ...]]:
        # To the end: a connection takes no other statement while one has rows left.
        return self._engine.execute(sql).fetchall()

    def wanted(self, query: str) -> pd.DataFrame:
        """Return the results of a query; `due` says which time had to pass."""
        return self._engine.execute(_SQL[query]).df()

    def judge(self, query: str, found: pd.DataFrame, *, closes: bool, late_ms: int = 0) -> Verdict:
        """Compare what an engine has written.

        Parameters
        ----------
        found
            With the columns of the query, in the order of writing.
        closes
            Whether the engine closes its windows when the input ends; else those that the last watermark has
            not passed may be missing.
        late_ms
            How much later than a window's end the watermark has to be for that.
        """
        columns = COLUMNS[query]
        names = ", ".join(f'"{name}"' for name in columns)
        typed = ", ".join(f'CAST("{name}" AS {kind}) AS "{name}"' for name, kind in columns.items())
        self._engine.register("written", found)
        self._asked(f"CREATE OR REPLACE TABLE found AS SELECT {typed} FROM written")
        if query == "q12":
            return self._judge_by_clock()
        if query in UPDATES:
            keys, greatest = UPDATES[query]
            of = ", ".join(f'"{key}"' for key in keys)
            self._asked(
                f"CREATE OR REPLACE TABLE found AS SELECT DISTINCT * FROM found "
                f'QUALIFY "{greatest}" = max("{greatest}") OVER (PARTITION BY {of})'
            )
        self._asked(f"CREATE OR REPLACE TABLE wanted AS {_SQL[query]}")
        may = f"due > {self.watermark_ms - late_ms}" if query in _WINDOWED and not closes else "false"
        faults = {
            "missing": f"SELECT {names} FROM wanted WHERE NOT ({may}) EXCEPT SELECT {names} FROM found",
            "duplicated": f"SELECT {names}, count(*) AS times FROM found GROUP BY ALL HAVING count(*) > 1",
            "wrong": f"SELECT {names} FROM found EXCEPT SELECT {names} FROM wanted",
        }
        return self._verdict(faults)

    def _judge_by_clock(self) -> Verdict:
        counted = """
            WITH f AS (SELECT bidder, sum(bid_count) AS n FROM found GROUP BY bidder),
                 w AS (SELECT bidder, count(*) AS n FROM bids GROUP BY bidder)
            SELECT bidder, w.n AS bids, f.n AS counted FROM w FULL JOIN f USING (bidder)
        """
        faults = {
            "missing": f"{counted} WHERE coalesce(f.n, 0) < coalesce(w.n, 0)",
            "duplicated": "SELECT bidder, starttime, count(*) FROM found GROUP BY ALL HAVING count(*) > 1",
            "wrong": f"""
                SELECT bidder, n, counted FROM ({counted} WHERE coalesce(f.n, 0) > coalesce(w.n, 0))
                    AS more(bidder, n, counted)
                UNION ALL SELECT bidder, starttime, endtime FROM found
                WHERE starttime % {WINDOW_MS} <> 0 OR endtime <> starttime + {WINDOW_MS}
            """,
        }
        return self._verdict(faults)

    def _verdict(self, faults: dict[str, str]) -> Verdict:
        ((compared,),) = self._asked("SELECT count(*) FROM found")
        counts, said = {}, []
        for what, sql in faults.items():
            rows = self._engine.execute(sql).df()
            # Of a row that is there three times two are too many.
            counts[what] = int((rows["times"] - 1).sum()) if "times" in rows else len(rows)
            if len(rows):
                said.append(f"{counts[what]:,} {what}, such as\n{rows.head(SHOWN).to_string(index=False)}")
        return Verdict(int(compared), **counts, examples="\n".join(said))
