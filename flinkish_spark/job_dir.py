"""What lies where below the job directory, and its typed reads and writes.

The only module that knows the keys (layout in `docs/architecture.md`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from flinkish_spark.errors import CorruptObjectError, JobDirError
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent, Verdict
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import CreateResult, Store

T = TypeVar("T")

JOB_KEY = "job.json"
REWIND_KEY = "rewind.json"


class JobDir:
    """Typed access to one job directory.

    Parameters
    ----------
    store
        Rooted at the job directory.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._objects = SealedObjects(store, "the job directory")

    # -- identity -------------------------------------------------------------------------------
    def read_or_create_job(self, wanted: Mapping[str, Any]) -> tuple[JobUuid, dict[str, Any]]:
        """Return the job's uuid and recorded settings, creating job.json at the first start.

        Raises
        ------
        JobDirError
            A setting that must never change differs from the recorded one.
        """
        body = {**wanted, "uuid": uuid.uuid4().hex}
        self.store.create_if_absent(JOB_KEY, seal("job", body))
        recorded = self._objects.read(JOB_KEY, "job", dict)
        for name, value in wanted.items():
            if recorded.get(name) != value:
                raise JobDirError(
                    f"this job directory was written with {name} = {recorded.get(name)!r}, "
                    f"and this job has {value!r}",
                    why=f"{name} must stay the same for the life of a job directory",
                    what_to_do=f"use {name} = {recorded.get(name)!r} again, or a new job_dir",
                    setting=name,
                    recorded=recorded.get(name),
                    wanted=value,
                )
        return JobUuid(recorded["uuid"]), recorded

    def known_uuid(self) -> JobUuid | None:
        """Return the uuid of a job that has started here before; None before its first start."""
        recorded: dict[str, Any] | None = self._objects.optional(JOB_KEY, "job", dict)
        return None if recorded is None else JobUuid(recorded["uuid"])

    def recorded_once(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Record `value` under ``facts/<name>.json`` at the first call; return what is recorded."""
        key = f"facts/{name}.json"
        self.store.create_if_absent(key, seal("fact", value))
        return self._objects.read(key, "fact", dict)

    # -- owners ---------------------------------------------------------------------------------
    def newest_owner(self) -> OwnerEpoch:
        """Return the highest owner epoch ever taken; 0 if none."""
        return OwnerEpoch(max(self._objects.numbers("owners"), default=0))

    def create_owner(self, epoch: OwnerEpoch, body: Mapping[str, Any]) -> CreateResult:
        """Take an owner epoch; exactly one process can."""
        return self.store.create_if_absent(f"owners/{epoch}.json", seal("owner", body))

    # -- staged micro-batches -------------------------------------------------------------------
    def write_staged(self, staged: StagedBatch) -> None:
        """Write the staged file of one attempt; its name is new by construction."""
        key = self.staged_key(staged)
        if self.store.create_if_absent(key, seal("staged", staged.to_json())) is CreateResult.EXISTS:
            raise CorruptObjectError(f"{key} exists already", why="an attempt number was used twice")

    def staged_batches(self, lineage: Lineage) -> dict[str, StagedBatch]:
        """Return the staged files of a lineage by attempt name ``<batch>-<owner>.<attempt>``."""
        found = {}
        for key in self.store.list(f"staged/{lineage}"):
            name = key.rsplit("/", 1)[1].removesuffix(".json")
            found[name] = self._objects.read(key, "staged", StagedBatch.from_json)
        return found

    def delete_staged(self, lineage: Lineage, attempt: str) -> None:
        """Delete a staged file, after its committables were ended or a receipt covers them."""
        self.store.delete(f"staged/{lineage}/{attempt}.json")

    @staticmethod
    def attempt_name(staged: StagedBatch) -> str:
        """Return the name of a staged file without folder and ending."""
        return f"{staged.batch}-{staged.owner_epoch}.{staged.attempt}"

    def staged_key(self, staged: StagedBatch) -> str:
        """Return where a staged batch is stored."""
        return f"staged/{staged.lineage}/{self.attempt_name(staged)}.json"

    # -- decisions and receipts -----------------------------------------------------------------
    def create_decision(self, decision: Decision) -> CreateResult:
        """Decide a checkpoint id once and for all; EXISTS means somebody else did."""
        return self.store.create_if_absent(
            f"checkpoints/{decision.checkpoint}/decision.json", seal("decision", decision.to_json())
        )

    def decision(self, checkpoint: CheckpointId) -> Decision | None:
        """Return the decision, or None while the id is open."""
        return self._objects.optional(
            f"checkpoints/{checkpoint}/decision.json", "decision", Decision.from_json
        )

    def decided_ids(self) -> tuple[CheckpointId, ...]:
        """Return all ids that have a folder, in order of id."""
        return tuple(CheckpointId(n) for n in sorted(self._objects.numbers("checkpoints", "")))

    def newest_commit(self) -> Decision | None:
        """Return the newest COMMIT decision, or None before the first."""
        for checkpoint in reversed(self.decided_ids()):
            decision = self.decision(checkpoint)
            if decision is not None and decision.verdict is Verdict.COMMIT:
                return decision
        return None

    def create_receipt(self, receipt: Receipt) -> CreateResult:
        """Confirm a checkpoint. EXISTS is harmless: somebody finished the same work."""
        return self.store.create_if_absent(
            f"checkpoints/{receipt.checkpoint}/receipt.json", seal("receipt", receipt.to_json())
        )

    def receipt(self, checkpoint: CheckpointId) -> Receipt | None:
        """Return the receipt, or None while unconfirmed."""
        return self._objects.optional(f"checkpoints/{checkpoint}/receipt.json", "receipt", Receipt.from_json)

    # -- rewinds --------------------------------------------------------------------------------
    def open_rewind(self) -> RewindIntent | None:
        """Return the unfinished rewind, if there is one."""
        return self._objects.optional(REWIND_KEY, "rewind", RewindIntent.from_json)

    def write_rewind(self, intent: RewindIntent) -> None:
        """Make a rewind durable before its first delete."""
        self.store.put(REWIND_KEY, seal("rewind", intent.to_json()))

    def close_rewind(self, intent: RewindIntent) -> None:
        """Move the finished rewind to the history, which is what the lineage is counted from."""
        # This order matters: the new lineage must be durable before the intent disappears.
        self.store.put(f"rewinds/{intent.lineage}.json", seal("rewind", intent.to_json()))
        self.store.delete(REWIND_KEY)

    def lineage(self) -> Lineage:
        """Return the live lineage: the number of finished rewinds."""
        return Lineage(max(self._objects.numbers("rewinds"), default=0))
