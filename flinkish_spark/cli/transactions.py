"""`flinkish transactions`: lists and ends transactions that a job has left open on Kafka's brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from flinkish_spark.connectors.kafka.job_transactions import (
    UNKNOWN_STATE,
    FoundTransaction,
    Standing,
    find_transactions,
)
from flinkish_spark.core.clock import SystemThreads
from flinkish_spark.core.errors import OwnedElsewhereError
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.records import CommitAnswer

if TYPE_CHECKING:
    from flinkish_spark.checkpoint.staging import OwnerLock
    from flinkish_spark.connectors.kafka.client.client import KafkaWire
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
        also = [row.transactional_id for row in wire.list_transactions()] if ended else []
        found = find_transactions(job.uuid, job.job_dir, wire, also)
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


_Plan = Callable[[Sequence[FoundTransaction], frozenset[str]], "list[Ending]"]
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
            found = find_transactions(job.uuid, job.job_dir, wire, wanted)
            ends = plan(found, wanted)
        chosen = frozenset(str(one.found.name) for one in ends if not one.refusal)
        if chosen and not dry_run:
            # Without the lock: the user may take a while, and the job may start meanwhile.
            confirm(_what_happens(ends, verb), f"{verb.capitalize()} them?", yes, as_json)
            with hold_lock(job, lock):
                found_now = find_transactions(job.uuid, job.job_dir, wire, wanted)
                again = plan(found_now, wanted or chosen)
                agreed = [one for one in again if str(one.found.name) in chosen or one.refusal]
                ends = carry_out(job, TransactionClient.from_wire(wire), agreed)
    strangers = sorted(wanted - {str(one.name) for one in found})
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
    ends = []
    for one in found:
        if wanted and str(one.name) not in wanted:
            continue
        refusal = _why_not_aborted(one)
        if wanted or not refusal:
            ends.append(Ending(one, refusal))
    return ends


def _why_not_aborted(one: FoundTransaction) -> str:
    from flinkish_spark.connectors.kafka.client.transactions import OPEN_STATES

    if one.standing is Standing.STAGED:
        return f"the next start keeps it or aborts it: {one.text}"
    # With the lock held no owner writes to unnamed transactions, not even the newest one.
    if one.standing not in (Standing.LEFTOVER, Standing.OF_NEWEST_OWNER):
        return f"a decision names it: {one.text}"
    return "" if one.state in OPEN_STATES else f"nothing is open under it (state {one.state})"


def commit(job: StoredJob, client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
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
    committables = [one.committable for one in named if one is not None]
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


def _order(found: FoundTransaction) -> tuple[int, str, int]:
    named = found.named
    if named is None or named.checkpoint is None:
        return (0, "", 0)
    return (int(named.checkpoint), named.sink, named.place)


def _whole_of(found: FoundTransaction) -> tuple[int, str]:
    return _order(found)[:2]
