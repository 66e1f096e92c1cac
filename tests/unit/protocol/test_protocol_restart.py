"""How long the supervisor waits before it starts the query again, and when it gives up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.restart import (
    REMEMBERED_CAUSES,
    REMEMBERED_FAILURES,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    GiveUp,
    NoRestart,
    RepeatedFailures,
    RestartAfter,
    RestartHistory,
)

HOUR_MS = 3_600_000


def history(*failures_ms) -> RestartHistory:
    result = RestartHistory()
    for now_ms in failures_ms:
        result = result.add_failure(now_ms)
    return result


def delays(strategy, *failures_ms) -> list[int]:
    """Return the delay after each of these failures."""
    return [strategy.decide(history(*failures_ms[: n + 1])).delay_ms for n in range(len(failures_ms))]


def test_no_restart_gives_up_at_once_and_says_why() -> None:
    assert NoRestart().decide(history(0)) == GiveUp("the restart strategy is NoRestart")


def test_fixed_delay_counts_failures_since_the_job_last_ran_well() -> None:
    strategy = FixedDelay(attempts=2, delay_ms=10)
    assert delays(strategy, 0, 1) == [10, 10]
    assert strategy.decide(history(0, 1, 2)) == GiveUp("2 restarts in a row did not help")
    assert strategy.decide(history(0, 1, 2).reset_attempts().add_failure(3)) == RestartAfter(10)


def test_fixed_delay_may_have_no_end_and_no_beginning() -> None:
    assert FixedDelay(UNLIMITED, 5).decide(history(*range(5_000))) == RestartAfter(5)
    assert isinstance(FixedDelay(attempts=0).decide(history(0)), GiveUp)


def test_exponential_delay_grows_up_to_its_maximum() -> None:
    assert delays(ExponentialDelay(100, 1_000), *range(6)) == [100, 200, 400, 800, 1_000, 1_000]
    assert delays(ExponentialDelay(100, 1_000, 1.5), *range(4)) == [100, 150, 225, 338]
    assert delays(ExponentialDelay(100, 1_000, 1.0), *range(4)) == [100, 100, 100, 100]
    assert delays(ExponentialDelay(100, 100), *range(3)) == [100, 100, 100]


def test_the_delay_starts_anew_after_a_quiet_time_that_counts_from_the_end_of_the_delay() -> None:
    strategy = ExponentialDelay(100, 1_000, reset_backoff_threshold_ms=5_000)
    assert delays(strategy, 0, 10, 10 + 5_199) == [100, 200, 400]
    assert delays(strategy, 0, 10, 10 + 5_200, 10 + 5_201) == [100, 200, 100, 200]


def test_a_checkpoint_between_two_failures_is_not_a_quiet_time() -> None:
    """A job that dies after each checkpoint must not restart at full speed for ever."""
    failing = RestartHistory()
    seen = []
    for now_ms in range(0, 60_000, 10_000):
        failing = failing.add_failure(now_ms)
        seen.append(ExponentialDelay().decide(failing).delay_ms)
        failing = failing.reset_attempts()
    assert seen == [500, 1_000, 2_000, 4_000, 8_000, 16_000]


def test_attempts_are_counted_until_the_delay_starts_anew() -> None:
    strategy = ExponentialDelay(100, 1_000, reset_backoff_threshold_ms=5_000, attempts_before_reset_backoff=2)
    assert delays(strategy, 0, 1) == [100, 200]
    assert strategy.decide(history(0, 1, 2)) == GiveUp("3 failures without 5000 ms of running between them")
    assert delays(strategy, 0, 1, 10_000, 10_001) == [100, 200, 100, 200]
    none = ExponentialDelay(attempts_before_reset_backoff=0)
    assert isinstance(none.decide(history(0)), GiveUp)


@pytest.mark.parametrize(
    ("random", "delay_ms"), [(0.0, 750), (0.25, 875), (0.5, 1_000), (0.75, 1_125), (0.999_999, 1_250)]
)
def test_jitter_moves_the_delay_both_ways(random, delay_ms) -> None:
    strategy = ExponentialDelay(1_000, 10_000, jitter_factor=0.25)
    assert strategy.decide(history(0), random) == RestartAfter(delay_ms)


def test_jitter_never_goes_above_the_maximum_nor_below_zero() -> None:
    strategy = ExponentialDelay(1_000, 1_000, jitter_factor=1.0)
    assert strategy.decide(history(0), 0.999) == RestartAfter(1_000)
    assert strategy.decide(history(0), 0.0) == RestartAfter(0)


@pytest.mark.parametrize("random", [-0.1, 1.0, float("nan")])
def test_a_number_that_is_no_random_number_is_refused(random) -> None:
    with pytest.raises(ValueError, match="random must be at least 0 and below 1"):
        ExponentialDelay().decide(history(0), random)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.integers(0, 2 * HOUR_MS), min_size=1, max_size=50),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1),
)
def test_every_delay_stays_within_its_bounds(pauses_ms, random, jitter_factor) -> None:
    strategy = ExponentialDelay(500, 30_000, jitter_factor=jitter_factor)
    delay_ms = strategy.decide(history(*itertools.accumulate(pauses_ms)), random).delay_ms
    assert round(500 * (1 - jitter_factor)) <= delay_ms <= 30_000


def test_failure_rate_counts_what_lies_within_the_interval_both_ends_included() -> None:
    strategy = FailureRate(max_failures=2, interval_ms=100, delay_ms=5)
    assert strategy.decide(history(0, 101, 102)) == RestartAfter(5)
    assert strategy.decide(history(2, 101, 102)) == GiveUp("3 failures within 100 ms")
    # A checkpoint in between changes nothing.
    assert isinstance(strategy.decide(history(0, 1).reset_attempts().add_failure(2)), GiveUp)


def test_memory_of_failures_is_bounded() -> None:
    long = history(*range(REMEMBERED_FAILURES + 7))
    assert long.failures_ms == tuple(range(7, REMEMBERED_FAILURES + 7))
    assert long.attempts == REMEMBERED_FAILURES + 7
    assert ExponentialDelay().decide(long) == RestartAfter(30_000)
    assert isinstance(FailureRate(max_failures=REMEMBERED_FAILURES - 1).decide(long), GiveUp)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedDelay(attempts=-1), "attempts must be a whole number >= 0, or UNLIMITED, got -1"),
        (lambda: FixedDelay(attempts=True), "attempts must be"),
        (lambda: FixedDelay(attempts="3"), "attempts must be a whole number >= 0, or UNLIMITED, got '3'"),
        (lambda: FixedDelay(delay_ms=-1), "delay_ms must be a whole number from 0 to 31536000000"),
        (lambda: FixedDelay(delay_ms=10**30), "delay_ms must be a whole number from 0 to 31536000000"),
        (lambda: FixedDelay(delay_ms=1.5), "delay_ms must be"),
        (lambda: ExponentialDelay(initial_delay_ms=0), "initial_delay_ms must be a whole number from 1"),
        (lambda: ExponentialDelay(max_delay_ms=None), "max_delay_ms must be"),
        (
            lambda: ExponentialDelay(1_000, 999),
            "max_delay_ms must be at least initial_delay_ms, which is 1000, got 999",
        ),
        (lambda: ExponentialDelay(backoff_multiplier=0.99), "backoff_multiplier must be a number from 1"),
        (lambda: ExponentialDelay(backoff_multiplier=float("inf")), "backoff_multiplier must be"),
        (lambda: ExponentialDelay(jitter_factor=1.01), "jitter_factor must be a number from 0"),
        (lambda: ExponentialDelay(jitter_factor=float("nan")), "jitter_factor must be"),
        (lambda: ExponentialDelay(reset_backoff_threshold_ms=0), "reset_backoff_threshold_ms must be"),
        (lambda: ExponentialDelay(attempts_before_reset_backoff=-1), "attempts_before_reset_backoff must"),
        (lambda: ExponentialDelay(attempts_before_reset_backoff=1_000), "must be below 1000, got 1000"),
        (lambda: FailureRate(max_failures=0), "max_failures must be a whole number >= 1"),
        (lambda: FailureRate(max_failures=1_000), "max_failures must be below 1000, got 1000"),
        (lambda: FailureRate(interval_ms=0), "interval_ms must be a whole number from 1"),
        (lambda: FailureRate(delay_ms=-1), "delay_ms must be a whole number from 0"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_when_it_is_made(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- the same failure again ------------------------------------------------------------------------------


def test_the_third_failure_from_one_cause_at_one_micro_batch_is_one_too_many() -> None:
    repeated, verdicts = RepeatedFailures(), []
    for _ in range(3):
        repeated = repeated.add_failure(7, "disk", "Kind")
        verdicts.append(repeated.is_stuck("disk"))
    assert verdicts == [False, False, True]
    assert (repeated.times("disk"), repeated.times("other")) == (3, 0)


def test_causes_that_take_turns_are_counted_side_by_side() -> None:
    repeated = RepeatedFailures()
    for cause in ("a", "b", "a", "b"):
        repeated = repeated.add_failure(7, cause, "Kind")
    assert (repeated.times("a"), repeated.times("b")) == (2, 2)
    assert repeated.add_failure(7, "a", "Kind").is_stuck("a") and not repeated.add_failure(
        7, "c", "Kind"
    ).is_stuck("c")


def test_a_later_micro_batch_and_a_checkpoint_are_progress_and_an_earlier_one_is_none() -> None:
    twice = RepeatedFailures().add_failure(7, "a", "Kind").add_failure(7, "a", "Kind")
    assert twice.add_failure(8, "a", "Kind").times("a") == 1
    # A restart goes back to the last checkpoint, and cuts the same records into fewer micro-batches.
    assert twice.add_failure(5, "a", "Kind").times("a") == 3
    # It failed before its first micro-batch, or nobody can say.
    assert twice.add_failure(None, "a", "Kind").times("a") == 3
    assert (
        RepeatedFailures()
        .add_failure(None, "a", "Kind")
        .add_failure(None, "a", "Kind")
        .add_failure(0, "a", "Kind")
        .times("a")
        == 3
    )
    again = twice.reset().add_failure(7, "a", "Kind")
    assert (again.times("a"), again.batch) == (1, 7)


def test_tries_may_be_one_and_may_have_no_end() -> None:
    assert RepeatedFailures(tries=1).add_failure(7, "a", "Kind").is_stuck("a")
    endless = RepeatedFailures(tries=UNLIMITED)
    for _ in range(2_000):
        endless = endless.add_failure(7, "a", "Kind")
    assert endless.times("a") == 2_000 and not endless.is_stuck("a")


def test_causes_that_are_new_each_time_take_no_memory() -> None:
    repeated = RepeatedFailures()
    for n in range(1_000):
        repeated = repeated.add_failure(7, f"cause {n}", "Kind")
    assert len(repeated.counted) == REMEMBERED_CAUSES and repeated.times("cause 999") == 1


def test_a_cause_whose_text_is_new_each_time_comes_nine_times() -> None:
    """Three tries, three times: a folder of `tempfile` in the text makes each another cause."""
    repeated, verdicts = RepeatedFailures(), []
    for name in "abcdefghi":
        repeated = repeated.add_failure(7, f"FileNotFoundError: /tmp/tmp{name}/x", "FileNotFoundError")
        verdicts.append(repeated.is_stuck_in("FileNotFoundError"))
    assert verdicts == [False] * 8 + [True]
    assert not repeated.is_stuck("FileNotFoundError: /tmp/tmpi/x") and not repeated.is_stuck_in("OSError")
    # Progress, of either sort, lets all of it begin anew.
    assert repeated.reset().times_of_kind("FileNotFoundError") == 0
    assert repeated.add_failure(8, "/tmp/tmpj/x", "FileNotFoundError").times_of_kind("FileNotFoundError") == 1
    assert (
        repeated.add_failure(6, "/tmp/tmpj/x", "FileNotFoundError").times_of_kind("FileNotFoundError") == 10
    )


def test_kinds_have_no_end_where_tries_have_none() -> None:
    endless = RepeatedFailures(tries=UNLIMITED)
    for n in range(100):
        endless = endless.add_failure(7, f"cause {n}", f"kind {n % 30}")
    assert not endless.is_stuck_in("kind 9") and len(endless.kinds) == REMEMBERED_CAUSES


@pytest.mark.parametrize("tries", [0, -1, True, 2.5, None, "3"])
def test_tries_that_are_no_number_are_refused_by_name(tries) -> None:
    with pytest.raises(ValueError, match="tries_without_progress must be a whole number >= 1, or UNLIMITED"):
        RepeatedFailures(tries=tries)
