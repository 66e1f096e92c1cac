"""What the kept job has to emit over so many files, computed from its input and nothing else."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.golden import job
from tests.golden.orders import Order, Payment, orders, payments

#: Time, user, value.
Timed = tuple[int, str, Any]
Rows = Counter[tuple[Any, ...]]
#: The watermark behind all input.
_OVER = 1 << 62


def expected(files: int) -> dict[str, Rows]:
    """Return the rows of each output when the input is over and everything has fired."""
    ordered = [one for file in range(files) for one in orders(file)]
    paid = [one for file in range(files) for one in payments(file)]
    totals = list(_paid(ordered, paid))
    return {
        "delta": Rows(_states(ordered)),
        "alarms": Rows((user, at_ms + job.ALARM_MS) for user, _, _, at_ms in ordered),
        "files": Rows(_windows(ordered)),
        "ledger": Rows(row for row in totals if row[-1] % job.REFUSED_ONE_IN),
        "refused": Rows(("ledger", "divisible", *row) for row in totals if row[-1] % job.REFUSED_ONE_IN == 0),
    }


def _by_user(ordered: Iterable[Order]) -> dict[str, list[Order]]:
    found: dict[str, list[Order]] = defaultdict(list)
    for one in ordered:
        found[one[0]].append(one)
    return found


def said(before: list[Order], order: Order) -> dict[str, Any]:
    """Return what the function with all states says of an order that comes behind others of its user."""
    so_far = [*before, order]
    amounts = [amount for _, _, amount, _ in so_far]
    return {
        "before": [before[-1][1], before[-1][2]] if before else None,
        "seen": [one[1] for one in so_far],
        "counts": [list(pair) for pair in sorted(Counter(amounts).items())],
        "largest": max(amounts),
        "mean": sum(amounts) // len(amounts),
        "kept": len(so_far),
        "short": None,
    }


def _states(ordered: list[Order]) -> Iterator[tuple[Any, ...]]:
    limited = dict(_limited(ordered))
    for user, own in _by_user(ordered).items():
        for place, order in enumerate(own):
            n = order[1]
            yield user, "order", n, json.dumps({"limited": limited[n], **said(own[:place], order)})
            if n < job.CALLED_BELOW:
                yield user, "call", n, None


def _limited(ordered: list[Order]) -> Iterator[tuple[int, list[Any]]]:
    """Yield what operators in front have said of each order."""
    limits = {name: most for name, most, _ in job.RULES}
    above: Counter[str] = Counter()
    numbers: dict[str, list[int]] = defaultdict(list)
    for place, (user, n, amount, _) in enumerate(ordered):
        recent = sum(other == user for other, _, _, _ in ordered[max(0, place - 5) : place])
        above[user] += amount > limits.get(user, 10)
        numbers[user].append(n)
        yield n, [recent, above[user], f"{numbers[user][0]:04d}", len(numbers[user])]


def _paid(ordered: list[Order], paid: list[Payment]) -> Iterator[tuple[str, int, int]]:
    totals: Counter[str] = Counter()
    for user, n, _, at_ms in ordered:
        for payer, _, amount, paid_ms in paid:
            if payer == user and at_ms <= paid_ms <= at_ms + job.NEAR_MS:
                totals[user] += amount
                yield user, n, totals[user]


# -- windows ------------------------------------------------------------------------------------------


def doubled(ordered: list[Order]) -> list[Timed]:
    """Return the results of the first windows."""
    amounts = [(at_ms, user, amount) for user, _, amount, at_ms in ordered]
    return assigned(amounts, sum, 2 * job.SIZE_MS, job.SIZE_MS)


def tumbled(ordered: list[Order], watermark_ms: int) -> list[Timed]:
    """Return what the second windows have of the first ones that have fired."""
    fired = [one for one in doubled(ordered) if one[0] <= watermark_ms]
    return assigned(fired, sum, 2 * job.SIZE_MS, 2 * job.SIZE_MS)


def merged(ordered: list[Order], watermark_ms: int) -> list[Timed]:
    """Return what the third windows have of the second ones that have fired."""
    fired = [one for one in tumbled(ordered, watermark_ms) if one[0] <= watermark_ms]
    return [
        (until_ms - 1, user, (sum(values), max(values)))
        for user, _, until_ms, values in sessions(fired, job.GAP_MS)
    ]


def waiting(ordered: list[Order], watermark_ms: int) -> set[tuple[str, tuple[Any, ...]]]:
    """Return users and contents of the last windows, fired or not, that late elements may still come to."""
    fired = [one for one in merged(ordered, watermark_ms) if one[0] <= watermark_ms]
    found = sessions(fired, job.LONG_GAP_MS)
    late_ms = watermark_ms - job.LATENESS_MS
    return {(user, tuple(values)) for user, _, until_ms, values in found if until_ms - 1 > late_ms}


def _windows(ordered: list[Order]) -> Iterator[tuple[Any, ...]]:
    for user, since_ms, until_ms, pairs in sessions(merged(ordered, _OVER), job.LONG_GAP_MS):
        sums, most = zip(*sorted(pairs), strict=True)
        yield user, since_ms, until_ms, sums, most


def assigned(
    elements: Iterable[Timed], fold: Callable[[list[Any]], Any], size_ms: int, slide_ms: int
) -> list[Timed]:
    """Return the results of windows that slide or tumble, with their times."""
    windows: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for at_ms, user, value in sorted(elements, key=lambda one: one[:2]):
        start_ms = at_ms // slide_ms * slide_ms
        while start_ms > at_ms - size_ms:
            windows[start_ms + size_ms - 1, user].append(value)
            start_ms -= slide_ms
    return [(at_ms, user, fold(values)) for (at_ms, user), values in sorted(windows.items())]


def sessions(elements: Iterable[Timed], gap_ms: int) -> list[tuple[str, int, int, list[Any]]]:
    """Return user, bounds and values of each session."""
    found: list[tuple[str, int, int, list[Any]]] = []
    for at_ms, user, value in sorted(elements, key=lambda one: (one[1], one[0])):
        if found and found[-1][0] == user and at_ms <= found[-1][2]:
            _, start_ms, _, values = found.pop()
            found.append((user, start_ms, at_ms + gap_ms, [*values, value]))
        else:
            found.append((user, at_ms, at_ms + gap_ms, [value]))
    return found
