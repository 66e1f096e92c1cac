"""Requests for a checkpoint of a running job, and their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from flinkish_spark.core.validation import to_ms
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.coordination import Abort
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.html import html_table
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose


class AnswerKind(Choice):
    """How a request ended."""

    #: The checkpoint is confirmed; a savepoint is written.
    COMPLETED = "COMPLETED"
    #: No checkpoint was started; `reason` says why.
    REFUSED = "REFUSED"
    #: The checkpoint was started and aborted.
    ABORTED = "ABORTED"
    #: The job ended while the checkpoint was being decided; if it was decided, the next start finishes it.
    LEFT_TO_NEXT_START = "LEFT_TO_NEXT_START"
    #: The checkpoint is confirmed, its savepoint could not be written.
    SAVEPOINT_FAILED = "SAVEPOINT_FAILED"


@dataclass(frozen=True, slots=True)
class CheckpointAnswer:
    """The outcome of a request for a checkpoint.

    Parameters
    ----------
    kind
        How it ended.
    checkpoint
        Its id; None if it got none.
    reason
        Why the request failed; None if it completed.
    text
        The reason in words; for a completed savepoint, its path.
    """

    kind: AnswerKind
    checkpoint: CheckpointId | None = None
    reason: CheckpointFailureReason | None = None
    text: str = ""

    @property
    def is_completed(self) -> bool:
        """True if the checkpoint is confirmed, and its savepoint written if one was requested."""
        return self.kind is AnswerKind.COMPLETED

    def _repr_html_(self) -> str:
        facts = [("answer", self.kind.value), ("checkpoint", self.checkpoint)]
        if self.reason is not None:
            facts.append(("reason", self.reason.value))
        return html_table([*facts, ("", self.text)] if self.text else facts)

    @classmethod
    def make_completed(cls, checkpoint: CheckpointId, place: str = "") -> CheckpointAnswer:
        """Return the answer for a confirmed checkpoint; `place` is the path of its savepoint."""
        return cls(AnswerKind.COMPLETED, checkpoint, None, place)

    @classmethod
    def make_refused(cls, reason: CheckpointFailureReason, text: str = "") -> CheckpointAnswer:
        """Return the answer for a request that got no id; `text` if more is known than the reason."""
        return cls(AnswerKind.REFUSED, None, reason, text or reason.text)

    @classmethod
    def make_aborted(cls, effect: Abort) -> CheckpointAnswer:
        """Return the answer for an aborted checkpoint."""
        return cls(AnswerKind.ABORTED, effect.checkpoint, effect.reason, effect.text)

    @classmethod
    def make_left_to_next_start(cls, checkpoint: CheckpointId) -> CheckpointAnswer:
        """Return the answer for a checkpoint that the next start of the job will finish or abort."""
        return cls(
            AnswerKind.LEFT_TO_NEXT_START,
            checkpoint,
            CheckpointFailureReason.SHUT_DOWN,
            "the job ended while the checkpoint was being decided or committed",
        )

    @classmethod
    def make_savepoint_failed(cls, checkpoint: CheckpointId, text: str) -> CheckpointAnswer:
        """Return the answer for a confirmed checkpoint whose savepoint could not be written."""
        reason = CheckpointFailureReason.SAVEPOINT_FAILED
        return cls(AnswerKind.SAVEPOINT_FAILED, checkpoint, reason, text)


@dataclass(frozen=True)
class CheckpointTriggerRequest:
    purpose: CheckpointPurpose
    #: Called once, in a thread of the job's; must not block.
    on_answer: Callable[[CheckpointAnswer], None]
    target: str = ""


@dataclass
class PendingAnswer:
    """A future for the answer to a request; resolved once.

    Examples
    --------
    >>> pending = PendingAnswer()
    >>> pending.wait(timeout_ms=0) is None
    True
    >>> pending.resolve(CheckpointAnswer.make_completed(CheckpointId(3)))
    >>> pending.wait(timeout_ms=0).checkpoint
    CheckpointId(value=3)
    """

    _done: threading.Event = field(default_factory=threading.Event)
    _answer: CheckpointAnswer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def resolve(self, answer: CheckpointAnswer) -> None:
        """Give the answer; a second one is ignored."""
        with self._lock:
            if not self._done.is_set():
                self._answer = answer
                self._done.set()

    def _repr_html_(self) -> str:
        answer = self.wait(timeout_ms=0)
        return "<pre>not answered yet: wait() waits</pre>" if answer is None else answer._repr_html_()

    def wait(self, timeout_ms: Duration | None = None) -> CheckpointAnswer | None:
        """Return the answer; None if it has not come within `timeout_ms`."""
        self._done.wait(None if timeout_ms is None else to_ms("timeout_ms", timeout_ms) / 1000)
        return self._answer
