"""Whom the demo kills and how fast it feeds; what chaos runs again and what not."""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from demo.process import Victim
from demo.rig import ROOT, UnusableDirectory, _empty
from demo.run import choose_victims, default_rate, parse_args
from tests.crash.chaos import append, read_done, rounds_of
from tests.crash.harness import At, random_crashes
from tests.support.effort import seeds


@pytest.mark.parametrize("kills", [0, 1, 4, 5, 20])
def test_every_kind_of_victim_occurs(kills: int) -> None:
    counts = Counter(choose_victims(kills, random.Random(kills)))
    assert counts.total() == kills
    assert len(counts) == min(kills, len(Victim))
    assert not counts or max(counts.values()) - min(counts[v] for v in Victim) <= 1


def test_input_still_arrives_at_the_last_kill() -> None:
    assert default_rate(300_000, 0) == 3_000
    assert 300_000 / default_rate(300_000, 20) > 20 * 20


def test_a_seed_is_drawn_if_none_is_given() -> None:
    assert parse_args(["--seed", "7"]).seed == 7
    assert parse_args([]).seed >= 0


@pytest.mark.parametrize(
    ("words", "is_bare"), [("", True), ("--shim", False), ("--store s3", False), ("--store hdfs", False)]
)
def test_the_job_has_no_jar_of_ours_unless_it_is_asked_for_or_needed(words: str, is_bare: bool) -> None:
    assert parse_args(words.split()).is_bare is is_bare


def test_the_demo_is_made_without_maven() -> None:
    """What make would run in a fresh clone; the same look finds Maven where it is used."""
    assert [uses_maven(*words) for words in (["demo"], ["demo", "SHIM=1"], ["shim"])] == [False, True, True]


def uses_maven(*words: str) -> bool:
    command = ["make", "--dry-run", "--always-make", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return "mvn" in done.stdout


def test_only_an_earlier_run_is_emptied(tmp_path: Path) -> None:
    _empty(tmp_path / "run")
    (tmp_path / "run" / "old").touch()
    _empty(tmp_path / "run")
    assert not (tmp_path / "run" / "old").exists()
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "letter").touch()
    with pytest.raises(UnusableDirectory, match="name another directory"):
        _empty(tmp_path / "else")


def test_chaos_goes_on_behind_a_cut_off_line(tmp_path: Path) -> None:
    results = tmp_path / "chaos" / "rounds.jsonl"
    append(results, {"seed": 1, "round": 1, "kills": 20})
    append(results, {"seed": 2, "round": 1, "kills": 20})
    with results.open("a") as file:
        file.write('{"seed": 1, "rou')
    assert set(read_done(results, 1)) == {1}
    append(results, {"seed": 1, "round": 2, "kills": 20})
    assert set(read_done(results, 1)) == {1, 2}
    assert all(json.loads(line) for line in results.read_text().splitlines())


def test_rounds_have_twenty_kills_and_the_rest() -> None:
    assert rounds_of(45) == [20, 20, 5]
    assert rounds_of(20) == [20]


@pytest.mark.parametrize("seed", seeds(20))
def test_a_rewind_follows_a_crash_that_left_something_to_rewind(seed: int) -> None:
    crashes = random_crashes(20, random.Random(seed))
    assert len(crashes) == 20
    for before, crash in zip([None, *crashes], crashes, strict=False):
        if isinstance(crash, At) and crash.finds_dead:
            assert before == At("decision:before:1")
