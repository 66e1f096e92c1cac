"""What happens to completed checkpoints: they are pinned, and go when others have taken their place."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flinkish_spark.clock import Clock
from flinkish_spark.config import CheckpointConfig
from flinkish_spark.errors import CorruptObjectError, JobDirError, StoreError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.retention import (
    CheckpointFact,
    CheckpointRetention,
    Deletion,
    Part,
    RetentionFacts,
    to_delete,
    to_delete_on_cancel,
)
from flinkish_spark.runtime.ownership import Ownership, seal_open_ids
from flinkish_spark.runtime.pins import CheckpointPins

LOG = logging.getLogger(__name__)


class CompletedCheckpoints:
    """The store of completed checkpoints of one owner; one thread at a time.

    Parameters
    ----------
    in_use
        Returns the checkpoints that somebody reads now, such as the export of a savepoint.
    """

    def __init__(
        self,
        job_dir: JobDir,
        config: CheckpointConfig,
        pins: CheckpointPins,
        in_use: Callable[[], frozenset[CheckpointId]],
        ownership: Ownership,
    ) -> None:
        self._job_dir, self._config, self._pins, self._in_use = job_dir, config, pins, in_use
        self._ownership = ownership
        #: Decisions and receipts never change, so each is read once.
        self._known: dict[CheckpointId, CheckpointFact] = {}

    def decided(self, decision: Decision) -> bool:
        """Pin a checkpoint that sinks are about to commit.

        That may take long, while Spark goes on and cleans up; and if what it staged since cannot be kept,
        this is the state that the job goes back to. What goes wrong here is tried again behind the receipt.

        Returns
        -------
        bool
            Whether it is pinned.
        """
        try:
            self._pins.pin(decision)
        except (StoreError, CorruptObjectError) as error:
            LOG.warning("checkpoint %s is pinned later: %s", decision.checkpoint, error)
            return False
        return True

    def completed(self, decision: Decision) -> None:
        """Pin a confirmed checkpoint and delete those beyond the retained ones.

        Called after the receipt. What goes wrong here is logged: the checkpoint is complete.
        """
        try:
            self._pins.pin(decision)
        except (StoreError, CorruptObjectError) as error:
            LOG.error("checkpoint %s cannot be gone back to later: %s", decision.checkpoint, error)
        try:
            self._delete(to_delete(self._facts()))
        except (StoreError, CorruptObjectError, JobDirError) as error:
            LOG.warning("old checkpoints are deleted later: %s", error)

    def cancelled(self, clock: Clock) -> None:
        """Do what the configuration says about the checkpoints of a cancelled job.

        Raises
        ------
        FencedError
            A newer owner has the job: they are its checkpoints now.
        """
        if self._config.retention is CheckpointRetention.RETAIN_ON_CANCELLATION:
            return
        ownership = self._ownership
        ownership.check()
        seal_open_ids(ownership, clock)
        known = self._job_dir.decided_ids()
        if known:
            # Ids are counted from what is there and must go on: sinks tell repeated commits by them.
            reason = "the job was cancelled and its checkpoints deleted"
            seal = Decision(known[-1].next(), Verdict.ABORT, ownership.epoch, clock.wall_ms(), reason=reason)
            self._job_dir.create_decision(seal)
        self._delete(to_delete_on_cancel(self._facts(), self._config.retention))

    # -- inside ---------------------------------------------------------------------------------
    def _facts(self) -> RetentionFacts:
        # This order matters: a pin is made after its checkpoint's folder and goes after it. One that
        # was there and has no folder later is what a crash left; the other way round it may be new.
        pinned = self._pins.pinned()
        ids = self._job_dir.decided_ids()
        self._known = {one: fact for one, fact in self._known.items() if one in ids}
        order, intent = self._job_dir.rewind_order(), self._job_dir.open_rewind()
        targets = [one.target for one in (order, intent) if one is not None and one.target is not None]
        return RetentionFacts(
            checkpoints=tuple(self._fact(one) for one in ids),
            history=self._job_dir.history(),
            retained=self._config.retained,
            pinned=pinned,
            in_use=self._in_use(),
            referenced=frozenset(targets),
        )

    def _fact(self, checkpoint: CheckpointId) -> CheckpointFact:
        known = self._known.get(checkpoint)
        if known is not None:
            return known
        try:
            decision = self._job_dir.decision(checkpoint)
        except (CorruptObjectError, JobDirError) as error:
            LOG.warning("checkpoint %s cannot be read and is kept as it is: %s", checkpoint, error)
            return CheckpointFact(checkpoint, None)
        has_receipt = self._job_dir.receipt(checkpoint) is not None
        if decision is None:
            return CheckpointFact(checkpoint, None, has_receipt=has_receipt)
        fact = CheckpointFact(
            checkpoint, decision.verdict, decision.lineage, has_receipt, decision.purpose.is_savepoint
        )
        if has_receipt or decision.verdict is Verdict.ABORT:
            self._known[checkpoint] = fact
        return fact

    def _delete(self, deletions: tuple[Deletion, ...]) -> None:
        for deletion in deletions:
            # What a newer owner keeps is not ours to judge, by facts that may be old.
            self._ownership.check()
            for part in deletion.parts:
                if part is Part.PIN:
                    self._pins.unpin(deletion.checkpoint)
                elif part is Part.RESTAGED:
                    self._job_dir.forget_restaged(deletion.checkpoint)
                else:
                    self._job_dir.store.delete(f"checkpoints/{deletion.checkpoint}/{part.value}")
