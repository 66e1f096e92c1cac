"""The queries of Nexmark: sizes of windows, and columns of results as every engine writes them."""

from __future__ import annotations

WINDOW_MS, SLIDE_MS, GAP_MS = 10_000, 2_000, 10_000
CATEGORY = 10
_BID = {"auction": "BIGINT", "bidder": "BIGINT", "price": "BIGINT"}
_TEXTS = {"channel": "VARCHAR", "url": "VARCHAR"}
_TIMED = {"dateTime": "BIGINT", "extra": "VARCHAR"}
_BOUNDS = {"starttime": "BIGINT", "endtime": "BIGINT"}
COLUMNS: dict[str, dict[str, str]] = {
    "q0": {**_BID, **_TIMED},
    "q5": {"auction": "BIGINT", "num": "BIGINT", **_BOUNDS},
    "q7": {**_BID, **_TIMED},
    "q8": {"id": "BIGINT", "name": "VARCHAR", **_BOUNDS},
    "q11": {"bidder": "BIGINT", "bid_count": "BIGINT", **_BOUNDS},
    "q12": {"bidder": "BIGINT", "bid_count": "BIGINT", **_BOUNDS},
    "q17": {
        "auction": "BIGINT",
        "day": "VARCHAR",
        **{
            f"{what}": "BIGINT"
            for what in (
                "total_bids", "rank1_bids", "rank2_bids", "rank3_bids",
                "min_price", "max_price", "avg_price", "sum_price",
            )
        },
    },
    "q18": {**_BID, **_TEXTS, **_TIMED},
    "q20": {
        **_BID, **_TEXTS, **_TIMED,
        "itemName": "VARCHAR", "description": "VARCHAR", "initialBid": "BIGINT", "reserve": "BIGINT",
        "auctionDateTime": "BIGINT", "expires": "BIGINT", "seller": "BIGINT", "category": "BIGINT",
        "auctionExtra": "VARCHAR",
    },
}  # fmt: skip
QUERIES = tuple(COLUMNS)
#: Of queries that update their results: what a result is of, and what is greatest in its last row.
UPDATES = {"q17": (("auction", "day"), "total_bids"), "q18": (("bidder", "auction"), "dateTime")}
