"""The committing half of two-phase sinks: from the user's answers and exceptions to outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flinkish_spark.bridge import said
from flinkish_spark.errors import CorruptObjectError, EnvironmentFault, FlinkishError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable
from flinkish_spark.runtime.failures import RepeatableUserError
from flinkish_spark.sinks.base import Committer, CompletedCheckpoint, SinkContext
from flinkish_spark.sinks.two_phase import Answer, TwoPhaseCommitSink, own_copy
from flinkish_spark.sinks.two_phase_names import TransactionName
from flinkish_spark.sinks.two_phase_tasks import SinkUnavailable
from flinkish_spark.user_iterators import USER_ERRORS

LOG = logging.getLogger(__name__)


class TwoPhaseCommitter(Committer):
    """Ends the transactions of a two-phase sink.

    Parameters
    ----------
    sink
        As the user made it. A copy is worked with, so that connections it keeps do not travel to tasks.
    """

    def __init__(self, sink: TwoPhaseCommitSink, context: SinkContext) -> None:
        self._sink, self._context = own_copy(sink), context

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit each, in the given order, stopping at the first that is not done."""
        answers: list[CommitAnswer] = []
        for committable in committables:
            name, stored = self._parts_of(committable)
            ours = name.owner_epoch == self._context.owner_epoch
            method = "commit" if ours else "recover_and_commit"
            answers.append(self._ask(method, stored, checkpoint))
            if not answers[-1].outcome.is_done:
                # What is lost must be a suffix (DESIGN 8.3): nothing is committed behind it.
                break
        return answers

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort each."""
        return [self._abort(*self._parts_of(committable)) for committable in committables]

    def _abort(self, name: TransactionName, stored: Any) -> CommitAnswer:
        ours = name.owner_epoch == self._context.owner_epoch
        answer = self._ask("abort" if ours else "recover_and_abort", stored)
        if answer.outcome is Outcome.LOST:
            # Gone is what was asked for.
            return CommitAnswer(Outcome.ALREADY_COMMITTED, answer.detail)
        return answer

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Ask the sink about each."""
        dead = {}
        for index, committable in enumerate(committables):
            name, stored = self._parts_of(committable)
            why = self._call("why_lost", stored)
            if why:
                dead[index] = f"sink '{self._context.uid}', {name}: {why}"
        return dead

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort what the sink lists and nobody will decide."""
        job, mark = self._context.job, TransactionName.mark_of(self._context.uid)
        listed = self._call("list_open", TransactionName.prefix(job, mark))
        if not (isinstance(listed, Mapping) and all(isinstance(name, str) for name in listed)):
            raise RepeatableUserError(
                f"list_open() of the sink '{self._context.uid}' returned a {type(listed).__name__}",
                what_to_do="return a dict: for each transaction's name what abort() takes",
                uid=self._context.uid,
            )
        if not listed:
            return 0
        # This order matters: a block that is leased after the listing has nothing in it.
        running = running_blocks()
        names = {str(c.payload.get("transaction", "")) for c in kept}
        aborted = 0
        for text, stored in listed.items():
            name = TransactionName.parse(text)
            # Exactly ours: a prefix may fit what somebody else made.
            if name is None or (name.job, name.sink) != (job, mark) or text in names:
                continue
            mine = name.owner_epoch == self._context.owner_epoch
            newer = name.owner_epoch > self._context.owner_epoch
            if newer or (mine and name.block in running):
                continue
            answer = self._abort(name, stored)
            if answer.outcome.is_done:
                aborted += 1
            else:
                LOG.warning(
                    "sink '%s' keeps the leftover %s for now: %s", self._context.uid, name, answer.detail
                )
        return aborted

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        """Ask the sink."""
        return self._ask("checkpoint_complete", completed)

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition: a transaction holds the rows of one task."""
        return self._parts_of(committable)[0].task

    def close(self) -> None:
        """Let the sink release its connections."""
        self._sink.close()

    def _parts_of(self, committable: Committable) -> tuple[TransactionName, Any]:
        name = TransactionName.parse(str(committable.payload.get("transaction", "")))
        if name is None or "committable" not in committable.payload:
            raise CorruptObjectError(
                f"a committable of sink '{self._context.uid}' is none of a two-phase sink",
                what_to_do="start the job once with the sink that wrote it, then change it",
                uid=self._context.uid,
            )
        return name, committable.payload["committable"]

    def _ask(self, method: str, *arguments: Any) -> CommitAnswer:
        """Call a method that ends something; an outage is an answer."""
        try:
            answer: Answer = self._call(method, *arguments)
        except EnvironmentFault as fault:
            if not fault.restartable:
                raise
            return CommitAnswer(Outcome.RETRY, str(fault))
        if answer is None:
            return CommitAnswer(Outcome.COMMITTED)
        if isinstance(answer, Outcome):
            said = f"{method}() answered {answer.name}"
            return CommitAnswer(answer, "" if answer.is_done else said)
        if isinstance(answer, CommitAnswer):
            return answer
        raise RepeatableUserError(
            f"{method}() of the sink '{self._context.uid}' returned a {type(answer).__name__}",
            what_to_do="return None, an Outcome or a CommitAnswer",
            uid=self._context.uid,
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the user's.

        Raises
        ------
        SinkUnavailable
            It raised one of the exceptions that mean: ask again.
        RepeatableUserError
            It raised another one.
        """
        what = f"{method}() of the sink '{self._context.uid}'"
        try:
            return getattr(self._sink, method)(*arguments)
        except FlinkishError:
            raise
        except self._sink.retry_on as error:
            raise SinkUnavailable(f"{what}: {said(error)}") from error
        except USER_ERRORS as error:
            raise RepeatableUserError(
                f"{what} failed",
                why=said(error),
                what_to_do="correct the sink and start the job again; what was decided is committed then",
                uid=self._context.uid,
            ) from error
