"""The transactions of a job that brokers know or its directory names, as rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.cli.params import Job
from flinkish_spark.cli.transactions_named import Named, Names, Standing
from flinkish_spark.protocol.ids import TransactionalId

if TYPE_CHECKING:
    from flinkish_spark.kafka._wire import KafkaWire
    from flinkish_spark.kafka.answers import TransactionView

#: Stands for the state of an id that the brokers do not know.
UNKNOWN_STATE = "Unknown"


@dataclass(frozen=True, slots=True)
class Found:
    """One transactional id of the job.

    Parameters
    ----------
    name
        Parsed exactly; ids of others that begin alike are not among them.
    state
        Kafka's word, or UNKNOWN_STATE.
    producer_id, producer_epoch
        As the brokers have it; None if they do not know the id.
    age_ms
        Since the transaction began, by the broker's clock; None if none is open.
    timeout_ms
        After which the broker aborts it.
    standing, named
        What the job directory says.
    """

    name: TransactionalId
    state: str
    producer_id: int | None
    producer_epoch: int | None
    age_ms: int | None
    timeout_ms: int | None
    standing: Standing
    named: Named | None

    @property
    def text(self) -> str:
        """The standing in words."""
        if self.named is not None:
            handle = (str(self.name), self.producer_id, self.producer_epoch)
            if self.state == UNKNOWN_STATE:
                return f"{self.named}; these brokers do not know it: it expired, or is on another cluster"
            return (
                str(self.named) if self.named.handle == handle else f"{self.named}, by another producer epoch"
            )
        if self.standing is Standing.OF_NEWEST_OWNER:
            return f"nobody names it: owner {self.name.owner_epoch} may be writing it, if it runs"
        return "a leftover: nobody names it"

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` says; see `docs/command-line.md`."""
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


def all_ids_of(job: Job, wire: KafkaWire) -> frozenset[str]:
    """Return every id of the job that the brokers remember; they forget one after a week or so."""
    return frozenset(map(str, _parsed(job, (row.transactional_id for row in wire.list_transactions()))))


def transactions_of(job: Job, wire: KafkaWire, also: frozenset[str] = frozenset()) -> tuple[Found, ...]:
    """Return the job's transactions that are open, to be decided or to be finished, by id.

    Parameters
    ----------
    also
        Ids that are looked at in any case, if they are the job's.

    Raises
    ------
    BrokerUnavailableError, AuthorizationError
        The brokers cannot be asked, or refuse.
    CorruptObjectError
        The job directory is damaged.
    """
    from flinkish_spark.kafka import TransactionClient

    # This order matters: a transaction that is named by now was on the brokers before.
    listed = {one.transactional_id for one in TransactionClient.over(wire).list_of_job(job.uuid)}
    listed.update(_parsed(job, also))
    names = Names.of(job.job_dir)
    waiting = (Standing.DECIDED, Standing.STAGED)
    listed.update(_parsed(job, (one.handle[0] for one in names.named if one.standing in waiting)))
    views = _views(wire, sorted(map(str, listed)))
    now_ms = job.clock.wall_ms()
    return tuple(_found(one, views.get(str(one)), names, now_ms) for one in sorted(listed))


def _parsed(job: Job, texts: Iterable[str]) -> Iterable[TransactionalId]:
    for text in texts:
        parsed = TransactionalId.parse(text)
        # Leading zeros parse to the same numbers; only the spelling we write is ours.
        if parsed is not None and parsed.job == job.uuid and str(parsed) == text:
            yield parsed


def _views(wire: KafkaWire, names: list[str]) -> dict[str, TransactionView]:
    from flinkish_spark.errors import AuthorizationError, BrokerUnavailableError
    from flinkish_spark.kafka._pace import pauses_ms
    from flinkish_spark.kafka.answers import UNAUTHORIZED, UNSETTLED, name_of

    views: dict[str, TransactionView] = {}
    for _left_ms in pauses_ms(wire.timeout_ms, wire.clock):
        views.update(wire.describe_transactions([n for n in names if n not in views]))
        views = {name: view for name, view in views.items() if view.code not in UNSETTLED}
        refused = [name for name, view in views.items() if view.code in UNAUTHORIZED]
        if refused:
            raise AuthorizationError(
                f"Kafka refuses this principal DESCRIBE on transactional id {refused[0]!r} "
                f"({name_of(views[refused[0]].code)})"
            )
        if len(views) == len(names):
            return views
    raise BrokerUnavailableError(
        f"{len(names) - len(views)} Kafka transactions could not be described in time",
        what_to_do="wait for the cluster to settle",
    )


def _found(name: TransactionalId, view: TransactionView | None, names: Names, now_ms: int) -> Found:
    from flinkish_spark.kafka.answers import Code

    if view is None or view.code != Code.NONE:
        named = names.about_id(str(name))
        standing = names.standing_by(name, named)
        return Found(name, UNKNOWN_STATE, None, None, None, None, standing, named)
    named = names.about((str(name), view.producer_id, view.producer_epoch))
    age_ms = None if view.began_at_ms is None else max(0, now_ms - view.began_at_ms)
    return Found(
        name,
        view.state,
        view.producer_id,
        view.producer_epoch,
        age_ms,
        view.timeout_ms,
        names.standing_by(name, named),
        named,
    )
