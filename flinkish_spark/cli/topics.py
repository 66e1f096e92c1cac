"""`flinkish topics`: shows a job's checkpoints and open transactions in a topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from flinkish_spark.cli.client import (
    brokers_options,
    connection_of,
    job_argument,
    json_option,
    print_json,
    print_table,
)
from flinkish_spark.cli.transactions import open_wire
from flinkish_spark.connectors.kafka.job_transactions import (
    NamedTransaction,
    NamedTransactions,
    Standing,
    find_transactions,
)
from flinkish_spark.core.errors import AuthorizationError
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.ids import TransactionalId

if TYPE_CHECKING:
    from flinkish_spark.connectors.kafka.client.client import ActiveProducer, KafkaWire, TransactionView
    from flinkish_spark.connectors.kafka.client.transactions import EvidenceReader
    from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
    from flinkish_spark.protocol.ids import Place

_COLUMNS = ("partition", "offset", "what", "state", "age s", "whose")
#: The state of a transaction with records in the log that no coordinator knows.
_HANGING = "HANGING"


@click.command()
@job_argument
@click.argument("topic")
@brokers_options
@json_option
def topics(job: StoredJob, topic: str, servers: str, config: Any, as_json: bool) -> None:
    """Show a job's topic: checkpoints, open transactions, and what read_committed readers wait for.

    Prints one table, by partition and offset. A checkpoint is shown at one of its records, while the job
    directory has its decision; an open transaction at its first offset. Readers wait at the last stable
    offset; the table tells which transaction holds it back, and whose it is. The job may run or not; nothing
    is changed.
    """
    with open_wire(connection_of(servers, config)) as wire:
        found = rows_of(job, topic, wire)
    if as_json:
        print_json({**job.to_json(), "topic": topic, "rows": [asdict(row) for row in found]})
    else:
        print_table(_COLUMNS, [row.cells() for row in found])


@dataclass(frozen=True, slots=True)
class TopicRow:
    partition: int
    #: None for a checkpoint whose record is in another topic of its transaction.
    offset: int | None
    #: "checkpoint N", "open transaction" or "last stable offset".
    what: str
    #: Outcome of a checkpoint's records (COMMITTED, ABORTED, UNDECIDED, GONE); Kafka's state of a
    #: transaction, or HANGING; number of offsets that readers wait for.
    state: str
    #: Age of the transaction by the coordinator's clock.
    age_ms: int | None
    whose: str

    def cells(self) -> tuple[object, ...]:
        age_s = None if self.age_ms is None else self.age_ms / 1_000
        return (self.partition, self.offset, self.what, self.state, age_s, self.whose)


def rows_of(job: StoredJob, topic: str, wire: KafkaWire) -> list[TopicRow]:
    from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, make_unknown_topic_error

    admin = KafkaAdmin.from_wire(wire)
    known = admin.topics([topic])
    if topic not in known:
        raise make_unknown_topic_error(topic, wire.connection.servers, of=f"the job '{job.name}'")
    places = [(topic, partition) for partition in range(known[topic].partitions)]
    # This order matters: a transaction open now was named before, or belongs to the newest owner.
    producers = wire.producers(places)
    names = NamedTransactions.read(job.job_dir)
    owners = _owners(job, names, wire, producers.values())
    if any(owner.state == _HANGING for owner in owners.values()):
        # It may have ended between the two requests: only a transaction that is still open hangs.
        again = wire.producers(places)
        producers = {place: _still(producers[place], again[place], owners) for place in places}
    opened = [row for place in places for row in _open_rows(place, producers[place], owners)]
    checkpoints = _checkpoint_rows(topic, len(places), names, wire)
    rows = [*checkpoints, *opened, *_stable_rows(places, admin, opened)]
    # At equal offsets the last stable offset comes last, after the transaction that holds it back.
    return sorted(rows, key=_order)


def _order(row: TopicRow) -> tuple[int, int, bool]:
    return (row.partition, -1 if row.offset is None else row.offset, row.what.startswith("last"))


@dataclass(frozen=True, slots=True)
class _Owner:
    state: str
    age_ms: int | None
    whose: str


def _owners(
    job: StoredJob, names: NamedTransactions, wire: KafkaWire, of: Iterable[Sequence[ActiveProducer]]
) -> dict[int, _Owner]:
    """Return the owners of all producers with an open transaction, by producer id."""
    open_now = [one for producers in of for one in producers if one.open_since is not None]
    wanted = {one.producer_id for one in open_now}
    if not wanted:
        return {}
    from flinkish_spark.connectors.kafka.client.transactions import OPEN_STATES

    listed = {row.producer_id: row.transactional_id for row in wire.list_transactions(OPEN_STATES)}
    try:
        ours = {str(one.name): one for one in find_transactions(job.uuid, job.job_dir, wire)}
    except AuthorizationError:
        # Without DESCRIBE permission on the job's ids Kafka lists none of them, but the job directory names
        # some.
        ours = {}
    handles = {one.handle[1:]: one for one in names.named}
    named = {one.producer_id: handles.get(one.handle) for one in open_now}
    strangers = [name for one in wanted if (name := listed.get(one)) is not None and name not in ours]
    views = wire.describe_transactions(strangers)
    now_ms = job.clock.wall_ms()

    def find_owner(producer_id: int) -> _Owner:
        name = listed.get(producer_id)
        if name is None:
            return _find_unlisted_owner(producer_id, named[producer_id])
        if name in ours:
            return _Owner(ours[name].state, ours[name].age_ms, f"{name}: {ours[name].text}")
        return _find_stranger(name, views.get(name), now_ms)

    return {one: find_owner(one) for one in wanted}


def _still(
    seen: Sequence[ActiveProducer], again: Sequence[ActiveProducer], owners: Mapping[int, _Owner]
) -> tuple[ActiveProducer, ...]:
    """Return the producers of a partition, without hanging ones that have ended at a second look."""
    open_now = {(one.producer_id, one.producer_epoch, one.open_since) for one in again}

    def is_over(one: ActiveProducer) -> bool:
        is_hanging = one.open_since is not None and owners[one.producer_id].state == _HANGING
        return is_hanging and (one.producer_id, one.producer_epoch, one.open_since) not in open_now

    return tuple(one for one in seen if not is_over(one))


def _find_unlisted_owner(producer_id: int, named: NamedTransaction | None) -> _Owner:
    """Return the owner of a producer that no coordinator knows; only its handle can tell."""
    if named is not None:
        return _Owner(_HANGING, None, f"{named.handle[0]}: {named}; no coordinator shows it")
    whose = f"nobody's: no coordinator shows an open transaction of producer {producer_id}"
    return _Owner(_HANGING, None, whose)


def _find_stranger(name: str, view: TransactionView | None, now_ms: int) -> _Owner:
    parsed = TransactionalId.parse(name)
    whose = f"{name}: of another program" if parsed is None else f"{name}: of the job {parsed.job}"
    return _Owner("", None, whose) if view is None else _Owner(view.state, view.age_ms(now_ms), whose)


def _open_rows(
    place: Place, producers: Sequence[ActiveProducer], owners: Mapping[int, _Owner]
) -> Iterator[TopicRow]:
    for one in producers:
        if one.open_since is not None:
            owner = owners[one.producer_id]
            yield TopicRow(
                place[1], one.open_since, "open transaction", owner.state, owner.age_ms, owner.whose
            )


def _checkpoint_rows(
    topic: str, partitions: int, names: NamedTransactions, wire: KafkaWire
) -> Iterator[TopicRow]:
    """Yield a row for each checkpoint and sink with a record here, or elsewhere in the same transaction."""
    from flinkish_spark.connectors.kafka.client.transactions import EvidenceReader
    from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable

    reader, seen = EvidenceReader(wire, patience_ms=0), set[tuple[object, ...]]()
    for one in names.named:
        if one.checkpoint is None or not isinstance(one.committable.payload.get("evidence"), Mapping):
            continue
        staged = KafkaSinkCommittable.of(one.committable.payload)
        place: tuple[int, int | None] | None = None
        if staged.handle.evidence.topic == topic:
            place = (staged.handle.evidence.partition, staged.handle.evidence.offset)
        elif used := [
            at for at, next_one in enumerate((staged.next_sequences or {}).get(topic, ())) if next_one
        ]:
            place = (used[0], None)
        if place is None or (key := (one.checkpoint, one.sink, place[0])) in seen:
            continue
        seen.add(key)
        is_there = place[0] < partitions
        yield _checkpoint_row(one, staged, place, _fate(reader, staged) if is_there else "GONE")


def _fate(reader: EvidenceReader, staged: KafkaSinkCommittable) -> str:
    handle = staged.handle
    fate: str = reader.read(handle.evidence, handle.producer_id, handle.producer_epoch).fate.value
    return fate


def _checkpoint_row(
    one: NamedTransaction, staged: KafkaSinkCommittable, place: tuple[int, int | None], fate: str
) -> TopicRow:
    told = {
        Standing.CONFIRMED: "confirmed",
        Standing.DECIDED: "decided and not confirmed",
        Standing.LEFT_BEHIND: "decided, but dead after a rewind",
    }
    whose = f"sink '{one.sink}', {told[one.standing]}"
    if staged.next_sequences is not None:
        used = sum(sum(map(bool, known)) for known in staged.next_sequences.values())
        whose += f", one transaction over {used} partitions"
    if place[1] is None:
        whose += f", among them {staged.handle.evidence}"
    return TopicRow(*place, f"checkpoint {one.checkpoint}", fate, None, whose)


def _stable_rows(places: Sequence[Place], admin: Any, opened: Sequence[TopicRow]) -> Iterator[TopicRow]:
    from flinkish_spark.connectors.kafka.client.client import Isolation

    stable = admin.end_offsets(places)
    ends = admin.end_offsets(places, Isolation.READ_UNCOMMITTED)
    for place in places:
        partition, waiting = place[1], max(0, ends[place] - stable[place])
        # An earlier transaction has ended since it was read.
        behind = [row for row in opened if row.partition == partition and _order(row)[1] >= stable[place]]
        first = min(behind, key=_order, default=None)
        if not waiting:
            yield TopicRow(partition, stable[place], "last stable offset", "at the end", None, "")
            continue
        whose = "what has begun, or ended, while this was asked" if first is None else first.whose
        age_ms = None if first is None else first.age_ms
        state = f"{waiting} offsets wait"
        yield TopicRow(partition, stable[place], "last stable offset", state, age_ms, f"held back by {whose}")
