"""Finishing a decided checkpoint: every sink, then the group offsets, then the receipt.

Used by the coordinator right after the decision and by the recovery after a crash; every step may
be repeated by any process that owns the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from flinkish_spark.clock import Clock
from flinkish_spark.errors import CommittableLostError, EnvironmentFault, FencedError, JobDirError
from flinkish_spark.graph.stream_graph import SourceNode
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Receipt
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.runtime.ownership import Ownership
from flinkish_spark.runtime.spark_log import LoggedOffsets
from flinkish_spark.runtime.steps import Observer, Step
from flinkish_spark.sinks.base import Committer

LOG = logging.getLogger(__name__)
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 50, 5_000


class Interrupted(Exception):
    """The job is being torn down; the checkpoint stays decided and is finished by the next start."""


class Confirmation:
    """Commits decided checkpoints; one thread at a time.

    Parameters
    ----------
    committers
        By sink uid, in the fixed order in which sinks commit.
    is_stopping
        Asked while waiting for a system that cannot answer.
    """

    def __init__(
        self,
        job_dir: JobDir,
        ownership: Ownership,
        committers: Mapping[str, Committer],
        sources: Sequence[SourceNode],
        clock: Clock,
        observer: Observer,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._job_dir, self._ownership = job_dir, ownership
        self._committers, self._sources = committers, sources
        self._clock, self._observer, self._is_stopping = clock, observer, is_stopping

    def confirm(self, decision: Decision) -> Receipt:
        """Finish a decided checkpoint.

        Raises
        ------
        CommittableLostError
            Something decided can never be committed; nothing later may be decided.
        FencedError
            A newer owner exists.
        """
        self._refuse_unknown_sinks(decision)
        staged = decision.by_sink()
        answers = {uid: self._commit_sink(decision, uid, staged.get(uid, [])) for uid in self._committers}
        # This order matters: the group offsets tell lag tools what is done, so they come after
        # the last sink; the receipt says that all of it is done, so it comes last.
        group_offsets = self._commit_group_offsets(decision)
        receipt = Receipt(
            decision.checkpoint, self._ownership.epoch, self._clock.wall_ms(), answers, group_offsets
        )
        self._observer.before(Step.RECEIPT, str(decision.checkpoint))
        self._job_dir.create_receipt(receipt)
        self._observer.after(Step.RECEIPT, str(decision.checkpoint))
        return receipt

    def _refuse_unknown_sinks(self, decision: Decision) -> None:
        names = {c.sink for batch in decision.batches for c in batch.committables}
        unknown = sorted(names - self._committers.keys())
        if unknown:
            raise JobDirError(
                f"checkpoint {decision.checkpoint} holds decided data of sink '{unknown[0]}', "
                "which this job does not have",
                what_to_do="start the job once with that sink, then remove it",
                uid=unknown[0],
            )

    def _commit_sink(
        self, decision: Decision, uid: str, pairs: list[tuple[StagedBatch, Committable]]
    ) -> list[str]:
        committables = [committable for _, committable in pairs]
        if not committables:
            return []
        self._ownership.check()
        self._observer.before(Step.SINK_COMMIT, uid)

        def commit() -> tuple[list[CommitAnswer], bool]:
            answers = list(self._committers[uid].commit(decision.checkpoint, committables))
            for (batch, committable), answer in zip(pairs, answers, strict=False):
                self._refuse_final(decision, uid, int(batch.batch), committable, answer)
            is_done = len(answers) == len(committables) and all(a.outcome.is_done for a in answers)
            return answers, is_done

        answers = self._until_done(commit, f"committing checkpoint {decision.checkpoint} to sink '{uid}'")
        self._observer.after(Step.SINK_COMMIT, uid)
        return [answer.outcome.value for answer in answers]

    def _refuse_final(
        self, decision: Decision, uid: str, batch: int, committable: Committable, answer: CommitAnswer
    ) -> None:
        if answer.outcome is Outcome.FENCED:
            self._ownership.check()
            raise FencedError(
                f"sink '{uid}' refused a committable of checkpoint {decision.checkpoint}", why=answer.detail
            )
        if answer.outcome is Outcome.LOST:
            raise CommittableLostError(
                f"a decided committable of sink '{uid}' in checkpoint {decision.checkpoint}, "
                f"micro-batch {batch}, is lost",
                why=answer.detail,
                what_to_do="nothing later is decided and nothing is skipped; restore the job from before "
                f"checkpoint {decision.checkpoint}, or clear its rows from the other sinks and replay",
                sink=uid,
                checkpoint=decision.checkpoint,
                committable=dict(committable.payload) if "transactional_id" in committable.payload else uid,
            )

    def _commit_group_offsets(self, decision: Decision) -> dict[str, Mapping[str, Mapping[str, int]]]:
        position = LoggedOffsets.parse(decision.offsets_text)
        self._ownership.check()
        self._observer.before(Step.GROUP_OFFSETS, str(decision.checkpoint))
        committed: dict[str, Mapping[str, Mapping[str, int]]] = {}

        def commit() -> tuple[list[CommitAnswer], bool]:
            try:
                for node in self._sources:
                    committed.update(node.source.commit_offsets(position))
            except EnvironmentFault as fault:
                if not fault.restartable:
                    raise
                return [CommitAnswer(Outcome.RETRY, str(fault))], False
            return [], True

        self._until_done(commit, f"committing the group offsets of checkpoint {decision.checkpoint}")
        self._observer.after(Step.GROUP_OFFSETS, str(decision.checkpoint))
        return committed

    def _until_done(
        self, attempt: Callable[[], tuple[list[CommitAnswer], bool]], what: str
    ) -> list[CommitAnswer]:
        """Repeat until done: after the decision there is no other way out but evidence of a loss."""
        pause_ms = _FIRST_PAUSE_MS
        while True:
            answers, is_done = attempt()
            if is_done:
                return answers
            if self._is_stopping():
                raise Interrupted(what)
            detail = answers[-1].detail if answers else ""
            LOG.warning("%s has to wait, which is expected while brokers restart: %s", what, detail)
            self._clock.sleep_ms(pause_ms)
            pause_ms = min(_LONGEST_PAUSE_MS, pause_ms * 2)
            self._ownership.check()
