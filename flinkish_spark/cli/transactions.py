"""`flinkish transactions`: what a job has left open on Kafka's brokers, and ending it.

The only command beside `flinkish audit` that talks to brokers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flinkish_spark.cli.brokers import brokers_options, connection_of
from flinkish_spark.cli.exits import ExitStatus, complain, end_with, one_line
from flinkish_spark.cli.params import Job, confirm, job_argument, json_option, yes_option
from flinkish_spark.cli.replies import print_json
from flinkish_spark.cli.tables import print_line, print_table

if TYPE_CHECKING:
    from flinkish_spark.cli.transactions_ending import Ending
    from flinkish_spark.cli.transactions_found import Found
    from flinkish_spark.kafka import KafkaConnection, TransactionClient
    from flinkish_spark.kafka._wire import KafkaWire

F = TypeVar("F", bound=Callable[..., Any])
_LIST = ("transactional id", "state", "age s", "timeout s", "producer", "epoch", "standing", "what it is")
_ENDED = ("transactional id", "state", "outcome", "detail")


def ids_argument(command: F) -> F:
    """Give a command the transactional ids it is about, as `ids`; none means all that can be."""
    return click.argument("ids", metavar="[ID]...", nargs=-1)(command)


def dry_run_option(command: F) -> F:
    """Give a command `--dry-run`, as `dry_run`."""
    return click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")(command)


@click.group()
def transactions() -> None:
    """Look at the Kafka transactions of a job, or end what it has left open."""


@transactions.command("list")
@job_argument
@brokers_options
@click.option("--all", "ended", is_flag=True, help="Also the ids under which nothing is open.")
@json_option
def list_transactions(job: Job, servers: str, config: Any, ended: bool, as_json: bool) -> None:
    """List the transactions of a job that are open, or wait for their end in the job directory.

    Works whether the job runs or not. An id belongs to the job if it parses exactly as one of its
    own. Ids that this principal may not describe are left out by Kafka.
    """
    from flinkish_spark.cli.transactions_found import all_ids_of, transactions_of

    with _wire(connection_of(servers, config)) as wire:
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
    job: Job, ids: tuple[str, ...], servers: str, config: Any, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Commit what a decision in the job directory names and no receipt confirms.

    It is what the next start of the job would do first, and may be repeated. Nothing else is
    committed. The job must not run.
    """
    from flinkish_spark.cli.transactions_ending import commit, plan_commits

    _end(job, ids, connection_of(servers, config), (plan_commits, commit, "commit"), dry_run, yes, as_json)


@transactions.command("abort")
@job_argument
@ids_argument
@brokers_options
@dry_run_option
@yes_option
@json_option
def abort_transactions(
    job: Job, ids: tuple[str, ...], servers: str, config: Any, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Abort open leftovers: what no decision and no staged file of the job directory names.

    They hide later records of their partitions from read_committed readers until they time out or
    the job starts again. The job must not run.
    """
    from flinkish_spark.cli.transactions_ending import abort, plan_aborts

    _end(job, ids, connection_of(servers, config), (plan_aborts, abort, "abort"), dry_run, yes, as_json)


_Plan = Callable[[Sequence["Found"], frozenset[str]], "list[Ending]"]
_Carry = Callable[[Job, "TransactionClient", Sequence["Ending"]], "list[Ending]"]


def _end(
    job: Job,
    ids: tuple[str, ...],
    connection: KafkaConnection,
    how: tuple[_Plan, _Carry, str],
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan, ask, plan again, carry out, and end with the status."""
    from flinkish_spark.cli.transactions_ending import holding, unknown
    from flinkish_spark.cli.transactions_found import transactions_of
    from flinkish_spark.kafka import TransactionClient

    plan, carry_out, verb = how
    wanted = frozenset(ids)
    with _wire(connection) as wire:
        with holding(job):
            found = transactions_of(job, wire, wanted)
            ends = plan(found, wanted)
        chosen = frozenset(str(one.found.name) for one in ends if not one.refusal)
        if chosen and not dry_run:
            # Not with the lock held: a person may take a while, and the job may want to start.
            confirm(_what_happens(ends, verb), f"{verb.capitalize()} them?", yes, as_json)
            with holding(job):
                again = plan(transactions_of(job, wire, wanted), wanted or chosen)
                agreed = [one for one in again if str(one.found.name) in chosen or one.refusal]
                ends = carry_out(job, TransactionClient.over(wire), agreed)
    strangers = unknown(wanted, found)
    _report(job, ends, strangers, verb, dry_run, as_json)
    failed = [one for one in ends if one.refusal or not (dry_run or one.is_done)]
    if failed or strangers:
        end_with(ExitStatus.NOT_DONE)


def _what_happens(ends: Sequence[Ending], verb: str) -> str:
    lines = [f"- {one.found.name}: {one.found.text}" for one in ends if not one.refusal]
    return "\n".join((f"To {verb} for good:", *lines))


def _report(
    job: Job, ends: Sequence[Ending], strangers: Sequence[str], verb: str, dry_run: bool, as_json: bool
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
        print_table(_ENDED, [_ended_row(one, verb, dry_run) for one in ends])
    elif not strangers:
        print_line(f"the job '{job.name}' has no transactions to {verb}")
    for one in strangers:
        complain(f"{one} is no transactional id of the job '{job.name}'")


def _ended_row(one: Ending, verb: str, dry_run: bool) -> tuple[object, ...]:
    if one.refusal:
        return (one.found.name, one.found.state, "refused", one.refusal)
    if one.answer is None:
        return (one.found.name, one.found.state, f"would {verb}" if dry_run else "", one.found.text)
    return (one.found.name, one.found.state, one.answer.outcome.value, one_line(one.answer.detail))


def _row(found: Found) -> tuple[object, ...]:
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
def _wire(connection: KafkaConnection) -> Iterator[KafkaWire]:
    from flinkish_spark.kafka._wire import KafkaWire

    wire = KafkaWire(connection)
    try:
        yield wire
    finally:
        wire.close()
