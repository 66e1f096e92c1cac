"""What one checkpoint cost, as a value that can be stored and read by somebody else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.codec import expect_object, expect_text, get_member
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.statistics import (
    MOST_TEXT,
    ChannelStatistics,
    CheckpointDurations,
    CheckpointFailure,
    CheckpointStatistics,
    CheckpointStatus,
    ParticipantStatistics,
)
from tests.support.effort import examples

DURATIONS = CheckpointDurations(
    trigger_ms=3, start_delay_ms=1, alignment_ms=4, sync_ms=50, async_ms=6, commit_ms=70, end_to_end_ms=133
)
CHANNELS = (ChannelStatistics("0", 1, 100, 2_000, 5), ChannelStatistics("1", 1))
SINK = ParticipantStatistics(
    "to-kafka",
    ParticipantKind.SINK,
    ack_ms=60,
    rows=150,
    bytes=3_000,
    sync_ms=9,
    commit_ms=70,
    barriers=2,
    channels=CHANNELS,
)
OPERATOR = ParticipantStatistics("totals", ParticipantKind.OPERATOR, ack_ms=60, late_dropped=4)
WAITED_FOR = ParticipantStatistics("catalog", ParticipantKind.HOOK, is_acknowledged=False)
PARTICIPANTS = (SINK, OPERATOR)


def triggered(number=7, purpose=CheckpointPurpose.PERIODIC) -> CheckpointStatistics:
    return CheckpointStatistics.begin(CheckpointId(number), purpose, trigger_at_ms=1_700_000_000_000)


def stored(statistics):
    """Return what a file would give back."""
    return json.loads(json.dumps(statistics.to_json()))


def test_the_story_of_a_checkpoint_that_completes() -> None:
    begun = triggered()
    assert begun.status is CheckpointStatus.IN_PROGRESS
    assert begun.durations == CheckpointDurations()
    done = begun.complete(DURATIONS, rows=150, bytes_staged=3_000, participants=PARTICIPANTS)
    assert (done.status, done.failure) == (CheckpointStatus.COMPLETED, None)
    assert (done.checkpoint, done.trigger_at_ms) == (begun.checkpoint, begun.trigger_at_ms)
    assert done.durations.commit_ms == 70
    assert (done.asked, done.acknowledged, done.unlisted) == (2, 2, 0)


def test_the_story_of_a_checkpoint_that_fails() -> None:
    expired = triggered().fail(CheckpointFailureReason.EXPIRED, "not decided within 600000 ms")
    assert expired.status is CheckpointStatus.FAILED
    assert expired.failure == CheckpointFailure(
        CheckpointFailureReason.EXPIRED, "not decided within 600000 ms"
    )
    assert expired.durations == CheckpointDurations()
    late = CheckpointDurations(trigger_ms=3, end_to_end_ms=600_001)
    assert triggered().fail(CheckpointFailureReason.EXPIRED, "", late).durations is late


def test_a_failed_checkpoint_says_who_had_acknowledged() -> None:
    """Behaviour 108, as far as one that did not complete is concerned."""
    late = triggered().fail(CheckpointFailureReason.EXPIRED, "", None, (*PARTICIPANTS, WAITED_FOR))
    assert (late.asked, late.acknowledged) == (3, 2)
    assert [p.uid for p in late.participants if not p.is_acknowledged] == ["catalog"]


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    for statistics in (triggered(), triggered().fail(CheckpointFailureReason.EXPIRED, "late")):
        assert (statistics.rows, statistics.bytes_staged) == (None, None)
        assert (statistics.asked, statistics.acknowledged) == (None, None)
    assert triggered().complete(DURATIONS, rows=0).bytes_staged is None


def test_a_long_text_is_cut() -> None:
    """An exception may quote a record of megabytes, and the history is written with every checkpoint."""
    failed = triggered().fail(CheckpointFailureReason.DECLINED, "x" * 3_000_000)
    assert failed.failure is not None
    assert (len(failed.failure.text), failed.failure.text[-4:]) == (MOST_TEXT, "x...")
    fits = triggered().fail(CheckpointFailureReason.DECLINED, "x" * MOST_TEXT)
    assert fits.failure is not None and fits.failure.text == "x" * MOST_TEXT


def test_details_are_left_out_and_counted() -> None:
    done = triggered().complete(DURATIONS, rows=150, participants=(SINK, SINK, OPERATOR), unlisted=1)
    assert done.detail_count == 7
    assert done.limit_details(7) is done
    short = done.limit_details(5)
    assert [len(p.channels) for p in short.participants] == [2, 0, 0]
    assert (short.detail_count, short.unlisted, short.asked) == (5, 3, 3)
    assert (done.drop_details().participants, done.drop_details().unlisted) == ((), 8)


def test_what_is_stored_comes_back_as_it_was() -> None:
    for statistics in (
        triggered(),
        triggered().complete(DURATIONS, rows=150, bytes_staged=3_000, participants=PARTICIPANTS),
        triggered(purpose=CheckpointPurpose.SAVEPOINT).fail(CheckpointFailureReason.DECLINED, "a sink"),
        triggered().fail(CheckpointFailureReason.EXPIRED, "", DURATIONS, (WAITED_FOR, SINK)),
    ):
        assert CheckpointStatistics.from_json(stored(statistics)) == statistics


AMOUNT = st.integers(0, 10**12)
MEASURED = st.none() | AMOUNT
DURATION = st.builds(CheckpointDurations, *[MEASURED] * 7)
CHANNEL = st.builds(ChannelStatistics, st.text(max_size=9), AMOUNT, MEASURED, MEASURED, MEASURED)
UID = st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True)
PARTICIPANT = st.builds(
    ParticipantStatistics,
    UID,
    st.sampled_from(ParticipantKind),
    st.booleans(),
    *[MEASURED] * 6,
    st.lists(CHANNEL, max_size=3).map(tuple),
)
BEGUN = st.builds(
    CheckpointStatistics.begin,
    AMOUNT.map(CheckpointId),
    st.sampled_from(CheckpointPurpose),
    trigger_at_ms=AMOUNT,
)
COMPLETED = st.builds(
    lambda begun, durations, rows, size, participants: begun.complete(
        durations, rows=rows, bytes_staged=size, participants=tuple(participants)
    ),
    BEGUN,
    DURATION,
    AMOUNT,
    MEASURED,
    st.lists(PARTICIPANT, max_size=3),
)
FAILED = st.builds(
    lambda begun, reason, text, durations, participants: begun.fail(
        reason, text, durations, tuple(participants)
    ),
    BEGUN,
    st.sampled_from(CheckpointFailureReason),
    st.text(max_size=20),
    DURATION,
    st.lists(PARTICIPANT, max_size=3),
)


@settings(derandomize=True, deadline=None, max_examples=examples(30))
@given(BEGUN | COMPLETED | FAILED)
def test_any_statistics_come_back_as_they_were(statistics) -> None:
    assert CheckpointStatistics.from_json(stored(statistics)) == statistics


WRONG = [None, -1, True, 1.5, "x", [], {}, [1], {"a": 1}]


def replaced(value, path, wrong):
    """Return a copy of JSON in which the value at `path` is `wrong`."""
    if not path:
        return wrong
    head, *rest = path
    if isinstance(value, list):
        return [replaced(v, rest, wrong) if i == head else v for i, v in enumerate(value)]
    return {k: replaced(v, rest, wrong) if k == head else v for k, v in value.items()}


def paths(value, here=()):
    """Yield the path of every value inside JSON, the whole included."""
    yield here
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from paths(part, (*here, key))


DONE = stored(triggered().complete(DURATIONS, rows=150, bytes_staged=9, participants=PARTICIPANTS))
LOST = stored(triggered().fail(CheckpointFailureReason.EXPIRED, "late", DURATIONS, (WAITED_FOR, SINK)))


@pytest.mark.parametrize("whole", [DONE, LOST], ids=["completed", "failed"])
def test_a_reader_of_anything_else_gets_a_value_error_or_sound_statistics(whole) -> None:
    """Every value is replaced by every kind of wrong one; nothing but ValueError may come out."""
    for path in paths(whole):
        for wrong in WRONG:
            changed = replaced(whole, path, wrong)
            try:
                read = CheckpointStatistics.from_json(changed)
            except ValueError:
                continue
            assert CheckpointStatistics.from_json(stored(read)) == read


#: Of participants and channels, which leave out what was not measured. Everything else is always there.
NEEDED = {"uid", "kind", "channel"}


@pytest.mark.parametrize("whole", [DONE, LOST], ids=["completed", "failed"])
def test_what_is_missing_is_not_measured_or_named(whole) -> None:
    for path in paths(whole):
        if not path or not isinstance(path[-1], str):
            continue
        *outer, name = path
        holder = whole
        for key in outer:
            holder = holder[key]
        changed = replaced(whole, outer, {k: v for k, v in holder.items() if k != name})
        leaves_out = "uid" in holder or "channel" in holder
        if not leaves_out or name in NEEDED or (name == "barriers" and "channel" in holder):
            with pytest.raises(ValueError, match=f"'{name}' is missing"):
                CheckpointStatistics.from_json(changed)
        else:
            read = CheckpointStatistics.from_json(changed)
            assert CheckpointStatistics.from_json(stored(read)) == read


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: (
                triggered()
                .fail(CheckpointFailureReason.EXPIRED, "")
                .complete(DURATIONS, rows=0, bytes_staged=0)
            ),
            "checkpoint 7 is COMPLETED with failure",
        ),
        (
            lambda: CheckpointStatistics(
                CheckpointId(7), CheckpointPurpose.USER, CheckpointStatus.FAILED, trigger_at_ms=0
            ),
            "checkpoint 7 is FAILED with failure None",
        ),
    ],
)
def test_statistics_that_cannot_be_are_refused_when_they_are_made(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_stored_values_are_taken_apart_by_shape() -> None:
    assert expect_object({}, "it") == {}
    assert expect_text("", "it") == ""
    assert get_member({"a": None}, "a") is None
    for check in (expect_object, expect_text):
        with pytest.raises(ValueError, match="it must be"):
            check(3, "it")
