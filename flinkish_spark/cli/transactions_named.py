"""Which Kafka transactions a job directory names, and what that means for who finds one open.

Reads the directory only. A transaction is named by transactional id, producer id and producer epoch:
behind a receipt the id alone is given to other transactions of the same job.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.cli.damage import as_damage
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.recovery_facts import DecidedFact, without_leftovers

Handle = tuple[str, int, int]


class Standing(enum.Enum):
    """What the job directory says about a transaction."""

    #: A COMMIT decision without receipt names it: it has to be committed.
    DECIDED = "DECIDED"
    #: A COMMIT decision with a receipt names it: it is committed.
    CONFIRMED = "CONFIRMED"
    #: A COMMIT decision names it that nobody will finish: a rewind left it behind, or a zombie wrote it.
    LEFT_BEHIND = "LEFT_BEHIND"
    #: A staged file names it, and no decision: the next start keeps it or aborts it.
    STAGED = "STAGED"
    #: Nobody names it, and it belongs to the newest owner: in use if that one runs, else a leftover.
    OF_NEWEST_OWNER = "OF_NEWEST_OWNER"
    #: Nobody names it and nobody will: it can be aborted.
    LEFTOVER = "LEFTOVER"


@dataclass(frozen=True, slots=True)
class Named:
    """A transaction that the job directory names.

    Parameters
    ----------
    standing
        DECIDED, CONFIRMED, LEFT_BEHIND or STAGED.
    handle
        Transactional id, producer id, producer epoch.
    sink, lineage, batch
        Who staged it, in which micro-batch.
    checkpoint
        Of the decision; None for what is undecided.
    place
        Among the committables of its sink in the decision, which are committed in this order.
    payload
        The committable's.
    """

    standing: Standing
    handle: Handle
    sink: str
    lineage: Lineage
    batch: BatchId
    checkpoint: CheckpointId | None
    place: int
    payload: Mapping[str, Any]

    def __str__(self) -> str:
        where = f"micro-batch {self.lineage}/{self.batch} of sink '{self.sink}'"
        match self.standing:
            case Standing.DECIDED:
                return f"checkpoint {self.checkpoint} is decided and not confirmed: {where}"
            case Standing.CONFIRMED:
                return f"checkpoint {self.checkpoint} is confirmed: {where}"
            case Standing.LEFT_BEHIND:
                return f"checkpoint {self.checkpoint} was decided and left behind: {where}"
            case _:
                return f"staged and not decided: {where}"


@dataclass(frozen=True, slots=True)
class Names:
    """Everything that the job directory names; `newest_owner` took the job last."""

    newest_owner: OwnerEpoch
    named: tuple[Named, ...]

    @classmethod
    def of(cls, job_dir: JobDir) -> Names:
        """Read a job directory.

        Raises
        ------
        CorruptObjectError
            An object cannot be read; nothing may be concluded then.
        """
        # This order matters: what is decided meanwhile is found as staged, or decided, or both.
        staged = list(_staged(job_dir))
        decided = list(_decided(job_dir))
        known = {one.handle for one in decided}
        return cls(job_dir.newest_owner(), (*decided, *(one for one in staged if one.handle not in known)))

    def about(self, handle: Handle) -> Named | None:
        """Return what names a transaction.

        What is to be decided or finished stands for its whole id: nobody may end anything under it.
        """
        exact = next((one for one in self.named if one.handle == handle), None)
        return exact or self.about_id(handle[0])

    def about_id(self, name: str) -> Named | None:
        """Return what is to be decided or finished under a transactional id."""
        waiting = (Standing.DECIDED, Standing.STAGED)
        return next((one for one in self.named if one.handle[0] == name and one.standing in waiting), None)

    def standing_by(self, name: TransactionalId, named: Named | None) -> Standing:
        """Return the standing of a transactional id, given what names it."""
        if named is not None:
            return named.standing
        newest = name.owner_epoch >= self.newest_owner
        return Standing.OF_NEWEST_OWNER if newest else Standing.LEFTOVER

    @property
    def waiting(self) -> tuple[Named, ...]:
        """Return what has to be committed, in the order in which its sinks commit."""
        return tuple(one for one in self.named if one.standing is Standing.DECIDED)


def _staged(job_dir: JobDir) -> Iterator[Named]:
    """Yield what staged files of any lineage name."""
    for key in job_dir.store.list("staged"):
        name = key.rsplit("/", 1)[1]
        if not name.isdecimal():
            continue
        for staged in job_dir.staged_batches(Lineage(int(name))).values():
            for one in staged.committables:
                handle = _handle(one.payload)
                if handle is not None:
                    yield Named(
                        Standing.STAGED, handle, one.sink, staged.lineage, staged.batch, None, 0, one.payload
                    )


def _decided(job_dir: JobDir) -> Iterator[Named]:
    commits = [
        decision
        for checkpoint in job_dir.decided_ids()
        if (decision := job_dir.decision(checkpoint)) is not None and decision.verdict is Verdict.COMMIT
    ]
    history = job_dir.history()
    live = [
        DecidedFact(d.checkpoint, d.batch, job_dir.receipt(d.checkpoint) is not None, d.lineage)
        for d in commits
        if history.superseded_by(d.checkpoint, d.lineage) is None
    ]
    standings = {
        fact.checkpoint: Standing.CONFIRMED if fact.has_receipt else Standing.DECIDED
        for fact in without_leftovers(live)
    }
    for decision in commits:
        yield from _named_in(decision, standings.get(decision.checkpoint, Standing.LEFT_BEHIND))


def _named_in(decision: Decision, standing: Standing) -> Iterator[Named]:
    for of_sink in decision.by_sink().values():
        for place, (staged, one) in enumerate(of_sink):
            handle = _handle(one.payload)
            if handle is not None:
                yield Named(
                    standing,
                    handle,
                    one.sink,
                    staged.lineage,
                    staged.batch,
                    decision.checkpoint,
                    place,
                    one.payload,
                )


def _handle(payload: Mapping[str, Any]) -> Handle | None:
    """Return the handle in a Kafka sink's payload; None in another sink's."""
    if "transactional_id" not in payload:
        return None
    with as_damage("a committable of a Kafka sink"):
        handle = (payload["transactional_id"], payload["producer_id"], payload["producer_epoch"])
        if not isinstance(handle[0], str) or not all(isinstance(number, int) for number in handle[1:]):
            raise ValueError(f"{handle!r} is no transaction")
    return handle
