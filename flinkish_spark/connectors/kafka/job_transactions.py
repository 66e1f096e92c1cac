"""The transactions of a job: which ones its directory names, and what the brokers know of each."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import (
    BatchId,
    CheckpointId,
    JobUuid,
    Lineage,
    OwnerEpoch,
    TransactionalId,
    is_left_over,
)
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.protocol.recovery import DecidedFact, drop_leftovers

if TYPE_CHECKING:
    # Imported late: the command line imports this module for every command.
    from flinkish_spark.connectors.kafka.client.client import KafkaWire, TransactionView

#: Transactional id, producer id, producer epoch: after a receipt the transactional id is reused.
Handle = tuple[str, int, int]


class Standing(enum.Enum):
    #: A COMMIT decision without receipt names it: it must be committed.
    DECIDED = "DECIDED"
    #: A COMMIT decision with a receipt names it: it is committed.
    CONFIRMED = "CONFIRMED"
    #: A COMMIT decision names it that will not be finished: a rewind made it dead, or a zombie wrote it.
    LEFT_BEHIND = "LEFT_BEHIND"
    #: A staged file names it, but no decision: the next start keeps or aborts it.
    STAGED = "STAGED"
    #: Unnamed, and of the newest owner: in use if that owner runs, else a leftover.
    OF_NEWEST_OWNER = "OF_NEWEST_OWNER"
    #: Unnamed for good: it can be aborted.
    LEFTOVER = "LEFTOVER"


@dataclass(frozen=True, slots=True)
class NamedTransaction:
    #: One of DECIDED, CONFIRMED, LEFT_BEHIND, STAGED.
    standing: Standing
    handle: Handle
    committable: Committable
    #: The micro-batch that staged it.
    lineage: Lineage
    batch: BatchId
    #: The checkpoint of the decision; None if undecided.
    checkpoint: CheckpointId | None
    #: Index among its sink's committables in the decision, which are committed in this order.
    place: int

    @property
    def sink(self) -> str:
        return self.committable.sink

    @property
    def is_waiting(self) -> bool:
        """Return whether it is undecided or unfinished; such an entry protects its whole id."""
        return self.standing in (Standing.DECIDED, Standing.STAGED)

    def __str__(self) -> str:
        where = f"micro-batch {self.lineage}/{self.batch} of sink '{self.sink}'"
        match self.standing:
            case Standing.DECIDED:
                return f"checkpoint {self.checkpoint} is decided and not confirmed: {where}"
            case Standing.CONFIRMED:
                return f"checkpoint {self.checkpoint} is confirmed: {where}"
            case Standing.LEFT_BEHIND:
                return f"checkpoint {self.checkpoint} was decided, but a rewind made it dead: {where}"
            case _:
                return f"staged and not decided: {where}"


@dataclass(frozen=True, slots=True)
class NamedTransactions:
    """All transactions that the job directory names; `newest_owner` took the job over last."""

    newest_owner: OwnerEpoch
    named: tuple[NamedTransaction, ...]

    @classmethod
    def read(cls, job_dir: JobDir) -> NamedTransactions:
        # This order matters: a transaction decided meanwhile is found as staged, or decided, or both.
        staged = list(_list_staged(job_dir))
        decided = list(_list_decided(job_dir))
        known = {one.handle for one in decided}
        return cls(job_dir.newest_owner(), (*decided, *(one for one in staged if one.handle not in known)))

    def find(self, handle: Handle) -> NamedTransaction | None:
        """Return the entry for a transaction, else an undecided or unfinished entry for its id."""
        exact = next((one for one in self.named if one.handle == handle), None)
        return exact or self.find_waiting(handle[0])

    def find_waiting(self, name: str) -> NamedTransaction | None:
        return next((one for one in self.named if one.handle[0] == name and one.is_waiting), None)

    def standing_of(self, name: TransactionalId, named: NamedTransaction | None) -> Standing:
        if named is not None:
            return named.standing
        # Only the newest owner knows its running blocks, so this one may be running.
        running = frozenset({name.block})
        is_over = is_left_over(name.owner_epoch, name.block, self.newest_owner, running)
        return Standing.LEFTOVER if is_over else Standing.OF_NEWEST_OWNER


def _list_staged(job_dir: JobDir) -> Iterator[NamedTransaction]:
    for key in job_dir.store.list("staged"):
        name = key.rsplit("/", 1)[1]
        if name.isdecimal():
            for staged in job_dir.list_staged(Lineage(int(name))).values():
                yield from _list_named(((staged, one) for one in staged.committables), Standing.STAGED)


def _list_decided(job_dir: JobDir) -> Iterator[NamedTransaction]:
    commits = [
        decision
        for checkpoint in job_dir.list_checkpoint_ids()
        if (decision := job_dir.decision(checkpoint)) is not None and decision.verdict is Verdict.COMMIT
    ]
    history = job_dir.history()
    live = [
        DecidedFact(d.checkpoint, d.batch, job_dir.receipt(d.checkpoint) is not None, d.lineage)
        for d in commits
        if history.find_superseding(d.checkpoint, d.lineage) is None
    ]
    standings = {
        fact.checkpoint: Standing.CONFIRMED if fact.has_receipt else Standing.DECIDED
        for fact in drop_leftovers(live)
    }
    for decision in commits:
        standing = standings.get(decision.checkpoint, Standing.LEFT_BEHIND)
        for of_sink in decision.group_by_sink().values():
            yield from _list_named(of_sink, standing, decision.checkpoint)


def _list_named(
    committables: Iterable[tuple[StagedBatch, Committable]],
    standing: Standing,
    checkpoint: CheckpointId | None = None,
) -> Iterator[NamedTransaction]:
    for place, (staged, one) in enumerate(committables):
        handle = _handle(one.payload)
        if handle is not None:
            yield NamedTransaction(standing, handle, one, staged.lineage, staged.batch, checkpoint, place)


def _handle(payload: Mapping[str, Any]) -> Handle | None:
    if "transactional_id" not in payload:
        return None
    name, producer_id, epoch = map(payload.get, ("transactional_id", "producer_id", "producer_epoch"))
    if isinstance(name, str) and isinstance(producer_id, int) and isinstance(epoch, int):
        return name, producer_id, epoch
    raise CorruptObjectError(
        "a committable of a Kafka sink is damaged",
        why=f"{(name, producer_id, epoch)} is no transaction",
        what_to_do="restore the file from a backup",
    )


#: The state of an id that the brokers do not know.
UNKNOWN_STATE = "Unknown"


@dataclass(frozen=True, slots=True)
class FoundTransaction:
    #: Parsed exactly; ids of other applications with the same prefix are excluded.
    name: TransactionalId
    #: Kafka's state, or UNKNOWN_STATE.
    state: str
    #: The brokers' value; None if they do not know the id.
    producer_id: int | None
    producer_epoch: int | None
    #: Age of the transaction by the broker's clock; None if none is open.
    age_ms: int | None
    #: Age at which the broker aborts it.
    timeout_ms: int | None
    standing: Standing
    named: NamedTransaction | None

    @property
    def text(self) -> str:
        if self.named is not None:
            handle = (str(self.name), self.producer_id, self.producer_epoch)
            if self.state == UNKNOWN_STATE:
                return f"{self.named}; these brokers do not know it: it expired, or is on another cluster"
            return (
                str(self.named) if self.named.handle == handle else f"{self.named}, by another producer epoch"
            )
        if self.standing is Standing.OF_NEWEST_OWNER:
            return f"not named yet: owner {self.name.owner_epoch} may be writing it, if it runs"
        return "a leftover: the job directory does not name it"

    def to_json(self) -> dict[str, Any]:
        named = self.named
        return {
            "transactional_id": str(self.name),
            "owner_epoch": int(self.name.owner_epoch),
            "block": self.name.block,
            "task": self.name.task,
            "attempt": self.name.attempt,
            "state": self.state,
            "producer_id": self.producer_id,
            "producer_epoch": self.producer_epoch,
            "age_ms": self.age_ms,
            "timeout_ms": self.timeout_ms,
            "standing": self.standing.value,
            "checkpoint": None if named is None or named.checkpoint is None else int(named.checkpoint),
            "sink": None if named is None else named.sink,
            "lineage": None if named is None else int(named.lineage),
            "batch": None if named is None else int(named.batch),
            "text": self.text,
        }


def find_transactions(
    job: JobUuid, job_dir: JobDir, wire: KafkaWire, also: Iterable[str] = ()
) -> tuple[FoundTransaction, ...]:
    """Return the job's open, undecided and unfinished transactions, and those of the ids `also`, by id."""
    from flinkish_spark.connectors.kafka.client.transactions import TransactionClient, parse_own_ids

    client = TransactionClient.from_wire(wire)
    # This order matters: a transaction that is named now was on the brokers before.
    ids = {one.transactional_id for one in client.list_open_transactions(job)}
    ids.update(parse_own_ids(job, also))
    names = NamedTransactions.read(job_dir)
    ids.update(parse_own_ids(job, (one.handle[0] for one in names.named if one.is_waiting)))
    views = client.describe(map(str, ids))
    now_ms = wire.clock.wall_ms()
    return tuple(_look_up(one, views[str(one)], names, now_ms) for one in sorted(ids))


def _look_up(
    name: TransactionalId, view: TransactionView, names: NamedTransactions, now_ms: int
) -> FoundTransaction:
    if view.code:
        named = names.find_waiting(str(name))
        standing = names.standing_of(name, named)
        return FoundTransaction(name, UNKNOWN_STATE, None, None, None, None, standing, named)
    named = names.find((str(name), view.producer_id, view.producer_epoch))
    return FoundTransaction(
        name,
        view.state,
        view.producer_id,
        view.producer_epoch,
        view.age_ms(now_ms),
        view.timeout_ms,
        names.standing_of(name, named),
        named,
    )
