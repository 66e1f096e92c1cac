"""Replay of an epoch: it runs again, apart from the job's log, and the sink that lost data stages it again.

The job's own log and state are not touched. The micro-batches of the decision run, with one start of the
query each, in a separate folder that begins with the pinned state of the previous checkpoint; `offsets/N` is
written there as it was logged, and Spark runs exactly that range. The other sinks stage nothing. A replay
that is cut off leaves a folder, which the next one clears, and unnamed staged data, which is swept.

The rules are in :mod:`flinkish_spark.protocol.replay`. The job's own query does not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.epoch_writer import AdmissionGate
from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.staging import Staging, StagingContext
from flinkish_spark.core.errors import (
    MAKE_DETERMINISTIC,
    CommittableLostError,
    CorruptObjectError,
    FlinkishError,
    NotReplayableError,
)
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import CreateResult
from flinkish_spark.job.engine import QueryEngine, QueryPlan
from flinkish_spark.protocol.decisions import Decision, RestagedEpoch
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.protocol.replay import BatchReplay, CannotReplay, ReplayPlan, plan_replay, restage

LOG = logging.getLogger(__name__)
_WATCH_MS = 20


@dataclass(frozen=True)
class Replayer:
    """Replays epochs of one job; used by the recovery."""

    engine: QueryEngine
    #: Its log and state are only read. A running micro-batch of a replay is ended by a cancel only: a job
    #: that stops commits all that is decided, since its next start may be far away.
    job: JobContext
    why_lost: Callable[[LoggedOffsets], str]
    #: Makes a new control file for each query.
    control: Callable[[], ControlFile]
    #: Gives each attempt of one owner a different number.
    attempts: Iterator[int]

    def replay(
        self,
        decision: Decision,
        lost: CommittableLostError,
        abort: Callable[[str, Sequence[Committable]], None],
        patiently: Callable[[Callable[[], str]], str],
    ) -> None:
        """Stage the data again that one sink lost of a decided checkpoint; may be cut off and repeated."""
        known = self.job.job_dir.find_restaged(decision.checkpoint)
        if known is not None and known.batches != decision.batches:
            # A deposed owner has finished its replay meanwhile: its staged data is confirmed, or lost as
            # well.
            LOG.warning("checkpoint %s was replayed by another process meanwhile", decision.checkpoint)
            return
        replay = _Replay(self, decision, lost, 1 if known is None else known.number + 1)
        plan = replay.plan()
        replay.check(patiently)
        LOG.warning("checkpoint %s is replayed: %s", decision.checkpoint, lost)
        # This order matters: an earlier owner that wakes up now still holds the old decision. It cannot
        # commit aborted data, so no record becomes visible twice.
        abort(plan.sink, plan.lost)
        staged = replay.run(plan)
        restaged = restage(decision, plan, staged, self.job.committers[plan.sink].task_of)
        if isinstance(restaged, CannotReplay):
            abort(plan.sink, [c for batch in staged.values() for c in batch.committables])
            raise replay.make_error(restaged.why + replay.origin_of(decision), _MAKE_DETERMINISTIC)
        abort(plan.sink, restaged.surplus)
        replay.finish(plan, restaged.batches)


_MAKE_DETERMINISTIC = f"{MAKE_DETERMINISTIC}; restore the job from before this checkpoint"
_RESTORE = "restore the job from before this checkpoint"


@dataclass(frozen=True)
class _Replay:
    """One replay; `number` is the next one as long as the decision is unchanged."""

    parts: Replayer
    decision: Decision
    lost: CommittableLostError
    number: int

    def plan(self) -> ReplayPlan:
        facts, uid = self.lost.facts, str(self.lost.facts["sink"])
        if "position" not in facts:
            raise self.make_error("it was not staged by a micro-batch", "check the sink's system")
        if not facts["is_proven_aborted"]:
            why = "nothing proves that it was never visible, so it may be there already"
            raise self.make_error(why, _RESTORE)
        task_of = self.parts.job.committers[uid].task_of
        plan = plan_replay(self.decision, uid, int(str(facts["position"])), task_of)
        if isinstance(plan, CannotReplay):
            raise self.make_error(plan.why, _RESTORE)
        return plan

    def check(self, patiently: Callable[[Callable[[], str]], str]) -> None:
        """Refuse an epoch that cannot run again, before anything is changed."""
        before = self._find_previous()
        first = BatchId(0) if before is None else before.batch.next()
        if first != self.decision.batches[0].batch:
            raise self.make_error(f"micro-batch {first} is not among those of the checkpoint", _RESTORE)
        if before is not None:
            why = self._why_no_state(before)
            if why:
                raise self.make_error(f"the state of checkpoint {before.checkpoint} is gone: {why}", _RESTORE)
        for batch in self.decision.batches:
            self._offsets(batch.batch)
        position = self._began_at() if before is None else LoggedOffsets.parse(before.offsets_text)
        position = position.add_partitions(LoggedOffsets.parse(self.decision.offsets_text))
        # The job must never continue silently without input that a decided checkpoint counts as read.
        why = patiently(partial(self.parts.why_lost, position))
        if why:
            raise self.make_error(why, "restore the input, or restore the job from before this checkpoint")

    def _began_at(self) -> LoggedOffsets:
        parts = self.parts
        return parts.job.log.find_first_offsets(parts.job.job_dir.history().log_began_in)

    def _why_no_state(self, before: Decision) -> str:
        pins = self.parts.job.pins
        if before.checkpoint not in pins.list_pinned():
            # It could not be pinned after its receipt; Spark continues from it, so it may still exist.
            try:
                pins.pin(before)
            except CorruptObjectError as gone:
                return str(gone)
        return pins.why_not_restorable(before.checkpoint)

    def make_error(self, why: str, what_to_do: str) -> NotReplayableError:
        lost = self.lost
        return NotReplayableError(
            f"{lost.what}, and cannot be replayed",
            why=f"{lost.why}; {why}" if lost.why else why,
            what_to_do=f"nothing later is decided and nothing is skipped; {what_to_do}",
            **lost.facts,
        )

    def origin_of(self, decision: Decision) -> str:
        before, end = self._find_previous(), LoggedOffsets.parse(decision.offsets_text)
        begin = None if before is None else LoggedOffsets.parse(before.offsets_text)
        return f" (its input: {end.describe_ranges(begin)})"

    def _find_previous(self) -> Decision | None:
        """Return the checkpoint before the epoch; None if the log begins with the epoch."""
        began_in = self.parts.job.job_dir.history().log_began_in
        found = [
            d
            for d in self.parts.job.job_dir.live_commits()
            if d.checkpoint < self.decision.checkpoint and d.lineage >= began_in
        ]
        return found[-1] if found else None

    def _offsets(self, batch: BatchId) -> str:
        is_last = batch == self.decision.batch
        text = self.decision.offsets_text if is_last else self.parts.job.log.read(OFFSETS, batch)
        if text is None:
            raise self.make_error(f"Spark's log has no entry {OFFSETS}/{batch} any more", _RESTORE)
        return text

    def run(self, plan: ReplayPlan) -> dict[BatchId, StagedBatch]:
        parts, job, checkpoint = self.parts, self.parts.job, self.decision.checkpoint
        log, before = job.log.begin_replay(checkpoint), self._find_previous()
        if before is not None:
            parts.engine.pins(log).restore(before.checkpoint)
        query, lineage = parts.engine.plan(parts.control()), job.job_dir.lineage()
        staging = query.staging(
            StagingContext(job.job, job.ownership, lineage, job.blocks, job.clock, log, checkpoint)
        )
        staged: dict[BatchId, StagedBatch] = {}
        for part in plan.batches:
            job.ownership.check()
            log.restore(OFFSETS, part.batch, self._offsets(part.batch))
            writer = _ReplayWriter(part, plan.sink, staging, parts.attempts, AdmissionGate(job.clock))
            self._run_one(query, log, writer)
            if writer.staged is not None:
                staged[part.batch] = writer.staged
        return staged

    def _run_one(self, plan: QueryPlan, log: SparkLog, writer: _ReplayWriter) -> None:
        parts = self.parts
        query = plan.start_once(log, writer)
        try:
            while query.is_active:
                if parts.job.is_cancelled():
                    raise JobInterruptedError(f"replaying checkpoint {self.decision.checkpoint}")
                parts.job.clock.sleep_ms(_WATCH_MS)
        finally:
            writer.gate.stop()
            query.stop()
        failure = writer.failure if isinstance(writer.failure, FlinkishError) else query.exception()
        if failure is not None:
            raise failure
        batch = writer.part.batch
        if log.read(COMMITS, batch) is None or (writer.part.lost and writer.staged is None):
            raise QueryError(f"micro-batch {batch} was to be replayed, and Spark did not run it")

    def finish(self, plan: ReplayPlan, batches: tuple[StagedBatch, ...]) -> None:
        job, checkpoint, why = self.parts.job, self.decision.checkpoint, str(self.lost.why or self.lost.what)
        epoch, now_ms = job.ownership.epoch, job.clock.wall_ms()
        restaged = RestagedEpoch(checkpoint, self.number, epoch, now_ms, plan.sink, why, batches)
        job.ownership.check()
        job.observer.on_step_start(Step.RESTAGED, str(checkpoint))
        # From this create on the checkpoint names the newly staged data; before, it names the aborted data.
        created = job.job_dir.create_restaged(restaged)
        job.observer.on_step_end(Step.RESTAGED, str(checkpoint))
        job.log.end_replay()
        if created is CreateResult.EXISTS:
            # Our staged data is unnamed and is swept; the confirmation uses the stored replay.
            LOG.warning("checkpoint %s was replayed by another process at the same time", checkpoint)


@dataclass
class _ReplayWriter:
    part: BatchReplay
    sink: str
    staging: Staging
    attempts: Iterator[int]
    gate: AdmissionGate
    staged: StagedBatch | None = None
    failure: BaseException | None = None

    def __call__(self, frame: Any, batch_id: int) -> None:
        try:
            if BatchId(batch_id) != self.part.batch:
                raise QueryError(f"Spark replays micro-batch {batch_id}, expected is {self.part.batch}")
            only = frozenset({self.sink} if self.part.lost else ())
            staged = self.staging.stage_only(frame, self.part.batch, next(self.attempts), only)
            self.staged = staged if self.part.lost else None
        except BaseException as error:
            self.failure = error
            self.gate.raise_if_stopped()
            raise
