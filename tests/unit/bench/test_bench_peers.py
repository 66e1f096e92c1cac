"""Spark's ways in the bench, without Spark: micro-batch by micro-batch they give what the input comes to.

The order of a micro-batch is Spark's: rows of each key, then timers up to the watermark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from bench import (
    login_peers,
    rise_peers,
    session_peers,
    sliding_peers,
    sum_peers,
    timer_peers,
    unpaid_peers,
)
from bench.checking import FIRST_MS, Orders, compare, expected
from bench.groups import LATE_MS

# What stands in for Spark is its own, from 4.2 on; nothing is measured under an earlier version.
_InMemoryStatefulProcessorHandle = pytest.importorskip(
    "pyspark.sql.streaming.tws_tester"
)._InMemoryStatefulProcessorHandle

COUNT, BATCH, USERS = 200_000, 50_000, 12_000
#: Of one micro-batch: the rows of each user as a frame.
Groups = dict[int, pd.DataFrame]


@pytest.fixture(scope="module")
def orders() -> Orders:
    rng = random.Random(3)
    # Few that come often and many that come seldom: sessions and silences, across micro-batches too.
    users = [rng.randrange(20) if rng.random() < 0.02 else rng.randrange(USERS) for _ in range(COUNT)]
    # Most events are left out again, since a call per user and micro-batch is slow.
    kept = [user if user < 150 else USERS for user in users]
    return Orders(np.array(kept), np.array([rng.randrange(1000) for _ in range(COUNT)]), BATCH)


def batches(orders: Orders, column: str) -> Iterator[tuple[Groups, int]]:
    """Yield the users' rows of each micro-batch and its watermark; in the end one without rows."""
    watermark_ms = 0
    at = np.arange(COUNT) + FIRST_MS
    times = at if column == "at_ms" else at.astype("datetime64[ms]")
    frame = pd.DataFrame({"user": orders.users, column: times, "amount": orders.amounts})
    for begin in range(0, COUNT, BATCH):
        own = frame[begin : begin + BATCH]
        yield {user: rows for user, rows in own[own["user"] < USERS].groupby("user")}, watermark_ms
        watermark_ms = FIRST_MS + begin + len(own) - 1 - LATE_MS
    yield {}, watermark_ms


def of_rows(processor: StatefulProcessor, orders: Orders, *, in_pandas: bool) -> pd.DataFrame:
    """Run a processor of transformWithState."""
    handle = _InMemoryStatefulProcessorHandle("EventTime")
    processor.init(handle)
    found: list[Any] = []
    for groups, watermark_ms in batches(orders, "at_ms"):
        handle.setWatermark(watermark_ms)
        now = TimerValues(-1, watermark_ms)
        for user, rows in groups.items():
            handle.setGroupingKey((user,))
            # In two parts, as Spark hands on large groups.
            frames = [rows[: len(rows) // 2 + 1], rows[len(rows) // 2 + 1 :]]
            parts = [one for one in frames if len(one)]
            given = parts if in_pandas else [Row(**row) for row in rows.to_dict("records")]
            found += processor.handleInputRows((user,), iter(given), now)
        for user in list(handle._timers.getAllKeysWithTimers()):
            handle.setGroupingKey(user)
            for time_ms in [one for one in handle.listTimers() if one <= watermark_ms]:
                info = ExpiredTimerInfo(time_ms)
                found += processor.handleExpiredTimer(key=user, timerValues=now, expiredTimerInfo=info)
                handle.deleteTimer(time_ms)
    return _together(found) if in_pandas else pd.DataFrame([row.asDict() for row in found])


def of_groups(function: Callable[..., Any], orders: Orders, *, is_timed: bool) -> pd.DataFrame:
    """Run a function of applyInPandasWithState, a group per key."""
    timeout = GroupStateTimeout.EventTimeTimeout if is_timed else GroupStateTimeout.NoTimeout
    kept: dict[int, tuple[Row, int]] = {}
    found: list[pd.DataFrame] = []

    def call(user: int, frames: list[pd.DataFrame], watermark_ms: int, *, has_timed_out: bool) -> None:
        value, due_ms = kept.get(user, (Row(), -1))
        here = user in kept
        facts = (0, watermark_ms, timeout, has_timed_out, is_timed, here, False, False, due_ms)
        state = GroupState(value, *facts, b"", T.StructType())
        found.extend(function((user,), iter(frames), state))
        kept.pop(user, None)
        if state.exists:
            kept[user] = Row(*state.get), state._timeout_timestamp

    for groups, watermark_ms in batches(orders, "at"):
        for user, rows in groups.items():
            call(user, [rows], watermark_ms, has_timed_out=False)
        for user, (_, due_ms) in list(kept.items()):
            if is_timed and user not in groups and due_ms <= watermark_ms:
                call(user, [], watermark_ms, has_timed_out=True)
    return _together(found)


def _together(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)


PEERS: dict[str, tuple[Any, type[StatefulProcessor], type[StatefulProcessor]]] = {
    "sum": (sum_peers.per_key, sum_peers.RowTotal, sum_peers.PandasTotal),
    "session": (session_peers.per_key, session_peers.RowSession, session_peers.PandasSession),
    "sliding": (sliding_peers.per_key, sliding_peers.RowSliding, sliding_peers.PandasSliding),
    "timers": (timer_peers.per_key, timer_peers.RowSilence, timer_peers.PandasSilence),
    "rises": (rise_peers.per_key, rise_peers.RowRise, rise_peers.PandasRise),
    "logins": (None, login_peers.RowLogin, login_peers.PandasLogin),
    "unpaid": (None, unpaid_peers.RowUnpaid, unpaid_peers.PandasUnpaid),
}


@pytest.mark.parametrize(
    ("work", "engine"),
    [
        (work, engine)
        for work, (per_key, *_) in PEERS.items()
        for engine in ("per-key", "tws-row", "tws-pandas")
        if per_key is not None or engine != "per-key"
    ],
)
def test_a_peer_gives_what_the_input_comes_to(orders: Orders, work: str, engine: str) -> None:
    function, in_rows, in_pandas = PEERS[work]
    if engine == "per-key":
        found = of_groups(function, orders, is_timed=work != "sum")
    else:
        is_pandas = engine == "tws-pandas"
        found = of_rows((in_pandas if is_pandas else in_rows)(), orders, in_pandas=is_pandas)
    if work == "sum":
        found = found.sort_values("orders").groupby("user").tail(1)
    wanted = expected(work, orders)
    wanted = wanted[wanted["user"] < USERS]
    assert compare(f"{work}-{engine}", wanted, found) > 40
