"""Carrying out the recovery: gather facts, ask the protocol, do the one step, start over."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from flinkish_spark.clock import Clock
from flinkish_spark.errors import EnvironmentFault, FencedError, InternalError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol import recovery as R
from flinkish_spark.protocol.decisions import Decision, RewindIntent, Verdict
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.outcomes import Outcome
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.runtime.confirmation import Confirmation, Interrupted
from flinkish_spark.runtime.ownership import Ownership
from flinkish_spark.runtime.spark_log import COMMITS, OFFSETS, SparkLog
from flinkish_spark.runtime.steps import Observer, Step
from flinkish_spark.sinks.base import Committer

T = TypeVar("T")
LOG = logging.getLogger(__name__)
_PAUSE_MS = 200
#: More steps than any recovery can need; above it the facts do not change, which is a bug.
_MOST_STEPS = 1_000


class Recovery:
    """Brings the job directory into a state from which Spark may start. Spark is not running."""

    def __init__(
        self,
        job_dir: JobDir,
        log: SparkLog,
        ownership: Ownership,
        committers: Mapping[str, Committer],
        confirmation: Confirmation,
        clock: Clock,
        observer: Observer,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._job_dir, self._log, self._ownership = job_dir, log, ownership
        self._committers, self._confirmation = committers, confirmation
        self._clock, self._observer, self._is_stopping = clock, observer, is_stopping
        self._is_swept = False

    def run(self) -> tuple[R.StartSpark, list[StagedBatch]]:
        """Recover; return where Spark starts, and the kept micro-batches in order.

        Raises
        ------
        CommittableLostError
            A decided committable is lost.
        CorruptObjectError
            Something in the job directory cannot be trusted.
        """
        self._is_swept = False
        for _ in range(_MOST_STEPS):
            self._ownership.check()
            staged = self._job_dir.staged_batches(self._job_dir.lineage())
            decisions = self._decisions()
            step = R.next_step(self._facts(staged, decisions))
            LOG.info("recovery: %s", step)
            if isinstance(step, R.StartSpark):
                kept = sorted((s for s in staged.values() if s.batch in step.kept), key=lambda s: s.batch)
                return step, kept
            self._do(step, staged, decisions)
        raise InternalError("the recovery does not come to an end", what_to_do="report this with its log")

    # -- facts ----------------------------------------------------------------------------------
    def _decisions(self) -> dict[int, Decision]:
        found = {}
        for checkpoint in self._job_dir.decided_ids():
            decision = self._job_dir.decision(checkpoint)
            if decision is not None and decision.verdict is Verdict.COMMIT:
                found[int(checkpoint)] = decision
        return found

    def _facts(self, staged: Mapping[str, StagedBatch], decisions: Mapping[int, Decision]) -> R.RecoveryFacts:
        decided = tuple(
            R.DecidedFact(d.checkpoint, d.batch, self._job_dir.receipt(d.checkpoint) is not None)
            for d in decisions.values()
        )
        commits = self._log.batches(COMMITS)
        newest = max((d.batch for d in decided), default=None)
        open_files = {n: s for n, s in staged.items() if newest is None or s.batch > newest}
        return R.RecoveryFacts(
            rewind_is_open=self._job_dir.open_rewind() is not None,
            lineage=self._job_dir.lineage(),
            offsets=self._log.batches(OFFSETS),
            commits=commits,
            decided=decided,
            staged=tuple(
                R.StagedFact(s.batch, name, self._why_dead(s) if s.batch in commits else "")
                for name, s in open_files.items()
            ),
            leftovers_are_swept=self._is_swept,
        )

    def _why_dead(self, staged: StagedBatch) -> str:
        for sink, committables in _by_sink(staged.committables).items():
            if sink not in self._committers:
                return f"the job has no sink '{sink}' any more"
            dead = self._patiently(partial(self._committers[sink].why_dead, committables))
            if dead:
                return str(next(iter(dead.values())))
        return ""

    # -- steps ----------------------------------------------------------------------------------
    def _do(self, step: R.Step, staged: Mapping[str, StagedBatch], decisions: Mapping[int, Decision]) -> None:
        match step:
            case R.FinishRewind():
                self._finish_rewind()
            case R.RestoreLog(checkpoint):
                decision = decisions[int(checkpoint)]
                self._log.restore(OFFSETS, decision.batch, decision.offsets_text)
                self._log.restore(COMMITS, decision.batch, decision.commits_text)
            case R.Confirm(checkpoint):
                decision = decisions[int(checkpoint)]
                self._confirmation.confirm(decision)
                for batch in decision.batches:
                    self._job_dir.delete_staged(batch.lineage, JobDir.attempt_name(batch))
            case R.AbortStaged(attempts, reason):
                for name in attempts:
                    self._abort(staged[name], reason)
                    self._job_dir.delete_staged(staged[name].lineage, name)
            case R.Rewind(first_removed, reason):
                self._open_rewind(first_removed, reason)
            case R.SweepLeftovers():
                self._sweep(staged, decisions)
                self._forget_confirmed(staged, decisions)
                self._is_swept = True

    def _abort(self, staged: StagedBatch, reason: str) -> None:
        LOG.info("aborting micro-batch %s of owner %s: %s", staged.batch, staged.owner_epoch, reason)
        for sink, committables in _by_sink(staged.committables).items():
            if sink not in self._committers:
                continue
            self._abort_sink(sink, committables)

    def _abort_sink(self, sink: str, committables: Sequence[Committable]) -> None:
        while True:
            answers = self._committers[sink].abort(committables)
            for answer in answers:
                if answer.outcome is Outcome.FENCED:
                    self._ownership.check()
                    raise FencedError(
                        f"an undecided committable of sink '{sink}' was committed by somebody else",
                        why=answer.detail,
                        what_to_do="find out which process did; the job's output may hold rows twice",
                    )
            if all(a.outcome.is_done for a in answers):
                return
            self._wait(f"aborting leftovers of sink '{sink}'", answers[-1].detail)

    def _open_rewind(self, first_removed: BatchId, reason: str) -> None:
        removed = {}
        for log in (OFFSETS, COMMITS):
            for batch in self._log.batches(log):
                text = self._log.read(log, batch) if batch >= first_removed else None
                if text is not None:
                    removed[f"{log}/{batch}"] = text
        lineage = type(self._job_dir.lineage())(self._job_dir.lineage().value + 1)
        intent = RewindIntent(first_removed, lineage, reason, removed)
        LOG.warning("rewinding so that micro-batch %s is planned again: %s", first_removed, reason)
        # This order matters: if a commits/ entry vanished before the intent is durable, Spark
        # would run the newest micro-batch again and skip the input of those in between.
        self._observer.before(Step.REWIND_INTENT, str(first_removed))
        self._job_dir.write_rewind(intent)
        self._observer.after(Step.REWIND_INTENT, str(first_removed))

    def _finish_rewind(self) -> None:
        intent = self._job_dir.open_rewind()
        if intent is None:
            raise InternalError("there is no rewind to finish")
        newest_first = sorted(intent.removed, key=lambda e: (-int(e.split("/")[1]), e))
        for entry in newest_first:
            self._observer.before(Step.REWIND_DELETE, entry)
            self._log.remove(entry)
            self._observer.after(Step.REWIND_DELETE, entry)
        if intent.first_removed == BatchId(0):
            self._log.clear_state()
        self._job_dir.close_rewind(intent)

    def _sweep(self, staged: Mapping[str, StagedBatch], decisions: Mapping[int, Decision]) -> None:
        kept = [c for s in staged.values() for c in s.committables]
        for committer in self._committers.values():
            count = self._patiently(partial(committer.sweep, kept, frozenset))
            if count:
                LOG.info("aborted %s leftover transactions, as expected after a crash", count)

    def _forget_confirmed(self, staged: Mapping[str, StagedBatch], decisions: Mapping[int, Decision]) -> None:
        """Delete staged files that a crash left behind a receipt; every decision has one by now."""
        newest = max((d.batch for d in decisions.values()), default=None)
        for name, batch in staged.items():
            if newest is not None and batch.batch <= newest:
                self._job_dir.delete_staged(batch.lineage, name)

    # -- waiting --------------------------------------------------------------------------------
    def _patiently(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except EnvironmentFault as fault:
                if not fault.restartable:
                    raise
                self._wait("recovery", str(fault))

    def _wait(self, what: str, detail: str) -> None:
        if self._is_stopping():
            raise Interrupted(what)
        LOG.warning("%s has to wait, which is expected while brokers restart: %s", what, detail)
        self._clock.sleep_ms(_PAUSE_MS)


def _by_sink(committables: Sequence[Committable]) -> dict[str, list[Committable]]:
    grouped: dict[str, list[Committable]] = defaultdict(list)
    for committable in committables:
        grouped[committable.sink].append(committable)
    return dict(grouped)
