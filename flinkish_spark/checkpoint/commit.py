"""Finishing a decided checkpoint: every sink, then the group offsets, then the receipt.

Used by the coordinator right after the decision and by the recovery after a crash; every step may
be repeated by any process that owns the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.contracts.manifest import NO_MANIFEST
from flinkish_spark.contracts.sink import Committer, CompletedCheckpoint, another_timeline
from flinkish_spark.core.clock import backoff_ms
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    CommittableLostError,
    EnvironmentFault,
    FencedError,
    JobDirError,
)
from flinkish_spark.core.log_context import add_log_facts
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.steps import Step
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.protocol.decisions import Decision, ManifestRecord, Receipt
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, StagedBatch

LOG = logging.getLogger(__name__)
#: Pauses between two tries, growing from the first to the longest.
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 50, 5_000


class JobInterruptedError(Exception):
    """The job is being torn down; the checkpoint stays decided and is finished by the next start."""


def refuse_another_timeline(committer: Committer, uid: str, ownership: Ownership, upto: CheckpointId) -> None:
    """Raise AnotherTimelineError if a sink holds a commit that this owner's timeline does not contain.

    Called only when this owner is known to be the newest of its job directory.
    """
    for mark in committer.newest_marks():
        why = ownership.why_foreign(mark, upto)
        if why:
            raise another_timeline(f"sink '{uid}'", mark, upto, why)


class Confirmation:
    """Commits decided checkpoints; one thread at a time."""

    def __init__(self, job: JobContext) -> None:
        self._job_dir, self._ownership = job.job_dir, job.ownership
        self._committers, self._sources = job.committers, job.sources
        self._clock, self._observer, self._tracker = job.clock, job.observer, job.tracker
        self._must_give_up, self._waiting = job.must_give_up, job.waiting
        self._manifest, self._job = job.manifest, job.job

    def confirm(self, decision: Decision) -> Receipt:
        with add_log_facts(checkpoint=int(decision.checkpoint)):
            return self._confirm(decision)

    def _confirm(self, decision: Decision) -> Receipt:
        names = {c.sink for batch in decision.batches for c in batch.committables}
        unknown = sorted(names - self._committers.keys())
        if unknown:
            raise JobDirError(
                f"checkpoint {decision.checkpoint} holds decided data of sink '{unknown[0]}', "
                "which this job does not have",
                what_to_do="start the job once with that sink, then remove it",
            )
        staged = decision.group_by_sink()
        answers = {uid: self._commit_sink(decision, uid, staged.get(uid, [])) for uid in self._committers}
        # This order matters: readers may see what a sink does for a complete checkpoint, so that comes after
        # the last sink's commit; the manifest tells readers what all sinks show; the group offsets tell lag
        # tools what is done, so they come next; the receipt confirms all of it and is last.
        completed = {uid: self._complete_sink(decision, uid) for uid in self._committers}
        facts = _collect_facts(answers, completed)
        self._write_manifest(decision, facts)
        group_offsets = self._commit_group_offsets(decision)
        receipt = Receipt(
            decision.checkpoint,
            self._ownership.epoch,
            self._clock.wall_ms(),
            {uid: [answer.outcome.value for answer in given] for uid, given in answers.items()},
            group_offsets,
            facts,
        )
        self._observer.on_step_start(Step.RECEIPT, str(decision.checkpoint))
        with self._waiting(f"the job directory to take the receipt of checkpoint {decision.checkpoint}"):
            self._job_dir.create_receipt(receipt)
        self._observer.on_step_end(Step.RECEIPT, str(decision.checkpoint))
        return receipt

    def _commit_sink(
        self, decision: Decision, uid: str, pairs: list[tuple[StagedBatch, Committable]]
    ) -> list[CommitAnswer]:
        committables = [committable for _, committable in pairs]
        if not committables:
            return []
        self._ownership.check()
        self._observer.on_step_start(Step.SINK_COMMIT, uid)
        began_ms = self._clock.monotonic_ms()

        def commit() -> tuple[list[CommitAnswer], bool]:
            try:
                answers = list(self._committers[uid].commit(decision.checkpoint, committables))
            except AnotherTimelineError:
                # To a deposed process the commits of its successor look like another timeline.
                self._ownership.check()
                raise
            self._tracker.on_answers(uid, answers)
            for position, (pair, answer) in enumerate(zip(pairs, answers, strict=False)):
                if answer.outcome is Outcome.LOST:
                    batch, lost = pair
                    raise CommittableLostError(
                        f"a decided committable of sink '{uid}' in checkpoint {decision.checkpoint}, "
                        f"micro-batch {batch.batch}, is lost",
                        why=answer.detail,
                        what_to_do="none: nothing later is decided, and the next start stages it again",
                        sink=uid,
                        checkpoint=decision.checkpoint,
                        position=position,
                        is_proven_aborted=answer.is_proven_aborted,
                        committable=dict(lost.payload) if "transactional_id" in lost.payload else uid,
                    )
                self._refuse_final(decision, uid, answer)
            is_done = len(answers) == len(committables) and all(a.outcome.is_done for a in answers)
            return answers, is_done

        answers = self._repeat_until_done(
            commit, f"committing checkpoint {decision.checkpoint} to sink '{uid}'"
        )
        self._tracker.on_committed(uid, self._clock.monotonic_ms() - began_ms)
        self._observer.on_step_end(Step.SINK_COMMIT, uid)
        return answers

    def _complete_sink(self, decision: Decision, uid: str) -> CommitAnswer:
        completed = CompletedCheckpoint(decision.checkpoint, decision.decided_at_ms, decision.purpose)
        if type(self._committers[uid]).checkpoint_complete is not Committer.checkpoint_complete:
            # The default method does nothing, so it needs no check of the ownership.
            self._ownership.check()
        self._observer.on_step_start(Step.SINK_COMPLETE, uid)

        def complete() -> tuple[list[CommitAnswer], bool]:
            answer = self._committers[uid].checkpoint_complete(completed)
            self._refuse_final(decision, uid, answer)
            return [answer], answer.outcome.is_done

        answers = self._repeat_until_done(
            complete, f"completing checkpoint {decision.checkpoint} at sink '{uid}'"
        )
        self._observer.on_step_end(Step.SINK_COMPLETE, uid)
        return answers[-1]

    def _refuse_final(self, decision: Decision, uid: str, answer: CommitAnswer) -> None:
        if answer.outcome is Outcome.FENCED:
            self._ownership.check()
            refuse_another_timeline(self._committers[uid], uid, self._ownership, decision.checkpoint)
            raise FencedError(
                f"sink '{uid}' refused a committable of checkpoint {decision.checkpoint}", why=answer.detail
            )
        if answer.outcome is Outcome.LOST:
            raise CommittableLostError(
                f"sink '{uid}' cannot complete checkpoint {decision.checkpoint}, since its data is lost",
                why=answer.detail,
                what_to_do="no later checkpoint is decided; check the sink's system and start the job again",
                sink=uid,
                checkpoint=decision.checkpoint,
            )

    def _write_manifest(self, decision: Decision, facts: Mapping[str, Mapping[str, Any]]) -> None:
        if self._manifest is NO_MANIFEST:
            return
        position = LoggedOffsets.parse(decision.offsets_text)
        log_began_in = self._job_dir.history().log_began_in
        record = ManifestRecord.of(decision, facts, position.partitions(), log_began_in)
        self._ownership.check()
        self._observer.on_step_start(Step.MANIFEST, str(decision.checkpoint))

        def write() -> tuple[list[CommitAnswer], bool]:
            answer = self._manifest.write(record)
            if answer.outcome is Outcome.FENCED:
                self._ownership.check()
                raise FencedError("the manifest is written by a newer owner", why=answer.detail)
            return [answer], answer.outcome.is_done

        self._repeat_until_done(write, f"writing checkpoint {decision.checkpoint} into the manifest")
        self._observer.on_step_end(Step.MANIFEST, str(decision.checkpoint))

    def _commit_group_offsets(self, decision: Decision) -> dict[str, Mapping[str, Mapping[str, int]]]:
        position = LoggedOffsets.parse(decision.offsets_text)
        mark = self._ownership.timeline.mark_of(decision.checkpoint)
        note = mark.to_text(self._job)
        self._ownership.check()
        self._observer.on_step_start(Step.GROUP_OFFSETS, str(decision.checkpoint))
        committed: dict[str, Mapping[str, Mapping[str, int]]] = {}

        def commit() -> tuple[list[CommitAnswer], bool]:
            try:
                for node in self._sources:
                    committed.update(node.source.commit_offsets(position, note))
            except EnvironmentFault as fault:
                if not fault.restartable:
                    raise
                return [CommitAnswer(Outcome.RETRY, str(fault))], False
            return [], True

        self._repeat_until_done(commit, f"committing the group offsets of checkpoint {decision.checkpoint}")
        self._observer.on_step_end(Step.GROUP_OFFSETS, str(decision.checkpoint))
        return committed

    def _repeat_until_done(
        self, attempt: Callable[[], tuple[list[CommitAnswer], bool]], what: str
    ) -> list[CommitAnswer]:
        """Repeat until done: after the decision only proof of a loss ends the retries."""
        pauses_ms = backoff_ms(FIRST_PAUSE_MS, LONGEST_PAUSE_MS)
        with self._waiting(f"{what} to end"):
            while True:
                answers, is_done = attempt()
                if is_done:
                    return answers
                if self._must_give_up():
                    raise JobInterruptedError(what)
                # The first that has to wait: those after it were not tried.
                detail = next((one.detail for one in answers if not one.outcome.is_done), "")
                note_failure(detail)
                LOG.warning("%s has to wait, which is expected while brokers restart: %s", what, detail)
                self._clock.sleep_ms(next(pauses_ms))
                self._ownership.check()


def _collect_facts(
    committed: Mapping[str, Sequence[CommitAnswer]], completed: Mapping[str, CommitAnswer]
) -> dict[str, dict[str, Any]]:
    """Return the facts that each sink answered with; later answers override earlier ones."""
    found: dict[str, dict[str, Any]] = {}
    for uid, answers in committed.items():
        for answer in (*answers, completed[uid]):
            if answer.facts:
                found.setdefault(uid, {}).update(answer.facts)
    return found
