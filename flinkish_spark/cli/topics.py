"""`flinkish topics`: shows a job's checkpoints and open transactions in a topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from flinkish_spark.connectors.kafka.client.client import ActiveProducer, KafkaWire
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
    found = _find_open(wire, places)
    names = NamedTransactions.read(job.job_dir)
    owners = _owners(job, names, wire, [one for _, one in found])
    if any(owner.state == _HANGING for owner in owners.values()):
        # It may have ended between the two requests: only a transaction that is still open hangs.
        again = [(partition, one.handle, one.open_since) for partition, one in _find_open(wire, places)]
        found = [
            (partition, one)
            for partition, one in found
            if owners[one.producer_id].state != _HANGING or (partition, one.handle, one.open_since) in again
        ]
    opened = [
        TopicRow(partition, one.open_since, "open transaction", *owners[one.producer_id])
        for partition, one in found
    ]
    checkpoints = _checkpoint_rows(topic, len(places), names, wire)
    rows = [*checkpoints, *opened, *_stable_rows(places, admin, opened)]
    # At equal offsets the last stable offset comes last, after the transaction that holds it back.
    return sorted(rows, key=_order)


def _order(row: TopicRow) -> tuple[int, int, bool]:
    return (row.partition, -1 if row.offset is None else row.offset, row.what.startswith("last"))


def _find_open(wire: KafkaWire, places: Sequence[Place]) -> list[tuple[int, ActiveProducer]]:
    producers = wire.producers(places)
    return [(place[1], one) for place in places for one in producers[place] if one.open_since is not None]


class _Owner(NamedTuple):
    state: str
    age_ms: int | None
    whose: str


def _owners(
    job: StoredJob, names: NamedTransactions, wire: KafkaWire, producers: Sequence[ActiveProducer]
) -> dict[int, _Owner]:
    """Return the owners of producers with an open transaction, by producer id."""
    if not producers:
        return {}
    from flinkish_spark.connectors.kafka.client.transactions import OPEN_STATES

    listed = {row.producer_id: row.transactional_id for row in wire.list_transactions(OPEN_STATES)}
    try:
        ours = {str(one.name): one for one in find_transactions(job.uuid, job.job_dir, wire)}
    except AuthorizationError:
        # Without DESCRIBE permission on the job's ids Kafka lists none of them, but the job directory names
        # some.
        ours = {}
    open_ids = {listed[one.producer_id] for one in producers if one.producer_id in listed}
    views = wire.describe_transactions(sorted(open_ids - ours.keys()))
    now_ms = job.clock.wall_ms()
    # A producer that no coordinator knows is found by its handle alone.
    named = {one.handle[1:]: one for one in names.named}
    owners = {}
    for one in producers:
        name, entry = listed.get(one.producer_id), named.get(one.handle)
        if name is None and entry is not None:
            owner = _Owner(_HANGING, None, f"{entry.handle[0]}: {entry}; no coordinator shows it")
        elif name is None:
            whose = f"nobody's: no coordinator shows an open transaction of producer {one.producer_id}"
            owner = _Owner(_HANGING, None, whose)
        elif name in ours:
            owner = _Owner(ours[name].state, ours[name].age_ms, f"{name}: {ours[name].text}")
        else:
            parsed, view = TransactionalId.parse(name), views.get(name)
            whose = f"{name}: of another program" if parsed is None else f"{name}: of the job {parsed.job}"
            state, age_ms = ("", None) if view is None else (view.state, view.age_ms(now_ms))
            owner = _Owner(state, age_ms, whose)
        owners[one.producer_id] = owner
    return owners


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
        handle, fate = staged.handle, "GONE"
        if place[0] < partitions:
            fate = reader.read(handle.evidence, handle.producer_id, handle.producer_epoch).fate.value
        yield _checkpoint_row(one, staged, place, fate)


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
