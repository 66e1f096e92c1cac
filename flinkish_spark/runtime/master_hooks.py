"""Calling the master hooks of a job: at a trigger, and before a start."""

from __future__ import annotations

import enum
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flinkish_spark.bridge import said
from flinkish_spark.errors import ConfigError, EnvironmentFault, JobDirError
from flinkish_spark.hooks import MasterHook
from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.ids import CheckpointId, checked_name
from flinkish_spark.user_iterators import USER_ERRORS, pairs_of

LOG = logging.getLogger(__name__)


class UnknownHookState(enum.Enum):
    """What becomes of the state of a hook that the job does not have."""

    REFUSE = "REFUSE"
    IGNORE = "IGNORE"


class HookFailed(EnvironmentFault):
    """A master hook raised."""

    restartable = True
    ends_when_repeated = True


class HookHangs(HookFailed):
    """A master hook has not returned from an earlier call; whether it ever will nobody can tell."""

    ends_when_repeated = False


class _Claims:
    """Which hooks are in a job that runs in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[MasterHook] = []

    def take(self, hooks: Mapping[str, MasterHook]) -> str | None:
        """Take all of them, or none; return the name of one that is taken."""
        with self._lock:
            for name, hook in hooks.items():
                if any(hook is one for one in self._taken):
                    return name
            self._taken.extend(hooks.values())
            return None

    def give_back(self, hooks: Mapping[str, MasterHook]) -> None:
        """Let other jobs have them."""
        with self._lock:
            ours = list(hooks.values())
            self._taken = [one for one in self._taken if not any(one is hook for hook in ours)]


_CLAIMS = _Claims()


class MasterHooks:
    """The hooks of a job by name.

    Parameters
    ----------
    hooks
        In the order in which they are called.
    unknown
        What becomes of state that no hook takes.
    """

    def __init__(
        self, hooks: Sequence[MasterHook] = (), unknown: UnknownHookState = UnknownHookState.REFUSE
    ) -> None:
        self._hooks: dict[str, MasterHook] = {}
        #: What a hook was called for and has not returned from; a hook that hangs outlives restarts.
        self._is_called, self._called_for = threading.Lock(), ""
        self._unknown = unknown
        for hook in hooks:
            self.add(hook)

    def add(self, hook: MasterHook) -> None:
        """Take a hook; the same name twice is refused.

        Raises
        ------
        ConfigError
            It is no hook, its name cannot be used, or the name is taken.
        """
        if not isinstance(hook, MasterHook):
            raise ConfigError(
                f"a {type(hook).__name__} is no MasterHook",
                what_to_do="derive it from flinkish_spark.MasterHook",
            )
        try:
            name = checked_name(hook.name, "name of a master hook")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if name in self._hooks:
            raise ConfigError(f"there are two master hooks named '{name}'", what_to_do="rename one of them")
        self._hooks[name] = hook

    def claim(self) -> None:
        """Take the hooks for one execution, until :meth:`close`.

        Raises
        ------
        ConfigError
            A job that runs has one of them: it would be set back, and closed, under that job's feet.
        """
        taken = _CLAIMS.take(self._hooks)
        if taken is not None:
            raise ConfigError(
                f"the master hook '{taken}' is in another job that runs",
                why="a hook is set to the checkpoint of one job, and closed when that job ends",
                what_to_do="give each environment a hook object of its own",
                hook=taken,
            )

    def participants(self) -> tuple[Participant, ...]:
        """Return the hooks as participants of every checkpoint."""
        return tuple(Participant(ParticipantKind.HOOK, name) for name in self._hooks)

    def trigger(self, checkpoint: CheckpointId) -> dict[Participant, Any]:
        """Call every hook and return what they gave, as stored.

        Raises
        ------
        HookFailed
            The first one that raised, or gave something that is not a JSON value.
        """
        found = {}
        with self._calling(f"checkpoint {checkpoint}"):
            for name, hook in self._hooks.items():
                found[Participant(ParticipantKind.HOOK, name)] = self._trigger(hook, name, checkpoint)
        return found

    @staticmethod
    def _trigger(hook: MasterHook, name: str, checkpoint: CheckpointId) -> Any:
        try:
            given = hook.trigger(int(checkpoint))
            # What is stored is what a restore will get: tuples become lists here already.
            return json.loads(json.dumps(None if given is None else dict(pairs_of(given)), allow_nan=False))
        except USER_ERRORS as error:
            raise HookFailed(
                f"the master hook '{name}' failed in checkpoint {checkpoint}",
                why=said(error),
                what_to_do="see to the system behind the hook; the next checkpoint calls it again",
                hook=name,
            ) from error

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Keep two threads from calling hooks at a time."""
        if not self._is_called.acquire(blocking=False):
            # A hook that hangs keeps its thread; the thread of a restart must not wait for it.
            raise HookHangs(
                f"a master hook has not returned from {self._called_for}",
                what_to_do="see to the system behind the hook",
            )
        self._called_for = what
        try:
            yield
        finally:
            self._is_called.release()

    def restore(self, checkpoint: CheckpointId | None, states: Mapping[str, Any]) -> None:
        """Set every hook to the checkpoint that the query starts from.

        Parameters
        ----------
        checkpoint
            None for a start from nothing.
        states
            What the hooks gave for it, by name.

        Raises
        ------
        JobDirError
            The checkpoint holds the state of a hook that the job does not have.
        HookFailed
            A hook raised.
        """
        unknown = sorted(states.keys() - self._hooks.keys())
        if unknown and self._unknown is UnknownHookState.REFUSE:
            raise JobDirError(
                f"the checkpoint holds the state of a master hook '{unknown[0]}' that the job does not have",
                what_to_do="add the hook again, or start with unknown_hook_state=UnknownHookState.IGNORE",
                hook=unknown[0],
            )
        with self._calling("a restore"):
            for name, hook in self._hooks.items():
                self._restore(hook, name, checkpoint, states)

    @staticmethod
    def _restore(
        hook: MasterHook, name: str, checkpoint: CheckpointId | None, states: Mapping[str, Any]
    ) -> None:
        try:
            if checkpoint is None or name not in states:
                hook.reset()
            else:
                hook.restore(int(checkpoint), states[name])
        except USER_ERRORS as error:
            raise HookFailed(
                f"the master hook '{name}' could not be restored",
                why=said(error),
                what_to_do="see to the system behind the hook, then start again",
                hook=name,
            ) from error

    def close(self) -> None:
        """Close every hook; what one raises is logged."""
        try:
            for name, hook in self._hooks.items():
                try:
                    hook.close()
                except Exception as error:
                    LOG.warning("closing the master hook '%s' failed: %s", name, said(error))
        finally:
            _CLAIMS.give_back(self._hooks)
