"""Crash points: kill a job from inside, at an exact step of a checkpoint.

A test app installs a :class:`KillAt` with ``env.observe(...)``. The process gets SIGKILL, so it runs nothing
afterwards: no handler, no flush, no ``finally``.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.steps import Step
from flinkish_spark.core.validation import check_function


class Moment(enum.Enum):
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class KillPoint:
    step: Step
    moment: Moment
    #: Number of the occurrence in the life of this process, from 1. Steps that the recovery repeats count,
    #: too.
    occurrence: int = 1
    #: Count only steps of this sink uid, log entry or id; empty for all.
    subject: str = ""

    def __post_init__(self) -> None:
        if self.occurrence < 1:
            raise ConfigError(f"a kill point's occurrence is {self.occurrence}", what_to_do="count from 1")

    def __str__(self) -> str:
        parts = [self.step.value, self.moment.value, str(self.occurrence)]
        return ":".join([*parts, self.subject] if self.subject else parts)

    @classmethod
    def parse(cls, text: str) -> KillPoint:
        """Parse ``<step>:<before or after>:<occurrence>[:<subject>]``."""
        step, _, rest = text.partition(":")
        moment, _, rest = rest.partition(":")
        occurrence, _, subject = rest.partition(":")
        try:
            return cls(Step(step), Moment(moment), int(occurrence), subject)
        except ValueError as error:
            raise ConfigError(
                f"{text!r} is not a kill point",
                why=str(error),
                what_to_do="write it like decision:before:2 or sink-commit:after:1:<sink uid>; "
                f"the steps are {', '.join(s.value for s in Step)}",
            ) from None


def kill_process() -> None:
    """Kill this process; its JVM and its Python workers live on for a while as orphans."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_process_group() -> None:
    if os.getpgid(0) != os.getpid():
        raise ConfigError(
            "this process does not lead its process group",
            why="the process that started it would be killed, too",
            what_to_do="start it with start_new_session=True",
        )
    os.killpg(os.getpid(), signal.SIGKILL)


class KillAt:
    """An observer that kills the process at one point; see :mod:`flinkish_spark.core.steps`.

    Parameters
    ----------
    point
        The step at which the process is killed.
    kill
        The action: :func:`kill_process` or :func:`kill_process_group`.

    Examples
    --------
    >>> fired = []
    >>> observer = KillAt(KillPoint.parse("receipt:before:2"), kill=lambda: fired.append("now"))
    >>> for checkpoint in ("1", "2"):
    ...     observer.on_step_start(Step.RECEIPT, checkpoint)
    >>> fired
    ['now']
    """

    def __init__(self, point: KillPoint, kill: Callable[[], None] = kill_process) -> None:
        check_function(kill, "kill", 0)
        self._point, self._kill = point, kill
        self._seen = 0
        # Called by the coordinator's thread and by that of foreachBatch.
        self._lock = threading.Lock()

    def on_step_start(self, step: Step, subject: str) -> None:
        """Die if this is the point."""
        self._count(step, Moment.BEFORE, subject)

    def on_step_end(self, step: Step, subject: str) -> None:
        """Die if this is the point."""
        self._count(step, Moment.AFTER, subject)

    def _count(self, step: Step, moment: Moment, subject: str) -> None:
        point = self._point
        if (step, moment) != (point.step, point.moment) or point.subject not in ("", subject):
            return
        with self._lock:
            self._seen += 1
            is_it = self._seen == point.occurrence
        if is_it:
            self._kill()
