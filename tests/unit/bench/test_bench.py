"""The bench itself: what it expects of a variant's output, and the rounds that it keeps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench import reporting
from bench.checking import FIRST_MS, SLACK_MS, DifferentResultsError, Orders, compare, expected
from bench.groups import GROUPS, LATE_MS, VARIANTS, Aim, Group, picked
from bench.results import Results
from bench.session_peers import GAP_MS
from bench.sliding_peers import SIZE_MS, SLIDE_MS
from bench.timer_peers import ALARM_MS

COUNT, BATCH, USERS = 150_000, 40_000, 2_000


@pytest.fixture(scope="module")
def orders() -> Orders:
    rng = random.Random(5)
    # Some users are rare, so that there are sessions and silences of all lengths.
    users = [int(rng.random() ** 4 * USERS) for _ in range(COUNT)]
    return Orders(np.array(users), np.array([rng.randrange(1000) for _ in range(COUNT)]), BATCH)


def by_user(orders: Orders) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    pairs = zip(orders.users.tolist(), orders.amounts.tolist(), strict=True)
    for number, (user, amount) in enumerate(pairs):
        found.setdefault(user, []).append((FIRST_MS + number, amount))
    return found


def rows(frame: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(frame.itertuples(index=False, name=None))


def test_sums_and_counts_of_users_are_expected(orders: Orders) -> None:
    wanted = {(user, sum(a for _, a in own), len(own), True) for user, own in by_user(orders).items()}
    assert rows(expected("sum", orders)) == wanted


def test_sessions_that_the_last_watermark_has_passed_must_be_there(orders: Orders) -> None:
    last = FIRST_MS + COUNT - 1 - LATE_MS - SLACK_MS
    wanted = set()
    for user, own in by_user(orders).items():
        begins, before, total = own[0][0], own[0][0], 0
        for at, amount in own:
            if at > before + GAP_MS:
                wanted.add((user, begins, total, before + GAP_MS <= last))
                begins, total = at, 0
            before, total = at, total + amount
        wanted.add((user, begins, total, before + GAP_MS <= last))
    assert rows(expected("session", orders)) == wanted


def test_a_record_counts_in_each_window_that_has_its_time(orders: Orders) -> None:
    last = FIRST_MS + COUNT - 1 - LATE_MS - SLACK_MS
    sums: dict[tuple[int, int], int] = {}
    for user, own in by_user(orders).items():
        for at, amount in own:
            for begins in range(at - at % SLIDE_MS, at - SIZE_MS, -SLIDE_MS):
                sums[user, begins] = sums.get((user, begins), 0) + amount
    wanted = {(*key, total, key[1] + SIZE_MS <= last) for key, total in sums.items()}
    assert rows(expected("sliding", orders)) == wanted


def test_an_alarm_must_fire_if_a_watermark_finds_the_user_silent(orders: Orders) -> None:
    ends = [min(end, COUNT) for end in range(BATCH, COUNT + BATCH, BATCH)]
    wanted = set()
    for user, own in by_user(orders).items():
        for (at, _), following in zip(own, [*(at for at, _ in own[1:]), None], strict=True):
            passed = [
                FIRST_MS + e - 1 - LATE_MS - SLACK_MS
                for e in ends
                if following is None or FIRST_MS + e <= following
            ]
            must = any(watermark >= at + ALARM_MS for watermark in passed)
            if following is None or following - at > ALARM_MS:
                wanted.add((user, at + ALARM_MS, 0, must))
            else:
                assert not must
    assert rows(expected("timers", orders)) == wanted


@pytest.mark.parametrize("work", ["sum", "session", "sliding", "timers"])
def test_what_may_be_open_is_asked_of_nobody_and_refused_to_nobody(orders: Orders, work: str) -> None:
    wanted = expected(work, orders)
    variant = f"{work}-tws-row"
    whole, closed = wanted.drop(columns="must"), wanted[wanted["must"]].drop(columns="must")
    assert compare(variant, wanted, whole) == len(wanted)
    assert compare(variant, wanted, closed) == len(closed)


def test_each_difference_is_told_with_an_example(orders: Orders) -> None:
    wanted = expected("session", orders)
    right = wanted.drop(columns="must")
    other = right.copy()
    other.loc[0, "total"] += 1
    more = pd.DataFrame({"user": [7], "begins": [FIRST_MS - 1], "total": [3]})
    for found, what in [
        (right.drop(index=wanted.index[wanted["must"]][0]), "1 missing"),
        (pd.concat([right, right.head(2)]), "2 twice"),
        (pd.concat([right, more]), "1 not to be there"),
        (other, "1 different"),
    ]:
        with pytest.raises(DifferentResultsError, match=what):
            compare("session-fold", wanted, found)


# -- groups, rounds, reports -----------------------------------------------------------------------------
def test_peers_and_aims_of_a_group_are_among_its_variants() -> None:
    for group in GROUPS.values():
        named = {*group.peers, *(aim.variant for aim in group.aims), *(aim.peer for aim in group.aims)}
        assert named <= set(group.variants)


def test_some_variants_are_a_group_of_their_own() -> None:
    two = picked(["sum-fold", "sum-native"])
    assert (two.peers, two.settings["batch"]) == (("sum-native",), 500_000)
    assert two.aims == (Aim("sum-fold", "sum-native", 0.8),)
    assert picked(VARIANTS[:1] + VARIANTS[-1:]).aims == ()


def test_a_run_goes_on_with_whole_rounds_of_the_same_settings(tmp_path: Path) -> None:
    path, settings = tmp_path / "sum.jsonl", {"events": 10, "variants": ("a",)}
    first = Results(path, settings, resume=True)
    first.add({"a": {"events_per_s": 1.0}})
    with path.open("a") as file:
        file.write('{"a": {"eve')
    again = Results(path, settings, resume=True)
    again.add({"a": {"events_per_s": 2.0}})
    third = Results(path, settings, resume=True)
    assert [one["events_per_s"] for one in third.by_variant(["a"])["a"]] == [1.0, 2.0]
    with pytest.raises(SystemExit, match=r"another run.*events"):
        Results(path, {**settings, "events": 11}, resume=True)
    assert Results(path, settings, resume=False).rounds == []
    assert len(path.read_text().splitlines()) == 1


def test_a_report_says_which_aims_are_met() -> None:
    group = Group(("a", "b"), ("b",), (Aim("a", "b", 2.0), Aim("a", "b", 2.5)))
    results = {
        "a": [{"events_per_s": rate, "cpu_seconds": 2.0} for rate in (30.0, 10.0, 20.0)],
        "b": [{"events_per_s": 10.0, "cpu_seconds": 1.0}] * 3,
    }
    report = reporting.report_of(group, results, 100)
    assert report["variants"]["a"] == {
        "rounds": 3,
        "events_per_s": 20,
        "min": 10,
        "max": 30,
        "events_per_cpu_s": 50,
        "times": {"b": 2.0},
        "times_per_cpu": {"b": 0.5},
    }
    assert reporting.said_of(report) == ["a: 2.00 times b, aim 2: met", "a: 2.00 times b, aim 2.5: missed"]
    page = reporting.markdown_of("some", report, group.peers)
    assert "| a | 20 | 10-30 | 50 | 2.00 | 0.50 |" in page
    assert json.loads(json.dumps(report)) == report
