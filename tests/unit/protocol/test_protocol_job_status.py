"""The status of a job, the states of its tasks, and what listeners hear of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.checkpoint import IllegalTransitionError
from flinkish_spark.protocol.job_status import (
    JOB_TRANSITIONS,
    REPORTED,
    TASK_TRANSITIONS,
    TASKS_FOLLOW,
    JobEvent,
    JobState,
    JobStatus,
    JobStatusChange,
    TaskEvent,
    TaskState,
    TaskStateChange,
    VertexStatus,
)
from tests.support.vertices import vertices_of
from tools.tables import job_status_table, task_state_table

J, E, T, V = JobStatus, JobEvent, TaskState, TaskEvent


def after(*events) -> JobState:
    """Return a job with two tasks after these events of the job or, as (uid, event), of a task."""
    job = JobState.create(vertices_of(["orders", "totals"]))
    for event in events:
        if isinstance(event, tuple):
            job, _ = job.on_task(*event, attempt=job.attempt)
        else:
            job, _ = job.on(event)
    return job


def states(job) -> set[TaskState]:
    return {one.state for one in job.tasks.values()}


def orders(state) -> dict[str, VertexStatus]:
    """Return a single task in a state."""
    return {"orders": VertexStatus("orders", "orders", ("orders",), (), state)}


def reachable(transitions, start) -> set:
    found, new = {start}, [start]
    while new:
        new = [s for state in new for s in transitions[state].values() if s not in found]
        found.update(new)
    return found


def test_the_tables_name_every_state_and_event() -> None:
    assert JOB_TRANSITIONS.keys() == set(J)
    assert TASK_TRANSITIONS.keys() == set(T)
    assert TASKS_FOLLOW.keys() == set(E)
    assert {event for row in JOB_TRANSITIONS.values() for event in row} == set(E)
    assert {event for row in TASK_TRANSITIONS.values() for event in row} == set(V)
    used = {step for steps in TASKS_FOLLOW.values() for step in steps}
    assert used | REPORTED == set(V)


def test_only_the_globally_terminal_states_have_no_way_out() -> None:
    assert {s for s in J if s.is_globally_terminal} == {J.CANCELED, J.FAILED, J.FINISHED}
    assert {s for s in J if s.is_terminal} == {J.CANCELED, J.FAILED, J.FINISHED, J.SUSPENDED}
    assert {s for s in T if s.is_terminal} == {T.FINISHED, T.CANCELED, T.FAILED}
    assert all(TASK_TRANSITIONS[state] for state in T)


@pytest.mark.parametrize("status", JobStatus)
def test_every_status_is_reached_and_leads_to_an_end(status) -> None:
    assert status in reachable(JOB_TRANSITIONS, J.CREATED)
    assert any(s.is_globally_terminal for s in reachable(JOB_TRANSITIONS, status))


@pytest.mark.parametrize("state", TaskState)
def test_every_task_state_is_reached_and_leads_to_an_end(state) -> None:
    assert state in reachable(TASK_TRANSITIONS, T.CREATED)
    assert any(s.is_terminal for s in reachable(TASK_TRANSITIONS, state))


@pytest.mark.parametrize(("status", "event"), list(itertools.product(JobStatus, JobEvent)))
def test_every_status_takes_or_refuses_every_event(status, event) -> None:
    job = JobState(status, orders(T.RUNNING))
    following = JOB_TRANSITIONS[status].get(event)
    if following is None:
        with pytest.raises(
            IllegalTransitionError, match=f"the job is {status.value} and cannot take {event.value}"
        ):
            job.on(event)
        assert job == JobState(status, orders(T.RUNNING))
    else:
        moved, changes = job.on(event, "why", at_ms=7)
        assert moved.status is following
        heard = [c for c in changes if isinstance(c, JobStatusChange)]
        told = JobStatusChange(status, following, event, "why", 7)
        assert heard == ([] if following is status else [told])
        assert {c.at_ms for c in changes} <= {7}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TaskState, TaskEvent)))
def test_every_task_takes_or_refuses_every_report(state, event) -> None:
    job = JobState(J.RUNNING, orders(state))
    following = TASK_TRANSITIONS[state].get(event) if event in REPORTED else None
    if following is None:
        with pytest.raises(
            IllegalTransitionError, match=f"task 'orders' is {state.value} and cannot take {event.value}"
        ):
            job.on_task("orders", event, attempt=1)
        assert job.tasks == orders(state)
    else:
        moved, changes = job.on_task("orders", event, attempt=1, cause="why", at_ms=7)
        assert moved.tasks["orders"] == VertexStatus(
            "orders", "orders", ("orders",), (), following, 1, 7, "why"
        )
        assert changes[0] == TaskStateChange("orders", "orders", 1, state, following, "why", 7)


def test_the_life_of_a_job_without_accidents() -> None:
    job = after(E.STARTED)
    assert (job.status, states(job)) == (J.RUNNING, {T.SCHEDULED})
    job = after(E.STARTED, ("orders", V.INITIALIZE), ("orders", V.RUN))
    # Behaviours 3, 4: a trigger asks who does not run, and who has finished.
    assert [one.state for one in job.tasks.values()] == [T.RUNNING, T.SCHEDULED]
    job, changes = job.on(E.FINISH)
    assert job.status is J.FINISHED
    assert [(c.vertex, c.before, c.after) for c in changes[1:]] == [
        ("orders", T.RUNNING, T.FINISHED),
        ("totals", T.SCHEDULED, T.CANCELING),
        ("totals", T.CANCELING, T.CANCELED),
    ]


def test_a_task_that_fails_fails_the_job_and_ends_the_others() -> None:
    """Behaviour 57, as far as states are concerned."""
    job = after(E.STARTED, ("orders", V.INITIALIZE), ("orders", V.RUN))
    job, changes = job.on_task("orders", V.FAIL, attempt=1, cause="a bad record")
    assert changes == (
        TaskStateChange("orders", "orders", 1, T.RUNNING, T.FAILED, "a bad record"),
        JobStatusChange(J.RUNNING, J.FAILING, E.FAILURE, "a bad record"),
        TaskStateChange("totals", "totals", 1, T.SCHEDULED, T.CANCELING, "a bad record"),
    )
    # A second failure meanwhile is noted for its task only.
    job, changes = job.on_task("totals", V.FAIL, attempt=1, cause="and one more")
    told = TaskStateChange("totals", "totals", 1, T.CANCELING, T.FAILED, "and one more")
    assert changes == (told,)
    assert job.status is J.FAILING


def test_a_restart_begins_a_new_attempt_of_every_task() -> None:
    job = after(E.STARTED, ("orders", V.INITIALIZE), ("orders", V.FINISH), E.FAILURE)
    job, changes = job.on(E.RESTART)
    assert (job.status, job.attempt, states(job)) == (J.RESTARTING, 2, {T.CREATED})
    assert [(c.vertex, c.attempt, c.after) for c in changes[1:]] == [
        ("totals", 1, T.CANCELED),
        ("orders", 2, T.CREATED),
        ("totals", 2, T.CREATED),
    ]
    assert after(E.STARTED, E.FAILURE, E.RESTART, E.STARTED).status is J.RUNNING


def test_a_report_from_an_earlier_attempt_changes_nothing() -> None:
    job = after(E.STARTED, E.FAILURE, E.RESTART, E.STARTED)
    assert job.on_task("orders", V.FAIL, attempt=1) == (job, ())


def test_a_job_that_gives_up_has_failed_for_good() -> None:
    job = after(E.STARTED, E.FAILURE, E.GIVE_UP)
    assert (job.status, states(job)) == (J.FAILED, {T.CANCELED})
    assert after(E.FAILURE, E.GIVE_UP).status is J.FAILED


@pytest.mark.parametrize("before", [(), (E.STARTED,), (E.STARTED, E.FAILURE), (E.FAILURE, E.RESTART)])
def test_a_job_can_be_cancelled_at_any_time(before) -> None:
    job = after(*before, E.CANCEL)
    assert job.status is J.CANCELLING
    # Twice, or with an error on the way, is the same.
    assert job.on(E.CANCEL) == job.on(E.FAILURE) == (job, ())
    job, _ = job.on(E.ALL_ENDED)
    assert (job.status, states(job)) == (J.CANCELED, {T.CANCELED})


@pytest.mark.parametrize("before", [(), (E.STARTED,), (E.FAILURE,), (E.FAILURE, E.RESTART), (E.CANCEL,)])
def test_a_process_that_lost_its_job_suspends_it_and_another_goes_on(before) -> None:
    """Behaviour 75: suspended is not over, also when it was being cancelled, so nothing is deleted."""
    job = after(*before, E.SUSPEND)
    assert job.status is J.SUSPENDED and not job.status.is_globally_terminal
    assert states(job) == {T.CANCELED}
    attempt = job.attempt
    job, _ = job.on(E.TAKE_OVER)
    assert (job.status, states(job), job.attempt) == (J.CREATED, {T.CREATED}, attempt + 1)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        after(E.STARTED).on_task("nobody", V.RUN, attempt=1)


def test_a_failure_belongs_to_the_one_vertex_that_has_the_operator() -> None:
    front = VertexStatus("1", "Source: in -> map f [late] -> map f", ("in", "map f [late]", "map f"), ("1",))
    behind = VertexStatus("2", "Sink: out", ("filter g", "map h", "out"), ("2", "2h"))
    last = VertexStatus("3", "Sink: log", ("map h", "log"), ("3h", "3"))
    job = JobState(J.CREATED, {one.vertex: one for one in (front, behind, last)})
    assert [job.vertex_of("", name) for name in ("in", "map f", "filter g", "log")] == ["1", "1", "2", "3"]
    # Two vertices have one of that name, and a beginning is no name.
    assert [job.vertex_of("", name) for name in ("map h", "map", "")] == [None, None, None]
    assert [job.vertex_of(known, "map h") for known in ("2h", "3h", "another")] == ["2", "3", None]


EVENTS = st.lists(
    st.one_of(
        st.sampled_from(E),
        st.tuples(st.sampled_from(["orders", "totals"]), st.sampled_from(V)),
    ),
    max_size=60,
)

#: What tasks can be while the job is this; not listed: anything.
TASKS_WHILE = {
    J.CREATED: {T.CREATED},
    J.RESTARTING: {T.CREATED},
    J.FAILING: {T.CANCELING, T.CANCELED, T.FINISHED, T.FAILED},
    J.CANCELLING: {T.CANCELING, T.CANCELED, T.FINISHED, T.FAILED},
    **{status: {T.CANCELED, T.FINISHED, T.FAILED} for status in J if status.is_terminal},
}


@settings(derandomize=True, deadline=None)
@given(EVENTS)
def test_whatever_happens_job_and_tasks_agree_and_the_changes_tell_it_all(events) -> None:
    job = JobState.create(vertices_of(["orders", "totals"]))
    told_status, told = job.status, {one.vertex: one.state for one in job.tasks.values()}
    for event in events:
        try:
            if isinstance(event, tuple):
                job, changes = job.on_task(*event, attempt=job.attempt)
            else:
                job, changes = job.on(event)
        except IllegalTransitionError:
            continue
        for change in changes:
            if isinstance(change, JobStatusChange):
                assert change.before is told_status is not change.after
                told_status = change.after
            else:
                assert change.before is told[change.vertex] is not change.after
                told[change.vertex] = change.after
        assert told_status is job.status
        assert told == {one.vertex: one.state for one in job.tasks.values()}
        assert states(job) <= TASKS_WHILE.get(job.status, set(T))


def test_the_tables_for_the_documents_have_a_row_per_state() -> None:
    job, task = job_status_table().splitlines(), task_state_table().splitlines()
    assert len(job) == 2 + len(J)
    assert len(task) == 2 + len(T)
    assert job[0].startswith("| status | STARTED | FAILURE |")
    assert task[2] == "| CREATED | SCHEDULED | - | - | - | CANCELED | - | FAILED | - |"
    assert {line.count("|") for line in job} == {len(E) + 2}
    assert {line.count("|") for line in task} == {len(V) + 2}
