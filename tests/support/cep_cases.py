"""Patterns and inputs for hypothesis to draw, over all that patterns can say, in the form of flink_cep.py."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.flink_cep import Case

Draw = Any
NAMES = "abc"
_COMPARE = st.sampled_from(["<", "<=", "==", ">=", ">"])
_SMALL = st.integers(0, 3)


def _is(draw: Draw, percent: int) -> bool:
    return draw(st.integers(0, 99)) < percent


def _condition(draw: Draw, known: list[str]) -> dict[str, Any]:
    kind = draw(
        st.sampled_from(
            ["name"] * 12
            + ["value"] * 3
            + ["true", "not", "or", "and", "time", *["count", "sum", "total", "last"] * bool(known)]
        )
    )
    match kind:
        case "name":
            return {kind: draw(st.sampled_from(NAMES))}
        case "value" | "time":
            return {kind: [draw(_COMPARE), draw(_SMALL if kind == "value" else st.integers(2, 12))]}
        case "true":
            return {kind: True}
        case "not":
            return {kind: [_condition(draw, known)]}
        case "or" | "and":
            return {kind: [_condition(draw, known), _condition(draw, known)]}
    return {kind: [draw(st.sampled_from(known)), draw(_COMPARE), draw(_SMALL)]}


def _window(draw: Draw) -> list[int]:
    return [draw(st.integers(1, 8))] if _is(draw, 20) else []


def _repetition(draw: Draw) -> list[Any]:
    match draw(st.sampled_from(["one_or_more", "times_or_more", "times", "times_range"])):
        case "one_or_more":
            return ["one_or_more", *_window(draw)]
        case "times_range":
            least = draw(st.integers(0, 2))
            return ["times_range", least, least + draw(st.integers(0, 2)), *_window(draw)]
        case call:
            return [call, draw(st.integers(1, 3)), *_window(draw)]


def _calls(draw: Draw, stage: dict[str, Any], known: list[str]) -> list[list[Any]]:
    calls: list[list[Any]] = []
    is_group, is_negation = "group" in stage, stage["link"].startswith("not_")
    if not is_group:
        for number in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
            call = "or_where" if number and _is(draw, 50) else "where"
            calls.append([call, _condition(draw, known)])
        if _is(draw, 4):
            calls.append(["subtype"])
    # One in so many is refused for what it says together; most of these are left out.
    if not is_negation:
        if _is(draw, 45):
            repetition = _repetition(draw)
            calls.append(repetition)
            if _is(draw, 40):
                calls.append([draw(st.sampled_from(["consecutive", "allow_combinations"]))])
            if not is_group and calls[-1] != ["allow_combinations"] and _is(draw, 30):
                calls.append(["greedy"])
            if repetition[0].endswith("or_more") and _is(draw, 35):
                calls.append(["until", _condition(draw, known)])
        if _is(draw, 20):
            calls.append(["optional"])
    if _is(draw, 2):
        calls.append([draw(st.sampled_from(["greedy", "optional", "consecutive", "allow_combinations"]))])
    if _is(draw, 12):
        calls.append(
            [
                "within",
                draw(st.integers(1, 10)),
                draw(st.sampled_from(["first_and_last", "previous_and_current"])),
            ]
        )
    return calls


def _stages(draw: Draw, known: list[str], depth: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for at in range(draw(st.sampled_from([1, 2, 2, 3, 3, 4] if depth == 0 else [1, 1, 2, 2, 3]))):
        before = found[-1]["calls"] if found else []
        links = ["next", "followed_by", "followed_by", "followed_by_any"]
        if ["optional"] not in before or _is(draw, 2):
            links += ["not_next", "not_followed_by"]
        stage: dict[str, Any] = {"link": draw(st.sampled_from(links)) if at else "begin"}
        if depth < 2 and not stage["link"].startswith("not_") and _is(draw, 15):
            stage["group"] = _stages(draw, known, depth + 1)
        else:
            stage["name"] = f"n{len(known)}"
            known.append(stage["name"])
        stage["calls"] = _calls(draw, stage, known)
        found.append(stage)
    return found


@st.composite
def skips(draw: Draw, names: list[str]) -> list[Any]:
    kind = draw(st.sampled_from(["none", "none", "none", "next", "past_last", "past_last", "first", "last"]))
    return [kind, draw(st.sampled_from(names)), _is(draw, 20)] if kind in ("first", "last") else [kind]


@st.composite
def inputs(draw: Draw) -> list[list[Any]]:
    """Events whose times stand still and leap, and times without an event."""
    steps: list[list[Any]] = []
    time_ms = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(2, 10))):
        time_ms += draw(st.sampled_from([0, 0, 1, 1, 2, 4]))
        if _is(draw, 5):
            steps.append([time_ms])
        else:
            steps.append([time_ms, draw(st.sampled_from(NAMES)), draw(_SMALL), _is(draw, 30)])
    return [*steps, [time_ms + 20]]


@st.composite
def cases(draw: Draw) -> Case:
    known: list[str] = []
    pattern = _stages(draw, known, 0)
    last = pattern[-1]
    if _is(draw, 90 if last["link"] == "not_followed_by" else 20):
        last["calls"].append(["within", draw(st.integers(1, 10))])
    outside = [stage["name"] for stage in pattern if "name" in stage]
    return {"pattern": pattern, "skip": draw(skips(outside or known)), "steps": draw(inputs())}
