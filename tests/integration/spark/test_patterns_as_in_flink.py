"""Our pattern matcher beside Flink's own: what both make of patterns and inputs is the same, in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support import effort
from tests.support.cep_cases import cases
from tests.support.flink_cep import Case, Flink, difference, ours, why_not
from tests.unit.cep.test_published_semantics import CASES, REFUSALS

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"Flink's matcher is not there: {why_not()}"),
    # Ten minutes of work at night, on a machine that may do other things.
    pytest.mark.timeout(2 * 3600 if effort.is_night else 900),
]

#: By day and at night.
PAIRS = 100_000 if effort.is_night else 2_000
#: We refuse these when they are compiled; Flink fails at the first event that meets them, or never ends.
REFUSED_EARLIER = ("for ever", "all names before it are optional", "cannot be distinguished")


@pytest.fixture(scope="module")
def flink() -> Iterator[Flink]:
    running = Flink()
    yield running
    running.close()


def is_refused_earlier(answer: dict) -> bool:
    return "refused" in answer and any(words in answer["says"] for words in REFUSED_EARLIER)


def test_patterns_match_what_they_match_in_flink(flink: Flink) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=PAIRS,
        deadline=None,
        database=None,
        derandomize=not effort.is_night,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def compare(case: Case) -> None:
        own = ours(case)
        if is_refused_earlier(own):
            seen["refused earlier"] += 1
            return
        theirs = flink(case)
        assert (differs := difference(own, theirs)) is None, differs
        for outcome in ("refused", "failed"):
            seen[outcome] += outcome in own
        for outcome in ("matches", "timeouts"):
            seen[outcome] += any(step[outcome] for step in own["steps"])
        seen["held"] += any(step["held"] for step in own["steps"])
        seen["pairs"] += 1

    compare()
    print(dict(seen))
    # What is compared has to say something.
    assert seen["pairs"] > 0.9 * PAIRS
    assert seen["matches"] > 0.2 * PAIRS
    assert seen["timeouts"] > 0.1 * PAIRS
    assert seen["refused earlier"] < 0.03 * PAIRS


@pytest.mark.parametrize("case", [*CASES, *REFUSALS], ids=lambda case: case["name"])
@pytest.mark.nightly
def test_what_is_written_down_is_what_flink_does(flink: Flink, case: Case) -> None:
    theirs = flink(case)
    assert (differs := difference(ours(case), theirs)) is None, differs
    if "refused" in case:
        assert ("refused" in theirs) == case["refused"]
    else:
        assert [match for step in theirs["steps"] for match in step["matches"]] == case["matches"]
