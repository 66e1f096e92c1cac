"""What is stored about time: strict, and enough to continue exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    Alignment,
    AssignerInput,
    AssignerRules,
    BatchTimes,
    BoundedOutOfOrderness,
    ChannelReport,
    ChannelStatus,
    NoWatermarks,
    NoWatermarkStrategy,
    ReportedWatermarks,
    TimerReport,
    check_time,
)
from flinkish_spark.protocol.watermarks import (
    EventTime,
    OperatorTime,
    find_channels_to_hold,
    next_micro_batch_ms,
    step,
)
from tests.support.effort import examples

UIDS = ["a", "b", "a#2.y"]
ANY_TIME = st.integers(-100, 100) | st.sampled_from([MIN_WATERMARK_MS, MAX_WATERMARK_MS])
GENERATIONS = st.one_of(
    st.integers(0, 30).map(BoundedOutOfOrderness),
    st.sampled_from([ReportedWatermarks(), NoWatermarks(), NoWatermarkStrategy()]),
)
ALIGNMENTS = st.none() | st.builds(Alignment, st.sampled_from(["g", "h"]), st.integers(0, 40))
RULES = st.dictionaries(
    st.sampled_from(UIDS),
    st.builds(AssignerRules, GENERATIONS, st.none() | st.integers(1, 30), ALIGNMENTS),
    min_size=1,
)
REPORT = st.builds(
    ChannelReport, st.sampled_from(UIDS), st.integers(0, 3), st.none() | st.integers(-100, 100)
)
INPUT = st.builds(
    AssignerInput,
    st.sampled_from(UIDS),
    st.none() | st.frozensets(st.integers(0, 3)),
    st.sampled_from([False, False, False, True]),
)
TIMER = st.builds(
    TimerReport, st.sampled_from(["x", "y"]), st.integers(0, 2), st.none() | ANY_TIME, st.none() | ANY_TIME
)
#: One reads a part of the job, the other all of it.
OPERATORS = {
    "x": OperatorTime(frozenset({"a"}), frozenset({"x"})),
    "y": OperatorTime(frozenset(UIDS), frozenset({"y"})),
}


@st.composite
def histories(draw):
    now_ms, batches = draw(st.integers(0, 1_000)), []
    for _ in range(draw(st.integers(1, 12))):
        batches.append(
            BatchTimes(
                now_ms,
                tuple(draw(st.lists(REPORT, max_size=6))),
                tuple(draw(st.lists(INPUT, max_size=2, unique_by=lambda one: one.assigner))),
                tuple(draw(st.lists(TIMER, max_size=3))),
                draw(st.just(MIN_WATERMARK_MS) | st.integers(-100, -50)),
                draw(st.dictionaries(st.sampled_from(["x", "y"]), st.integers(-49, 0))),
            )
        )
        now_ms += draw(st.integers(0, 25))
    return draw(RULES), batches


def stored(value):
    """Return what a file would give back."""
    return json.loads(json.dumps(value.to_json()))


def run(rules, batches, state=None):
    state, states = EventTime() if state is None else state, []
    for batch in batches:
        state = step(rules, state, batch)
        states.append(state)
    return states


@given(histories())
@settings(max_examples=examples(80), deadline=None)
def test_the_watermark_never_goes_back(history) -> None:
    """Behaviour 124, as far as whole operators are concerned."""
    rules, batches = history
    states = run(rules, batches, EventTime().adapt_to_job(rules, OPERATORS))
    watermarks = [MIN_WATERMARK_MS, *(state.watermark_ms for state in states)]
    assert watermarks == sorted(watermarks)
    for uid in OPERATORS:
        own = [MIN_WATERMARK_MS, *(state.watermarks.get(uid) for state in states)]
        assert own == sorted(own)
        seen = [batch.carried.get(uid) for batch in batches]
        assert all(after >= before for after, before in zip(own[1:], seen, strict=True))


@given(histories())
@settings(max_examples=examples(60), deadline=None)
def test_whoever_continues_from_what_is_stored_continues_exactly(history) -> None:
    rules, batches = history
    states = run(rules, batches, EventTime().adapt_to_job(rules, OPERATORS))
    for at, state in enumerate(states):
        restored = EventTime.from_json(stored(state))
        assert restored == state
        facts = [BatchTimes.from_json(stored(batch)) for batch in batches[at + 1 :]]
        assert facts == batches[at + 1 :]
        assert run(rules, facts, restored) == states[at + 1 :]
        # The same job: nothing is left out, and nothing moves.
        same = restored.adapt_to_job(rules, OPERATORS)
        assert run(rules, facts, same) == states[at + 1 :]


@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60), deadline=None)
def test_a_micro_batch_that_runs_again_leads_to_the_same_in_whatever_order_its_tasks_report(
    history, chance
) -> None:
    rules, batches = history
    before = EventTime()
    for batch in batches:
        # Every sink brings every report; tasks come in any order.
        again = [*batch.reports, *batch.reports]
        chance.shuffle(again)
        twice = replace(batch, reports=tuple(again))
        after = step(rules, before, batch)
        assert step(rules, before, twice) == after == step(rules, before, batch)
        before = after


@given(histories())
@settings(max_examples=examples(80), deadline=None)
def test_the_watermark_is_that_of_the_slowest_active_assigner(history) -> None:
    rules, batches = history
    before = EventTime()
    for batch in batches:
        after = step(rules, before, batch)
        active = [
            after.assigners[uid]
            for uid, one in after.valve.channels.items()
            if one.status is ChannelStatus.ACTIVE
        ]
        if not after.has_ended and active:
            slowest_ms = min(one.valve.watermark_ms for one in active)
            seen_ms = max(before.watermark_ms, batch.carried_ms)
            assert after.watermark_ms >= min(slowest_ms, seen_ms)
            counting = [one.watermark_ms for one in after.valve.channels.values() if one.counts]
            assert not counting or after.watermark_ms == max(seen_ms, min(counting))
        before = after


@given(histories())
@settings(max_examples=examples(80), deadline=None)
def test_the_slowest_of_a_group_goes_on_and_nobody_is_woken_for_nothing(history) -> None:
    rules, batches = history
    for state in run(rules, batches):
        held = find_channels_to_hold(rules, state)
        groups = {rules[uid].alignment.group for uid, _ in held}
        for group in groups:
            members = {uid for uid, one in rules.items() if one.alignment and one.alignment.group == group}
            free = [
                uid
                for uid in members & state.valve.channels.keys()
                if state.valve.channels[uid].status is ChannelStatus.ACTIVE
                and (
                    not state.assigners[uid].valve.channels
                    or any((uid, channel) not in held for channel in state.assigners[uid].valve.channels)
                )
            ]
            assert free
        due_ms = next_micro_batch_ms(rules, state)
        if due_ms is not None and due_ms > state.processing_time_ms:
            empty = step(rules, state, BatchTimes(due_ms))
            now = (state.valve, {uid: one.valve for uid, one in state.assigners.items()})
            then = (empty.valve, {uid: one.valve for uid, one in empty.assigners.items()})
            assert then != now or state.agenda.due(MIN_WATERMARK_MS - 1, due_ms)


# -- strict -------------------------------------------------------------------------------------------


def example() -> EventTime:
    rules = {"a": AssignerRules(BoundedOutOfOrderness(5), 10), "b": AssignerRules(ReportedWatermarks())}
    batch = BatchTimes(
        1_000,
        (ChannelReport("a", 0, 50), ChannelReport("a", 1, 90), ChannelReport("b", 0, 70)),
        (AssignerInput("b", frozenset(), has_ended=True),),
        (TimerReport("sums", 3, 100, None),),
    )
    more = [BatchTimes(1_009, (ChannelReport("a", 1, 95),)), BatchTimes(1_010, carried_ms=44)]
    return run(rules, [batch, *more])[-1]


def of_operators() -> EventTime:
    """The same job, as a version stores it that knows its operators."""
    rules = {"a": AssignerRules(BoundedOutOfOrderness(5), 10), "b": AssignerRules(ReportedWatermarks())}
    operators = {
        "sums": OperatorTime(frozenset({"a"}), frozenset({"sums.x", "sums.y"})),
        "tops": OperatorTime(frozenset({"b"}), frozenset({"tops"})),
    }
    batch = BatchTimes(1_010, carried_ms=44, carried_above={"tops": 60})
    return step(rules, replace(example(), carried_ms=0).adapt_to_job(rules, operators), batch)


def test_what_is_stored_looks_like_this() -> None:
    """Whoever changes it has to read the old form, too."""
    assert stored(example()) == {
        "processing_time_ms": 1_010,
        "carried_ms": 44,
        "watermark_ms": 89,
        "assigners": {
            "a": {
                "known_since_ms": 1_000,
                "watermark_ms": 89,
                "has_ended": False,
                "channels": [[0, 44, "IDLE", False, 1_000], [1, 89, "ACTIVE", True, 1_009]],
            },
            "b": {"known_since_ms": 1_000, "watermark_ms": 70, "has_ended": True, "channels": []},
        },
        "valve": [["a", 89, "ACTIVE", True]],
        "timers": [["sums", 3, 100, None]],
    }
    assert stored(of_operators())["operators"] == {
        "sums": {
            "inputs": ["a"],
            "instances": ["sums.x", "sums.y"],
            "watermark_ms": 89,
            "carried_ms": 44,
            "valve": [["a", 89, "ACTIVE", True]],
        },
        "tops": {
            "inputs": ["b"],
            "instances": ["tops"],
            "watermark_ms": MAX_WATERMARK_MS,
            "carried_ms": 60,
            "valve": [],
        },
    }
    assert EventTime.from_json(stored(of_operators())) == of_operators()
    assert stored(EventTime())["processing_time_ms"] is None
    assert EventTime.from_json(stored(EventTime())) == EventTime()


def test_facts_of_a_micro_batch_look_like_this() -> None:
    facts = BatchTimes(
        7,
        (ChannelReport("a", 0, None),),
        (AssignerInput("a"), AssignerInput("b", frozenset({2, 1}), has_ended=True)),
        (TimerReport("sums", 3, None, 9),),
        carried_ms=-5,
    )
    assert stored(facts) == {
        "processing_time_ms": 7,
        "carried_ms": -5,
        "reports": [["a", 0, None]],
        "inputs": [["a", None, False], ["b", [1, 2], True]],
        "timers": [["sums", 3, None, 9]],
    }
    further = replace(facts, carried_above={"tops": 9, "sums": -4})
    assert stored(further)["carried_above"] == {"sums": -4, "tops": 9}
    assert BatchTimes.from_json(stored(further)) == further
    drained = replace(facts, drained=4)
    assert stored(drained) == {**stored(facts), "drained": 4}
    assert BatchTimes.from_json(stored(drained)) == drained
    assert stored(BatchTimes(7)) == {"processing_time_ms": 7}


@pytest.mark.parametrize(
    "change",
    [
        {"processing_time_ms": -1},
        {"processing_time_ms": "1010"},
        {"carried_ms": None},
        {"watermark_ms": 1 << 63},
        {"watermark_ms": 8.0},
        {"watermark_ms": True},
        {"assigners": []},
        {"assigners": {"../x": {}}},
        {"assigners": {"a": []}},
        {"assigners": {}},
        {"valve": {}},
        {"valve": [["a", 89, "ACTIVE"]]},
        {"valve": [["a", 89, "ASLEEP", True]]},
        {"valve": [["a", 89, [], True]]},
        {"valve": [["a", 89, "ACTIVE", 1]]},
        {"valve": [["a", 89, "IDLE", True]]},
        {"valve": [[["a"], 89, "ACTIVE", True]]},
        {"valve": [["a", 89, "ACTIVE", True], ["a", 89, "ACTIVE", True]]},
        {"timers": [["sums", -3, 100, None]]},
        {"timers": [["sums", 3, None, None]]},
        {"timers": [["sums", 3, 1, None], ["sums", 3, 2, None]]},
        {"timers": None},
        {"operators": []},
        {"operators": {"sums": {}}},
        {"operators": {"../x": {}}},
    ],
    ids=str,
)
def test_stored_time_of_another_shape_is_refused(change) -> None:
    with pytest.raises(ValueError):
        EventTime.from_json({**stored(example()), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"known_since_ms": -1},
        {"has_ended": 0},
        {"channels": [[0, 44, "ACTIVE", True]]},
        {"channels": [[-1, 44, "ACTIVE", True, 0]]},
        {"channels": [["0", 44, "ACTIVE", True, 0]]},
        {"channels": [[0, None, "ACTIVE", True, 0]]},
        {"channels": [[0, 44, "ACTIVE", True, -1]]},
        {"channels": [[0, 44, "ACTIVE", True, 0], [0, 44, "ACTIVE", True, 0]]},
    ],
    ids=str,
)
def test_a_stored_assigner_of_another_shape_is_refused(change) -> None:
    value = stored(example())
    value["assigners"]["a"] |= change
    with pytest.raises(ValueError):
        EventTime.from_json(value)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": ["a", "a"]},
        {"inputs": "a"},
        {"instances": [None]},
        {"watermark_ms": None},
        {"carried_ms": 1 << 63},
        {"valve": [["a", 89, "IDLE", True]]},
    ],
    ids=str,
)
def test_a_stored_operator_of_another_shape_is_refused(change) -> None:
    value = stored(of_operators())
    value["operators"]["sums"] |= change
    with pytest.raises(ValueError):
        EventTime.from_json(value)
    value = stored(of_operators())
    del value["operators"]["sums"][next(iter(change))]
    with pytest.raises(ValueError):
        EventTime.from_json(value)


@pytest.mark.parametrize("name", ["processing_time_ms", "carried_ms", "watermark_ms", "assigners", "valve"])
def test_nothing_may_be_missing(name) -> None:
    value = stored(example())
    del value[name]
    with pytest.raises(ValueError):
        EventTime.from_json(value)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"processing_time_ms": None},
        {"processing_time_ms": 7, "reports": [["a", 0]]},
        {"processing_time_ms": 7, "reports": [["a/b", 0, 1]]},
        {"processing_time_ms": 7, "reports": [["a", None, 1]]},
        {"processing_time_ms": 7, "reports": [["a", 0, "1"]]},
        {"processing_time_ms": 7, "reports": [["a", 0, 1 << 63]]},
        {"processing_time_ms": 7, "inputs": [["a", [1, 1], False]]},
        {"processing_time_ms": 7, "inputs": [["a", [[]], False]]},
        {"processing_time_ms": 7, "inputs": [["a", None, "no"]]},
        {"processing_time_ms": 7, "inputs": [["a", None, False], ["a", [1], False]]},
        {"processing_time_ms": 7, "timers": [["sums", 0, "1", None]]},
        {"processing_time_ms": 7, "timers": "none"},
        {"processing_time_ms": 7, "carried_ms": None},
        {"processing_time_ms": 7, "drained": True},
        {"processing_time_ms": 7, "carried_above": []},
        {"processing_time_ms": 7, "carried_ms": 5, "carried_above": {"sums": 5}},
        {"processing_time_ms": 7, "carried_above": {"sums": "6"}},
        {"processing_time_ms": 7, "carried_above": {"a/b": 6}},
    ],
    ids=str,
)
def test_facts_of_another_shape_are_refused(value) -> None:
    with pytest.raises(ValueError):
        BatchTimes.from_json(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Alignment("a b", 0),
        lambda: AssignerInput.from_json(["a", [-1], False]),
    ],
)
def test_rules_and_facts_check_themselves(make) -> None:
    with pytest.raises(ValueError):
        make()


def test_a_time_is_a_number_of_64_bits_or_none():
    assert (check_time("it", None), check_time("it", -1)) == (None, -1)
    for wrong in (1 << 63, 1.0, True, "1"):
        with pytest.raises(ValueError, match="it must be a whole number"):
            check_time("it", wrong)


def test_scans_in_chains_have_names_that_are_no_uids():
    long = "n" * 128
    for name in ("orders", "orders#2", "orders.totals", "orders#12.totals", f"{long}#2.{long}", "a..b"):
        assert AssignerInput.from_json([name, None, False]).assigner == name
        assert ChannelReport.from_json([name, 0, 1]).assigner == name
    for name in ("", "#2", "orders#", "orders#two", "or ders", "orders/2", f"{long}n#2"):
        with pytest.raises(ValueError, match="is neither a uid"):
            AssignerInput.from_json([name, None, False])
