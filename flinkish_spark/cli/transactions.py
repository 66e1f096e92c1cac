"""`flinkish transactions`: lists and ends transactions that a job has left open on Kafka's brokers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from flinkish_spark.cli.client import (
    ExitStatus,
    brokers_options,
    complain,
    confirm,
    connection_of,
    end_with,
    job_argument,
    json_option,
    one_line,
    print_json,
    print_line,
    print_table,
    refuse_plain_query,
    yes_option,
)
from flinkish_spark.core.clock import SystemThreads
from flinkish_spark.core.errors import OwnedElsewhereError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.job.stored_job import (
    StoredJob,
    raise_as_corrupt,
)
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Committable
from flinkish_spark.protocol.recovery import DecidedFact, drop_leftovers

if TYPE_CHECKING:
    from flinkish_spark.checkpoint.staging import OwnerLock
    from flinkish_spark.connectors.kafka.client.client import KafkaWire, TransactionView
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
    from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
    from flinkish_spark.connectors.kafka.writer import KafkaCommitter


#: Interval at which the job's owner is checked.
_POLL_MS = 1_000
_LIST = ("transactional id", "state", "age s", "timeout s", "producer", "epoch", "standing", "what it is")
_ENDED = ("transactional id", "state", "outcome", "detail")


ids_argument = click.argument("ids", metavar="[ID]...", nargs=-1)
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the planned actions, and do nothing.")


@click.group()
def transactions() -> None:
    """List the Kafka transactions of a job, or end its open ones."""


@transactions.command("list")
@job_argument
@brokers_options
@click.option("--all", "ended", is_flag=True, help="Also the ids under which nothing is open.")
@json_option
def list_transactions(job: StoredJob, servers: str, config: Any, ended: bool, as_json: bool) -> None:
    """List the transactions of a job that are open, or decided and not yet confirmed.

    The job may run or not. An id belongs to the job if it parses exactly as one of the job's own. Kafka
    leaves out ids that this principal may not describe.
    """
    with open_wire(connection_of(servers, config)) as wire:
        found = transactions_of(job, wire, all_ids_of(job, wire) if ended else frozenset())
    if as_json:
        print_json({**job.to_json(), "transactions": [one.to_json() for one in found]})
    elif found:
        print_table(_LIST, [_row(one) for one in found])
    else:
        print_line(f"the job '{job.name}' has no open transactions")


@transactions.command("commit")
@job_argument
@ids_argument
@brokers_options
@dry_run_option
@yes_option
@json_option
def commit_transactions(
    job: StoredJob, ids: tuple[str, ...], servers: str, config: Any, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Commit transactions that a decision in the job directory names and no receipt confirms.

    The next start of the job would do the same first. May be repeated. Nothing else is committed. The job
    must not run.
    """
    _end(job, ids, connection_of(servers, config), (plan_commits, commit, "commit"), dry_run, yes, as_json)


@transactions.command("abort")
@job_argument
@ids_argument
@brokers_options
@dry_run_option
@yes_option
@json_option
def abort_transactions(
    job: StoredJob, ids: tuple[str, ...], servers: str, config: Any, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Abort open leftovers, which no decision and no staged file of the job directory names.

    They hide later records of their partitions from read_committed readers until they time out or the job
    restarts. The job must not run.
    """
    _end(job, ids, connection_of(servers, config), (plan_aborts, abort, "abort"), dry_run, yes, as_json)


_Plan = Callable[[Sequence["FoundTransaction"], frozenset[str]], "list[Ending]"]
_Carry = Callable[[StoredJob, "TransactionClient", Sequence["Ending"]], "list[Ending]"]


def _end(
    job: StoredJob,
    ids: tuple[str, ...],
    connection: KafkaConnection,
    how: tuple[_Plan, _Carry, str],
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from flinkish_spark.connectors.kafka.client.transactions import TransactionClient

    plan, carry_out, verb = how
    refuse_plain_query(job)
    wanted, lock = frozenset(ids), lock_of(job)
    with open_wire(connection) as wire:
        with hold_lock(job, lock):
            found = transactions_of(job, wire, wanted)
            ends = plan(found, wanted)
        chosen = frozenset(str(one.found.name) for one in ends if not one.refusal)
        if chosen and not dry_run:
            # Without the lock: the user may take a while, and the job may start meanwhile.
            confirm(_what_happens(ends, verb), f"{verb.capitalize()} them?", yes, as_json)
            with hold_lock(job, lock):
                again = plan(transactions_of(job, wire, wanted), wanted or chosen)
                agreed = [one for one in again if str(one.found.name) in chosen or one.refusal]
                ends = carry_out(job, TransactionClient.from_wire(wire), agreed)
    strangers = unknown(wanted, found)
    _report(job, ends, strangers, verb, dry_run, as_json)
    failed = [one for one in ends if one.refusal or not (dry_run or one.is_done)]
    if failed or strangers:
        end_with(ExitStatus.NOT_DONE)


def _what_happens(ends: Sequence[Ending], verb: str) -> str:
    lines = [f"- {one.found.name}: {one.found.text}" for one in ends if not one.refusal]
    return "\n".join((f"To {verb} for good:", *lines))


def _report(
    job: StoredJob, ends: Sequence[Ending], strangers: Sequence[str], verb: str, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                **job.to_json(),
                "dry_run": dry_run,
                "transactions": [one.to_json() for one in ends],
                "unknown": list(strangers),
            }
        )
        return
    if ends:
        print_table(_ENDED, [_format_ending(one, verb, dry_run) for one in ends])
    elif not strangers:
        print_line(f"the job '{job.name}' has no transactions to {verb}")
    for one in strangers:
        complain(f"{one} is no transactional id of the job '{job.name}'")


def _format_ending(one: Ending, verb: str, dry_run: bool) -> tuple[object, ...]:
    if one.refusal:
        return (one.found.name, one.found.state, "refused", one.refusal)
    if one.answer is None:
        return (one.found.name, one.found.state, f"would {verb}" if dry_run else "", one.found.text)
    return (one.found.name, one.found.state, one.answer.outcome.value, one_line(one.answer.detail))


def _row(found: FoundTransaction) -> tuple[object, ...]:
    return (
        found.name,
        found.state,
        _seconds(found.age_ms),
        _seconds(found.timeout_ms),
        found.producer_id,
        found.producer_epoch,
        found.standing.value,
        found.text,
    )


def _seconds(duration_ms: int | None) -> float | None:
    return None if duration_ms is None else duration_ms / 1_000


@contextmanager
def open_wire(connection: KafkaConnection) -> Iterator[KafkaWire]:
    from flinkish_spark.connectors.kafka.client.client import KafkaWire

    wire = KafkaWire(connection)
    try:
        yield wire
    finally:
        wire.close()


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
    #: The sink and micro-batch that staged it.
    sink: str
    lineage: Lineage
    batch: BatchId
    #: The checkpoint of the decision; None if undecided.
    checkpoint: CheckpointId | None
    #: Index among its sink's committables in the decision, which are committed in this order.
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
                return f"checkpoint {self.checkpoint} was decided, but a rewind made it dead: {where}"
            case _:
                return f"staged and not decided: {where}"


@dataclass(frozen=True, slots=True)
class Names:
    """All transactions that the job directory names; `newest_owner` took the job over last."""

    newest_owner: OwnerEpoch
    named: tuple[NamedTransaction, ...]

    @classmethod
    def of(cls, job_dir: JobDir) -> Names:
        # This order matters: a transaction decided meanwhile is found as staged, or decided, or both.
        staged = list(_list_staged(job_dir))
        decided = list(_list_decided(job_dir))
        known = {one.handle for one in decided}
        return cls(job_dir.newest_owner(), (*decided, *(one for one in staged if one.handle not in known)))

    def find(self, handle: Handle) -> NamedTransaction | None:
        """Return the entry for a transaction, else an undecided or unfinished entry for its id."""
        exact = next((one for one in self.named if one.handle == handle), None)
        return exact or self.find_by_id(handle[0])

    def find_by_id(self, name: str) -> NamedTransaction | None:
        # An undecided or unfinished entry protects its whole id: no transaction under it may be ended.
        waiting = (Standing.DECIDED, Standing.STAGED)
        return next((one for one in self.named if one.handle[0] == name and one.standing in waiting), None)

    def standing_by(self, name: TransactionalId, named: NamedTransaction | None) -> Standing:
        if named is not None:
            return named.standing
        newest = name.owner_epoch >= self.newest_owner
        return Standing.OF_NEWEST_OWNER if newest else Standing.LEFTOVER

    @property
    def waiting(self) -> tuple[NamedTransaction, ...]:
        """Return the transactions to commit, in the order in which their sinks commit."""
        return tuple(one for one in self.named if one.standing is Standing.DECIDED)


def _list_staged(job_dir: JobDir) -> Iterator[NamedTransaction]:
    for key in job_dir.store.list("staged"):
        name = key.rsplit("/", 1)[1]
        if not name.isdecimal():
            continue
        for staged in job_dir.list_staged(Lineage(int(name))).values():
            for one in staged.committables:
                handle = _handle(one.payload)
                if handle is not None:
                    yield NamedTransaction(
                        Standing.STAGED, handle, one.sink, staged.lineage, staged.batch, None, 0, one.payload
                    )


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
        yield from _list_named(decision, standings.get(decision.checkpoint, Standing.LEFT_BEHIND))


def _list_named(decision: Decision, standing: Standing) -> Iterator[NamedTransaction]:
    for of_sink in decision.group_by_sink().values():
        for place, (staged, one) in enumerate(of_sink):
            handle = _handle(one.payload)
            if handle is not None:
                yield NamedTransaction(
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
    """Return the handle in a Kafka sink's payload; None for other sinks."""
    if "transactional_id" not in payload:
        return None
    with raise_as_corrupt("a committable of a Kafka sink"):
        handle = (payload["transactional_id"], payload["producer_id"], payload["producer_epoch"])
        if not isinstance(handle[0], str) or not all(isinstance(number, int) for number in handle[1:]):
            raise ValueError(f"{handle!r} is no transaction")
    return handle


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


def all_ids_of(job: StoredJob, wire: KafkaWire) -> frozenset[str]:
    return frozenset(map(str, _parse_ids(job, (row.transactional_id for row in wire.list_transactions()))))


def transactions_of(
    job: StoredJob, wire: KafkaWire, also: frozenset[str] = frozenset()
) -> tuple[FoundTransaction, ...]:
    """Return the job's open, undecided and unfinished transactions, by id."""
    from flinkish_spark.connectors.kafka.client.transactions import TransactionClient

    # This order matters: a transaction that is named now was on the brokers before.
    listed = {
        one.transactional_id for one in TransactionClient.from_wire(wire).list_open_transactions(job.uuid)
    }
    listed.update(_parse_ids(job, also))
    names = Names.of(job.job_dir)
    waiting = (Standing.DECIDED, Standing.STAGED)
    listed.update(_parse_ids(job, (one.handle[0] for one in names.named if one.standing in waiting)))
    views = _views(wire, sorted(map(str, listed)))
    now_ms = job.clock.wall_ms()
    return tuple(_look_up(one, views.get(str(one)), names, now_ms) for one in sorted(listed))


def _parse_ids(job: StoredJob, texts: Iterable[str]) -> Iterable[TransactionalId]:
    for text in texts:
        parsed = TransactionalId.parse(text)
        # Leading zeros parse to the same numbers; only ids in our own spelling are ours.
        if parsed is not None and parsed.job == job.uuid and str(parsed) == text:
            yield parsed


def _views(wire: KafkaWire, names: list[str]) -> dict[str, TransactionView]:
    from flinkish_spark.connectors.kafka.client.client import UNAUTHORIZED, UNSETTLED, describe_code
    from flinkish_spark.core.clock import tries
    from flinkish_spark.core.errors import AuthorizationError, BrokerUnavailableError

    views: dict[str, TransactionView] = {}
    for _left_ms in tries(wire.timeout_ms, wire.clock):
        views.update(wire.describe_transactions([n for n in names if n not in views]))
        views = {name: view for name, view in views.items() if view.code not in UNSETTLED}
        refused = [name for name, view in views.items() if view.code in UNAUTHORIZED]
        if refused:
            raise AuthorizationError(
                f"Kafka refuses this principal DESCRIBE on transactional id {refused[0]!r} "
                f"({describe_code(views[refused[0]].code)})"
            )
        if len(views) == len(names):
            return views
    raise BrokerUnavailableError(
        f"{len(names) - len(views)} Kafka transactions could not be described in time",
        what_to_do="wait for the cluster to settle",
    )


def _look_up(
    name: TransactionalId, view: TransactionView | None, names: Names, now_ms: int
) -> FoundTransaction:
    if view is None or view.code:
        named = names.find_by_id(str(name))
        standing = names.standing_by(name, named)
        return FoundTransaction(name, UNKNOWN_STATE, None, None, None, None, standing, named)
    named = names.find((str(name), view.producer_id, view.producer_epoch))
    age_ms = None if view.began_at_ms is None else max(0, now_ms - view.began_at_ms)
    return FoundTransaction(
        name,
        view.state,
        view.producer_id,
        view.producer_epoch,
        age_ms,
        view.timeout_ms,
        names.standing_by(name, named),
        named,
    )


OPEN_STATES = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")


@dataclass(frozen=True, slots=True)
class Ending:
    found: FoundTransaction
    #: Why it is not ended; empty if it will be.
    refusal: str = ""
    #: The result of ending it; None if it was not tried.
    answer: CommitAnswer | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None and self.answer.outcome.is_done

    def to_json(self) -> dict[str, Any]:
        return {
            **self.found.to_json(),
            "refusal": self.refusal,
            "outcome": None if self.answer is None else self.answer.outcome.value,
            "detail": "" if self.answer is None else self.answer.detail,
        }


def lock_of(job: StoredJob) -> OwnerLock:
    """Return the job's lock; in a bucket, a lease that detects a running owner."""
    # Imported here, since other commands hold no lock.
    from flinkish_spark.checkpoint.ownership import BeatLease, JobLock

    if job.place.is_local:
        return JobLock(job.place.folder / "owner.lock")
    from flinkish_spark.core.config import CheckpointConfig

    # In a bucket nothing prevents a start meanwhile. That is harmless: its transactions have ids with its own
    # epoch, and two processes may commit decided data, as after any takeover.
    lease_ms = CheckpointConfig().owner_lease_ms
    return BeatLease(job.job_dir, job.place.url, job.clock, SystemThreads(), lease_ms)


@contextmanager
def hold_lock(job: StoredJob, lock: OwnerLock) -> Iterator[None]:
    """Hold the job's lock, so that starts of the job are refused for the block."""
    try:
        _acquire(job, lock)
    except OwnedElsewhereError as owned:
        raise OwnedElsewhereError(
            f"the job '{job.name}' runs: {owned.facts.get('holder', 'another process')} owns it",
            why="it ends its transactions itself, and may be writing some that no staged file names yet",
            what_to_do="stop the job first; `flinkish transactions list` works while it runs",
        ) from owned
    try:
        yield
    finally:
        lock.release()


def _acquire(job: StoredJob, lock: OwnerLock) -> None:
    from flinkish_spark.checkpoint.ownership import LivenessUnknown

    is_said = False
    while True:
        try:
            return lock.acquire()
        except LivenessUnknown as unknown:
            if not is_said:
                complain(str(unknown))
            is_said = True
            job.clock.sleep_ms(_POLL_MS)


# Transactions are planned and ended with the job's lock held, so that no owner stages, decides or ends
# anything meanwhile. A commit does what the next start would do; an abort never touches a named transaction.
def plan_commits(found: Sequence[FoundTransaction], wanted: frozenset[str]) -> list[Ending]:
    """Plan the commit of all decided transactions, or of the `wanted` ones."""
    decided = [one for one in found if one.standing is Standing.DECIDED]
    ends = []
    for one in found:
        if wanted and str(one.name) not in wanted:
            continue
        if one.standing is Standing.DECIDED:
            ends.append(Ending(one, _why_not_committed(one, decided, wanted)))
        elif wanted:
            ends.append(Ending(one, f"no decision waits for it: {one.text}"))
    return ends


def _why_not_committed(
    one: FoundTransaction, decided: Sequence[FoundTransaction], wanted: frozenset[str]
) -> str:
    # The transactions of a sink in a checkpoint are committed together, and none of them may be unknown.
    together = [other for other in decided if _whole_of(other) == _whole_of(one)]
    unknown = [str(other.name) for other in together if other.state == UNKNOWN_STATE]
    if unknown:
        return (
            f"these brokers do not know {unknown[0]}: it expired, or is on another cluster; "
            "the next start of the job looks closer"
        )
    left_out = [str(other.name) for other in together if wanted and str(other.name) not in wanted]
    if left_out:
        return f"it is committed together with {len(left_out)} others, such as {left_out[0]}: name them, too"
    return ""


def plan_aborts(found: Sequence[FoundTransaction], wanted: frozenset[str]) -> list[Ending]:
    """Plan the abort of all open leftovers, or of the `wanted` ones."""
    ends = []
    for one in found:
        if wanted and str(one.name) not in wanted:
            continue
        refusal = _why_not_aborted(one)
        if wanted or not refusal:
            ends.append(Ending(one, refusal))
    return ends


def _why_not_aborted(one: FoundTransaction) -> str:
    if one.standing is Standing.STAGED:
        return f"the next start keeps it or aborts it: {one.text}"
    # With the lock held no owner writes to unnamed transactions, not even the newest one.
    if one.standing not in (Standing.LEFTOVER, Standing.OF_NEWEST_OWNER):
        return f"a decision names it: {one.text}"
    return "" if one.state in OPEN_STATES else f"nothing is open under it (state {one.state})"


def commit(job: StoredJob, client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
    """Commit the transactions of each sink with the job's own committer, in its order."""
    done: list[Ending] = []
    for _, group in groupby(
        sorted(ends, key=lambda end: _order(end.found)), lambda end: _whole_of(end.found)
    ):
        done += _commit(job, client, list(group))
    return done


def _commit(job: StoredJob, client: TransactionClient, ends: list[Ending]) -> list[Ending]:
    named = [end.found.named for end in ends]
    checkpoint = None if named[0] is None else named[0].checkpoint
    if checkpoint is None or any(end.refusal for end in ends):
        return ends
    committables = [Committable(one.sink, one.payload) for one in named if one is not None]
    answers = list(_committer(job, client, committables[0].sink).commit(checkpoint, committables))
    last = ends[len(answers) - 1].found.name
    behind = [replace(end, refusal=f"{last} comes before it and is not done") for end in ends[len(answers) :]]
    # There are fewer answers if the committer stopped.
    tried = zip(ends, answers, strict=False)
    return [*(replace(end, answer=answer) for end, answer in tried), *behind]


def _committer(job: StoredJob, client: TransactionClient, uid: str) -> KafkaCommitter:
    from pyspark.sql.types import StructType

    from flinkish_spark.connectors.kafka.writer import KafkaCommitter
    from flinkish_spark.contracts.sink import SinkContext
    from flinkish_spark.core.config import CheckpointConfig

    context = SinkContext(
        job=job.uuid,
        owner_epoch=job.job_dir.newest_owner(),
        uid=uid,
        schema=StructType(),
        checkpoint=CheckpointConfig(),
        job_name=job.name,
        place=job.place.to_child(f"sinks/{uid}"),
        clock=job.clock,
    )
    return KafkaCommitter(client, context)


def abort(_job: StoredJob, client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
    return [one if one.refusal else replace(one, answer=client.abort_open(one.found.name)) for one in ends]


def unknown(wanted: frozenset[str], found: Sequence[FoundTransaction]) -> list[str]:
    return sorted(wanted - {str(one.name) for one in found})


def _order(found: FoundTransaction) -> tuple[int, str, int]:
    named = found.named
    if named is None or named.checkpoint is None:
        return (0, "", 0)
    return (int(named.checkpoint), named.sink, named.place)


def _whole_of(found: FoundTransaction) -> tuple[int, str]:
    return _order(found)[:2]
