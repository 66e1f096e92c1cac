"""Cancellation of a query (interrupts, in the end of its process), of a job, and of a stop by signal."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from flinkish_spark.bridge.query_threads import QueryThreads, end_jvm
from flinkish_spark.checkpoint import epoch_writer
from flinkish_spark.core.clock import Clock, Threads
from flinkish_spark.core.errors import CancellationTimedOut
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.protocol.cancellation import CancellationRules, CancellationStep
from flinkish_spark.protocol.limits import exceeds
from flinkish_spark.protocol.process_loss import JobProcess

LOG = logging.getLogger(__name__)
_LOOK_MS = 100
#: Time limit for the last interrupt and for finding out where the query hangs.
_LAST_MS = 1_000
_MOST_FRAMES = 4


class _Attempt:
    def __init__(self, query: StreamingQuery, threads: QueryThreads) -> None:
        self._query, self._threads = query, threads
        self.has_ended = threading.Event()
        self.failure: Exception | None = None
        #: Stacks of its threads at the last look.
        self.hangs_in = ""

    def stop(self) -> None:
        """Stop the query through Spark, and wait for its tasks that run in this JVM."""
        try:
            self._query.stop()
            while self._threads.tasks() and not self.has_ended.wait(_LOOK_MS / 1000):
                pass
        except Exception as error:
            self.failure = error
        finally:
            self.has_ended.set()

    def interrupt(self, for_ms: int) -> None:
        try:
            # The threads that stage micro-batches: those of this Python process, and those of the JVM.
            stacks = map(traceback.extract_stack, sys._current_frames().values())
            own = [one for one in stacks if any(frame.filename == epoch_writer.__file__ for frame in one)]
            self.hangs_in = "; ".join((*map(_format_stack, own), *self._threads.stacks()))
            LOG.warning(
                "a micro-batch has not ended %s s after its cancellation; interrupted again, it is in %s",
                for_ms // 1000,
                self.hangs_in or "a task on an executor",
            )
            self._threads.interrupt()
        except Exception as error:
            LOG.warning("the micro-batch could not be interrupted: %s", describe_error(error))


class QueryCancellation:
    def __init__(
        self,
        spark: SparkSession,
        query: StreamingQuery,
        rules: CancellationRules,
        clock: Clock,
        threads: Threads,
    ) -> None:
        self._spark, self._query = spark, query
        self._rules, self._clock, self._threads = rules, clock, threads
        # Looked up now, because a JVM that hangs does not answer.
        self._of_query = QueryThreads(spark, str(query.runId))

    def run(self) -> None:
        """End the query; when this returns, it and its tasks in this JVM have ended."""
        attempt, interrupts = _Attempt(self._query, self._of_query), 0
        began_ms = self._clock.monotonic_ms()
        self._threads.start("flinkish-query-stop", attempt.stop)
        while not self._clock.wait(attempt.has_ended, _LOOK_MS):
            for_ms = self._clock.monotonic_ms() - began_ms
            match self._rules.step(for_ms, interrupts):
                case CancellationStep.INTERRUPT:
                    interrupts += 1
                    self._threads.start("flinkish-interrupter", partial(attempt.interrupt, for_ms))
                case CancellationStep.END_PROCESS:
                    self._threads.start("flinkish-interrupter", partial(attempt.interrupt, for_ms))
                    if not self._clock.wait(attempt.has_ended, _LAST_MS):
                        raise self._end_process(attempt, for_ms)
        if attempt.failure is not None:
            raise attempt.failure

    def _end_process(self, attempt: _Attempt, for_ms: int) -> CancellationTimedOut:
        has_ended = end_jvm(self._spark)
        done = (
            "the JVM of this driver was ended" if has_ended else "the JVM of this driver could not be ended"
        )
        LOG.error("the micro-batch did not end within %s s of its cancellation; %s", for_ms // 1000, done)
        restart = "start the job again" if has_ended else "restart the cluster or its driver, then the job"
        return CancellationTimedOut(
            f"a micro-batch did not end, {for_ms // 1000} s after it was cancelled; {done}",
            why=f"it was in {attempt.hangs_in}" if attempt.hangs_in else "its call cannot be interrupted",
            what_to_do=f"{restart}: it continues from the last checkpoint. Let functions and sinks wait with "
            "a timeout",
            process=JobProcess.DRIVER,
            exit_code=None,
            for_ms=for_ms,
            hangs_in=attempt.hangs_in,
        )


def _format_stack(stack: traceback.StackSummary) -> str:
    frames = list(reversed(stack[-_MOST_FRAMES:]))
    return " < ".join(f"{one.filename}:{one.lineno} in {one.name}" for one in frames)


def make_timeout_error(waits: Sequence[Wait], for_ms: int) -> CancellationTimedOut:
    """Return the error for a cancelled job whose threads did not end in time."""
    idents = {f"the thread '{thread.name}'": thread.ident for thread in threading.enumerate()}
    frames = sys._current_frames()
    found = [(wait, frames.get(idents.get(wait.who) or 0)) for wait in waits]
    stands = [
        f"{wait}, in {_format_stack(traceback.extract_stack(at))}" if at is not None else str(wait)
        for wait, at in found
    ]
    return CancellationTimedOut(
        f"the job did not end, {for_ms // 1000} s after it was cancelled: it waits for {waits[0].what}",
        why="; ".join(stands),
        what_to_do="start the job again: decided checkpoints are committed then, and the hanging thread "
        "does nothing more for it. End this process first if the hanging call must not complete; let sinks "
        "and listeners wait with a timeout",
        process=JobProcess.DRIVER,
        exit_code=None,
        for_ms=for_ms,
        hangs_in="; ".join(stands),
    )


class _StoppableJob(Protocol):
    """The part of a :class:`~flinkish_spark.job.client.JobClient` that a signal needs."""

    @property
    def progress(self) -> JobProgress: ...

    def stop_with_checkpoint(self) -> None: ...

    def cancel(self) -> None: ...


_HEARD = (
    "stopping the job with a last checkpoint; Ctrl-C, or SIGTERM, once more cancels it without a checkpoint"
)


class SignalledStop:
    """Stops a job with a checkpoint at the first signal, and cancels it at the second."""

    def __init__(
        self,
        job: _StoppableJob,
        rules: CancellationRules,
        clock: Clock,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._job, self._rules, self._clock, self._tell = job, rules, clock, tell
        #: A message to log later: the signal handler may have interrupted a thread that is writing the log.
        self._news: list[str] = []
        self._is_asked = self._is_cancelled = False
        self._since_ms, self._seen = 0, (0, 0, 0)

    def on_signal(self) -> None:
        if self._is_asked:
            self._cancel()
            return
        self._is_asked, self._since_ms, self._seen = True, self._clock.monotonic_ms(), self._count_progress()
        self._news.append(_HEARD)
        self._job.stop_with_checkpoint()

    def look(self) -> None:
        """Cancel the job if its stop makes no progress; called periodically by the waiting thread."""
        while self._news:
            self._tell(self._news.pop(0))
        if not self._is_asked or self._is_cancelled:
            return
        now_ms, done = self._clock.monotonic_ms(), self._count_progress()
        if done != self._seen:
            self._since_ms, self._seen = now_ms, done
        elif exceeds(now_ms - self._since_ms, self._rules.timeout_ms):
            LOG.error(
                "the job is stopping, and neither a micro-batch nor a checkpoint has ended for %s s; "
                "it is cancelled",
                (now_ms - self._since_ms) // 1000,
            )
            self._cancel()

    def _cancel(self) -> None:
        if not self._is_cancelled:
            self._news.append("cancelling the job; its next start continues from its last checkpoint")
        self._is_cancelled = True
        self._job.cancel()

    def _count_progress(self) -> tuple[int, int, int]:
        progress = self._job.progress
        return progress.batches, progress.checkpoints, progress.restarts
