"""Which failed checkpoints count, and when there are too many in a row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.failures import (
    FAILURE_TEXTS,
    REMEMBERED_IDS,
    CheckpointFailureReason,
    FailureManager,
    FailurePhase,
    FailureVerdict,
)
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.limits import UNLIMITED, check_factor, check_limit, check_whole, exceeds
from tools.tables import failure_reason_table

R, V, P = CheckpointFailureReason, FailureVerdict, CheckpointPurpose
EXPIRED = R.EXPIRED


class Counting:
    """Reads as the story of a job: who failed, who completed, and what was said."""

    def __init__(self, tolerable, **state) -> None:
        self.manager = FailureManager(tolerable, **state)

    def failed(self, number, reason=EXPIRED, purpose=P.PERIODIC) -> FailureVerdict:
        checkpoint = None if number is None else CheckpointId(number)
        self.manager, verdict = self.manager.on_failure(checkpoint, reason, purpose)
        return verdict

    def completed(self, number) -> None:
        self.manager = self.manager.on_completion(CheckpointId(number))


def test_the_rules_are_total_and_each_has_its_own_text() -> None:
    reasons = [reason for texts in FAILURE_TEXTS.values() for reason in texts]
    assert sorted(reasons, key=lambda one: one.name) == sorted(R, key=lambda one: one.name)
    texts = [reason.text for reason in R]
    assert len(set(texts)) == len(texts)
    assert all(text and "\n" not in text and "|" not in text for text in texts)
    assert all(reason.value == reason.name for reason in R)


def test_exactly_these_reasons_count() -> None:
    """Behaviour 52; and 17, 18, 20, 31, 46, 66 for single ones."""
    assert {reason for reason in R if reason.counts} == {
        R.ID_COUNTER_FAILED,
        R.INITIALISATION_FAILED,
        R.HOOK_FAILED,
        R.DECLINED,
        R.BARRIERS_DO_NOT_ADD_UP,
        R.EXPIRED,
        R.STAGED_DATA_DEAD,
        R.DECISION_FAILED,
    }


def test_a_refused_trigger_never_counts() -> None:
    """Behaviours 10, 52: nothing was begun, so nothing has failed."""
    refused = [reason for reason in R if reason.phase is FailurePhase.PRE_CHECK]
    assert len(refused) == 9
    for reason in refused:
        assert Counting(0).failed(None, reason) is V.NOT_COUNTED


def test_the_table_for_the_documents_has_a_row_per_reason() -> None:
    lines = failure_reason_table().splitlines()
    assert len(lines) == 2 + len(R)
    assert lines[2] == "| SHUT_DOWN | PRE_CHECK | no | the coordinator is shut down |"
    assert "| EXPIRED | IN_FLIGHT | yes | it was not decided within its timeout |" in lines
    assert {line.count("|") for line in lines} == {5}


@pytest.mark.parametrize("tolerable", [0, 1, 2, 5])
def test_the_job_fails_with_one_failure_more_than_it_tolerates(tolerable) -> None:
    """Behaviours 47, 48: in a row, and any mixture of reasons that count."""
    job, reasons = Counting(tolerable), [R.EXPIRED, R.DECLINED, R.DECISION_FAILED]
    for number in range(1, tolerable + 1):
        assert job.failed(number, reasons[number % 3]) is V.TOLERATED
    assert job.manager.consecutive == tolerable
    assert job.failed(tolerable + 1) is V.JOB_FAILS


def test_after_the_job_failed_counting_begins_anew() -> None:
    job = Counting(1)
    job.failed(1)
    assert job.failed(2) is V.JOB_FAILS
    assert job.manager.consecutive == 0
    # What the old tasks still say about ids that ended with the job.
    assert job.failed(2) is job.failed(1) is V.NOT_COUNTED
    assert job.failed(3) is V.TOLERATED
    assert job.failed(4) is V.JOB_FAILS


def test_one_success_clears_the_count() -> None:
    """Behaviour 49."""
    job = Counting(1)
    job.failed(1)
    job.completed(2)
    assert job.failed(3) is V.TOLERATED
    job.completed(4)
    assert job.failed(5) is V.TOLERATED
    assert job.failed(6) is V.JOB_FAILS


@pytest.mark.parametrize("late", [1, 3, 4])
def test_failures_of_ids_up_to_the_last_success_do_not_count(late) -> None:
    """Behaviour 50; 46: a decline that comes after its id has ended changes nothing."""
    job = Counting(0)
    job.completed(4)
    before = job.manager
    assert job.failed(late) is V.NOT_COUNTED
    assert job.manager is before


def test_a_success_older_than_the_last_one_clears_nothing() -> None:
    job = Counting(1)
    job.completed(5)
    job.failed(6)
    job.completed(3)
    assert job.failed(7) is V.JOB_FAILS


def test_many_declines_of_one_id_count_once() -> None:
    """Behaviour 51."""
    job = Counting(1)
    assert job.failed(7, R.DECLINED) is V.TOLERATED
    assert {job.failed(7, reason) for reason in (R.DECLINED, R.EXPIRED, R.DECLINED)} == {V.NOT_COUNTED}
    assert job.manager.consecutive == 1


def test_an_id_that_failed_before_an_older_one_completed_still_counts_once() -> None:
    """Behaviour 51 with two in flight."""
    job = Counting(1)
    job.failed(7)
    job.completed(6)
    assert job.manager.consecutive == 0
    assert job.failed(7) is V.NOT_COUNTED
    assert job.failed(8) is V.TOLERATED


def test_attempts_without_an_id_count_each() -> None:
    """Behaviours 17, 18: each is an attempt of its own."""
    job = Counting(2)
    assert [job.failed(None, R.INITIALISATION_FAILED) for _ in range(3)] == [
        V.TOLERATED,
        V.TOLERATED,
        V.JOB_FAILS,
    ]


def test_a_store_that_refuses_the_decision_is_counted() -> None:
    """Behaviour 68."""
    assert Counting(0).failed(1, R.DECISION_FAILED) is V.JOB_FAILS


def test_a_failing_savepoint_does_not_count_but_the_last_checkpoint_does() -> None:
    """Behaviours 61, 62: a job that stands behind its last barrier must not wait for ever."""
    job = Counting(0)
    assert job.failed(1, R.EXPIRED, P.SAVEPOINT) is V.NOT_COUNTED
    for purpose in P:
        assert job.failed(2, R.SAVEPOINT_FAILED, purpose) is V.NOT_COUNTED
    assert Counting(0).failed(1, R.EXPIRED, P.FINAL) is V.JOB_FAILS
    assert Counting(0).failed(1, R.EXPIRED, P.FINAL_SAVEPOINT) is V.JOB_FAILS


def test_without_a_limit_the_job_never_fails_and_memory_stays_bounded() -> None:
    job = Counting(UNLIMITED)
    assert {job.failed(number) for number in range(1, 1_000)} == {V.TOLERATED}
    assert job.manager.consecutive == 999
    assert len(job.manager.counted) == REMEMBERED_IDS
    # Forgotten ones do not count a second time.
    assert job.failed(1) is job.failed(999 - REMEMBERED_IDS) is V.NOT_COUNTED


def test_a_takeover_begins_behind_the_newest_completed_checkpoint() -> None:
    """Behaviour 50: what a predecessor left does not count against its successor."""
    job = Counting(0)
    job.completed(12)
    assert job.failed(11) is V.NOT_COUNTED
    assert job.failed(13) is V.JOB_FAILS


@pytest.mark.parametrize("tolerable", [-1, True, 1.0, None, "1"])
def test_a_limit_that_is_none_is_refused(tolerable) -> None:
    with pytest.raises(ValueError, match="tolerable_failures must be a whole number >= 0"):
        FailureManager(tolerable)


NUMBERS = st.integers(1, 12)
STORY = st.lists(
    st.one_of(
        st.tuples(st.just("completed"), NUMBERS),
        st.tuples(st.just("failed"), st.none() | NUMBERS, st.sampled_from(R), st.sampled_from(P)),
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 3) | st.just(UNLIMITED), STORY)
def test_handling_a_failure_never_raises_and_agrees_with_a_plain_list(tolerable, story) -> None:
    """Behaviours 33, 48 to 52, against a model that remembers everything."""
    job, row, seen, over = Counting(tolerable), 0, set(), 0
    for event, number, *rest in story:
        if event == "completed":
            job.completed(number)
            row, over = (0, number) if number > over else (row, over)
            continue
        reason, purpose = rest
        verdict = job.failed(number, reason, purpose)
        if not reason.counts or purpose is P.SAVEPOINT or (number and (number <= over or number in seen)):
            assert verdict is V.NOT_COUNTED
            continue
        row += 1
        seen |= {number} - {None}
        if tolerable is not UNLIMITED and row > tolerable:
            assert verdict is V.JOB_FAILS
            row, over = 0, max(over, *seen, 0)
        else:
            assert verdict is V.TOLERATED
        assert job.manager.consecutive == row


def test_limits_and_numbers_are_checked_by_name() -> None:
    assert check_limit("n", UNLIMITED, 5) is UNLIMITED
    assert check_limit("n", 5, 5) == 5
    assert not exceeds(10**9, UNLIMITED)
    assert check_factor("f", 1, 0, 1) == 1.0
    for wrong in (-0.1, 1.1, float("nan"), float("inf"), True, "1", None):
        with pytest.raises(ValueError, match="f must be a number from 0 to 1"):
            check_factor("f", wrong, 0, 1)
    for wrong in (4, 5.0, True, None):
        with pytest.raises(ValueError, match="n must be a whole number >= 5"):
            check_whole("n", wrong, 5)
