"""The newest checkpoints, counts of all, and the summary over a window."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.statistics import (
    MOST_TEXT,
    ChannelStatistics,
    CheckpointCounts,
    CheckpointDurations,
    CheckpointStatistics,
    CheckpointStatus,
    ParticipantStatistics,
    Quantity,
    RestoredCheckpoint,
    StatisticsHistory,
    Summary,
    make_sample,
)

EXPIRED = CheckpointFailureReason.EXPIRED
P = CheckpointPurpose


def triggered(number, purpose=P.PERIODIC) -> CheckpointStatistics:
    return CheckpointStatistics.begin(CheckpointId(number), purpose, trigger_at_ms=number * 1_000)


def completed(number, purpose=P.PERIODIC, end_to_end_ms=None) -> CheckpointStatistics:
    durations = CheckpointDurations(end_to_end_ms=end_to_end_ms or number)
    return triggered(number, purpose).complete(durations, rows=number * 10, bytes_staged=0)


def failed(number, purpose=P.PERIODIC) -> CheckpointStatistics:
    return triggered(number, purpose).fail(EXPIRED, "too slow")


def history_of(*ended, limit=20, window=1_000) -> StatisticsHistory:
    history = StatisticsHistory(limit, window=window)
    for one in ended:
        history = history.add_triggered(triggered(int(one.checkpoint), one.purpose)).add_ended(one)
    return history


def ids(history) -> list[int]:
    return [int(entry.checkpoint) for entry in history.entries]


def stored(history) -> dict:
    return json.loads(json.dumps(history.to_json()))


def test_every_triggered_checkpoint_is_in_progress_completed_or_failed() -> None:
    history = history_of(completed(1), failed(2)).add_triggered(triggered(3)).count_refused()
    history = history.add_restored(RestoredCheckpoint(CheckpointId(1), 5_000))
    assert history.counts == CheckpointCounts(triggered=3, completed=1, failed=1, refused=1, restored=1)
    assert history.counts.in_progress == 1
    assert history.in_progress == (triggered(3),)
    assert ids(history) == [1, 2, 3]


def test_two_checkpoints_in_flight_end_in_any_order() -> None:
    """Behaviour 2, as far as statistics are concerned."""
    history = StatisticsHistory().add_triggered(triggered(1)).add_triggered(triggered(2))
    history = history.add_ended(completed(2)).add_ended(failed(1))
    assert [entry.status for entry in history.entries] == [
        CheckpointStatus.FAILED,
        CheckpointStatus.COMPLETED,
    ]
    assert history.in_progress == ()


def test_only_the_newest_that_ended_are_kept_and_none_in_progress_is_dropped() -> None:
    history = StatisticsHistory(limit=2).add_triggered(triggered(1))
    for number in range(2, 8):
        history = history.add_triggered(triggered(number)).add_ended(completed(number))
    assert ids(history) == [1, 6, 7]
    assert history.find(CheckpointId(6)) == completed(6)
    assert history.find(CheckpointId(5)) is None
    # The old one is still there when it ends, and goes with its end.
    assert ids(history.add_ended(completed(1))) == [6, 7]


def test_the_newest_of_each_kind_are_remembered_when_they_are_dropped() -> None:
    history = history_of(
        completed(1, P.SAVEPOINT),
        failed(2),
        failed(3),
        completed(4, P.FINAL_SAVEPOINT),
        completed(5),
        limit=0,
    ).add_restored(RestoredCheckpoint(CheckpointId(4), 9_000, "savepoints/first"))
    assert history.entries == ()
    assert history.newest_completed == completed(5)
    assert history.newest_failed == failed(3)
    assert history.newest_savepoint == completed(4, P.FINAL_SAVEPOINT)
    assert history.newest_restored.path == "savepoints/first"
    assert history.find(CheckpointId(4)) == history.newest_savepoint
    assert history.find(CheckpointId(1)) is None


def detailed(number, channels) -> CheckpointStatistics:
    found = tuple(ChannelStatistics(str(c), 1) for c in range(channels))
    sink = ParticipantStatistics("out", ParticipantKind.SINK, rows=1, channels=found)
    return triggered(number).complete(CheckpointDurations(), rows=1, bytes_staged=1, participants=(sink,))


def test_details_are_kept_from_the_newest_back_until_there_are_enough() -> None:
    history = StatisticsHistory(details=10)
    for number in range(1, 5):
        history = history.add_triggered(triggered(number)).add_ended(detailed(number, channels=4))
    assert [entry.detail_count for entry in history.entries] == [0, 0, 5, 5]
    assert history.entries[0] == detailed(1, 4).drop_details()
    # The one that is remembered beside them is not stored with its details twice.
    assert history.newest_completed == detailed(4, 4).drop_details()
    assert history.find(CheckpointId(4)) == detailed(4, 4)


def test_the_newest_has_the_first_right_to_details_and_no_right_to_more() -> None:
    history = StatisticsHistory(details=10)
    for number in range(1, 4):
        history = history.add_triggered(triggered(number)).add_ended(detailed(number, channels=4))
    history = history.add_triggered(triggered(4)).add_ended(detailed(4, channels=40))
    assert [entry.detail_count for entry in history.entries] == [0, 0, 5, 1]
    assert [entry.unlisted for entry in history.entries] == [5, 5, 0, 40]
    # Nobody who looks has to count: what is not listed is known to be missing.
    assert history.newest_completed is not None
    assert (history.newest_completed.asked, history.newest_completed.unlisted) == (1, 41)


def test_the_stored_form_stays_below_a_megabyte() -> None:
    """A thousand participants with many channels, the longest uids, numbers, texts and a full window."""
    much = 10**12
    durations = CheckpointDurations(*[much] * 7)
    sinks = tuple(
        ParticipantStatistics(
            f"{n:0128}",
            ParticipantKind.SINK,
            *(True, much, much, much, much, much, 200),
            tuple(ChannelStatistics(str(much + c), 1, much) for c in range(200)),
        )
        for n in range(1_000)
    )
    history = StatisticsHistory(samples=(make_sample(completed(much).complete(durations, rows=much)),) * 999)
    for number in range(1, 31):
        begun = triggered(much + number, P.FINAL_SAVEPOINT)
        done = begun.complete(durations, rows=much, bytes_staged=much, participants=sinks)
        lost = begun.fail(CheckpointFailureReason.BARRIERS_DO_NOT_ADD_UP, "\u1234" * MOST_TEXT, None, sinks)
        history = history.add_triggered(begun).add_ended(done if number % 10 == 0 else lost)
    size = len(seal("statistics", history.to_json()))
    assert 400_000 < size < 1_000_000
    assert sum(entry.detail_count for entry in history.entries) == 1_000


def test_newest_means_the_highest_id_not_the_last_to_end() -> None:
    history = StatisticsHistory()
    for number in (1, 2, 3, 4):
        history = history.add_triggered(triggered(number, P.SAVEPOINT))
    history = history.add_ended(completed(2, P.SAVEPOINT)).add_ended(completed(1, P.SAVEPOINT))
    history = history.add_ended(failed(4, P.SAVEPOINT)).add_ended(failed(3, P.SAVEPOINT))
    assert history.newest_completed == history.newest_savepoint == completed(2, P.SAVEPOINT)
    assert history.newest_failed == failed(4, P.SAVEPOINT)


def test_a_savepoint_is_a_completed_checkpoint_too() -> None:
    history = history_of(completed(1), completed(2, P.SAVEPOINT))
    assert history.newest_completed == history.newest_savepoint == completed(2, P.SAVEPOINT)
    assert history.counts.completed == 2


def test_an_end_that_comes_twice_changes_nothing() -> None:
    """Behaviour 37; a recovery may confirm a checkpoint a second time."""
    history = history_of(*[completed(n) for n in range(1, 6)], limit=2)
    for again in (completed(5), failed(5), completed(1)):
        assert history.add_ended(again) is history


def test_an_end_of_a_checkpoint_that_another_process_began_counts_as_triggered() -> None:
    history = history_of(completed(1)).add_ended(completed(4))
    assert history.counts == CheckpointCounts(triggered=2, completed=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.add_triggered(completed(9)), "checkpoint 9 is COMPLETED, not triggered"),
        (lambda h: h.add_triggered(triggered(5)), "checkpoint 5 was triggered before"),
        (lambda h: h.add_triggered(triggered(4)), "checkpoint 4 was triggered before"),
        (lambda h: h.add_triggered(triggered(1)), "checkpoint 1 was triggered before"),
        (lambda h: h.add_ended(triggered(5)), "checkpoint 5 has not ended"),
    ],
)
def test_a_step_that_makes_no_sense_is_an_error(change, message) -> None:
    """Behaviour 11: no id comes twice, also when its statistics were dropped."""
    history = history_of(*[completed(n) for n in range(1, 5)], limit=1).add_triggered(triggered(5))
    with pytest.raises(ValueError, match=message):
        change(history)


# -- summary --------------------------------------------------------------------------------------


def test_the_summary_is_over_completed_checkpoints_of_the_window() -> None:
    """Behaviour 108, as far as durations are summed up."""
    history = history_of(*[completed(n) for n in range(1, 11)], failed(11), limit=1, window=4)
    summary = history.summary()
    assert summary[Quantity.END_TO_END_MS] == Summary(4, 7, 8.5, 8, 10, 10)
    assert summary[Quantity.ROWS].maximum == 100
    # Measured as 0 is measured; never measured is left out.
    assert summary[Quantity.BYTES_STAGED] == Summary(4, 0, 0.0, 0, 0, 0)
    assert Quantity.SYNC_MS not in summary
    unknown = triggered(1).complete(CheckpointDurations(), rows=1)
    assert list(history_of(unknown).summary()) == [Quantity.ROWS]
    assert StatisticsHistory().summary() == {}


def test_a_checkpoint_that_was_not_measured_is_left_out_of_its_quantity_only() -> None:
    some = triggered(1).complete(CheckpointDurations(sync_ms=8), rows=1, bytes_staged=1)
    summary = history_of(some, completed(2)).summary()
    assert summary[Quantity.SYNC_MS].count == summary[Quantity.END_TO_END_MS].count == 1
    assert summary[Quantity.ROWS].count == 2


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300))
def test_percentiles_are_exact(values) -> None:
    summary = Summary.of(values)
    assert (summary.count, summary.minimum, summary.maximum) == (len(values), min(values), max(values))
    assert summary.average == sum(values) / len(values)
    for percent, found in ((50, summary.p50), (99, summary.p99)):
        reaching = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
        assert found == min(reaching)


def test_the_hundredth_value_is_the_p99_only_above_a_hundred() -> None:
    assert Summary.of(range(1, 101)).p99 == 99
    assert Summary.of(range(1, 102)).p99 == 100
    assert Summary.of([5]) == Summary(1, 5, 5.0, 5, 5, 5)


# -- storing --------------------------------------------------------------------------------------


def busy_history() -> StatisticsHistory:
    return (
        history_of(*[completed(n, P.SAVEPOINT) for n in range(1, 5)], failed(5), limit=2, window=3)
        .add_triggered(triggered(6))
        .add_restored(RestoredCheckpoint(CheckpointId(3), 7_000, "savepoints/old"))
        .count_refused()
    )


def test_a_history_comes_back_as_it_was() -> None:
    for history in (StatisticsHistory(), busy_history()):
        assert StatisticsHistory.from_json(stored(history)) == history


STEPS = st.lists(
    st.tuples(st.sampled_from(["trigger", "complete", "fail"]), st.integers(1, 9), st.sampled_from(P)),
    max_size=40,
)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), STEPS)
def test_whatever_happens_the_history_is_bounded_sound_and_can_be_stored(limit, window, steps) -> None:
    history, make = StatisticsHistory(limit, window=window), {"complete": completed, "fail": failed}
    for step, number, purpose in steps:
        try:
            history = (
                history.add_triggered(triggered(number, purpose))
                if step == "trigger"
                else history.add_ended(make[step](number, purpose))
            )
        except ValueError as error:
            assert str(error) == f"checkpoint {number} was triggered before"
        assert len(history.entries) - len(history.in_progress) <= limit
        assert len(history.samples) <= window
        assert history.counts.in_progress == len(history.in_progress)
        assert StatisticsHistory.from_json(stored(history)) == history


@pytest.mark.parametrize("wrong", [None, -1, True, 1.5, "x", [], {}, [[1]], [{}], {"a": 1}])
def test_a_reader_of_anything_else_gets_a_value_error_or_a_sound_history(wrong) -> None:
    whole = stored(busy_history())
    places = [(), *((key,) for key in whole)]
    places += [("counts", key) for key in whole["counts"]]
    places += [("newest_restored", key) for key in whole["newest_restored"]]
    for place in places:
        changed = json.loads(json.dumps(whole))
        if not place:
            changed = wrong
        elif len(place) == 1:
            changed[place[0]] = wrong
        else:
            changed[place[0]][place[1]] = wrong
        try:
            read = StatisticsHistory.from_json(changed)
        except ValueError:
            continue
        assert StatisticsHistory.from_json(stored(read)) == read


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[1, 2]], r"samples\[0\] must be a list of 9 values"),
        ([[*[None] * 8, -1]], r"samples\[0\]\[8\] must be a whole number >= 0"),
        ([5], r"samples\[0\] must be a list of 9 values"),
        (5, "samples must be a list"),
    ],
)
def test_samples_that_cannot_be_are_refused(samples, message) -> None:
    with pytest.raises(ValueError, match=message):
        StatisticsHistory.from_json(stored(busy_history()) | {"samples": samples})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 2}, "contradict each other"),
        ({"entries": []}, "contradict each other"),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        StatisticsHistory.from_json(stored(busy_history()) | change)


def test_entries_out_of_order_and_counts_below_zero_are_refused() -> None:
    whole = stored(busy_history())
    with pytest.raises(ValueError, match=r"rising ids, got \[6, 5, 4\]"):
        StatisticsHistory.from_json(whole | {"entries": whole["entries"][::-1]})
    with pytest.raises(ValueError, match="more checkpoints ended than were triggered"):
        CheckpointCounts(triggered=1, completed=1, failed=1)
