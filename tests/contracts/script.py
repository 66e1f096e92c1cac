"""What both suites do with a running job: checkpoints on request, and failures at chosen moments."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flinkish_spark import CheckpointStatistics, JobClient
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.steps import SilentObserver, Step

_PATIENCE_S = 240
_ANSWER_MS = 120_000


def checkpoint(client: JobClient) -> CheckpointStatistics:
    """Take a checkpoint of a job that has no reason to fail; return what it cost."""
    answer = client.trigger_checkpoint().wait(_ANSWER_MS)
    assert answer is not None and answer.is_completed, answer
    found = client.statistics.find(answer.checkpoint)
    assert found is not None
    return found


def bring(client: JobClient, is_all_there: Callable[[], bool]) -> None:
    """Take checkpoints until one completes behind which all that is wanted is visible.

    Several may be needed: a barrier may pass a source in front of records that have just come, and a failure
    that a restart mends may end one.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        answer = client.trigger_checkpoint().wait(_ANSWER_MS)
        if answer is None or not answer.is_completed:
            # It is starting, or starting again: nobody has an answer yet.
            assert not client.wait(timeout_ms=100), "the job ended"
        elif is_all_there():
            return
        assert time.monotonic() < deadline, f"not within {_PATIENCE_S} s; {client.progress}"


class Stumble(EnvironmentFault):
    """A failure that a restart mends."""

    restartable = True


class Stumbling(SilentObserver):
    """Fails the query right in front of or behind some steps, once for each.

    Parameters
    ----------
    left
        "before" or "after", the step, and its subject; an empty subject stands for any.
    """

    def __init__(self, *left: tuple[str, Step, str]) -> None:
        self.left = list(left)

    def on_step_start(self, step: Any, subject: str) -> None:
        """Fail in front of a step that is in the list, and take it off."""
        self._maybe("before", step, subject)

    def on_step_end(self, step: Any, subject: str) -> None:
        """Fail behind one, likewise."""
        self._maybe("after", step, subject)

    def _maybe(self, when: str, step: Step, subject: str) -> None:
        for moment in ((when, step, subject), (when, step, "")):
            if moment in self.left:
                self.left.remove(moment)
                raise Stumble(f"the test lets the query fail {when} {step.value} {subject}")


class FailingOnce:
    """Lets one attempt of one task fail. An object of it travels to tasks, so a file says whether it has.

    Parameters
    ----------
    file
        It fails when this file is there, which it then is no more.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def arm(self) -> None:
        """Let the next record's task fail."""
        self._file.touch()

    @property
    def is_armed(self) -> bool:
        """Whether it has still to fail."""
        return self._file.exists()

    def maybe(self) -> None:
        """Fail, if it was armed; of several tasks one does."""
        try:
            self._file.unlink()
        except FileNotFoundError:
            return
        raise RuntimeError("the test lets this attempt fail")
