"""Job directories for tests of the command line, written by the classes that jobs use."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from flinkish_spark.checkpoint.answers import CheckpointAnswer
from flinkish_spark.checkpoint.pins import PinManifest
from flinkish_spark.cli.app import app
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.requests import Inbox, OutsideRequest
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent, TriggerRecord, Verdict
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.records import Barrier, Committable, SinkAck, StagedBatch, TaskAck

Handler = Callable[[OutsideRequest], CheckpointAnswer | None]
HOUR_MS = 3_600_000


class JobOnDisk:
    """A job directory whose checkpoints a test writes."""

    def __init__(self, root: Path, owners: int = 1) -> None:
        self.root = root
        self.job_dir = JobDir(LocalStore(root))
        self.uuid, _ = self.job_dir.read_or_create_job({"job": "orders"})
        for number in range(1, owners + 1):
            self.take_over(number)

    def take_over(self, number: int) -> OwnerEpoch:
        self.job_dir.create_owner(OwnerEpoch(number), {"owner_epoch": number})
        return OwnerEpoch(number)

    def trigger(self, checkpoint: int, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC) -> None:
        record = TriggerRecord(CheckpointId(checkpoint), OwnerEpoch(1), purpose, checkpoint * HOUR_MS)
        self.job_dir.create_trigger(record)

    def commit(self, checkpoint: int, lineage: int = 0, **more: Any) -> Decision:
        """Decide COMMIT, over two micro-batches with 3 rows each."""
        batches = tuple(
            StagedBatch(
                Lineage(lineage),
                BatchId(2 * checkpoint + place),
                OwnerEpoch(1),
                7,
                (SinkAck("out", (TaskAck(0, 3, 99, (Barrier(CheckpointId(checkpoint), 0),)),)),),
                (Committable("out", {"secret": "in the payload"}),),
            )
            for place in (0, 1)
        )
        decision = Decision(
            CheckpointId(checkpoint),
            Verdict.COMMIT,
            OwnerEpoch(1),
            checkpoint * HOUR_MS + 500,
            lineage=Lineage(lineage),
            batches=batches,
            offsets_text='v1\n{"batchTimestampMs":0}\n{"orders":{"0":5}}',
            commits_text="v2\n{}",
            uids=("in", "out"),
            triggered_at_ms=checkpoint * HOUR_MS,
            **more,
        )
        self.job_dir.create_decision(decision)
        return decision

    def confirm(self, checkpoint: int) -> None:
        answers = {"out": ["COMMITTED", "ALREADY_COMMITTED"]}
        offsets = {"readers": {"orders": {"0": 5}}}
        at_ms = checkpoint * HOUR_MS + 900
        self.job_dir.create_receipt(Receipt(CheckpointId(checkpoint), OwnerEpoch(1), at_ms, answers, offsets))

    def pin(self, checkpoint: int, files: dict[str, int] | None = None) -> None:
        manifest = PinManifest(CheckpointId(checkpoint), BatchId(2 * checkpoint + 1), {}, files or {})
        self.job_dir.store.put(f"pins/{checkpoint}.json", seal("pin", manifest.to_json()))

    def complete(self, *checkpoints: int, lineage: int = 0, **more: Any) -> None:
        for checkpoint in checkpoints:
            self.commit(checkpoint, lineage, **more)
            self.confirm(checkpoint)
            self.pin(checkpoint)

    def abort(self, checkpoint: int, reason: str) -> None:
        self.job_dir.create_decision(
            Decision(CheckpointId(checkpoint), Verdict.ABORT, OwnerEpoch(1), 0, reason=reason)
        )

    def went_back(self, target: int, lineage: int, order_id: str = "") -> None:
        """Finish a rewind, as the recovery does."""
        kind, first = RewindKind.TO_CHECKPOINT, BatchId(2 * target + 2)
        intent = RewindIntent(
            first, Lineage(lineage), "ordered", {}, kind, CheckpointId(target), order_id=order_id
        )
        self.job_dir.create_rewind(intent)
        self.job_dir.close_rewind(intent)

    def damage(self, key: str) -> None:
        path = self.root / key
        path.write_bytes(path.read_bytes()[:-5])

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    @contextmanager
    def running(self, handler: Handler, owner: int = 1) -> Iterator[list[OutsideRequest]]:
        """Answer requests in a thread, as a running job does; None leaves one unanswered."""
        inbox, seen, stop = Inbox(self.job_dir, SystemClock()), [], threading.Event()
        inbox.took_over(OwnerEpoch(owner))

        def poll() -> None:
            while not stop.wait(0.02):
                for request in inbox.take():
                    seen.append(request)
                    answer = handler(request)
                    if answer is not None:
                        inbox.answer(request.name, answer)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()


def flinkish(*words: object, answers: str = "") -> Result:
    """Run the command line in this process; what it raises that is no exit is raised here."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=answers, prog_name="flinkish")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def said(result: Result) -> Any:
    """Return the JSON document on stdout."""
    return json.loads(result.stdout)
