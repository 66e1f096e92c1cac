"""Async functions in a harness: order, capacity, time-outs, retries, limits, batches, recorded answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flinkish_spark import (
    AsyncBatchFunction,
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    CallLimits,
    CircuitBreaker,
    KeyedProcessFunction,
    MapFunction,
    OutputTag,
    ToSide,
    ValueStateDescriptor,
    async_retry_predicates,
    current_call,
)
from flinkish_spark.core.errors import ConfigError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.testing import ProgramHarness

LETTERS = OutputTag("letters", "n LONG, why STRING")
#: What functions note while they run: copies of them are made, and all see these.
LOG: list[Any] = []
ANSWER: Any = None


@pytest.fixture(autouse=True)
def _clean() -> None:
    global ANSWER
    LOG.clear()
    ANSWER = itertools.count(100)


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


class Calling(AsyncFunction):
    """Does what a function of the element and the attempt says, and notes when it was called."""

    def __init__(self, does: Callable[[int, int], Any], says: str = "") -> None:
        self.does, self.says = does, says

    async def async_invoke(self, value: Any) -> Any:
        attempt = current_call().attempt
        LOG.append((value.n, attempt, now_ms()))
        result = self.does(value.n, attempt)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, Exception):
            raise result
        return [(value.n, result)]

    def timeout(self, value: Any) -> Any:
        if "timeout" in self.says:
            return [ToSide(LETTERS, (value.n, "late"))]
        return super().timeout(value)

    def on_error(self, value: Any, error: Exception) -> Any:
        if "failed" in self.says:
            return [ToSide(LETTERS, (value.n, str(error)))]
        return super().on_error(value, error)


def harness(make: Callable[[Any], Any], **settings: Any) -> ProgramHarness:
    return ProgramHarness(make, "n LONG", **settings)


def push(run: ProgramHarness, *numbers: int) -> None:
    run.push_all([((n,), None) for n in numbers])


async def after(delay_ms: int, result: Any) -> Any:
    await asyncio.sleep(delay_ms / 1_000)
    return result


OUT = "n LONG, answer LONG"


def ordered(function: Any, timeout_ms: int = 1_000, capacity: int = 2, **settings: Any) -> ProgramHarness:
    call = partial(AsyncDataStream.ordered_wait, output=OUT, uid="asked", **settings)
    return harness(lambda s: call(s, function, timeout_ms, capacity), side_outputs=[LETTERS])


def retried(function: Any, strategy: Any, timeout_ms: int = 60_000, **settings: Any) -> ProgramHarness:
    call = partial(AsyncDataStream.ordered_wait_with_retry, output=OUT, uid="asked", **settings)
    return harness(lambda s: call(s, function, timeout_ms, 10, strategy), side_outputs=[LETTERS])


def test_results_come_in_the_order_of_the_elements() -> None:
    slow_first = Calling(lambda n, _: after(100 - 10 * n, n))
    run = ordered(slow_first, capacity=9)
    push(run, 1, 2, 3)
    assert [row.n for row in run.take().rows] == [1, 2, 3]
    unordered = harness(lambda s: AsyncDataStream.unordered_wait(s, slow_first, 1_000, 9, output=OUT))
    push(unordered, 1, 2, 3)
    assert [row.n for row in unordered.take().rows] == [1, 2, 3]


def test_no_more_calls_than_capacity_are_on_their_way() -> None:
    run = ordered(Calling(lambda n, _: after(10, n)), capacity=2)
    push(run, *range(6))
    assert [at_ms for _, _, at_ms in LOG] == [0, 0, 10, 10, 20, 20]


def test_an_element_that_takes_too_long_ends_the_micro_batch_unless_the_function_says_what_comes() -> None:
    run = ordered(Calling(lambda n, _: after(5_000, n)), timeout_ms=100)
    with pytest.raises(TimeoutError, match="timeout_ms"):
        push(run, 1)
    lenient = ordered(Calling(lambda n, _: after(5_000 * (n % 2), n), "timeout"), timeout_ms=100)
    push(lenient, 1, 2)
    found = lenient.take()
    assert (found.rows, found.side) == ([(2, 2)], {"letters": [(1, "late")]})


def test_what_a_call_raises_ends_the_micro_batch_unless_the_function_says_what_comes() -> None:
    run = ordered(Calling(lambda n, _: ValueError("no") if n == 2 else n))
    with pytest.raises(ValueError, match="no"):
        push(run, 1, 2, 3)
    lenient = ordered(Calling(lambda n, _: ValueError("no") if n == 2 else n, "failed"))
    push(lenient, 1, 2, 3)
    found = lenient.take()
    assert (found.rows, found.side) == ([(1, 1), (3, 3)], {"letters": [(2, "no")]})


def test_a_side_output_is_read_without_another_call() -> None:
    run = ordered(Calling(lambda n, _: next(ANSWER), "failed"))
    push(run, 1, 2)
    assert len(LOG) == 2
    assert [row.answer for row in run.take().rows] == [100, 101]


def test_a_time_out_of_the_callee_is_a_failure_and_not_the_elements_time_out() -> None:
    run = ordered(Calling(lambda n, _: TimeoutError("the socket's"), "failed timeout"))
    push(run, 1)
    assert run.take().side == {"letters": [(1, "the socket's")]}


def test_a_cancellation_that_is_not_ours_is_a_failure() -> None:
    async def of_another(n: int) -> Any:
        shared = asyncio.ensure_future(asyncio.sleep(60))
        shared.cancel()
        await shared

    run = ordered(Calling(lambda n, _: of_another(n) if n == 2 else n, "failed"), capacity=1)
    push(run, 1, 2, 3)
    found = run.take()
    assert [row.n for row in found.rows] == [1, 3]
    assert found.side == {"letters": [(2, "what the call awaited was cancelled")]}


def test_a_function_that_hides_its_cancellation_is_late_all_the_same() -> None:
    async def stubborn(n: int) -> Any:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            raise OSError("the connection was closed") from None

    strategy = AsyncRetryStrategy.fixed_delay(3, 10)
    run = retried(Calling(lambda n, _: stubborn(n), "failed timeout"), strategy, timeout_ms=100)
    push(run, 1)
    assert run.take().side == {"letters": [(1, "late")]}


def test_a_harness_runs_within_an_event_loop_as_in_a_notebook() -> None:
    async def cell() -> Any:
        run = ordered(Calling(lambda n, _: after(10, n)))
        push(run, 1, 2)
        return [row.n for row in run.take().rows]

    assert asyncio.run(cell()) == [1, 2]


# -- retries --------------------------------------------------------------------------------------


def test_a_call_that_fails_is_made_again_so_many_times() -> None:
    run = retried(Calling(lambda n, _: ValueError("no"), "failed"), AsyncRetryStrategy.fixed_delay(3, 100))
    push(run, 1)
    assert LOG == [(1, 0, 0), (1, 1, 100), (1, 2, 200), (1, 3, 300)]
    assert run.take().side == {"letters": [(1, "no")]}


def test_waits_get_longer_up_to_the_longest() -> None:
    strategy = AsyncRetryStrategy.exponential_backoff(4, 100, 300, 2.0)
    push(retried(Calling(lambda n, _: ValueError("no"), "failed"), strategy), 1)
    assert [at_ms for _, _, at_ms in LOG] == [0, 100, 300, 600, 900]


def test_predicates_say_what_is_tried_again() -> None:
    by_result = AsyncRetryStrategy.fixed_delay(5, 10, result_predicate=lambda rows: rows[0][1] < 2)
    run = retried(Calling(lambda n, attempt: attempt), by_result)
    push(run, 1)
    assert run.take().rows == [(1, 2)]
    # With a predicate for results alone an error is not tried again, as in Flink.
    with pytest.raises(ValueError, match="no"):
        push(retried(Calling(lambda n, _: ValueError("no")), by_result), 1)
    only_os = partial(async_retry_predicates.exception_type_predicate, expected_error_type=OSError)
    strategy = AsyncRetryStrategy.fixed_delay(5, 10, exception_predicate=only_os)
    run = retried(Calling(lambda n, attempt: OSError() if attempt < 3 else attempt), strategy)
    push(run, 1)
    assert run.take().rows == [(1, 3)]
    with pytest.raises(ValueError, match="no"):
        push(retried(Calling(lambda n, _: ValueError("no")), strategy), 1)


def test_an_empty_result_may_be_tried_again() -> None:
    class Empty(AsyncFunction):
        async def async_invoke(self, value: Any) -> Any:
            return [] if current_call().attempt < 2 else [(value.n, 7)]

    predicate = async_retry_predicates.empty_result_predicate
    run = retried(Empty(), AsyncRetryStrategy.fixed_delay(5, 10, result_predicate=predicate))
    push(run, 1)
    assert run.take().rows == [(1, 7)]


class Busy(Exception):
    def __init__(self) -> None:
        self.headers = {"Retry-After": "7"}


class Later(Exception):
    retry_after_ms = 1_234


@pytest.mark.parametrize(("error", "wait_ms"), [(Busy(), 7_000), (Later(), 1_234)])
def test_a_callee_that_says_when_to_come_again_is_obeyed(error: Exception, wait_ms: int) -> None:
    run = retried(Calling(lambda n, attempt: 5 if attempt else error), AsyncRetryStrategy.fixed_delay(1, 10))
    push(run, 1)
    assert [at_ms for _, _, at_ms in LOG] == [0, wait_ms]
    assert run.take().rows == [(1, 5)]


def test_retries_and_waits_count_for_the_time_out() -> None:
    strategy = AsyncRetryStrategy.fixed_delay(100, 30)
    run = retried(Calling(lambda n, _: ValueError("no"), "timeout"), strategy, timeout_ms=100)
    push(run, 1)
    assert [at_ms for _, _, at_ms in LOG] == [0, 30, 60, 90]
    assert run.take().side == {"letters": [(1, "late")]}


def test_jitter_spreads_waits_around_the_delay() -> None:
    strategy = AsyncRetryStrategy.fixed_delay(1, 1_000, jitter=0.5)
    run = retried(Calling(lambda n, attempt: 1 if attempt else ValueError()), strategy)
    push(run, *range(10))
    waits = sorted(at_ms for _, attempt, at_ms in LOG if attempt)
    assert 500 <= waits[0] < waits[-1] <= 1_500


# -- limits ---------------------------------------------------------------------------------------


def test_a_rate_spaces_calls_evenly() -> None:
    limits = CallLimits(per_worker_per_s=10)
    run = ordered(Calling(lambda n, _: after(1, n)), capacity=5, timeout_ms=50, limits=limits)
    push(run, *range(4))
    # Waiting for one's turn is no part of the time-out.
    assert [at_ms for _, _, at_ms in LOG] == [0, 100, 200, 300]


def test_the_rate_of_a_job_is_shared_by_its_workers() -> None:
    assert CallLimits(per_job_per_s=100).rate_per_s(4) == 25
    assert CallLimits(per_worker_per_s=10, per_job_per_s=100).rate_per_s(4) == 10
    assert CallLimits().rate_per_s(4) is None


def test_a_circuit_breaker_makes_no_calls_to_what_fails_and_loses_nothing() -> None:
    limits = CallLimits(circuit_breaker=CircuitBreaker(failures=3, reset_ms=1_000))
    # It is down for the first 2.5 seconds.
    down = Calling(lambda n, _: ValueError("down") if now_ms() < 2_500 else n)
    call = partial(AsyncDataStream.ordered_wait_with_retry, output=OUT, uid="asked", limits=limits)
    run = harness(lambda s: call(s, down, 60_000, 2, AsyncRetryStrategy.fixed_delay(99, 0)))
    push(run, *range(4))
    assert [row.n for row in run.take().rows] == [0, 1, 2, 3]
    times = [at_ms for _, _, at_ms in LOG]
    # Two at once, the third failure opens it; then one call a second is made to see.
    assert times[:5] == [0, 0, 0, 0, 1_000] or times[:4] == [0, 0, 0, 1_000]
    assert [at_ms for at_ms in times if 0 < at_ms < 3_000] == [1_000, 2_000]
    assert all(at_ms >= 3_000 for at_ms in times[-4:])


def test_what_is_held_back_between_two_calls_is_not_late() -> None:
    limits = CallLimits(circuit_breaker=CircuitBreaker(failures=1, reset_ms=10_000))
    call = partial(AsyncDataStream.ordered_wait_with_retry, output=OUT, uid="asked", limits=limits)
    flaky = Calling(lambda n, attempt: n if attempt else ValueError("no"), "timeout")
    run = harness(lambda s: call(s, flaky, 100, 3, AsyncRetryStrategy.fixed_delay(1, 10)))
    push(run, 1, 2, 3)
    assert sorted(row.n for row in run.take().rows) == [1, 2, 3]


def test_elements_that_were_made_of_one_record_have_keys_of_their_own() -> None:
    class Keyed(AsyncFunction):
        async def async_invoke(self, value: Any) -> Any:
            LOG.append(current_call().idempotency_key)
            return [(value.n, 1)]

    def three_of_one(row: Any) -> Any:
        return [(row.n,), (row.n + 1,), (row.n,)]

    call = partial(AsyncDataStream.ordered_wait, output=OUT, uid="asked")
    run = harness(lambda s: call(s.flat_map(three_of_one, output="n LONG"), Keyed(), 100))
    push(run, 1)
    assert len(set(LOG)) == 3


# -- batches --------------------------------------------------------------------------------------


class Bulk(AsyncBatchFunction):
    def __init__(self, does: Callable[[list[int]], Any] = lambda ns: ns) -> None:
        self.does = does

    async def async_invoke_batch(self, inputs: Any) -> Any:
        LOG.append([one.n for one in inputs])
        await asyncio.sleep(0.01 * (10 - inputs[0].n))
        result = self.does([one.n for one in inputs])
        return [None if n is None else (n, n) for n in result] if isinstance(result, list) else result

    def timeout_batch(self, inputs: Any) -> Any:
        return [ToSide(LETTERS, (one.n, "late")) for one in inputs]


def bulk(function: Any, method: Any = AsyncDataStream.ordered_wait_batch, **settings: Any) -> ProgramHarness:
    call = partial(method, output=OUT, uid="asked", **settings)
    return harness(lambda s: call(s, function, 1_000, 3), side_outputs=[LETTERS])


def test_a_call_has_up_to_so_many_elements_and_each_its_row() -> None:
    run = bulk(Bulk(lambda ns: [n if n % 3 else None for n in ns]))
    push(run, *range(8))
    assert LOG == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [row.n for row in run.take().rows] == [1, 2, 4, 5, 7]
    unordered = bulk(Bulk(), AsyncDataStream.unordered_wait_batch)
    push(unordered, *range(8))
    assert [row.n for row in unordered.take().rows] == [*range(8)]


def test_capacity_counts_elements_and_not_calls() -> None:
    run = bulk(Bulk(), capacity=3)
    push(run, *range(9))
    assert [row.n for row in run.take().rows] == [*range(9)]


def test_a_batch_that_takes_too_long_says_what_comes_of_each_element() -> None:
    class Slow(Bulk):
        async def async_invoke_batch(self, inputs: Any) -> Any:
            await asyncio.sleep(5)

    run = bulk(Slow())
    push(run, 1, 2)
    assert run.take().side == {"letters": [(1, "late"), (2, "late")]}


@pytest.mark.parametrize("answer", [lambda ns: [1], lambda ns: [*ns, 4]])
def test_another_number_of_rows_than_of_elements_is_an_error(answer: Any) -> None:
    run = bulk(Bulk(answer))
    with pytest.raises(ValueError, match="rows for 2 elements"):
        push(run, 5, 6)


def test_something_that_is_no_list_is_an_error() -> None:
    with pytest.raises(TypeError, match="one row for each"):
        push(bulk(Bulk(lambda ns: "text")), 5)


# -- recorded answers -----------------------------------------------------------------------------


def test_a_recorded_answer_outlives_a_crash_and_another_one_does_not() -> None:
    for settings, asked_again in ((dict(record_answers=True), [3]), ({}, [1, 2, 3])):
        LOG.clear()
        run = ordered(Calling(lambda n, _: next(ANSWER)), **settings)
        push(run, 1, 2)
        before = run.take().rows
        run.crash()
        push(run, 1, 2, 3)
        after_crash = run.take().rows
        assert [n for n, _, _ in LOG][2:] == asked_again
        assert (before == after_crash[:2]) is bool(settings)


def test_equal_elements_have_an_answer_each_and_get_the_same_ones_again() -> None:
    run = ordered(Calling(lambda n, _: next(ANSWER)), record_answers=True)
    push(run, 1, 1)
    push(run, 1)
    before = run.take().rows
    assert len({row.answer for row in before}) == 3
    run.crash()
    push(run, 1)
    push(run, 1, 1)
    assert sorted(run.take().rows) == sorted(before)
    assert len(LOG) == 3


def test_answers_go_with_their_checkpoint() -> None:
    run = ordered(Calling(lambda n, _: next(ANSWER)), record_answers=True)
    push(run, 1)
    run.snapshot()
    run.crash()
    push(run, 1)
    assert len(LOG) == 2


def test_what_was_answered_is_kept_where_another_element_has_failed() -> None:
    once = {"down": True}

    def does(n: int, attempt: int) -> Any:
        return ValueError("no") if n == 3 and once["down"] else next(ANSWER)

    run = ordered(Calling(does), capacity=1, record_answers=True)
    with pytest.raises(ValueError, match="no"):
        push(run, 1, 2, 3)
    once["down"] = False
    run.crash()
    push(run, 1, 2, 3)
    assert [n for n, _, _ in LOG] == [1, 2, 3, 3]


def test_a_changed_question_has_another_answer() -> None:
    shift = {"by": 0}

    class Shifted(MapFunction):
        def map(self, value: Any) -> Any:
            return (value.n + shift["by"],)

    function = Calling(lambda n, _: next(ANSWER))
    call = partial(AsyncDataStream.ordered_wait, output=OUT, uid="asked", record_answers=True)
    run = harness(lambda s: call(s.map(Shifted(), output="n LONG"), function, 1_000))
    push(run, 1)
    shift["by"] = 1
    run.crash()
    push(run, 1)
    assert [n for n, _, _ in LOG] == [1, 2]


# -- where it stands, and what is refused ---------------------------------------------------------


class Totals(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.total.update(self.total.value() + value.n)
        yield value.n % 2, self.total.value()


def test_it_stands_in_front_of_between_and_behind_keyed_operators() -> None:
    double = Calling(lambda n, _: after(n, 2 * n))

    def program(stream: Any) -> Any:
        asked = AsyncDataStream.unordered_wait(stream.key_by("n"), double, 1_000, 9, output=OUT)
        totals = asked.key_by(lambda row: row.n % 2, key="LONG")
        first = totals.process(Totals(), output="n LONG, total LONG", uid="totals")
        again = AsyncDataStream.ordered_wait(first, double, 1_000, output=OUT, uid="again")
        last = again.key_by("n").process(Totals(), output="n LONG, total LONG", uid="more")
        return AsyncDataStream.ordered_wait(last, double, 1_000, output=OUT, uid="last")

    run = harness(program)
    push(run, 1, 2, 3, 4)
    assert sorted(row.n for row in run.take().rows) == [0, 0, 1, 1]


class Opened(Calling):
    def open(self, context: Any) -> Any:
        LOG.append("open")
        return asyncio.sleep(0)

    async def close(self) -> None:  # type: ignore[override]
        LOG.append("close")


def test_a_function_is_opened_once_for_all_micro_batches_of_a_worker() -> None:
    run = ordered(Opened(lambda n, _: n))
    push(run, 1)
    push(run, 2)
    run.close()
    assert [one for one in LOG if isinstance(one, str)] == ["open", "close"]


def test_a_function_alone_in_a_harness() -> None:
    run = ProgramHarness.of(Calling(lambda n, _: after(30_000, n)), "n LONG", output=OUT)
    push(run, 1, 2)
    assert run.take().rows == [(1, 1), (2, 2)]
    many = ProgramHarness.of(Bulk(), "n LONG", output=OUT)
    push(many, 1, 2)
    assert many.take().rows == [(1, 1), (2, 2)]


class NotAsync(AsyncFunction):
    def async_invoke(self, value: Any) -> Any:  # type: ignore[override]
        return []


class AsyncTimeout(Calling):
    async def timeout(self, value: Any) -> Any:  # type: ignore[override]
        return []


NEVER: Any = Calling(lambda n, _: n)
REFUSED: list[tuple[str, Any, dict[str, Any], type[Exception], str]] = [
    ("not async", (NotAsync(), 10), {}, ConfigError, "async_invoke.. of the NotAsync is not async"),
    ("async time-out", (AsyncTimeout(lambda n, _: n), 10), {}, ConfigError, "timeout.. of the Async"),
    ("a class", (Calling, 10), {}, ConfigError, "async_function"),
    ("a lambda", (lambda value: value, 10), {}, ConfigError, "async_function"),
    ("no time", (NEVER, 0), {}, ConfigError, "timeout_ms"),
    ("no room", (NEVER, 10, 0), {}, ConfigError, "capacity"),
    ("pyflink's order", (NEVER, 10, AsyncRetryStrategy.no_retry()), {}, ConfigError, "capacity"),
    ("a uid", (NEVER, 10), {"uid": "a/b"}, GraphError, "uid"),
    ("limits", (NEVER, 10), {"limits": 5}, ConfigError, "limits"),
    ("a text", (NEVER, 10), {"record_answers": "no"}, ConfigError, "record_answers"),
    ("no output", (NEVER, 10), {"output": None}, SchemaError, "output of 'async-[0-9a-f]{8}' is not known"),
]


@pytest.mark.parametrize(
    ("given", "settings", "error", "says"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED]
)
def test_what_cannot_be_is_refused_when_it_is_said(given: Any, settings: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        harness(lambda s: AsyncDataStream.ordered_wait(s, *given, **{"output": OUT, **settings}))


def test_a_uid_is_used_once() -> None:
    def program(stream: Any) -> Any:
        first = AsyncDataStream.ordered_wait(stream, NEVER, 10, output=OUT, uid="asked")
        return AsyncDataStream.ordered_wait(first, NEVER, 10, output=OUT, uid="asked")

    with pytest.raises(GraphError, match="used twice"):
        harness(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CallLimits(per_job_per_s=0),
        lambda: CircuitBreaker(failures=0),
        lambda: AsyncRetryStrategy.fixed_delay(-1, 0),
        lambda: AsyncRetryStrategy.fixed_delay(1, 0, jitter=2),
        lambda: AsyncRetryStrategy.exponential_backoff(1, 10, 10, 0.5),
        lambda: AsyncRetryStrategy.exponential_backoff(1, 10, 10, "2"),
        lambda: CallLimits(circuit_breaker=5),
    ],
)
def test_settings_are_checked_when_they_are_made(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


class Wrong(AsyncFunction):
    def __init__(self, row: Any) -> None:
        self.row = row

    async def async_invoke(self, value: Any) -> Any:
        return self.row


@pytest.mark.parametrize("row", [{"n": 1}, "text", 5])
def test_a_row_that_is_not_in_a_list_is_an_error(row: Any) -> None:
    with pytest.raises(TypeError, match="return a list of rows"):
        push(ordered(Wrong(row)), 1)


def test_a_row_of_another_type_names_the_operator() -> None:
    with pytest.raises(UserFunctionError, match="asked"):
        push(ordered(Wrong([("text", 1)])), 1)


def test_nothing_may_come_of_an_element() -> None:
    run = ordered(Wrong(None))
    push(run, 1)
    assert run.take().rows == []


class Counting(Calling):
    def open(self, context: Any) -> None:
        context.add_accumulator("calls", object())


def test_an_async_function_has_no_accumulators() -> None:
    with pytest.raises(RuntimeError, match="count in a function after it"):
        push(ordered(Counting(lambda n, _: n)), 1)


def test_current_call_is_for_calls() -> None:
    with pytest.raises(RuntimeError, match="while they run"):
        current_call()
