"""Who is told of statuses and checkpoints: everybody, in order, once, and whatever others do."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from flinkish_spark.checkpoint.hooks import JobStates, QuietListener
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import EnvironmentFault, UserFunctionError
from flinkish_spark.protocol.checkpoint import IllegalTransitionError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.job_status import JobEvent, JobStatus, TaskState
from tests.support.vertices import vertices_of


def did(states) -> dict[str, TaskState]:
    """Return what each vertex does."""
    return {one.vertex: one.state for one in states.vertices}


class Heard(QuietListener):
    """Writes down what it is told, as words."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def on_change(self, change) -> None:
        self.words.append(str(change.after.value))

    def on_checkpoint_complete(self, checkpoint) -> None:
        self.words.append(f"complete{checkpoint}")

    def on_checkpoint_aborted(self, checkpoint, newest) -> None:
        self.words.append(f"aborted{checkpoint}({newest})")


class Broken(QuietListener):
    """Raises whatever it is told."""

    def on_change(self, change) -> None:
        raise RuntimeError("a bug of the listener's")

    def on_checkpoint_complete(self, checkpoint) -> None:
        raise RuntimeError("a bug of the listener's")

    def on_checkpoint_aborted(self, checkpoint, newest) -> None:
        raise RuntimeError("a bug of the listener's")


def test_a_listener_that_does_not_return_is_named() -> None:
    named: list[str] = []

    def waiting(what: str):
        named.append(what)
        return nullcontext()

    states = JobStates(vertices_of([]), [Heard(), Broken()], SystemClock(), waiting)
    states.on_checkpoint_complete(CheckpointId(2))
    states.on(JobEvent.SUSPEND)
    assert named == ["the listener Heard to return", "the listener Broken to return"] * 2


def test_everybody_hears_of_each_checkpoint_once_with_the_latest_complete_one() -> None:
    """Behaviours 1, 54."""
    one, other = Heard(), Heard()
    states = JobStates(vertices_of(["a"]), [one, other], SystemClock())
    states.on_checkpoint_aborted(CheckpointId(1))
    states.on_checkpoint_complete(CheckpointId(2))
    states.on_checkpoint_aborted(CheckpointId(3))
    assert one.words == other.words == ["aborted1(None)", "complete2", "aborted3(2)"]


def test_changes_come_in_their_order() -> None:
    heard = Heard()
    states = JobStates(vertices_of(["orders"]), [heard], SystemClock())
    states.on(JobEvent.STARTED)
    states.initialize_tasks()
    assert did(states) == {"orders": TaskState.INITIALIZING}
    states.run_tasks()
    assert (states.status, did(states)) == (JobStatus.RUNNING, {"orders": TaskState.RUNNING})
    (orders,) = states.vertices
    assert (orders.name, orders.attempt, orders.cause) == ("orders", 1, "") and orders.since_ms > 0
    known = len(heard.words)
    # Every further micro-batch says the same.
    states.run_tasks()
    assert len(heard.words) == known
    assert heard.words.index("INITIALIZING") > heard.words.index("RUNNING")


def test_a_step_that_the_table_does_not_have_is_told_to_nobody() -> None:
    heard = Heard()
    states = JobStates(vertices_of([]), [heard], SystemClock())
    with pytest.raises(IllegalTransitionError):
        states.on(JobEvent.FINISH)
    assert (heard.words, states.status) == ([], JobStatus.CREATED)


@pytest.mark.parametrize(
    "events,status",
    [
        ([], JobStatus.FAILED),
        ([JobEvent.STARTED], JobStatus.FAILED),
        ([JobEvent.CANCEL], JobStatus.CANCELED),
        ([JobEvent.SUSPEND], JobStatus.SUSPENDED),
        ([JobEvent.STARTED, JobEvent.FINISH], JobStatus.FINISHED),
    ],
)
def test_everything_comes_to_an_end(events, status) -> None:
    states = JobStates(vertices_of(["a"]), [], SystemClock())
    for event in events:
        states.on(event)
    states.end(EnvironmentFault("the JVM is gone"))
    assert states.status is status


def test_a_listener_that_raises_keeps_nobody_from_hearing(caplog) -> None:
    """Behaviour 33."""
    heard = Heard()
    states = JobStates(vertices_of(["a"]), [Broken(), heard], SystemClock())
    states.on(JobEvent.STARTED)
    states.on_checkpoint_complete(CheckpointId(1))
    states.on_checkpoint_aborted(CheckpointId(2))
    assert heard.words[-2:] == ["complete1", "aborted2(1)"]
    assert caplog.text.count("a listener failed: RuntimeError: a bug of the listener's") >= 3


def test_a_quiet_listener_hears_everything_and_says_nothing() -> None:
    states = JobStates(vertices_of(["a"]), [QuietListener()], SystemClock())
    states.on(JobEvent.STARTED)
    states.on_checkpoint_complete(CheckpointId(1))
    states.on_checkpoint_aborted(CheckpointId(2))


def test_behind_a_recovery_the_latest_complete_checkpoint_is_what_the_job_goes_on_from() -> None:
    """Behaviour 54: in a new process it is one of the process before, after a rewind an older one."""
    heard = Heard()
    states = JobStates(vertices_of([]), [heard], SystemClock())
    states.on_restored(CheckpointId(7))
    states.on_checkpoint_aborted(CheckpointId(8))
    states.on_restored(CheckpointId(3))
    states.on_checkpoint_aborted(CheckpointId(9))
    states.on_restored(None)
    states.on_checkpoint_aborted(CheckpointId(10))
    assert heard.words == ["aborted8(7)", "aborted9(3)", "aborted10(None)"]


def test_the_task_that_an_error_names_has_failed_and_the_others_are_ended() -> None:
    """Behaviour 57."""
    states = JobStates(vertices_of(["orders", "totals"]), [], SystemClock())
    states.on(JobEvent.STARTED)
    states.run_tasks()
    states.on_failure(UserFunctionError("raised", uid="totals"))
    assert states.status is JobStatus.FAILING
    assert did(states) == {"orders": TaskState.CANCELING, "totals": TaskState.FAILED}
    # Once more, and one that names nobody: nothing changes, nothing raises.
    states.on_failure(UserFunctionError("raised", uid="totals"))
    states.on_failure(UserFunctionError("raised", uid="nobody"))
    states.on_failure(UserFunctionError("raised"))
    assert did(states)["totals"] is TaskState.FAILED
    states.on(JobEvent.RESTART)
    states.on(JobEvent.STARTED)
    states.run_tasks()
    assert did(states) == {"orders": TaskState.RUNNING, "totals": TaskState.RUNNING}


def test_the_vertex_of_the_last_failure_says_why() -> None:
    states = JobStates(vertices_of(["orders", "totals"]), [], SystemClock())
    states.on(JobEvent.STARTED)
    states.end(UserFunctionError("the function raised", uid="totals"))
    assert states.status is JobStatus.FAILED
    orders, totals = states.vertices
    told = (
        "the function raised. To do: correct the function or the record; "
        "the job goes on from the last checkpoint."
    )
    assert (totals.state, totals.cause) == (TaskState.FAILED, told)
    assert (orders.state, orders.cause) == (TaskState.CANCELED, told)
