"""The matcher beside a search through all ways to take events: what a pattern means, on a page.

A pattern stands for sequences of single names: each repetition written out, each optional name there or not.
A sequence is found by trying every event where its contiguity lets it be. No greed, no negation, no until.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.flink_cep import Case, condition, ours

Event = Any
#: A name, which events may stand before it, and its condition.
Step = tuple[str, str, Any]
INNER = {"consecutive": "next", "allow_combinations": "followed_by_any"}


def sequences(stages: list[dict[str, Any]], most: int) -> Iterator[list[Step]]:
    """Yield all sequences of single names that a pattern stands for, up to a length."""
    options = []
    for stage in stages:
        calls = dict((call, rest) for call, *rest in stage["calls"])
        fits = condition(calls["where"][0])
        link = "next" if stage["link"] == "begin" else stage["link"]
        inner = next((INNER[call] for call in calls if call in INNER), "followed_by")
        counts = range(1, 2)
        if "one_or_more" in calls:
            counts = range(1, most + 1)
        if "times_range" in calls:
            counts = range(max(calls["times_range"][0], 1), calls["times_range"][1] + 1)
        is_missing = "optional" in calls or calls.get("times_range", [1])[0] == 0
        found = [[]] if is_missing else []
        for count in counts:
            found.append([(stage["name"], link if at == 0 else inner, fits) for at in range(count)])
        options.append(found)
    for chosen in itertools.product(*options):
        yield [step for part in chosen for step in part]


def taken(steps: list[Step], events: list[Event], begin: int) -> Iterator[list[int]]:
    """Yield the places at which the steps are found, the first at `begin` or behind it."""
    if not steps:
        yield []
        return
    (_, link, fits), *rest = steps
    for at in range(begin, len(events)):
        if fits(events[at]):
            for places in taken(rest, events, at + 1):
                yield [at, *places]
            if link != "followed_by_any":
                return
        if link == "next":
            return


def brute_force(case: Case, events: list[Event], times: list[int], window: int | None) -> list[Any]:
    found = []
    for steps in sequences(case["pattern"], len(events)):
        if not steps:
            continue
        for begin in range(len(events)):
            # A match begins at each event that fits: which ones stood before does not matter.
            first = [(steps[0][0], "next", steps[0][2]), *steps[1:]]
            for places in taken(first, events, begin):
                if window is None or times[places[-1]] - times[places[0]] < window:
                    names = [name for name, _, _ in steps]
                    found.append(tuple(zip(names, places, strict=True)))
    return sorted(set(found))


@st.composite
def simple_cases(draw: Any) -> Case:
    stages: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 3))):
        calls: list[Any] = [["where", {"name": draw(st.sampled_from("ab"))}]]
        repetition = draw(st.sampled_from(["", "", "one_or_more", "times_range"]))
        if repetition == "one_or_more":
            calls.append([repetition])
        elif repetition:
            least = draw(st.integers(0, 2))
            calls.append([repetition, least, max(least, 1) + draw(st.integers(0, 1))])
        if repetition and draw(st.booleans()):
            calls.append([draw(st.sampled_from(list(INNER)))])
        if draw(st.integers(0, 3)) == 0 and calls[1:2] != [["times_range", 0, 1]]:
            calls.append(["optional"])
        link = draw(st.sampled_from(["next", "followed_by", "followed_by_any"])) if number else "begin"
        stages.append({"link": link, "name": f"n{number}", "calls": calls})
    window = draw(st.none() | st.integers(2, 8))
    if window is not None:
        stages[-1]["calls"].append(["within", window])
    times = sorted(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    steps = [[time, draw(st.sampled_from("abx"))] for time in times]
    return {"pattern": stages, "steps": steps, "window": window}


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


@settings(max_examples=examples(2_000))
@given(simple_cases())
def test_all_ways_to_take_events_are_found_and_no_others(case: Case) -> None:
    answer = ours(case)
    assume("refused" not in answer)
    matches = [match for step in answer["steps"] for match in step["matches"]]
    own = sorted(
        tuple((name, place) for name, places in match.items() for place in places) for match in matches
    )
    events, times = [Named(step[1]) for step in case["steps"]], [step[0] for step in case["steps"]]
    assert own == brute_force(case, events, times, case["window"])
