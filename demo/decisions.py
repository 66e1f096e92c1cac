"""What the job decided, as seen from outside while it runs.

The job deletes old decisions, so whoever wants to know at the end has to write down as it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flinkish_spark.core.job_dir import JOB_KEY, open_job_dir
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.envelope import unseal
from flinkish_spark.protocol.ids import CheckpointId, JobUuid


@dataclass(slots=True)
class Committed:
    """A checkpoint with a COMMIT decision.

    `batches` are its micro-batches as "<lineage>/<batch>", as in the header of each Kafka record;
    `rows` is what each sink acknowledged, by batch.
    """

    checkpoint: int
    batches: tuple[str, ...]
    rows: dict[str, dict[str, int]]
    is_confirmed: bool = False

    def rows_of(self, sink: str) -> int:
        return sum(self.rows[sink].values())


@dataclass
class DecisionBook:
    """All decisions and receipts that ever were in a job directory; never forgets."""

    place: StoreSpec
    checkpoints: dict[int, Committed] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    #: Checkpoint by micro-batch.
    of_batch: dict[str, int] = field(default_factory=dict)
    #: The highest checkpoint with a receipt; 0 before the first. Other threads may read it.
    newest_confirmed: int = 0

    def __post_init__(self) -> None:
        self._dir = open_job_dir(self.place)

    def refresh(self) -> None:
        """Read what is new."""
        for checkpoint in self._dir.list_checkpoint_ids():
            number = int(checkpoint)
            known = self.checkpoints.get(number)
            if number in self.aborted or (known is not None and known.is_confirmed):
                continue
            if known is None:
                known = self._read(checkpoint)
            if known is not None and self._dir.receipt(checkpoint) is not None:
                known.is_confirmed = True
                self.newest_confirmed = max(self.newest_confirmed, number)

    def _read(self, checkpoint: CheckpointId) -> Committed | None:
        decision = self._dir.decision(checkpoint)
        if decision is None:
            return None
        if decision.verdict is Verdict.ABORT:
            self.aborted.add(int(checkpoint))
            return None
        found = Committed(int(checkpoint), tuple(_batch_names(decision)), _rows(decision))
        self.checkpoints[found.checkpoint] = found
        self.of_batch.update(dict.fromkeys(found.batches, found.checkpoint))
        return found

    @property
    def confirmed(self) -> int:
        """How many checkpoints have a receipt."""
        return sum(c.is_confirmed for c in self.checkpoints.values())

    def job_uuid(self) -> JobUuid | None:
        """Return the job's uuid, or None if it never came so far as to have one."""
        try:
            return JobUuid(unseal("job", self._dir.store.read(JOB_KEY))["uuid"])
        except ObjectMissing:
            return None


def _batch_names(decision: Decision) -> Iterator[str]:
    for staged in decision.batches:
        yield f"{staged.lineage}/{staged.batch}"


def _rows(decision: Decision) -> dict[str, dict[str, int]]:
    rows: dict[str, dict[str, int]] = {}
    for name, staged in zip(_batch_names(decision), decision.batches, strict=True):
        for ack in staged.acks:
            written = sum(task.rows - task.dropped - task.dead_lettered for task in ack.tasks)
            rows.setdefault(ack.sink, {})[name] = written
    return rows
