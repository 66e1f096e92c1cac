"""Nexmark without an engine: the same events from the same seed, and a judge that finds what is wrong."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import pandas as pd
import pytest

from bench.nexmark import engines, recovery, report
from bench.nexmark.generator import FIRST_ID, FIRST_MS, Events, Model, events
from bench.nexmark.queries import COLUMNS, GAP_MS, QUERIES, WINDOW_MS
from bench.nexmark.truth import Truth

MODEL = Model(events=60_000, active=300, seed=7)


@pytest.fixture(scope="module")
def parts() -> list[Events]:
    return list(events(MODEL))


@pytest.fixture(scope="module")
def truth(parts: list[Events]) -> Truth:
    return Truth(
        *(pd.concat([getattr(part, name) for part in parts]) for name in ("persons", "auctions", "bids"))
    )


def digest(model: Model) -> str:
    return hashlib.sha256(b"\n".join(value for part in events(model) for value in part.values)).hexdigest()


def test_events_are_the_same_on_every_machine() -> None:
    wanted = "3501b4e73fc877e08d89b6c4b6a3335ad4c5719f237c700c3aef65a80a2f046a"
    assert digest(Model(events=20_000, active=1_000, seed=1)) == wanted
    assert digest(Model(events=20_000, active=1_000, seed=2)) != wanted


def test_a_longer_stream_begins_with_a_shorter_one(parts: list[Events]) -> None:
    shorter = next(events(Model(10_000, MODEL.active, MODEL.seed)))
    assert shorter.values == parts[0].values[:10_000]


def test_json_says_what_the_tables_say(parts: list[Events]) -> None:
    said: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for value in parts[0].values:
        event = json.loads(value)
        kind = ("person", "auction", "bid")[event["event_type"]]
        said[kind].append(event[kind])
    for kind, rows in said.items():
        assert rows == getattr(parts[0], f"{kind}s").to_dict("records")
    assert {kind: len(rows) for kind, rows in said.items()} == {
        "person": 1_200,
        "auction": 3_600,
        "bid": 55_200,
    }


def test_bids_are_for_auctions_and_by_persons_that_are_active(parts: list[Events]) -> None:
    first_auction = parts[0].auctions["id"].iloc[0]
    bids = parts[0].bids
    assert first_auction == 3 * MODEL.active + FIRST_ID
    assert bids["auction"].min() >= first_auction - MODEL.active - 100
    assert bids["dateTime"].is_unique
    assert bids["dateTime"].min() == FIRST_MS + 4


# -- the judge -----------------------------------------------------------------------------------------
def test_sessions_are_those_of_a_loop(parts: list[Events], truth: Truth) -> None:
    of: dict[int, list[int]] = defaultdict(list)
    for bidder, at in zip(parts[0].bids["bidder"].tolist(), parts[0].bids["dateTime"].tolist(), strict=True):
        of[bidder].append(at)
    wanted = set()
    for bidder, times in of.items():
        begins, count, before = times[0], 0, times[0]
        for at in times:
            if at > before + GAP_MS:
                wanted.add((bidder, count, begins, before + GAP_MS))
                begins, count = at, 0
            before, count = at, count + 1
        wanted.add((bidder, count, begins, before + GAP_MS))
    found = truth.wanted("q11")[list(COLUMNS["q11"])]
    assert set(found.itertuples(index=False, name=None)) == wanted


def test_hot_items_are_those_of_a_loop(parts: list[Events], truth: Truth) -> None:
    counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for auction, at in zip(
        parts[0].bids["auction"].tolist(), parts[0].bids["dateTime"].tolist(), strict=True
    ):
        for begins in range(at - at % 2_000 - 8_000, at - at % 2_000 + 1, 2_000):
            counts[begins][auction] += 1
    wanted = {
        (auction, count, begins, begins + WINDOW_MS)
        for begins, own in counts.items()
        for auction, count in own.items()
        if count == max(own.values())
    }
    found = truth.wanted("q5")[list(COLUMNS["q5"])]
    assert set(found.itertuples(index=False, name=None)) == wanted


def test_joined_rows_are_those_of_a_loop(parts: list[Events], truth: Truth) -> None:
    chosen = parts[0].auctions[parts[0].auctions["category"] == 10]
    assert len(truth.wanted("q20")) == parts[0].bids["auction"].isin(chosen["id"]).sum() > 0


@pytest.mark.parametrize("query", [query for query in QUERIES if query != "q12"])
def test_the_right_results_are_right_and_others_are_not(truth: Truth, query: str) -> None:
    right = truth.wanted(query)[list(COLUMNS[query])]
    assert truth.judge(query, right, closes=True).is_right
    number = next(name for name, kind in reversed(COLUMNS[query].items()) if kind == "BIGINT")
    changed = right.copy()
    changed.loc[changed.index[0], number] += 1
    verdict = truth.judge(query, changed, closes=True)
    assert (verdict.missing, verdict.wrong) == (1, 1)
    assert "missing" in verdict.examples
    lost = truth.judge(query, right.iloc[1:], closes=True)
    assert (lost.missing, lost.wrong, lost.duplicated) == (1, 0, 0)


def test_a_row_that_is_there_three_times_is_two_too_many(truth: Truth) -> None:
    right = truth.wanted("q0")[list(COLUMNS["q0"])]
    thrice = pd.concat([right, right.iloc[:1], right.iloc[:1]])
    verdict = truth.judge("q0", thrice, closes=True)
    assert (verdict.duplicated, verdict.missing, verdict.wrong) == (2, 0, 0)


def test_of_updates_the_last_row_counts(truth: Truth) -> None:
    right = truth.wanted("q17")[list(COLUMNS["q17"])]
    earlier = right.assign(total_bids=right["total_bids"] - 1)
    assert truth.judge("q17", pd.concat([earlier, right]), closes=True).is_right
    more = right.assign(total_bids=right["total_bids"] + 1)
    assert truth.judge("q17", pd.concat([right, more]), closes=True).wrong == len(right)


def test_windows_that_are_open_at_the_end_may_be_missing_where_they_do_not_close(truth: Truth) -> None:
    right = truth.wanted("q7")
    closed = right[right["due"] <= truth.watermark_ms][list(COLUMNS["q7"])]
    assert len(closed) < len(right)
    assert truth.judge("q7", closed, closes=False).is_right
    assert truth.judge("q7", closed, closes=True).missing == len(right) - len(closed)


def test_windows_by_the_clock_have_every_bid_once(truth: Truth, parts: list[Events]) -> None:
    counts = parts[0].bids.groupby("bidder").size()
    right = pd.DataFrame({"bidder": counts.index, "bid_count": counts, "starttime": 0, "endtime": WINDOW_MS})
    assert truth.judge("q12", right, closes=True).is_right
    assert truth.judge("q12", right.iloc[1:], closes=True).missing == 1
    assert truth.judge("q12", right.assign(bid_count=right["bid_count"] + 1), closes=True).wrong == len(right)
    assert truth.judge("q12", right.assign(starttime=1), closes=True).wrong == len(right)


# -- engines and reports -------------------------------------------------------------------------------
def test_each_engine_runs_a_query_or_says_why_not() -> None:
    for engine in engines.ENGINES.values():
        assert set(engine.cannot) < set(QUERIES), engine.name
        assert all(engine.cannot.values())


def _kept(folder: Any, query: str, **changed: Any) -> None:
    settings = {
        "events": 1_000, "batch": 100, "active": 10, "seed": 1, "revision": "abc", "machine": "m",
        "versions": {"ours": "1", "native": "2"}, "variants": ["ours", "ours@1s", "native"], **changed,
    }  # fmt: skip
    run = {"events_per_s": 100.0, "cpu_seconds": 10.0, "peak_mib": 500, "results": 7}
    rounds = [
        {"ours": {**run, "events_per_s": rate, "checkpoint_ms": [5]}, "ours@1s": run, "native": run}
        for rate in (150.0, 200.0, 400.0)
    ]
    lines = [settings, *rounds]
    (folder / f"nexmark-{query}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_page_has_medians_ratios_and_what_cannot_be(tmp_path: Any) -> None:
    for query in ("q0", "q12"):
        _kept(tmp_path, query)
    settings, rounds = report.kept(tmp_path)
    page = report.page(settings, rounds)
    assert "| ours | 200 | 150-400 | 2.00 | 100 | 500 | 5 | 7 |" in page
    assert "checkpoints every 1s instead of 10 s cost ours 50% of its rate" in page
    assert "| native | cannot: windows by processing time" in page


def test_runs_of_two_machines_are_not_mixed(tmp_path: Any) -> None:
    _kept(tmp_path, "q0")
    _kept(tmp_path, "q5", machine="another")
    with pytest.raises(SystemExit, match="another run or machine"):
        report.kept(tmp_path)


def test_kills_are_kept_and_what_an_engine_at_most_promises_counts(tmp_path: Any) -> None:
    path, settings = tmp_path / "nexmark-recovery.jsonl", {"rate": 4_000}
    kept = recovery.Kept(path, settings, resume=False)
    found = {"recovery_s": 9.5, "ready_s": 6.0, "written_again": 120, "lost": 0, "duplicated": 0, "wrong": 0}
    kept.add({"engine": "ours", "query": "q0", "kill": 1, "examples": "", **found})
    kept.add({"engine": "native", "query": "q0", "kill": 1, "examples": "twice", **found, "duplicated": 120})
    again = recovery.Kept(path, settings, resume=True)
    assert again.has("ours", "q0", 1)
    assert not again.has("ours", "q0", 2)
    assert "| q0 | ours | exactly once | 1 | 9.5 (9.5-9.5) | 6.0 | 120 | 0 | 0 | 0 |" in again.lines()
    assert again.faults() == ""
    again.add({"engine": "ours", "query": "q0", "kill": 2, "examples": "one is gone", **found, "lost": 1})
    assert again.faults() == "q0 by ours, kill 2: one is gone"
    with pytest.raises(SystemExit, match="another run"):
        recovery.Kept(path, {"rate": 1}, resume=True)
