"""Status of a job and states of its tasks, as two transition tables.

Rules of this file: status and states move only along :data:`JOB_TRANSITIONS` and
:data:`TASK_TRANSITIONS`; an event that a table does not list raises and changes nothing. A job's
event also moves its tasks, as :data:`TASKS_FOLLOW` says. The names are Flink's; a *task* is here
a whole vertex of the job graph, since Spark schedules its partitions itself.

Rules that the tables cannot express:

- There is no way out of CANCELED, FAILED and FINISHED. SUSPENDED ends the work of one process
  only: another process, or a later start, takes the job over.
- A process that lost its ownership must end in SUSPENDED, also while it cancels: the files that a
  cancelled job deletes belong to the newer owner by then.
- FINISHED needs more than finished tasks: their last data must be in a confirmed checkpoint. So
  only the supervisor sends FINISH.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from flinkish_spark.protocol.checkpoint import IllegalTransitionError
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.job_graph import JobVertex


class JobStatus(Choice):
    """Status of a job, as one process sees it."""

    #: The job is being checked, taken over or recovered; Spark does not run yet.
    CREATED = "CREATED"
    #: Query and coordinator run.
    RUNNING = "RUNNING"
    #: Something failed; query and coordinator are being ended.
    FAILING = "FAILING"
    #: They have ended; the job waits for its restart, or recovers.
    RESTARTING = "RESTARTING"
    #: The job was cancelled; query and coordinator are being ended.
    CANCELLING = "CANCELLING"
    #: Cancelled for good.
    CANCELED = "CANCELED"
    #: Failed for good.
    FAILED = "FAILED"
    #: Its last checkpoint is confirmed, and its input has ended or it was stopped for good.
    FINISHED = "FINISHED"
    #: This process has stopped working on it; the job itself is not over.
    SUSPENDED = "SUSPENDED"

    @property
    def is_globally_terminal(self) -> bool:
        """True if the job is over for every process; only then its files may be deleted."""
        return not JOB_TRANSITIONS[self]

    @property
    def is_terminal(self) -> bool:
        """True if the job is over for this process."""
        return self.is_globally_terminal or self is JobStatus.SUSPENDED


class JobEvent(enum.Enum):
    #: Query and coordinator were started.
    STARTED = "STARTED"
    #: Something failed.
    FAILURE = "FAILURE"
    #: Everything has ended, and the restart strategy says to start again.
    RESTART = "RESTART"
    #: Everything has ended, and the failure is final.
    GIVE_UP = "GIVE_UP"
    #: A user wants it to end at once.
    CANCEL = "CANCEL"
    #: After a cancel everything has ended.
    ALL_ENDED = "ALL_ENDED"
    #: The last checkpoint is confirmed and the job will not go on.
    FINISH = "FINISH"
    #: This process stops: a newer owner has the job, or it was stopped to be started again later.
    SUSPEND = "SUSPEND"
    #: A process goes on with a suspended job.
    TAKE_OVER = "TAKE_OVER"


_J, _E = JobStatus, JobEvent

JOB_TRANSITIONS: Mapping[JobStatus, Mapping[JobEvent, JobStatus]] = {
    _J.CREATED: {
        _E.STARTED: _J.RUNNING,
        _E.FAILURE: _J.FAILING,
        _E.CANCEL: _J.CANCELLING,
        _E.SUSPEND: _J.SUSPENDED,
    },
    _J.RUNNING: {
        _E.FAILURE: _J.FAILING,
        _E.CANCEL: _J.CANCELLING,
        _E.FINISH: _J.FINISHED,
        _E.SUSPEND: _J.SUSPENDED,
    },
    # A second failure while the first is handled changes nothing, and neither does a second cancel.
    _J.FAILING: {
        _E.FAILURE: _J.FAILING,
        _E.RESTART: _J.RESTARTING,
        _E.GIVE_UP: _J.FAILED,
        _E.CANCEL: _J.CANCELLING,
        _E.SUSPEND: _J.SUSPENDED,
    },
    _J.RESTARTING: {
        _E.STARTED: _J.RUNNING,
        _E.FAILURE: _J.FAILING,
        _E.CANCEL: _J.CANCELLING,
        _E.SUSPEND: _J.SUSPENDED,
    },
    _J.CANCELLING: {
        _E.FAILURE: _J.CANCELLING,
        _E.CANCEL: _J.CANCELLING,
        _E.ALL_ENDED: _J.CANCELED,
        _E.SUSPEND: _J.SUSPENDED,
    },
    _J.CANCELED: {},
    _J.FAILED: {},
    _J.FINISHED: {},
    _J.SUSPENDED: {_E.TAKE_OVER: _J.CREATED},
}


class TaskState(Choice):
    """State of a vertex of the job graph."""

    #: It does not run yet.
    CREATED = "CREATED"
    #: The query was started; Spark does not run it yet.
    SCHEDULED = "SCHEDULED"
    #: Spark runs it and it restores its state; no micro-batch has come through yet.
    INITIALIZING = "INITIALIZING"
    #: It takes part in micro-batches and checkpoints.
    RUNNING = "RUNNING"
    #: It has come to the end of its input.
    FINISHED = "FINISHED"
    #: It was told to end.
    CANCELING = "CANCELING"
    #: It has ended before its input did.
    CANCELED = "CANCELED"
    #: It has ended with an error.
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        """True if this attempt has ended; only a new attempt can change the state."""
        return TASK_TRANSITIONS[self].keys() == {TaskEvent.RESET}


class TaskEvent(enum.Enum):
    SCHEDULE = "SCHEDULE"
    INITIALIZE = "INITIALIZE"
    RUN = "RUN"
    FINISH = "FINISH"
    CANCEL = "CANCEL"
    ENDED = "ENDED"
    FAIL = "FAIL"
    #: A new attempt begins.
    RESET = "RESET"


_T, _V = TaskState, TaskEvent

TASK_TRANSITIONS: Mapping[TaskState, Mapping[TaskEvent, TaskState]] = {
    _T.CREATED: {_V.SCHEDULE: _T.SCHEDULED, _V.CANCEL: _T.CANCELED, _V.FAIL: _T.FAILED},
    _T.SCHEDULED: {_V.INITIALIZE: _T.INITIALIZING, _V.CANCEL: _T.CANCELING, _V.FAIL: _T.FAILED},
    # A vertex that had finished before the restored checkpoint has nothing to run.
    _T.INITIALIZING: {
        _V.RUN: _T.RUNNING,
        _V.FINISH: _T.FINISHED,
        _V.CANCEL: _T.CANCELING,
        _V.FAIL: _T.FAILED,
    },
    _T.RUNNING: {_V.FINISH: _T.FINISHED, _V.CANCEL: _T.CANCELING, _V.FAIL: _T.FAILED},
    _T.FINISHED: {_V.RESET: _T.CREATED},
    _T.CANCELING: {_V.ENDED: _T.CANCELED, _V.FAIL: _T.FAILED},
    _T.CANCELED: {_V.RESET: _T.CREATED},
    _T.FAILED: {_V.RESET: _T.CREATED},
}

#: Task events that follow from a job's event, in order; a task whose state does not allow one ignores it.
TASKS_FOLLOW: Mapping[JobEvent, tuple[TaskEvent, ...]] = {
    _E.STARTED: (_V.SCHEDULE,),
    _E.FAILURE: (_V.CANCEL,),
    _E.RESTART: (_V.ENDED, _V.RESET),
    _E.GIVE_UP: (_V.ENDED,),
    _E.CANCEL: (_V.CANCEL,),
    _E.ALL_ENDED: (_V.ENDED,),
    _E.FINISH: (_V.FINISH, _V.CANCEL, _V.ENDED),
    _E.SUSPEND: (_V.CANCEL, _V.ENDED),
    _E.TAKE_OVER: (_V.RESET,),
}

#: Events that are reported about one task; the others follow from the job's events.
REPORTED = frozenset({_V.INITIALIZE, _V.RUN, _V.FINISH, _V.ENDED, _V.FAIL})


@dataclass(frozen=True, slots=True)
class VertexStatus:
    """State of a vertex of the job graph.

    Parameters
    ----------
    vertex
        Its id in the job graph, the same in every process.
    name
        Its operators' titles, as the job graph has them.
    operators
        Uids of its operators; for an operator without a uid its name.
    ids
        Ids of its operators in the job graph.
    state
        See :class:`TaskState`.
    attempt
        1 for the first start, one more with each restart.
    since_ms
        Wall clock time of the last change of its state; 0 before the first one.
    cause
        Reason of the state, for people; empty if nothing went wrong.
    """

    vertex: str
    name: str
    operators: tuple[str, ...]
    ids: tuple[str, ...] = ()
    state: TaskState = TaskState.CREATED
    attempt: int = 1
    since_ms: int = 0
    cause: str = ""

    @classmethod
    def of(cls, vertex: JobVertex) -> VertexStatus:
        """Return the initial status of a vertex."""
        operators = tuple(one.uid or one.name for one in vertex.operators)
        return cls(vertex.id, vertex.name, operators, tuple(one.id for one in vertex.operators))

    def has(self, operator: str) -> bool:
        """Return if an operator is in the vertex, by its uid or name."""
        # The name of an operator for a side output ends with that output.
        return any(one == operator or one.startswith(f"{operator} [") for one in self.operators)


@dataclass(frozen=True, slots=True)
class JobStatusChange:
    """The job's status changed; `at_ms` is the wall clock's."""

    before: JobStatus
    after: JobStatus
    event: JobEvent
    cause: str
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class TaskStateChange:
    """The state of one vertex changed.

    Parameters
    ----------
    vertex, name
        As in the job graph.
    attempt
        Its current attempt.
    before, after
        Its states.
    cause
        Reason of the change, for people: an error, if there was one.
    at_ms
        Wall clock time.
    """

    vertex: str
    name: str
    attempt: int
    before: TaskState
    after: TaskState
    cause: str
    at_ms: int = 0


#: A change of which listeners are told, in order.
Change = JobStatusChange | TaskStateChange


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's status and the states of its tasks; a value that the supervisor replaces."""

    status: JobStatus
    #: Status of each vertex, by its id.
    tasks: Mapping[str, VertexStatus]
    #: 1 for the first start, one more with each restart. All tasks start anew together.
    attempt: int = 1

    @classmethod
    def create(cls, vertices: Iterable[JobVertex]) -> JobState:
        return cls(JobStatus.CREATED, {one.id: VertexStatus.of(one) for one in vertices})

    def vertex_of(self, operator: str, name: str) -> str | None:
        of_id = [one.vertex for one in self.tasks.values() if operator in one.ids]
        found = of_id or [one.vertex for one in self.tasks.values() if one.has(name)]
        return found[0] if len(found) == 1 else None

    def on(self, event: JobEvent, cause: str = "", at_ms: int = 0) -> tuple[JobState, tuple[Change, ...]]:
        """Return the job after `event`, and the changes: of the job first, then of its tasks."""
        following = JOB_TRANSITIONS[self.status].get(event)
        if following is None:
            raise IllegalTransitionError(f"the job is {self.status.value} and cannot take {event.value}")
        if following is self.status:
            return self, ()
        changes: list[Change] = [JobStatusChange(self.status, following, event, cause, at_ms)]
        tasks, attempt = dict(self.tasks), self.attempt
        for step in TASKS_FOLLOW[event]:
            if step is TaskEvent.RESET:
                attempt += 1
            for vertex, before in tasks.items():
                after = TASK_TRANSITIONS[before.state].get(step)
                if after is not None:
                    tasks[vertex], change = _move_task(before, after, attempt, cause, at_ms)
                    changes.append(change)
        return JobState(following, tasks, attempt), tuple(changes)

    def on_task(
        self, vertex: str, event: TaskEvent, *, attempt: int, cause: str = "", at_ms: int = 0
    ) -> tuple[JobState, tuple[Change, ...]]:
        """Return the job after a report about one task; a report of an earlier attempt changes nothing."""
        before = self.tasks[vertex]
        if attempt != self.attempt:
            return self, ()
        after = TASK_TRANSITIONS[before.state].get(event) if event in REPORTED else None
        if after is None:
            raise IllegalTransitionError(
                f"task '{before.name}' is {before.state.value} and cannot take {event.value}"
            )
        moved, change = _move_task(before, after, attempt, cause, at_ms)
        job = replace(self, tasks={**self.tasks, vertex: moved})
        if event is not TaskEvent.FAIL:
            return job, (change,)
        job, consequences = job.on(JobEvent.FAILURE, cause, at_ms)
        return job, (change, *consequences)


def _move_task(
    before: VertexStatus, after: TaskState, attempt: int, cause: str, at_ms: int
) -> tuple[VertexStatus, TaskStateChange]:
    moved = replace(before, state=after, attempt=attempt, since_ms=at_ms, cause=cause)
    return moved, TaskStateChange(before.vertex, before.name, attempt, before.state, after, cause, at_ms)
