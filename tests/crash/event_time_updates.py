"""Windows of `tests/crash/event_time_app.py` that fire again, in pairs of count windows: what is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from tests.crash.event_time_app import LAST, LATE_BY_MS, LATE_ONE_IN, WINDOW_MS

#: Of whom, and when it begins.
Window = tuple[str, int]


class Reading(NamedTuple):
    """One record."""

    user: str
    n: int
    at: int


class Firing(NamedTuple):
    """What a window had when it fired."""

    user: str
    begin: int
    numbers: tuple[int, ...]


class Update(NamedTuple):
    """A firing, and the firing of the same user before it."""

    now: Firing
    before: Firing | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Update:
        """Return what a record says."""
        user, begin_before = row["user"], row["begin_before"]
        assert row["end_ms"] == row["begin_ms"] + WINDOW_MS
        before = None
        if begin_before is not None:
            before = Firing(user, begin_before, tuple(row["numbers_before"]))
        return cls(Firing(user, row["begin_ms"], tuple(row["numbers"])), before)


def told(reading: Reading) -> Reading:
    """Return a reading as the windows get it: now and then one that is late."""
    is_late = reading.user != LAST and reading.n % LATE_ONE_IN == 0
    return reading._replace(at=reading.at - LATE_BY_MS) if is_late else reading


def expected_windows(given: Iterable[Reading]) -> dict[Window, tuple[int, ...]]:
    """Recompute what each window has in the end."""
    found: dict[Window, list[int]] = {}
    for user, n, at in map(told, given):
        if user != LAST:
            found.setdefault((user, at - at % WINDOW_MS), []).append(n)
    return {window: tuple(sorted(numbers)) for window, numbers in found.items()}


def last_firings(updates: Iterable[Update]) -> dict[Window, tuple[int, ...]]:
    """Return the greatest firing of each window."""
    by_size = sorted((update.now for update in updates), key=lambda firing: len(firing.numbers))
    return {(user, begin): numbers for user, begin, numbers in by_size}


def updates_that_are_wrong(given: Iterable[Reading], updates: list[Update]) -> list[str]:
    """Return what is not as it must be; empty if all is right.

    A window fires at its end, and then once for each late reading, each of which adds one number. So firings
    are all different, and each but a user's last one is the one before of just one other.
    """
    expected, last = expected_windows(given), last_firings(updates)
    said = [f"{window}: {last.get(window)}" for window in expected if last.get(window) != expected[window]]
    said += [f"{window} should not be there" for window in last.keys() - expected.keys()]
    firings = Counter(update.now for update in updates)
    said += [f"{firing} x{count}" for firing, count in firings.items() if count > 1]
    sizes: dict[Window, list[Firing]] = {}
    for firing in sorted(firings, key=lambda firing: len(firing.numbers)):
        sizes.setdefault((firing.user, firing.begin), []).append(firing)
    for own in sizes.values():
        for less, more in pairwise(own):
            if len(more.numbers) != len(less.numbers) + 1 or not set(less.numbers) < set(more.numbers):
                said.append(f"{less} and then {more}")
    return said + _pairs_that_are_wrong(updates, firings)


def _pairs_that_are_wrong(updates: list[Update], firings: Counter[Firing]) -> list[str]:
    befores = Counter(update.before for update in updates if update.before is not None)
    said = [f"{before} was never there" for before in befores.keys() - firings.keys()]
    said += [f"{before} is before x{count}" for before, count in befores.items() if count > 1]
    users = {firing.user for firing in firings}
    firsts = Counter(update.now.user for update in updates if update.before is None)
    lasts = Counter(firing.user for firing in firings.keys() - befores.keys())
    for user in users:
        if (firsts[user], lasts[user]) != (1, 1):
            said.append(f"{user}: {firsts[user]} first firings, {lasts[user]} last ones")
    return said
