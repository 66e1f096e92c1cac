"""What one checkpoint cost, as a value that can be stored and read by somebody else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.json_values import list_of, measured, member, object_of, text_of
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.statistics import (
    ChannelStatistics,
    CheckpointDurations,
    CheckpointFailure,
    CheckpointStatistics,
    CheckpointStatus,
    ParticipantStatistics,
)

DURATIONS = CheckpointDurations(3, 4, 50, 6, 70, 133)
CHANNELS = (ChannelStatistics("0", 1, 100, 2_000, 5), ChannelStatistics("orders-1", 1))
PARTICIPANTS = (
    ParticipantStatistics("totals", 150, sync_ms=40),
    ParticipantStatistics("to-kafka", 150, 3_000, 9, 70, CHANNELS),
)


def triggered(number=7, purpose=CheckpointPurpose.PERIODIC) -> CheckpointStatistics:
    return CheckpointStatistics.triggered(CheckpointId(number), purpose, trigger_at_ms=1_700_000_000_000)


def stored(statistics):
    """Return what a file would give back."""
    return json.loads(json.dumps(statistics.to_json()))


def test_the_story_of_a_checkpoint_that_completes() -> None:
    begun = triggered()
    assert begun.status is CheckpointStatus.IN_PROGRESS
    assert begun.durations == CheckpointDurations()
    done = begun.completed(DURATIONS, rows=150, bytes_staged=3_000, participants=PARTICIPANTS)
    assert (done.status, done.failure) == (CheckpointStatus.COMPLETED, None)
    assert (done.checkpoint, done.trigger_at_ms) == (begun.checkpoint, begun.trigger_at_ms)
    assert done.durations.commit_ms == 70
    assert [p.barriers for p in done.participants] == [0, 2]


def test_the_story_of_a_checkpoint_that_fails() -> None:
    expired = triggered().failed(CheckpointFailureReason.EXPIRED, "not decided within 600000 ms")
    assert expired.status is CheckpointStatus.FAILED
    assert expired.failure == CheckpointFailure(
        CheckpointFailureReason.EXPIRED, "not decided within 600000 ms"
    )
    assert expired.durations == CheckpointDurations()
    late = CheckpointDurations(trigger_ms=3, end_to_end_ms=600_001)
    assert triggered().failed(CheckpointFailureReason.EXPIRED, "", late).durations is late


def test_what_is_stored_comes_back_as_it_was() -> None:
    for statistics in (
        triggered(),
        triggered().completed(DURATIONS, rows=150, bytes_staged=3_000, participants=PARTICIPANTS),
        triggered(purpose=CheckpointPurpose.SAVEPOINT).failed(CheckpointFailureReason.DECLINED, "a sink"),
    ):
        assert CheckpointStatistics.from_json(stored(statistics)) == statistics


AMOUNT = st.integers(0, 10**12)
MEASURED = st.none() | AMOUNT
DURATION = st.builds(CheckpointDurations, MEASURED, MEASURED, MEASURED, MEASURED, MEASURED, MEASURED)
CHANNEL = st.builds(ChannelStatistics, st.text(max_size=9), AMOUNT, MEASURED, MEASURED, MEASURED)
UID = st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True)
PARTICIPANT = st.builds(
    ParticipantStatistics, UID, AMOUNT, MEASURED, MEASURED, MEASURED, st.lists(CHANNEL, max_size=3).map(tuple)
)
BEGUN = st.builds(
    CheckpointStatistics.triggered,
    AMOUNT.map(CheckpointId),
    st.sampled_from(CheckpointPurpose),
    trigger_at_ms=AMOUNT,
)
COMPLETED = st.builds(
    lambda begun, durations, rows, size, participants: begun.completed(
        durations, rows=rows, bytes_staged=size, participants=tuple(participants)
    ),
    BEGUN,
    DURATION,
    AMOUNT,
    AMOUNT,
    st.lists(PARTICIPANT, max_size=3),
)
FAILED = st.builds(
    lambda begun, reason, text, durations: begun.failed(reason, text, durations),
    BEGUN,
    st.sampled_from(CheckpointFailureReason),
    st.text(max_size=20),
    DURATION,
)


@settings(derandomize=True, deadline=None, max_examples=30)
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


DONE = stored(triggered().completed(DURATIONS, rows=150, bytes_staged=9, participants=PARTICIPANTS))
LOST = stored(triggered().failed(CheckpointFailureReason.EXPIRED, "late"))


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
            assert stored(read) == changed


@pytest.mark.parametrize("whole", [DONE, LOST], ids=["completed", "failed"])
def test_whatever_is_missing_is_named(whole) -> None:
    for path in paths(whole):
        if path and isinstance(path[-1], str):
            *outer, name = path
            holder = whole
            for key in outer:
                holder = holder[key]
            without = {k: v for k, v in holder.items() if k != name}
            with pytest.raises(ValueError, match=f"'{name}' is missing"):
                CheckpointStatistics.from_json(replaced(whole, outer, without))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CheckpointDurations(sync_ms=-1), "sync_ms must be a whole number >= 0, got -1"),
        (lambda: CheckpointDurations(commit_ms=1.5), "commit_ms must be"),
        (lambda: ChannelStatistics("0", -1), "barriers must be"),
        (lambda: ChannelStatistics(0, 1), "channel must be a text, got 0"),
        (lambda: ChannelStatistics("0", 1, alignment_ms=-5), "alignment_ms must be"),
        (lambda: ParticipantStatistics("a/b", 0), "uid 'a/b' is not usable"),
        (lambda: ParticipantStatistics("a", -1), "rows must be"),
        (lambda: ParticipantStatistics("a", 0, bytes=-1), "bytes must be"),
        (lambda: CheckpointFailure(CheckpointFailureReason.EXPIRED, 5), "text must be a text"),
        (lambda: triggered().completed(DURATIONS, rows=-1, bytes_staged=0), "rows must be"),
        (lambda: triggered().completed(DURATIONS, rows=0, bytes_staged=-1), "bytes_staged must be"),
        (
            lambda: (
                triggered()
                .failed(CheckpointFailureReason.EXPIRED, "")
                .completed(DURATIONS, rows=0, bytes_staged=0)
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
    assert object_of({}, "it") == {}
    assert list_of([], "it") == []
    assert text_of("", "it") == ""
    assert (measured("n", None), measured("n", 0)) == (None, 0)
    assert member({"a": None}, "a") is None
    for check in (object_of, list_of, text_of):
        with pytest.raises(ValueError, match="it must be"):
            check(3, "it")
