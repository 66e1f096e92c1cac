"""Carrying out what other processes ask of the job, by its directory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from flinkish_spark.answers import AnswerKind, Asked, CheckpointAnswer
from flinkish_spark.clock import Clock
from flinkish_spark.errors import EnvironmentFault, FlinkishError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.runtime.inbox import Inbox
from flinkish_spark.runtime.outside_requests import RequestKind
from flinkish_spark.runtime.threads import RunningThread, Threads

LOG = logging.getLogger(__name__)
#: How often the job directory is looked at.
LOOK_MS = 250


class RewindOrdered(EnvironmentFault):
    """Somebody ordered the job to go back; the next start of the query does. No failure."""

    restartable = True


class Outside:
    """Looks into the job directory for requests and orders, in a thread of its own.

    The thread lives as long as an ownership: also while the job recovers, waits for a broker or
    for its restart, it can be cancelled, and whoever asks for a checkpoint is told that none can
    be taken now.

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
        self._stopping = threading.Event()
        self._thread: RunningThread | None = None
        self._sees_order = False
        self._trouble = ""

    def start(self, threads: Threads, epoch: OwnerEpoch) -> None:
        """Take what is asked of this owner, until :meth:`stop`; called behind each takeover."""
        self._inbox.took_over(epoch)
        self._sees_order, self._stopping = False, threading.Event()
        self._thread = threads.start("flinkish-requests", partial(self._run, self._stopping))

    def stop(self) -> None:
        """Look no more; what was taken is answered by whoever it was passed to."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.look()
            self._clock.wait(stopping, LOOK_MS)

    def look(self) -> None:
        """Carry out what has come since the last look; seldom more than a listing. Never raises.

        What somebody put there must not end the job, and neither must a disk that fails for a while.
        """
        try:
            for request in self._inbox.take():
                answer = partial(self._inbox.answer, request.name)
                if request.purpose is not None:
                    self._ask(Asked.of(request.purpose, answer, request.target))
                    continue
                # Both are under way with this answer; that they are done is seen in the directory.
                answer(CheckpointAnswer(AnswerKind.COMPLETED))
                if request.kind is RequestKind.CANCEL:
                    self._cancel()
            self._sees_order = self._job_dir.rewind_order() is not None
            self._trouble = ""
        except FlinkishError as error:
            if str(error) != self._trouble:
                LOG.warning("orders and requests from outside are looked at later: %s", error)
            self._trouble = str(error)

    def raise_if_ordered(self) -> None:
        """Raise if an order waits; called by whoever watches the query.

        Raises
        ------
        RewindOrdered
            The query is to be started again from an earlier checkpoint.
        """
        if not self._sees_order:
            return
        self._sees_order = False
        # It may have been carried out since it was seen, by the recovery of a restart.
        order = self._job_dir.rewind_order()
        if order is not None:
            raise RewindOrdered(f"the job goes back to checkpoint {order.target}: {order.reason}")
