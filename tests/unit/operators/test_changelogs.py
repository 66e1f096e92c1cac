"""Aggregates over changelogs, row by row, against what the rows that are there come to."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest

from flinkish_spark import AggregateColumn, AggregateFunction, Emit, Fold
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.testing import ProgramHarness
from tests.support.effort import seeds

ORDERS = "id LONG, user STRING, amount LONG, price DECIMAL(10,2), x DOUBLE, at TIMESTAMP, _row_kind STRING"
COLUMNS = (
    AggregateColumn("n", Fold.COUNT),
    AggregateColumn("amounts", Fold.COUNT, "amount"),
    AggregateColumn("total", Fold.SUM, "amount"),
    AggregateColumn("paid", Fold.SUM, "price"),
    AggregateColumn("xs", Fold.SUM, "x"),
    AggregateColumn("least", Fold.MIN, "amount"),
    AggregateColumn("most", Fold.MAX, "x"),
    AggregateColumn("last", Fold.MAX, "at"),
)
T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def folded(orders: Any) -> Any:
    return orders.key_by("user").fold(*COLUMNS, row_kind="_row_kind", uid="totals")


def order(kind: str, user: str, amount: int | None = 1, price: str | None = "1.00", x: float | None = 0.5,
          seconds: int = 0) -> tuple[Any, ...]:  # fmt: skip
    money = None if price is None else Decimal(price)
    return (0, user, amount, money, x, T0 + dt.timedelta(seconds=seconds), kind)


def came(harness: Any, *elements: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    for element in elements:
        harness.push(element)
    return [tuple(row) for row in harness.take().rows]


def test_each_row_changes_what_was_said() -> None:
    harness = ProgramHarness(folded, ORDERS)
    first = ("ann", 1, 1, 5, Decimal("1.00"), 0.5, 5, 0.5, T0)
    assert came(harness, order("+I", "ann", 5)) == [(*first, "+I")]
    second = ("ann", 2, 2, 8, Decimal("3.50"), 2.5, 3, 2.0, T0 + dt.timedelta(seconds=9))
    assert came(harness, order("+I", "ann", 3, "2.50", 2.0, 9)) == [(*first, "-U"), (*second, "+U")]
    # The update of the second row: it is taken back, and another one comes.
    third = ("ann", 2, 1, 5, Decimal("1.00"), 1.5, 5, 1.0, T0)
    found = came(harness, order("-U", "ann", 3, "2.50", 2.0, 9), order("+U", "ann", None, None, 1.0))
    assert found == [(*second, "-U"), (*first, "+U"), (*first, "-U"), (*third, "+U")]
    # An update that moves a row to another key.
    ben = ("ben", 1, 1, 5, Decimal("1.00"), 0.5, 5, 0.5, T0)
    left = ("ann", 1, 0, None, None, 1.0, None, 1.0, T0)
    found = came(harness, order("-U", "ann", 5), order("+U", "ben", 5))
    assert found == [(*third, "-U"), (*left, "+U"), (*ben, "+I")]
    assert came(harness, order("-D", "ann", None, None, 1.0)) == [(*left, "-D")]
    # Nothing is known of the key any more, so it begins anew; and what nobody knows cannot go.
    assert came(harness, order("-D", "ann", 7)) == []
    assert came(harness, order("+I", "ann", 5)) == [(*first, "+I")]


def expected(rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """What the rows of a key come to."""
    here = list(rows)
    if not here:
        return None
    columns = [[row[at] for row in here if row[at] is not None] for at in (2, 3, 4, 5)]
    amounts, prices, xs, times = columns

    def greatest(values: list[Any]) -> Any:
        # NaN is greater than all numbers.
        return max(values, key=lambda v: (isinstance(v, float) and math.isnan(v), v), default=None)

    return (
        *(here[0][1], len(here), len(amounts)),
        *(sum(amounts) if amounts else None, sum(prices) if prices else None, sum(xs) if xs else None),
        *(min(amounts, default=None), greatest(xs), max(times)),
    )


def text(row: tuple[Any, ...] | None) -> str:
    return repr(row)


@pytest.mark.parametrize("seed", seeds(8))
def test_any_changes_come_to_what_the_rows_that_are_left_come_to(seed: int) -> None:
    """Also behind a crash; applied as a sink applies it, the changelog is the table."""
    drawn, there, table = random.Random(seed), Counter[tuple[Any, ...]](), dict[str, tuple[Any, ...]]()
    harness = ProgramHarness(folded, ORDERS)
    for step in range(150):
        rows = sorted(there.elements(), key=repr)
        if rows and drawn.random() < 0.45:
            row, kind = drawn.choice(rows), drawn.choice(["-U", "-D"])
            there[row] -= 1
            there += Counter()
        else:
            kind = drawn.choice(["+I", "+U"])
            row = order(
                "",
                drawn.choice("ab"),
                drawn.choice([None, -3, 0, 2, 2]),
                drawn.choice([None, "0.10", "-7.25"]),
                drawn.choice([None, 0.5, -2.0, 0.25, math.inf, -math.inf, math.nan]),
                drawn.randrange(3),
            )
            row = tuple(None if v is None else math.nan if v != v else v for v in row)
            there[row] += 1
        for one in came(harness, (*row[:-1], kind)):
            *fields, what = one
            if what in ("+I", "+U"):
                table[fields[0]] = tuple(fields)
            else:
                assert text(table.pop(fields[0])) == text(tuple(fields)), "it takes back what it said"
        for user in "ab":
            wanted = expected(row for row in there.elements() if row[1] == user)
            assert text(table.get(user)) == text(wanted), (step, kind, row)
        if step % 50 == 49:
            harness.snapshot()
            harness.crash()


class Longest(AggregateFunction):
    """The names of all users, in their order, with nothing to go by but what came and went."""

    def create_accumulator(self) -> Any:
        return ([],)

    def add(self, value: Any, accumulator: Any) -> Any:
        return (sorted([*accumulator[0], value.user]),)

    def retract(self, value: Any, accumulator: Any) -> Any:
        left = list(accumulator[0])
        left.remove(value.user)
        return (left,)

    def get_result(self, accumulator: Any) -> Any:
        return {"users": ",".join(accumulator[0])}


def test_an_aggregate_of_the_user_s_takes_rows_back() -> None:
    def program(orders: Any) -> Any:
        return orders.key_by("id").aggregate(
            Longest(), accumulator="names ARRAY<STRING>", output="users STRING", row_kind="_row_kind", uid="x"
        )

    harness = ProgramHarness(program, ORDERS)
    assert came(harness, order("+I", "b"), order("+I", "a")) == [("b", "+I"), ("b", "-U"), ("a,b", "+U")]
    assert came(harness, order("-D", "b")) == [("a,b", "-U"), ("a", "+U")]
    assert came(harness, order("-U", "a"), order("+U", "a")) == [("a", "-D"), ("a", "+I")]


class Amounts(AggregateFunction):
    """All amounts, in one list that is changed in place and given away as it is."""

    def create_accumulator(self) -> Any:
        return []

    def add(self, value: Any, accumulator: Any) -> Any:
        accumulator.append(value.amount)
        return accumulator

    def retract(self, value: Any, accumulator: Any) -> Any:
        accumulator.remove(value.amount)
        return accumulator

    def get_result(self, accumulator: Any) -> Any:
        return {"amounts": accumulator}


def test_an_accumulator_may_be_changed_in_place() -> None:
    def program(orders: Any) -> Any:
        told = {"accumulator": "ARRAY<LONG>", "output": "amounts ARRAY<LONG>"}
        return orders.key_by("user").aggregate(Amounts(), **told, row_kind="_row_kind", uid="x")

    harness = ProgramHarness(program, ORDERS)
    one, two = order("+I", "ann", 1), order("+I", "ann", 2)
    harness.push_all([(row, 0) for row in (one, two, (*one[:-1], "-D"), (*two[:-1], "-D"))])
    assert [tuple(row) for row in harness.take().rows] == [
        ([1], "+I"),
        *(([1], "-U"), ([1, 2], "+U")),
        *(([1, 2], "-U"), ([2], "+U")),
        ([2], "-D"),
    ]


def test_a_decimal_is_taken_back_with_all_its_digits() -> None:
    def program(paid: Any) -> Any:
        total = AggregateColumn("total", Fold.SUM, "price")
        return paid.key_by("user").fold(total, row_kind="_row_kind", uid="x")

    harness = ProgramHarness(program, "user STRING, price DECIMAL(38,2), _row_kind STRING")
    much, little = Decimal("123456789012345678901234567890123.45"), Decimal("1.00")
    came(harness, ("ann", much, "+I"), ("ann", little, "+I"))
    found = came(harness, ("ann", much, "-D"))
    both = Decimal("123456789012345678901234567890124.45")
    assert found == [("ann", both, "-U"), ("ann", little, "+U")]


def test_upserts_become_whole_changes() -> None:
    def program(users: Any) -> Any:
        return users.key_by("id").changelog_normalize(uid="users")

    harness = ProgramHarness(program, "id LONG, _row_kind STRING, name STRING")
    assert came(harness, (1, "+U", "ann")) == [(1, "+I", "ann")]
    assert came(harness, (1, "+U", "ann")) == []
    assert came(harness, (1, "+U", "eve")) == [(1, "-U", "ann"), (1, "+U", "eve")]
    assert came(harness, (1, "-D", None)) == [(1, "-D", "eve")]
    assert came(harness, (1, "-D", None), (2, "-D", None)) == []
    assert came(harness, (1, "+U", None)) == [(1, "+I", None)]


@pytest.mark.parametrize("kind", ["", "I", None])
def test_what_is_no_kind_ends_the_job(kind: Any) -> None:
    harness = ProgramHarness(folded, ORDERS)
    with pytest.raises(ValueError, match="no row kind"):
        harness.push(order(kind, "ann"))


def test_what_cannot_be_taken_back_is_refused() -> None:
    def over(*columns: Any, **more: Any) -> Any:
        return lambda orders: orders.key_by("user").fold(
            *columns, **{"row_kind": "_row_kind", "uid": "x", **more}
        )

    for column in (AggregateColumn("f", Fold.FIRST, "amount"), AggregateColumn("s", Fold.SUM, "user")):
        with pytest.raises(ConfigError, match=r"aggregate '[fs]' is Fold"):
            ProgramHarness(over(column), ORDERS)
    with pytest.raises(ConfigError, match="does not have"):
        ProgramHarness(over(AggregateColumn("f", Fold.MIN, "no")), ORDERS)
    with pytest.raises(SchemaError, match="'kind'"):
        ProgramHarness(over(AggregateColumn("n", Fold.COUNT), row_kind="kind"), ORDERS)

    class NoRetract(Longest):
        retract = None

    def aggregated(function: Any, **more: Any) -> Any:
        told = {"accumulator": "names ARRAY<STRING>", "output": "users STRING", "row_kind": "_row_kind"}
        told["uid"] = "x"
        return lambda orders: orders.key_by("id").aggregate(function, **told, **more)

    with pytest.raises(ConfigError, match="retract"):
        ProgramHarness(aggregated(NoRetract()), ORDERS)
    with pytest.raises(ConfigError, match="once per key"):
        ProgramHarness(aggregated(Longest(), emit=Emit.PER_KEY), ORDERS)
