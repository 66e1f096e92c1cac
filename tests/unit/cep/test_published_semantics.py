"""What Flink's own tests assert about patterns, as data; each case is compared with Flink itself at night.

tests/support/flink_cep.py says the form of a case; `matches` and `timeouts` are what comes of it, in order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.flink_cep import Case, ours

HERE = Path(__file__).parent
CASES: list[Case] = json.loads((HERE / "flink_cases.json").read_text(encoding="utf-8"))
REFUSALS: list[Case] = json.loads((HERE / "flink_refusals.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_pattern_matches_what_flink_says(case: Case) -> None:
    answer = ours(case)
    assert "refused" not in answer, answer
    assert [match for step in answer["steps"] for match in step["matches"]] == case["matches"]
    assert [lost for step in answer["steps"] for lost in step["timeouts"]] == case.get("timeouts", [])
    assert ("failed" in answer) == case.get("fails", False)


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case["name"])
def test_a_pattern_is_refused_if_flink_refuses_it(case: Case) -> None:
    answer = ours(case)
    assert ("refused" in answer) == case["refused"], answer
    for fact in ("states", "empty"):
        if fact in case:
            assert answer[fact] == case[fact]
    if case["refused"]:
        assert re.fullmatch(r".+[^.]\. .+[^.]\. To do: .+[^.]\.", answer["says"])


def test_there_are_as_many_cases_as_flink_has() -> None:
    assert len(CASES) >= 209 and len(REFUSALS) >= 34
    assert len({case["name"] for case in [*CASES, *REFUSALS]}) == len(CASES) + len(REFUSALS)
