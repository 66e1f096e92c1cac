"""What each variant must have written, reckoned from the input without any engine; and whether it did.

Engines differ in what they leave open when the input ends: ours close everything, Spark's what their
watermark has passed. So a result is one that must be there, or one that may be; anything else is wrong. Which
alarms fire depends on where micro-batches end, as it does in every engine that moves watermarks between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.groups import COPY, DOOR, KEYED, LATE_MS
from bench.login_peers import FAILS_BELOW
from bench.rise_peers import WITHIN_MS
from bench.session_peers import GAP_MS
from bench.sliding_peers import SIZE_MS, SLIDE_MS
from bench.timer_peers import ALARM_MS
from bench.unpaid_peers import ORDERS_FROM, PAYS_BELOW

#: The time of the first order, 2026-01-01: they come a millisecond apart.
FIRST_MS = 1_767_225_600_000
#: Watermarks of two engines differ by a millisecond or two, since one waits for the slowest partition.
SLACK_MS = 10
#: What tells results apart, and what they say, by workload.
KEYS = {
    "sum": ["user"],
    "session": ["user", "begins"],
    "sliding": ["user", "begins"],
    "timers": ["user", "begins"],
    "rises": ["user", "begins"],
    "logins": ["user", "begins"],
    "unpaid": ["user", "begins"],
}
VALUES = {work: ["total", "orders"] if work == "sum" else ["total"] for work in KEYS}
SHOWN = 5


class DifferentResultsError(Exception):
    """A variant has not done the work that it is measured with."""


@dataclass(frozen=True)
class Orders:
    """The input: the n-th order has the n-th time."""

    users: np.ndarray
    amounts: np.ndarray
    batch: int

    @property
    def watermark_ms(self):
        """The last one, by which every engine has emitted what is over."""
        return FIRST_MS + len(self.users) - 1 - LATE_MS - SLACK_MS

    def by_user(self):
        """Return users, times and amounts, sorted by users and times."""
        order = np.argsort(self.users, kind="stable")
        return self.users[order], order + FIRST_MS, self.amounts[order]


def work_of(variant):
    """Return the name of what a variant does; None where it writes nothing that could be read."""
    if variant in KEYED:
        return variant.partition("-")[0]
    if variant in COPY:
        return "copy"
    if variant in DOOR:
        return None if DOOR[variant][1] == "noop" else "copy"
    return "sum"


def expected(work, orders):
    """Return all results that may be there, as a frame; `must` says which must."""
    reckoned = {
        "sum": _sums,
        "session": _sessions,
        "sliding": _windows,
        "timers": _alarms,
        "rises": _rises,
        "logins": _logins,
        "unpaid": _unpaid,
    }
    return reckoned[work](orders)


def _sums(orders):
    frame = pd.DataFrame({"user": orders.users, "total": orders.amounts})
    found = frame.groupby("user")["total"].agg(total="sum", orders="count").reset_index()
    return found.assign(must=True)


def _sessions(orders):
    users, at, amounts = orders.by_user()
    apart = (np.diff(users) != 0) | (np.diff(at) > GAP_MS)
    firsts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    lasts = np.concatenate((firsts[1:] - 1, [len(users) - 1]))
    return pd.DataFrame(
        {
            "user": users[firsts],
            "begins": at[firsts],
            "total": np.add.reduceat(amounts, firsts),
            "must": at[lasts] + GAP_MS <= orders.watermark_ms,
        }
    )


def _windows(orders):
    users, at, amounts = orders.by_user()
    slices = pd.DataFrame({"user": users, "begins": at // SLIDE_MS * SLIDE_MS, "total": amounts})
    slices = slices.groupby(["user", "begins"], as_index=False)["total"].sum()
    shifted = [slices.assign(begins=slices["begins"] - back) for back in range(0, SIZE_MS, SLIDE_MS)]
    found = pd.concat(shifted).groupby(["user", "begins"], as_index=False)["total"].sum()
    return found.assign(must=found["begins"] + SIZE_MS <= orders.watermark_ms)


def _rises(orders):
    users, at, amounts = orders.by_user()
    is_one = (np.diff(users) == 0) & (np.diff(amounts) > 0) & (np.diff(at) < WITHIN_MS)
    firsts, seconds = np.flatnonzero(is_one), np.flatnonzero(is_one) + 1
    found = {"user": users[firsts], "begins": at[firsts], "total": amounts[seconds]}
    return pd.DataFrame({**found, "must": at[seconds] <= orders.watermark_ms})


def _logins(orders):
    users, at, amounts = orders.by_user()
    fails = amounts < FAILS_BELOW
    first = np.arange(len(users) - 3)
    is_one = ~fails[3:] & (users[:-3] == users[3:]) & (at[3:] - at[:-3] < WITHIN_MS)
    for behind in range(3):
        is_one &= fails[behind : len(users) - 3 + behind]
    first = first[is_one]
    found = {"user": users[first], "begins": at[first], "total": amounts[first + 3]}
    return pd.DataFrame({**found, "must": at[first + 3] <= orders.watermark_ms})


def _unpaid(orders):
    users, at, amounts = orders.by_user()
    opened, pays = np.flatnonzero(amounts >= ORDERS_FROM), np.flatnonzero(amounts < PAYS_BELOW)
    following = np.searchsorted(pays, opened)
    paid = np.append(pays, 0)[following]
    is_paid = (following < len(pays)) & (users[paid] == users[opened]) & (at[paid] - at[opened] < WITHIN_MS)
    own = opened[~is_paid]
    found = {"user": users[own], "begins": at[own], "total": amounts[own]}
    return pd.DataFrame({**found, "must": at[own] + WITHIN_MS <= orders.watermark_ms})


def _alarms(orders):
    users, at, _ = orders.by_user()
    count = len(users)
    following = np.append(at[1:], FIRST_MS + count)
    following[np.append(np.diff(users) != 0, True)] = FIRST_MS + count
    last = following == FIRST_MS + count
    # The newest watermark before the next order of this user: that of the micro-batch before its own.
    ends = np.where(last, count, (following - FIRST_MS) // orders.batch * orders.batch)
    watermarks = FIRST_MS + ends - 1 - LATE_MS - SLACK_MS
    silent = last | (following - at > ALARM_MS)
    due = at + ALARM_MS
    return pd.DataFrame({"user": users, "begins": due, "total": 0, "must": watermarks >= due})[silent]


def compare(variant, wanted, found):
    """Raise unless a variant found all that must be there, once, and nothing that may not.

    Returns how many results were compared.
    """
    keys, values = KEYS[work_of(variant)], VALUES[work_of(variant)]
    faults = {"twice": found[found.duplicated(keys)]}
    both = wanted.merge(found, on=keys, how="outer", suffixes=("", "_found"), indicator="where")
    faults["missing"] = both[(both["where"] == "left_only") & (both["must"] == True)]  # noqa: E712 - nulls
    faults["not to be there"] = both[both["where"] == "right_only"]
    same = np.logical_and.reduce([both[name] == both[f"{name}_found"] for name in values])
    faults["different"] = both[(both["where"] == "both") & ~same]
    said = [
        f"{len(rows):,} {what}, such as\n{rows.head(SHOWN).to_string(index=False)}"
        for what, rows in faults.items()
        if len(rows)
    ]
    if said:
        raise DifferentResultsError(f"{variant} has not done the same work as the others: " + "\n".join(said))
    return len(found)


def check(variant, orders, answer):
    """Check what a worker has read back of its variant's output; returns how many results there were."""
    work = work_of(variant)
    if work == "copy":
        if answer["found"] != answer["wanted"]:
            raise DifferentResultsError(f"{variant} copied {answer['found']}, of {answer['wanted']}")
        return answer["found"]["records"]
    found = pd.read_parquet(answer["results"])
    found["user"] = found["user"].str.removeprefix("user-").astype(np.int64)
    return compare(variant, expected(work, orders), found)
