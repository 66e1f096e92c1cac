"""Carrying out what other processes ask of the running job, by its directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flinkish_spark.answers import AnswerKind, Asked, CheckpointAnswer
from flinkish_spark.clock import Clock
from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.runtime.inbox import Inbox
from flinkish_spark.runtime.outside_requests import RequestKind

#: How often the job directory is looked at.
LOOK_MS = 250
_PURPOSES = {
    RequestKind.CHECKPOINT: CheckpointPurpose.USER,
    RequestKind.SAVEPOINT: CheckpointPurpose.SAVEPOINT,
    RequestKind.STOP_WITH_SAVEPOINT: CheckpointPurpose.FINAL_SAVEPOINT,
}


class RewindOrdered(EnvironmentFault):
    """Somebody ordered the job to go back; the next start of the query does. No failure."""

    restartable = True


class Outside:
    """Looks into the job directory for requests and orders; used by the supervisor's thread.

    Parameters
    ----------
    ask
        Passes a request for a checkpoint on.
    cancel
        Ends the job.
    """

    def __init__(
        self, job_dir: JobDir, clock: Clock, ask: Callable[[Asked], None], cancel: Callable[[], None]
    ) -> None:
        self._job_dir, self._clock, self._ask, self._cancel = job_dir, clock, ask, cancel
        self._inbox = Inbox(job_dir, clock)
        self._looked_ms = clock.monotonic_ms() - LOOK_MS

    def took_over(self, epoch: OwnerEpoch) -> None:
        """Take requests that were asked of this owner."""
        self._inbox.took_over(epoch)

    def look(self) -> None:
        """Carry out what has come since the last look; cheap, and seldom more than a listing.

        Raises
        ------
        RewindOrdered
            The query is to be started again from an earlier checkpoint.
        """
        if self._clock.monotonic_ms() - self._looked_ms < LOOK_MS:
            return
        self._looked_ms = self._clock.monotonic_ms()
        for request in self._inbox.take():
            answer = partial(self._inbox.answer, request.name)
            if request.kind in _PURPOSES:
                self._ask(Asked(_PURPOSES[request.kind], answer, target=request.target))
            else:
                # Both are under way with this answer; that they are done is seen in the directory.
                answer(CheckpointAnswer(AnswerKind.COMPLETED))
                if request.kind is RequestKind.CANCEL:
                    self._cancel()
        order = self._job_dir.rewind_order()
        if order is not None:
            raise RewindOrdered(f"the job goes back to checkpoint {order.target}: {order.reason}")
