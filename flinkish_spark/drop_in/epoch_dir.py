"""What the drop-in sink keeps beside Spark's checkpoint, and its typed reads and writes.

    <checkpointLocation>/flinkish-kafka/sink.json             uuid, part of all transactional ids
    <checkpointLocation>/flinkish-kafka/attempts/<n>.json     planned attempts
    <checkpointLocation>/flinkish-kafka/decisions/<n>.json    COMMIT or ABORT of attempt n: the write-ahead
    <checkpointLocation>/flinkish-kafka/receipts/<batch>.json everything of the batch is committed

The folder lives and dies with Spark's checkpoint: who deletes one must delete the other, and who
copies one must copy both.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from flinkish_spark.errors import CorruptObjectError, JobDirError
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import BatchId, JobUuid
from flinkish_spark.protocol.micro_batches import (
    Attempt,
    AttemptDecision,
    AttemptNumber,
    DecidedBatch,
    decided_batches,
)
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import CreateResult, LocalStore, ObjectMissing

T = TypeVar("T")

FOLDER = "flinkish-kafka"
#: How many batches keep their files. Spark runs only the newest one again; the rest are for people.
_KEPT_BATCHES = 20


class EpochDir:
    """Typed access to the files of one drop-in sink.

    Parameters
    ----------
    checkpoint_location
        Spark's checkpoint of the query, absolute and local.
    """

    def __init__(self, checkpoint_location: Path) -> None:
        self._spark_checkpoint = checkpoint_location
        self._store = LocalStore(checkpoint_location / FOLDER)
        self._objects = SealedObjects(self._store, str(self._store.root))

    def sink_uuid(self) -> JobUuid:
        """Return the uuid of this sink, made at the first call."""
        try:
            return JobUuid(self._objects.read("sink.json", "sink", dict)["uuid"])
        except ObjectMissing:
            self._store.create_if_absent("sink.json", seal("sink", {"uuid": uuid.uuid4().hex}))
            return JobUuid(self._objects.read("sink.json", "sink", dict)["uuid"])

    # -- attempts -------------------------------------------------------------------------------
    def newest_attempt(self) -> Attempt | None:
        """Return the attempt that was planned last, by any driver."""
        numbers = self._objects.numbers("attempts")
        return (
            None
            if not numbers
            else self._objects.read(_attempt_key(max(numbers)), "attempt", Attempt.from_json)
        )

    def attempt(self, number: AttemptNumber) -> Attempt | None:
        """Return a planned attempt, or None if it is no longer kept."""
        return self._objects.optional(_attempt_key(int(number)), "attempt", Attempt.from_json)

    def create_attempt(self, attempt: Attempt) -> CreateResult:
        """Take an attempt number; exactly one driver can."""
        return self._store.create_if_absent(
            _attempt_key(int(attempt.number)), seal("attempt", attempt.to_json())
        )

    def undecided_attempts(self) -> tuple[AttemptNumber, ...]:
        """Return the attempts that nobody has decided, in order."""
        open_numbers = self._objects.numbers("attempts") - self._objects.numbers("decisions")
        return tuple(AttemptNumber(n) for n in sorted(open_numbers))

    # -- decisions ------------------------------------------------------------------------------
    def create_decision(self, decision: AttemptDecision) -> CreateResult:
        """Decide an attempt once and for all; EXISTS means that it is decided otherwise.

        A decision counts only beside its attempt: a zombie that slept until its attempt, and the seal
        on it, were pruned gets EXISTS too.
        """
        key = f"decisions/{decision.attempt}.json"
        created = self._store.create_if_absent(key, seal("attempt-decision", decision.to_json()))
        if created is CreateResult.CREATED and self.attempt(decision.attempt) is None:
            self._store.delete(key)
            return CreateResult.EXISTS
        if created is CreateResult.EXISTS and self.decision(decision.attempt) == decision:
            # A file system over a network may do what it was asked and lose the answer.
            return CreateResult.CREATED
        return created

    def decision(self, attempt: AttemptNumber) -> AttemptDecision | None:
        """Return the decision, or None while the attempt is open."""
        try:
            return self._decision(int(attempt))
        except ObjectMissing:
            return None

    def decisions(self) -> tuple[AttemptDecision, ...]:
        """Return all decisions that count, in order of attempt."""
        numbers = self._objects.numbers("attempts") & self._objects.numbers("decisions")
        return tuple(self._decision(n) for n in sorted(numbers))

    def decided_batches(self) -> tuple[DecidedBatch, ...]:
        """Return the batches with a COMMIT, in order of batch.

        Raises
        ------
        CorruptObjectError
            The decisions contradict each other.
        """
        try:
            return decided_batches(self.decisions())
        except ValueError as error:
            raise CorruptObjectError(
                f"the decisions below {self._store.root} contradict each other",
                why=str(error),
                what_to_do="restore the checkpoint from a backup; nothing is guessed",
            ) from error

    # -- receipts -------------------------------------------------------------------------------
    def create_receipt(self, batch: BatchId, body: Mapping[str, Any]) -> CreateResult:
        """Confirm a batch. EXISTS is harmless: somebody finished the same work."""
        return self._store.create_if_absent(f"receipts/{batch}.json", seal("batch-receipt", body))

    def confirmed(self) -> frozenset[BatchId]:
        """Return the batches of which everything is committed, those that are kept."""
        return frozenset(BatchId(number) for number in self._objects.numbers("receipts"))

    # -- Spark's own ----------------------------------------------------------------------------
    def offsets_sha256(self, batch: BatchId) -> str:
        """Return the digest of what Spark logged as the batch's offsets, without its metadata line.

        Raises
        ------
        JobDirError
            Spark has no such entry there: the option names another folder than Spark uses.
        """
        entry = self._spark_checkpoint / "offsets" / str(batch)
        try:
            lines = entry.read_text(encoding="utf-8").strip().split("\n")
        except FileNotFoundError:
            raise JobDirError(
                f"Spark's checkpoint in {self._spark_checkpoint} has no offsets of batch {batch}",
                why="the option checkpointLocation of the sink is not where Spark keeps its checkpoint",
                what_to_do="give the same absolute path as the query's checkpointLocation",
            ) from None
        return hashlib.sha256("\n".join([lines[0], *lines[2:]]).encode()).hexdigest()

    # -- retention ------------------------------------------------------------------------------
    def prune(self) -> None:
        """Delete what belongs to batches long confirmed; the newest attempt always stays."""
        receipts = self._objects.numbers("receipts")
        if len(receipts) <= _KEPT_BATCHES + _KEPT_BATCHES // 2:
            return
        oldest_kept = sorted(receipts)[-_KEPT_BATCHES]
        newest = max(self._objects.numbers("attempts"))
        kept_from = min(
            (
                int(d.attempt)
                for d in self.decisions()
                if d.batch is not None and d.batch.value >= oldest_kept
            ),
            default=newest,
        )
        for number in sorted(n for n in self._objects.numbers("attempts") if n < kept_from):
            # This order matters: an attempt without its decision would look open.
            self._store.delete(_attempt_key(number))
        for number in sorted(self._objects.numbers("decisions") - self._objects.numbers("attempts")):
            self._store.delete(f"decisions/{number}.json")
        for number in (n for n in receipts if n < oldest_kept):
            self._store.delete(f"receipts/{number}.json")

    # -- helpers --------------------------------------------------------------------------------
    def _decision(self, number: int) -> AttemptDecision:
        key = f"decisions/{number}.json"
        found = self._objects.read(key, "attempt-decision", AttemptDecision.from_json)
        if int(found.attempt) != number:
            raise CorruptObjectError(f"{key} is about attempt {found.attempt}", key=key)
        return found


def committed(decision: AttemptDecision | None) -> bool:
    """Return whether a decision is COMMIT."""
    return decision is not None and decision.verdict is Verdict.COMMIT


def _attempt_key(number: int) -> str:
    return f"attempts/{number}.json"
