"""What is wanted of a job reaches whichever coordinator runs; a standby and a restart end when told to."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from flinkish_spark.checkpoint.answers import CheckpointAnswer, CheckpointTriggerRequest, PendingAnswer
from flinkish_spark.checkpoint.coordinator import StopWithSavepointError
from flinkish_spark.checkpoint.decision_point import DeadCommittableError, DecisionError
from flinkish_spark.checkpoint.failures import Outage, QueryError, RepeatableUserError, classify, kind_of
from flinkish_spark.checkpoint.hooks import HookError
from flinkish_spark.connectors.splits import SourceUnavailable
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import (
    BrokerUnavailableError,
    CommittableLostError,
    ConfigError,
    FlinkishError,
    InputLostError,
    NoProgressError,
    OwnedElsewhereError,
    RetriableError,
    StoreError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.watchdog import skip_watch
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.engine import JobSettings, Standby
from flinkish_spark.job.inputs import Inputs, ask_until_answered
from flinkish_spark.job.job_control import JobControl
from flinkish_spark.job.requests import (
    OutsideRequest,
    RequestFiles,
    RequestKind,
    RequestWatcher,
    RestartForRewind,
    StopMode,
)
from flinkish_spark.job.restart_policy import RestartPolicy
from flinkish_spark.job.standby import LockWait, wait_for_lock
from flinkish_spark.job.supervisor import Supervisor
from flinkish_spark.protocol.checkpoint import Schedule
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, OwnerEpoch
from flinkish_spark.protocol.ids import CheckpointPurpose as P
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.lineage import RewindOrder, Tables
from flinkish_spark.protocol.restart import ExponentialDelay, FixedDelay, NoRestart
from tests.support.clocks import ManualClock
from tests.support.jvm_errors import FULL_DISK, Throwables
from tests.support.vertices import vertices_of


class DriverError(Exception):
    """Of a library that knows no OSError."""


def by(error: Exception, cause: Exception) -> Exception:
    """Return an error as if it had been raised from `cause`."""
    error.__cause__ = cause
    return error


class Unwatched:
    """Threads that do nothing: the watchdog's."""

    def start(self, name: str, target: Any) -> Any:
        assert name == "flinkish-watchdog"


def refused(number: int) -> Exception:
    """Return what a store makes of a refusal of its file system."""
    cause = OSError(number, os.strerror(number))
    return by(StoreError.from_os_error(cause, "cannot write 7.json", what_to_do="look at the disk"), cause)


class Coordinator:
    """Writes down what reaches it."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.exporting: frozenset[CheckpointId] = frozenset()
        self.asked: list[CheckpointTriggerRequest] = []
        self.schedules: list[Schedule] = []

    def ask(self, asked: CheckpointTriggerRequest) -> None:
        self.asked.append(asked)

    def schedule(self, schedule: Schedule) -> None:
        self.schedules.append(schedule)


def control(why: str = "") -> JobControl:
    return JobControl(lambda target: why)


def ask(job: JobControl, purpose: P = P.USER, target: str = "") -> CheckpointAnswer | None:
    pending = PendingAnswer()
    job.ask(CheckpointTriggerRequest(purpose, pending.resolve, target))
    return pending.wait(timeout_ms=0)


def attach(job: JobControl) -> Any:
    coordinator: Any = Coordinator()
    job.prepare(coordinator)
    job.attach(coordinator)
    return coordinator


# -- requests -------------------------------------------------------------------------------------------


def test_where_no_query_runs_a_request_is_refused_and_a_coordinator_that_runs_gets_it(caplog) -> None:
    """Behaviours 9, 13. The log has it, too: who does not look at the answer would wait for ever."""
    job = control()
    before = ask(job, P.FINAL_SAVEPOINT)
    assert before is not None and before.reason is Reason.PARTICIPANT_NOT_RUNNING
    assert "(FINAL_SAVEPOINT) is refused: the job starts, or starts again: ask once it runs" in caplog.text
    first = attach(job)
    assert ask(job) is None and [one.purpose for one in first.asked] == [P.USER]
    first.is_stopping = True
    restarting = ask(job)
    assert restarting is not None and restarting.reason is Reason.PARTICIPANT_NOT_RUNNING
    job.detach()
    job.close()
    over = ask(job)
    assert over is not None and over.reason is Reason.SHUT_DOWN


def test_a_savepoint_is_forced_and_its_target_is_looked_at_before_it_gets_an_id() -> None:
    """Behaviours 26, 58: and what cannot be written disturbs no stream."""
    coordinator = attach(job := control())
    ask(job, P.SAVEPOINT, "/savepoints/a")
    ask(job, P.USER)
    assert [one.purpose.is_savepoint for one in coordinator.asked] == [True, False]
    coordinator = attach(job := control("something else is there"))
    for purpose in (P.SAVEPOINT, P.FINAL_SAVEPOINT):
        answer = ask(job, purpose, "/savepoints/a")
        assert answer is not None
        assert (answer.reason, answer.text) == (Reason.STORAGE_NOT_READY, "something else is there")
    ask(job, P.USER)
    assert [one.purpose for one in coordinator.asked] == [P.USER]


def test_a_timer_that_is_switched_off_stays_off_behind_a_restart() -> None:
    """Behaviour 12."""
    job = control()
    job.schedule(Schedule.OFF)
    first = attach(job)
    assert first.schedules == [Schedule.OFF]
    job.schedule(Schedule.ON)
    assert first.schedules == [Schedule.OFF, Schedule.ON]
    assert attach(job).schedules == []


def test_a_timer_that_is_switched_off_never_triggers_for_a_coordinator_that_begins() -> None:
    """While a query starts its interval goes by, so the first tick would trigger."""
    job, coordinator = control(), Coordinator()
    job.schedule(Schedule.OFF)
    starting: Any = coordinator
    job.prepare(starting)
    assert coordinator.schedules == [Schedule.OFF]
    # It does not run yet: requests are refused, and the timer is switched all the same.
    assert ask(job) is not None and coordinator.asked == []
    job.schedule(Schedule.ON)
    job.attach(starting)
    assert coordinator.schedules == [Schedule.OFF, Schedule.ON]


# -- ending ---------------------------------------------------------------------------------------------


class Lock:
    """Held by somebody else until `free_at_ms`."""

    def __init__(self, clock: ManualClock, free_at_ms: int) -> None:
        self._clock, self._free_at_ms = clock, free_at_ms

    def acquire(self) -> None:
        if self._clock.now_ms < self._free_at_ms:
            raise OwnedElsewhereError("somebody else has it")

    def release(self) -> None:
        pass


def settings(clock: ManualClock, standby: Standby) -> Any:
    return SimpleNamespace(clock=clock, standby=standby, standby_poll_ms=100)


def test_a_standby_waits_and_takes_over() -> None:
    clock = ManualClock()
    waited = wait_for_lock(Lock(clock, 950), settings(clock, Standby.WAIT), threading.Event())
    assert (waited, clock.now_ms) == (LockWait.TAKEN, 1_000)
    with pytest.raises(OwnedElsewhereError):
        wait_for_lock(Lock(clock, 5_000), settings(clock, Standby.REFUSE), threading.Event())


@pytest.mark.parametrize("end", ["stop_with_checkpoint", "cancel"])
def test_a_standby_that_is_told_to_end_never_takes_the_job_over(end: str) -> None:
    clock, job = ManualClock(), control()
    getattr(job, end)()
    # Also if the lock is free by now: whoever said so did not mean a job that begins.
    for free_at_ms in (0, 10**9):
        wanted = settings(clock, Standby.WAIT)
        assert wait_for_lock(Lock(clock, free_at_ms), wanted, job.end_wanted) is LockWait.GIVEN_UP


def test_a_failed_stop_with_savepoint_uses_up_no_restart() -> None:
    policy = RestartPolicy(NoRestart(), lambda: 0.5)
    for _ in range(3):
        assert policy.delay_ms_after(StopWithSavepointError("no room"), 0) == 0
    with pytest.raises(QueryError):
        policy.delay_ms_after(QueryError("a real one"), 0)


def failed(what: str = "IOException: no such thing", **facts: Any) -> QueryError:
    return QueryError(what, **facts)


def test_the_same_failure_at_the_same_micro_batch_ends_the_job_with_its_first_cause() -> None:
    """Whatever the strategy says: the default restarts for ever."""
    policy = RestartPolicy(ExponentialDelay(), lambda: 0.5)
    first = failed("IOException: no block 17 in file /in/a", why="it is damaged")
    assert policy.delay_ms_after(first, 0, BatchId(7)) == 500
    assert policy.delay_ms_after(failed("IOException: no block 18 in file /in/a"), 0, BatchId(7)) == 1_000
    with pytest.raises(NoProgressError) as caught:
        policy.delay_ms_after(failed("IOException: no block 19 in file /in/a"), 0, BatchId(7))
    error = caught.value
    assert error.__cause__ is first and not error.restartable
    assert str(error).startswith("IOException: no block 17 in file /in/a. It is damaged; it failed 3 ")
    assert "at micro-batch 7" in str(error) and "To do: " in str(error)
    assert (error.tries, error.batch) == (3, BatchId(7))


def test_a_failure_before_the_first_micro_batch_is_bounded_too() -> None:
    policy = RestartPolicy(FixedDelay(attempts=99, delay_ms=0), lambda: 0.5, tries_without_progress=2)
    assert policy.delay_ms_after(failed(), 0) == 0
    with pytest.raises(NoProgressError, match="before its first micro-batch"):
        policy.delay_ms_after(failed(), 0)


def test_progress_lets_a_failure_come_back() -> None:
    policy = RestartPolicy(FixedDelay(attempts=99, delay_ms=0), lambda: 0.5)
    for n in range(20):
        # A later micro-batch each time, or a confirmed checkpoint in between.
        assert policy.delay_ms_after(failed(), 0, BatchId(n)) == 0
    for _ in range(20):
        policy.ran_well()
        assert policy.delay_ms_after(failed(), 0, BatchId(3)) == 0


@pytest.mark.parametrize(
    "error",
    [
        Outage("ConnectException: Connection refused"),
        BrokerUnavailableError("no broker answers"),
        StoreError("the disk is away"),
        SourceUnavailable("the source cannot be asked now"),
        by(HookError("the catalog"), ConnectionRefusedError(111, "Connection refused")),
        by(HookError("the catalog"), OSError("the catalog is away")),
        by(HookError("the catalog"), TimeoutError("no answer")),
        by(HookError("the catalog"), DriverError("could not connect to server")),
        HookError("a master hook has not returned", ends_when_repeated=False),
        refused(errno.ENOSPC),
        refused(errno.ESTALE),
        refused(errno.EIO),
        by(RetriableError("too many"), TimeoutError("not decided within its timeout")),
        by(RetriableError("too many"), by(DecisionError("not decided"), refused(errno.EDQUOT))),
    ],
    ids=repr,
)
def test_an_outage_of_an_hour_ends_no_job(error: FlinkishError) -> None:
    """Every 30 s, for an hour, at one micro-batch; only the strategy could end it."""
    policy = RestartPolicy(ExponentialDelay(), lambda: 0.5)
    delays = [policy.delay_ms_after(error, now_ms, BatchId(7)) for now_ms in range(0, 3_600_000, 30_000)]
    assert len(delays) == 120 and max(delays) == 30_000


def test_without_an_end_of_tries_the_strategy_decides() -> None:
    policy = RestartPolicy(FixedDelay(attempts=9, delay_ms=0), lambda: 0.5, tries_without_progress=UNLIMITED)
    for _ in range(9):
        assert policy.delay_ms_after(failed(), 0, BatchId(7)) == 0
    with pytest.raises(QueryError):
        policy.delay_ms_after(failed(), 0, BatchId(7))


@pytest.mark.parametrize(
    "error",
    [
        RetriableError("other rows"),
        RetriableError("other dead letters"),
        CommittableLostError("vacuumed"),
        DeadCommittableError("it timed out"),
        by(HookError("the catalog"), ValueError("no such version")),
        by(HookError("the catalog"), PermissionError("of another user")),
        refused(errno.EACCES),
        refused(errno.EROFS),
        refused(errno.ENOTDIR),
        refused(errno.EISDIR),
        RetriableError("barriers do not add up"),
        by(RetriableError("too many"), by(DecisionError("not decided"), refused(errno.EROFS))),
        by(RetriableError("too many"), by(HookError("the catalog"), KeyError("version"))),
    ],
    ids=repr,
)
def test_what_is_no_outage_is_not_run_for_ever(error: FlinkishError) -> None:
    policy = RestartPolicy(ExponentialDelay(), lambda: 0.5)
    for _ in range(2):
        policy.delay_ms_after(error, 0, BatchId(7))
    with pytest.raises(NoProgressError, match=r"[Ii]t failed 3 times at micro-batch 7"):
        policy.delay_ms_after(error, 0, BatchId(7))


def test_a_failure_with_another_text_each_time_ends_the_job_with_the_first() -> None:
    policy = RestartPolicy(ExponentialDelay(), lambda: 0.5)
    # As `classify` makes them: the folder is one of tempfile's.
    texts = [f"FileNotFoundError: no /tmp/tmp{name}_x/part" for name in ("kq", "rw", "ze", *"abcdef")]
    failures = [failed(text, cause=text, kind="FileNotFoundError") for text in texts]
    for error in failures[:8]:
        policy.delay_ms_after(error, 0, BatchId(7))
    with pytest.raises(NoProgressError, match=r"tmpkq_x/part.*It failed 9 times at micro-batch 7") as caught:
        policy.delay_ms_after(failures[8], 0, BatchId(7))
    assert caught.value.__cause__ is failures[0]
    # The class says what kind it is where nothing else does.
    assert (kind_of(failures[0]), kind_of(DeadCommittableError("9"))) == (
        "FileNotFoundError",
        "DeadCommittableError",
    )
    try:
        raise ValueError("/tmp/tmpk3j_x9ab/x")
    except ValueError as error:
        assert kind_of(classify(error)) == "ValueError"


def test_a_job_that_was_told_to_stop_is_started_once_more_and_not_for_ever() -> None:
    policy, job = RestartPolicy(FixedDelay(attempts=99, delay_ms=0), lambda: 0.5), control()
    assert not policy.gives_up(QueryError("before"), job)
    job.stop_with_checkpoint()
    assert [policy.gives_up(QueryError("again"), job) for _ in range(2)] == [False, True]
    job = control()
    job.cancel()
    assert policy.gives_up(QueryError("while it is cancelled"), job)


# -- the directory --------------------------------------------------------------------------------------


class Here:
    """A job directory and whoever looks into it."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.job_dir = ManualClock(), JobDir(LocalStore(folder))
        self.cancelled: list[str] = []
        self.outside = RequestWatcher(
            self.job_dir, self.clock, lambda asked: None, lambda: self.cancelled.append("cancel")
        )


def test_an_order_is_obeyed_once_and_only_while_it_waits(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.outside.look()
    here.outside.raise_if_ordered()
    order = RewindOrder("a" * 32, CheckpointId(3), Tables.KEEP, "wanted", 0)
    here.job_dir.create_rewind_order(order)
    here.outside.look()
    with pytest.raises(RestartForRewind, match="checkpoint 3"):
        here.outside.raise_if_ordered()
    here.outside.raise_if_ordered()
    here.outside.look()
    here.job_dir.refuse_rewind_order(order, "closed meanwhile")
    here.outside.raise_if_ordered()


@pytest.mark.parametrize(
    ("mode", "purpose"), [(StopMode.SUSPEND, P.FINAL_SAVEPOINT), (StopMode.DRAIN, P.DRAINED_SAVEPOINT)]
)
def test_how_a_job_is_to_stop_is_passed_on(tmp_path: Path, mode: StopMode, purpose: P) -> None:
    here, asked = Here(tmp_path), list[CheckpointTriggerRequest]()
    here.outside = RequestWatcher(here.job_dir, here.clock, asked.append, lambda: None)
    here.outside._inbox.took_over(OwnerEpoch(1))
    kind, name = RequestKind.STOP_WITH_SAVEPOINT, "b" * 32
    request = OutsideRequest(name, kind, OwnerEpoch(1), here.clock.wall_ms(), "/sp", mode)
    RequestFiles(here.job_dir, name).create(request)
    here.outside.look()
    assert [(one.purpose, one.target) for one in asked] == [(purpose, "/sp")]


def test_how_a_job_is_to_stop_is_said_by_its_name() -> None:
    client = JobClient.__new__(JobClient)
    with pytest.raises(ConfigError, match="mode is 'DRAIN'"):
        client.stop_with_savepoint("/sp", "DRAIN")  # type: ignore[arg-type]


def test_an_order_that_cannot_be_read_does_not_end_the_job(tmp_path: Path, caplog) -> None:
    here = Here(tmp_path)
    here.job_dir.store.put("orders/rewind.json", b"torn")
    for _ in range(3):
        here.outside.look()
        here.outside.raise_if_ordered()
    assert sum("are read later" in record.message for record in caplog.records) == 1


def test_the_thread_that_looks_ends_with_the_ownership(tmp_path: Path) -> None:
    here = Here(tmp_path)
    started: list[Any] = []

    class Threads:
        def start(self, name: str, target: Any) -> threading.Thread:
            thread = threading.Thread(name=name, target=target)
            started.append(thread)
            thread.start()
            return thread

    here.clock.wait = lambda event, timeout_ms: event.wait(0.001)  # type: ignore[method-assign]
    for epoch in (1, 2):
        here.outside.start(Threads(), OwnerEpoch(epoch))
        here.outside.stop()
    assert [(one.name, one.is_alive()) for one in started] == [("flinkish-requests", False)] * 2


# -- inputs ---------------------------------------------------------------------------------------------


def test_a_position_whose_input_is_gone_says_so_before_anything_is_touched(tmp_path: Path) -> None:
    asked: list[object] = []

    class Source:
        def __init__(self, error: Exception | None) -> None:
            self._error = error

        def check_input(self, job_dir: object, uid: str, position: LoggedOffsets) -> None:
            asked.append((uid, position))
            if self._error is not None:
                raise self._error

    def inputs(error: Exception | None) -> Inputs:
        nodes: Any = [SimpleNamespace(uid=u, source=Source(e)) for u, e in (("a", None), ("b", error))]
        log: Any = None
        return Inputs(nodes, JobDir(LocalStore(tmp_path)), log)

    position: Any = object()
    assert inputs(None).why_lost(position) == ""
    assert asked == [("a", position), ("b", position)]
    assert "offsets 3 to 8" in inputs(InputLostError("offsets 3 to 8 are gone")).why_lost(position)
    # Not to be known now: the recovery waits and asks again.
    with pytest.raises(QueryError):
        inputs(QueryError("no broker")).why_lost(position)


def test_a_source_that_refuses_at_once_is_asked_ever_more_slowly_and_a_stop_does_not_wait() -> None:
    clock, at_ms = ManualClock(), list[int]()

    def ask() -> bool:
        at_ms.append(clock.now_ms)
        return len(at_ms) == 10

    assert ask_until_answered(ask, lambda: False, clock)
    # 50 ms, then twice as long each time, and never more than 5 s.
    assert at_ms == [0, 50, 150, 350, 750, 1_550, 3_150, 6_350, 11_350, 16_350]
    clock, at_ms = ManualClock(), []
    assert not ask_until_answered(ask, lambda: clock.now_ms >= 2_000, clock)
    assert clock.now_ms == 2_000


@pytest.mark.parametrize("error", [RepeatableUserError("fingerprint() failed"), refused(errno.EACCES)])
def test_what_is_no_outage_of_a_source_is_not_waited_for(tmp_path: Path, error: Exception) -> None:
    def check_identity(job_dir: object, uid: str) -> None:
        raise error

    node: Any = SimpleNamespace(uid="in", source=SimpleNamespace(check_identity=check_identity))
    with pytest.raises(type(error)):
        Inputs([node], JobDir(LocalStore(tmp_path)), None).check_identity()  # type: ignore[arg-type]


def test_what_the_jvm_raises_before_the_query_reaches_nobody_raw(tmp_path: Path) -> None:
    def check() -> None:
        raise Throwables(FULL_DISK).raised()

    engine: Any = SimpleNamespace(vertices=vertices_of(["in"]), why_no_savepoint_at=None, check=check)
    job: dict[str, Any] = dict(clock=ManualClock(), threads=Unwatched(), observer=None, scratch=tmp_path)
    settings = JobSettings("orders", StoreSpec(str(tmp_path)), CheckpointConfig(), NoRestart(), 0, 1, **job)
    supervisor = Supervisor(engine, settings, JobDir(LocalStore(tmp_path)))
    with pytest.raises(Outage, match=r"^IOException: No space left on device") as caught:
        supervisor.run()
    assert isinstance(caught.value.__cause__, Py4JJavaError)
    assert supervisor.states.status is JobStatus.FAILED


def test_a_look_at_the_input_behind_a_failure_raises_only_what_is_final(caplog) -> None:
    def look(error: Exception) -> None:
        def check() -> bool:
            raise error

        supervisor: Any = SimpleNamespace(_waiting=skip_watch)
        Supervisor._raise_if_lost(supervisor, SimpleNamespace(check=check))  # type: ignore[arg-type]

    for passing in (ConnectionRefusedError("no catalog"), KeyError("x"), RepeatableUserError("wrong")):
        look(passing)
    assert [line.split(":")[0] for line in caplog.messages] == ["the input cannot be checked now"] * 3
    with pytest.raises(InputLostError):
        look(InputLostError("offsets 3 to 8 are gone"))
