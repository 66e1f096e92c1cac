"""Threads that do not get on are named, in the log and in the job's progress; nothing is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flinkish_spark.checkpoint.control import AlignmentStatus
from flinkish_spark.checkpoint.coordinator import Workers
from flinkish_spark.core.clock import GivenUp, SystemClock, SystemThreads, outcome_of
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.watchdog import Wait, Watchdog, note_failure
from flinkish_spark.protocol.records import Outcome
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Rig


class Watched:
    """A watchdog whose clock the test moves."""

    def __init__(self) -> None:
        self.clock, self.told, self.is_hurried = ManualClock(), [()], False
        self.dog = Watchdog(self.clock, self.told.append, lambda: self.is_hurried)

    def after(self, seconds: int) -> list[tuple[str, int]]:
        """Let time go by and look; return what is waited for, and for how long."""
        self.clock.now_ms += seconds * 1_000
        self.dog.look()
        return [(wait.what, wait.for_ms // 1_000) for wait in self.told[-1]]


def in_thread(name: str, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_a_wait_of_a_minute_is_named_and_again_after_twice_the_time(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with watched.dog.waiting("Spark to end the query"):
        assert watched.after(59) == []
        assert watched.after(1) == [("Spark to end the query", 60)]
        assert watched.told[-1][0].who == f"the thread '{threading.current_thread().name}'"
        assert watched.after(59) == [("Spark to end the query", 119)]
        assert watched.after(1) == [("Spark to end the query", 120)]
        assert watched.after(100) == [("Spark to end the query", 220)]
    assert watched.after(1_000) == []
    name = threading.current_thread().name
    assert [record.message for record in caplog.records] == [
        f"the thread '{name}' has waited 60 s for Spark to end the query; nothing is ended because of that",
        f"the thread '{name}' has waited 120 s for Spark to end the query; nothing is ended because of that",
        f"the thread '{name}' goes on: it waits no more for Spark to end the query",
    ]


def test_what_is_waited_for_now_is_known() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock, lambda waits: None)
    assert watchdog.longest == ""
    with watchdog.waiting("the recovery to end"):
        assert watchdog.longest == "the recovery to end"
        with watchdog.waiting("a sink to commit"):
            assert watchdog.longest == "a sink to commit"
    assert watchdog.longest == ""


def test_who_gets_on_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with watched.dog.waiting("the recovery to end"):
        for _ in range(5):
            with watched.dog.waiting("sink 'a' to commit"):
                assert watched.after(40) == []
            assert watched.after(40) == []
        # The outer one counts from when the inner one was over.
        assert watched.after(20) == [("the recovery to end", 60)]
    assert len(caplog.records) == 2


def test_the_innermost_wait_of_each_thread_is_told_the_longest_first() -> None:
    watched = Watched()

    def inside() -> None:
        watched.clock.now_ms += 5_000
        with watched.dog.waiting("complete-3 to end"), watched.dog.waiting("the MERGE"):
            watched.clock.now_ms += 70_000
            watched.dog.look()

    with watched.dog.waiting("the coordinator to end"):
        in_thread("flinkish-complete-3", inside)
        own = threading.current_thread().name
        assert watched.told[-1] == (
            Wait(f"the thread '{own}'", "the coordinator to end", 75_000),
            Wait("the thread 'flinkish-complete-3'", "the MERGE", 70_000),
        )


def test_a_job_that_is_cancelled_says_soon_what_it_waits_for() -> None:
    watched = Watched()
    with watched.dog.waiting("Spark to end the query"):
        assert watched.after(6) == []
        watched.is_hurried = True
        assert watched.after(1) == [("Spark to end the query", 7)]


def test_an_error_ends_a_wait() -> None:
    watched = Watched()
    with pytest.raises(ValueError, match="no"), watched.dog.waiting("a"), watched.dog.waiting("b"):
        raise ValueError("no")
    assert watched.after(100) == []


def test_it_looks_in_a_thread_of_its_own_until_it_is_stopped() -> None:
    looked = threading.Event()

    class Clock(ManualClock):
        def wait(self, event: threading.Event, timeout_ms: int) -> bool:
            assert timeout_ms == 1_000
            self.now_ms += 10_000
            return event.wait(0.001)

    def tell(waits: tuple[Wait, ...]) -> None:
        if waits:
            looked.set()

    dog = Watchdog(Clock(), tell)
    with dog.waiting("nothing"):
        dog.start(SystemThreads())
        assert looked.wait(10)
    dog.stop()


def test_workers_and_who_waits_for_them_are_named() -> None:
    watched, seen, ended = Watched(), [], threading.Event()
    workers = Workers(SystemThreads(), seen.append, watched.dog.waiting)
    workers.begin("complete-7", lambda: (ended.wait(10), None)[1])
    joining = threading.Thread(target=workers.join, name="flinkish-coordinator")
    joining.start()
    while len(watched.told[-1]) < 2:
        watched.after(60)
    assert {(wait.who, wait.what) for wait in watched.told[-1]} == {
        ("the thread 'flinkish-complete-7'", "complete-7 to end"),
        ("the thread 'flinkish-coordinator'", "the thread of complete-7 to end"),
    }
    ended.set()
    joining.join(10)
    assert watched.after(60) == [] and not seen


def test_a_commit_that_takes_two_minutes_is_named_with_sink_and_checkpoint_and_finished() -> None:
    watched = Watched()
    rig = Rig(sinks="a", clock=watched.clock, waiting=watched.dog.waiting)
    said: dict[str, list[tuple[str, int]]] = {}
    rig.committers["a"].on_call = lambda call: said.setdefault(call, watched.after(120))
    rig.take()
    assert said["why_dead"] == [("sink 'a' to check its data of checkpoint 1", 120)]
    assert said["commit"] == [("committing checkpoint 1 to sink 'a' to end", 120)]
    assert (rig.confirmed, rig.answers, watched.after(120)) == ([1], ["user=COMPLETED"], [])


def test_what_may_hang_is_given_up_when_the_job_is_to_end() -> None:
    """A master hook whose system never answers keeps no cancel out."""
    hangs, clock, asked = threading.Event(), SystemClock(), []

    def must_give_up() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(GivenUp, match="hooks"):
        outcome_of(hangs.wait, "hooks", SystemThreads(), clock, must_give_up)
    hangs.set()
    assert outcome_of(lambda: 7, "hooks", SystemThreads(), clock, lambda: False) == 7

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        outcome_of(fail, "hooks", SystemThreads(), clock, lambda: False)


def test_two_intervals_are_told_with_the_last_error_and_the_log_has_its_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, told = ManualClock(), [()]
    dog = Watchdog(clock, told.append, patience_ms=2_000)
    with dog.waiting("the commit to end"):
        clock.now_ms += 1_999
        dog.look()
        assert told[-1] == ()
        note_failure("no\x1b[2J\nroute")
        clock.now_ms += 1
        dog.look()
        me = f"the thread '{threading.current_thread().name}'"
        assert told[-1] == (Wait(me, "the commit to end", 2_000, "no?[2J route"),)
        assert str(told[-1][0]) == f"{me} has waited 2 s for the commit to end: no?[2J route"
        with dog.waiting("the disk"):
            pass
        clock.now_ms += 2_000
        dog.look()
        # It got on in between: what failed before that counts no more.
        assert told[-1] == (Wait(me, "the commit to end", 2_000),)
    assert not caplog.records
    note_failure("nobody waits here")


def test_no_interval_is_longer_than_a_minute() -> None:
    clock, told = ManualClock(), [()]
    dog = Watchdog(clock, told.append, patience_ms=600_000)
    with dog.waiting("the commit to end"):
        clock.now_ms += 60_000
        dog.look()
    assert len(told[-1]) == 1


def test_a_commit_that_is_answered_with_retry_is_told_with_its_reason() -> None:
    """K05: a committer that answers RETRY for ever was seen nowhere."""
    clock, told = ManualClock(), [()]
    dog = Watchdog(clock, told.append, patience_ms=2_000, held=lambda: rig.coordinator.list_waits())
    rig = Rig(sinks="a", clock=clock, waiting=dog.waiting)
    rig.committers["a"].outcomes = [Outcome.RETRY] * 6
    seen: list[list[tuple[str, str, str]]] = []

    def on_call(call: str) -> None:
        dog.look()
        seen.append([(wait.who, wait.what, wait.error) for wait in told[-1]])

    rig.committers["a"].on_call = on_call
    rig.take()
    me = f"the thread '{threading.current_thread().name}'"
    # Pauses of 50, 100, 200, 400, 800 and 1,600 ms: the seventh try comes 3,150 ms behind the first.
    assert [who for who, _, _ in seen[-2]] == ["checkpoint 1", me]
    assert seen[-2][1] == (me, "committing checkpoint 1 to sink 'a' to end", "as told")
    assert [bool(one) for one in seen] == [False] * 7 + [True, True]
    dog.look()
    assert (rig.confirmed, told[-1]) == ([1], ())


def test_a_sink_that_cannot_say_what_is_left_is_one_wait_over_all_tries() -> None:
    clock, told = ManualClock(), [()]
    dog = Watchdog(clock, told.append, patience_ms=2_000)
    rig = Rig(sinks="a", clock=clock, waiting=dog.waiting)
    rig.committers["a"].deaths = [EnvironmentFault("no broker") for _ in range(6)]
    for death in rig.committers["a"].deaths:
        death.restartable = True
    seen: list[tuple[str, str]] = []
    rig.committers["a"].on_call = lambda call: (
        dog.look(),
        seen.extend((wait.what, wait.error) for wait in told[-1]),
    )
    rig.take()
    assert seen[-1] == ("sink 'a' to check its data of checkpoint 1", "no broker.")


def test_an_open_checkpoint_says_who_has_not_seen_its_barrier() -> None:
    clock = ManualClock(1_000)
    rig = Rig(clock=clock)
    rig.ask()
    clock.now_ms += 3_000
    assert [*rig.coordinator.list_waits()] == [
        Wait("checkpoint 1", "its barrier to come through to operator 'sum', sink 'a', sink 'b'", 3_000)
    ]
    rig.control.status = AlignmentStatus(False, "waits for checkpoint 4 of the upstream job")
    (wait,) = rig.coordinator.list_waits()
    assert wait.what == (
        "its barrier to come through to operator 'sum', sink 'a', sink 'b'; "
        "the source waits for checkpoint 4 of the upstream job"
    )
    batch = rig.stage(1)
    assert [wait.what for wait in rig.coordinator.list_waits()] == ["Spark to log its micro-batch as done"]
    rig.commit_log(batch)
    assert [*rig.coordinator.list_waits()] == []
