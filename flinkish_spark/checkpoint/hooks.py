"""Master hooks, which take part in checkpoints, and listeners, which are told of changes."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from flinkish_spark.checkpoint.statistics import StagedAge
from flinkish_spark.contracts.hooks import MasterHook
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, JobDirError
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.iterators import USER_ERRORS, pairs_of
from flinkish_spark.core.watchdog import Wait, Waiting, skip_watch
from flinkish_spark.protocol.checkpoint import IllegalTransitionError, Participant, ParticipantKind
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch, check_name
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.job_status import (
    Change,
    JobEvent,
    JobState,
    JobStatus,
    TaskEvent,
    VertexStatus,
)

LOG = logging.getLogger(__name__)


class UnknownHookState(Choice):
    """The treatment of stored state of a hook that the job does not have."""

    REFUSE = "REFUSE"
    IGNORE = "IGNORE"


class HookError(EnvironmentFault):
    restartable = True
    ends_when_repeated = True


#: The hooks of the jobs that run in this process.
_CLAIMED: list[MasterHook] = []
_CLAIM_LOCK = threading.Lock()


class MasterHooks:
    def __init__(
        self, hooks: Sequence[MasterHook] = (), unknown: UnknownHookState = UnknownHookState.REFUSE
    ) -> None:
        self._hooks: dict[str, MasterHook] = {}
        #: Held while a hook is called, and for what; a call that hangs outlives restarts of the query.
        self._is_called, self._called_for = threading.Lock(), ""
        self._unknown = unknown
        for hook in hooks:
            self.add(hook)

    def add(self, hook: MasterHook) -> None:
        try:
            name = check_name(hook.name, "name of a master hook")
        except ValueError as error:
            raise ConfigError(str(error), what_to_do="give the hook a valid name") from None
        if name in self._hooks:
            raise ConfigError(f"there are two master hooks named '{name}'", what_to_do="rename one of them")
        self._hooks[name] = hook

    def claim(self) -> None:
        """Reserve the hooks for one execution, until :meth:`close`; raise ConfigError if a job has one."""
        with _CLAIM_LOCK:
            for name, hook in self._hooks.items():
                if any(hook is one for one in _CLAIMED):
                    raise ConfigError(
                        f"the master hook '{name}' is in another job that runs",
                        why="a hook is set to the checkpoint of one job, and closed when that job ends",
                        what_to_do="give each environment a hook object of its own",
                        hook=name,
                    )
            _CLAIMED.extend(self._hooks.values())

    def participants(self) -> tuple[Participant, ...]:
        return tuple(Participant(ParticipantKind.HOOK, name) for name in self._hooks)

    def trigger(self, checkpoint: CheckpointId) -> dict[Participant, Any]:
        found = {}
        with self._calling(f"checkpoint {checkpoint}"):
            for name, hook in self._hooks.items():
                advice = "repair the system that the hook calls; the next checkpoint calls the hook again"
                with _translate_errors(name, f"failed in checkpoint {checkpoint}", advice):
                    given = hook.trigger(int(checkpoint))
                    # Converted as a restore will get it: tuples become lists here already.
                    stored = None if given is None else dict(pairs_of(given))
                    state = json.loads(json.dumps(stored, allow_nan=False))
                found[Participant(ParticipantKind.HOOK, name)] = state
        return found

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Let one thread at a time call hooks; raise HookError in a second one."""
        if not self._is_called.acquire(blocking=False):
            # A hook that hangs blocks its thread; the thread of a restart must not wait for it.
            raise HookError(
                f"a master hook has not returned from {self._called_for}",
                what_to_do="repair the system that the hook calls",
                ends_when_repeated=False,
            )
        self._called_for = what
        try:
            yield
        finally:
            self._is_called.release()

    def restore(self, checkpoint: CheckpointId | None, states: Mapping[str, Any]) -> None:
        """Restore every hook to the checkpoint that the query starts from; reset those without a state."""
        unknown = sorted(states.keys() - self._hooks.keys())
        if unknown and self._unknown is UnknownHookState.REFUSE:
            raise JobDirError(
                f"the checkpoint holds the state of a master hook '{unknown[0]}' that the job does not have",
                what_to_do="add the hook again, or start with unknown_hook_state=UnknownHookState.IGNORE",
                hook=unknown[0],
            )
        with self._calling("a restore"):
            for name, hook in self._hooks.items():
                with _translate_errors(
                    name, "could not be restored", "repair the system that the hook calls, then start again"
                ):
                    if checkpoint is None or name not in states:
                        hook.reset()
                    else:
                        hook.restore(int(checkpoint), states[name])

    def close(self) -> None:
        try:
            for name, hook in self._hooks.items():
                try:
                    hook.close()
                except Exception as error:
                    LOG.warning("closing the master hook '%s' failed: %s", name, describe_error(error))
        finally:
            with _CLAIM_LOCK:
                ours = list(self._hooks.values())
                _CLAIMED[:] = [one for one in _CLAIMED if not any(one is hook for hook in ours)]


@contextmanager
def _translate_errors(name: str, what: str, what_to_do: str) -> Iterator[None]:
    try:
        yield
    except USER_ERRORS as error:
        raise HookError(
            f"the master hook '{name}' {what}", why=describe_error(error), what_to_do=what_to_do, hook=name
        ) from error


class JobListener(Protocol):
    """Receives changes of a job, in their order, in threads of the job.

    Its methods must return soon; their errors are logged. Derive from :class:`QuietListener` to handle some
    changes only; methods that are defined there and not here are optional.
    """

    def on_change(self, change: Change) -> None:
        """Note that the status of the job or the state of a task changed."""

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        """Note that a checkpoint is confirmed: every sink shows its data."""

    def on_checkpoint_aborted(self, checkpoint: CheckpointId, newest: CheckpointId | None) -> None:
        """Note that a checkpoint was aborted; `newest` is the latest complete one."""


class QuietListener:
    """A listener that does nothing; override the methods that you need."""

    def on_change(self, change: Change) -> None:
        """Do nothing."""

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        """Do nothing."""

    def on_checkpoint_aborted(self, checkpoint: CheckpointId, newest: CheckpointId | None) -> None:
        """Do nothing."""

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        """Do nothing; called when this process has become the job's owner, before the recovery."""

    def on_staged_data_aging(self, age: StagedAge) -> None:
        """Do nothing; called once per sink and epoch, when half of its data's lifetime has passed."""

    def on_waits(self, waits: tuple[Wait, ...]) -> None:
        """Do nothing; called several times a second with the waits that hold the job back, mostly none."""


class JobStates:
    """The status of a job and of its tasks; the supervisor changes it, any thread reads it."""

    def __init__(
        self,
        vertices: Iterable[JobVertex],
        listeners: Sequence[JobListener],
        clock: Clock,
        waiting: Waiting = skip_watch,
    ) -> None:
        self._state, self._listeners = JobState.create(vertices), tuple(listeners)
        self._clock, self._waiting = clock, waiting
        self._newest: CheckpointId | None = None
        self._lock = threading.RLock()

    @property
    def status(self) -> JobStatus:
        return self._state.status

    @property
    def vertices(self) -> tuple[VertexStatus, ...]:
        return tuple(self._state.tasks.values())

    def on(self, event: JobEvent, cause: str = "") -> None:
        with self._lock:
            self._become(*self._state.on(event, cause, self._clock.wall_ms()))

    def on_failure(self, error: BaseException) -> None:
        """Note that the job failed, and in which vertex if the error names an operator."""
        cause = str(error)
        vertex = self._state.vertex_of(getattr(error, "operator", ""), getattr(error, "uid", ""))
        if vertex is not None:
            self._on_task(vertex, TaskEvent.FAIL, cause)
        self.on(JobEvent.FAILURE, cause)

    def end(self, error: BaseException) -> None:
        """Note that the job has ended for good because of `error`."""
        if self.status is JobStatus.CANCELLING:
            self.on(JobEvent.ALL_ENDED, str(error))
        elif not self.status.is_terminal:
            self.on_failure(error)
            self.on(JobEvent.GIVE_UP, str(error))

    def initialize_tasks(self) -> None:
        for vertex in self._state.tasks:
            self._on_task(vertex, TaskEvent.INITIALIZE)

    def run_tasks(self) -> None:
        self.initialize_tasks()
        for vertex in self._state.tasks:
            self._on_task(vertex, TaskEvent.RUN)

    def _on_task(self, vertex: str, event: TaskEvent, cause: str = "") -> None:
        with self._lock, contextlib.suppress(IllegalTransitionError):
            state, at_ms = self._state, self._clock.wall_ms()
            self._become(*state.on_task(vertex, event, attempt=state.attempt, cause=cause, at_ms=at_ms))

    def _become(self, state: JobState, changes: Sequence[Change]) -> None:
        # Called with the lock held: two threads change states, and listeners must see the changes in order.
        self._state = state
        for change in changes:
            self._tell("on_change", change)

    def on_restored(self, newest: CheckpointId | None) -> None:
        self._newest = newest

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        self._newest = checkpoint
        self._tell("on_checkpoint_complete", checkpoint)

    def on_checkpoint_aborted(self, checkpoint: CheckpointId) -> None:
        self._tell("on_checkpoint_aborted", checkpoint, self._newest)

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        self._tell("on_taken_over", epoch)

    def on_staged_data_aging(self, age: StagedAge) -> None:
        self._tell("on_staged_data_aging", age)

    def on_waits(self, waits: tuple[Wait, ...]) -> None:
        self._tell("on_waits", waits)

    def _tell(self, method: str, *what: object) -> None:
        for listener in self._listeners:
            tell = getattr(listener, method, None)
            if tell is None:
                continue
            try:
                with self._waiting(f"the listener {type(listener).__name__} to return"):
                    tell(*what)
            except Exception as error:
                LOG.warning("a listener failed: %s: %s", type(error).__name__, error)
