"""What one participant did for a checkpoint, and how many of them are listed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.statistics import ChannelStatistics, ParticipantStatistics, limit_participants

K = ParticipantKind


def sink(uid: str, channels: int = 0, *, is_acknowledged: bool = True) -> ParticipantStatistics:
    found = tuple(ChannelStatistics(str(number), 1) for number in range(channels))
    return ParticipantStatistics(uid, K.SINK, is_acknowledged, barriers=channels, channels=found)


def test_what_was_not_measured_takes_no_room_in_the_stored_form() -> None:
    assert ParticipantStatistics("sum", K.OPERATOR, ack_ms=4).to_json() == {
        "uid": "sum",
        "kind": "operator",
        "ack_ms": 4,
    }
    late = ParticipantStatistics("a", K.SINK, False, rows=0, channels=(ChannelStatistics("3", 1, rows=0),))
    assert late.to_json() == {
        "uid": "a",
        "kind": "sink",
        "is_acknowledged": False,
        "rows": 0,
        "channels": [{"channel": "3", "barriers": 1, "rows": 0}],
    }
    for one in (late, sink("b", 2)):
        assert ParticipantStatistics.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_those_that_are_waited_for_are_listed_first() -> None:
    all_of_them = [sink("a"), sink("b", is_acknowledged=False), sink("c"), sink("d", is_acknowledged=False)]
    assert [one.uid for one in limit_participants(all_of_them, 4)] == ["b", "d", "a", "c"]
    assert [one.uid for one in limit_participants(all_of_them, 3)] == ["b", "d", "a"]


def test_participants_come_before_channels_and_channels_come_whole() -> None:
    kept = limit_participants([sink("a", 4), sink("b", 3), sink("c", 1)], 7)
    assert [(one.uid, len(one.channels), one.barriers) for one in kept] == [
        ("a", 4, 4),
        ("b", 0, 3),
        ("c", 0, 1),
    ]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12), st.integers(0, 30))
def test_no_more_are_listed_than_may_be(shapes, at_most) -> None:
    participants = [sink(f"s{i}", n, is_acknowledged=known) for i, (n, known) in enumerate(shapes)]
    kept = limit_participants(participants, at_most)
    count = sum(one.detail_count for one in kept)
    assert count <= at_most
    assert len(kept) == min(len(participants), at_most)
    if sum(one.detail_count for one in participants) <= at_most:
        assert sorted(one.uid for one in kept if one.channels) == sorted(
            one.uid for one in participants if one.channels
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParticipantStatistics.from_json({"uid": ["a"]}), "uid must be a text"),
        (
            lambda: ParticipantStatistics.from_json({"uid": "a", "kind": "cat"}),
            "kind must be one of operator, sink, hook, got 'cat'",
        ),
    ],
)
def test_participants_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
