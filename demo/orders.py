"""Seeded orders, and what the job must make of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

USERS = 1_000
PRODUCTS = ("apple", "book", "candle", "drum", "easel", "flute", "globe", "hammer")
_OPENED = datetime(2026, 1, 1, tzinfo=UTC)

#: (user, running total, running count): one row of the job's output. The count makes each row of a user
#: different from the others, so a row that comes twice or not at all always shows in a multiset.
Total = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Order:
    user: str
    product: str
    amount: int
    at: datetime

    @property
    def key(self) -> bytes:
        """The record key: one user's orders sit in one partition, so their order is kept."""
        return self.user.encode()

    @property
    def value(self) -> bytes:
        body = {
            "user": self.user,
            "product": self.product,
            "amount": self.amount,
            "at": self.at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        }
        return json.dumps(body).encode()


def generate(seed: int) -> Iterator[Order]:
    """Yield orders without end; the n-th one depends on `seed` and n only."""
    chance = random.Random(seed)
    at = _OPENED
    while True:
        # Squared, so that some users order a lot and some hardly ever.
        user = int(USERS * chance.random() ** 2)
        # Refunds too: a total that only rises would hide some mix-ups.
        amount = chance.randint(-20, 100)
        at += timedelta(milliseconds=chance.randint(0, 40))
        yield Order(f"user-{user:04}", chance.choice(PRODUCTS), amount, at)


def expected_totals(values: Iterable[bytes]) -> Counter[Total]:
    """Return the multiset of output rows for the input records' values.

    Parameters
    ----------
    values
        Each partition in the order of its offsets; the partitions in any order.
    """
    state: dict[str, tuple[int, int]] = {}
    rows: Counter[Total] = Counter()
    for value in values:
        order = json.loads(value)
        user = order["user"]
        total, count = state.get(user, (0, 0))
        state[user] = total, count = total + order["amount"], count + 1
        rows[user, total, count] += 1
    return rows


def newest_totals(values: Iterable[bytes]) -> Counter[Total]:
    """Return the last row of each user: what an upsert by user leaves, and what the job's state says."""
    newest: dict[str, Total] = {}
    for row in expected_totals(values):
        newest[row[0]] = max(row, newest.get(row[0], row), key=lambda one: one[2])
    return Counter(newest.values())
