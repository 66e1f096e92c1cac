"""Orders come out the same for the same seed, and the recomputation is the running total per user."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

from demo.orders import Order, expected_totals, generate


def first(count: int, seed: int = 7) -> list[Order]:
    return list(islice(generate(seed), count))


def test_an_order_depends_on_seed_and_position_only() -> None:
    assert first(10) == first(1_000)[:10]
    assert first(10) != first(10, seed=8)


def test_the_key_is_the_user() -> None:
    for order in first(100):
        assert order.key.decode() == order.user == json.loads(order.value)["user"]


def test_the_expected_rows_are_running_totals_in_input_order() -> None:
    orders = [("a", 5), ("b", 1), ("a", -2)]
    values = [json.dumps({"user": user, "amount": amount}).encode() for user, amount in orders]
    assert expected_totals(values) == Counter({("a", 5, 1): 1, ("b", 1, 1): 1, ("a", 3, 2): 1})


def test_partitions_may_be_read_one_after_the_other() -> None:
    values = [order.value for order in first(2_000)]
    by_user = sorted(values, key=lambda value: json.loads(value)["user"])
    assert expected_totals(values) == expected_totals(by_user)
    assert expected_totals(values).total() == 2_000
