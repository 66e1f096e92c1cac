"""Which of a job's transactions a command may end, why not the others, and ending them.

Everything here runs with the job's lock held, so that no owner stages, decides or ends anything
meanwhile. A commit is what the next start would do; an abort touches nothing that anybody names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from flinkish_spark.cli.params import Job
from flinkish_spark.cli.transactions_found import UNKNOWN_STATE, Found
from flinkish_spark.cli.transactions_named import Standing
from flinkish_spark.errors import OwnedElsewhereError
from flinkish_spark.protocol.outcomes import CommitAnswer
from flinkish_spark.protocol.records import Committable

if TYPE_CHECKING:
    from flinkish_spark.kafka import TransactionClient
    from flinkish_spark.sinks.kafka_committer import KafkaCommitter

_OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")


@dataclass(frozen=True, slots=True)
class Ending:
    """What is to become of one transaction.

    Parameters
    ----------
    found
        The transaction.
    refusal
        Why it is not touched; empty if it is to be ended.
    answer
        What came of it; None until it was tried, and where it is not.
    """

    found: Found
    refusal: str = ""
    answer: CommitAnswer | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is ended."""
        return self.answer is not None and self.answer.outcome.is_done

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` says; see `docs/command-line.md`."""
        return {
            **self.found.to_json(),
            "refusal": self.refusal,
            "outcome": None if self.answer is None else self.answer.outcome.value,
            "detail": "" if self.answer is None else self.answer.detail,
        }


@contextmanager
def holding(job: Job) -> Iterator[None]:
    """Hold the job's lock: nobody owns it meanwhile, and a start in between is refused.

    Raises
    ------
    OwnedElsewhereError
        The job runs.
    """
    # Here and not above: other commands hold no lock.
    from flinkish_spark.runtime.ownership import JobLock

    lock = JobLock(job.root / "owner.lock")
    try:
        lock.acquire()
    except OwnedElsewhereError as owned:
        raise OwnedElsewhereError(
            f"the job '{job.name}' runs: {owned.facts.get('holder', 'another process')} owns it",
            why="it ends its transactions itself, and may be writing those that nobody names yet",
            what_to_do="stop the job first; `flinkish transactions list` works while it runs",
        ) from owned
    try:
        yield
    finally:
        lock.release()


def plan_commits(found: Sequence[Found], wanted: frozenset[str]) -> list[Ending]:
    """Return what committing means: all that is decided, or what of that is `wanted`.

    What a sink has in a checkpoint is committed as a whole: what of it is lost must be its end.
    """
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


def _why_not_committed(one: Found, decided: Sequence[Found], wanted: frozenset[str]) -> str:
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


def plan_aborts(found: Sequence[Found], wanted: frozenset[str]) -> list[Ending]:
    """Return what aborting means: all open leftovers, or what of them is `wanted`.

    With the lock held nobody writes what nobody names, so also what the newest owner began is a
    leftover.
    """
    ends = []
    for one in found:
        if wanted and str(one.name) not in wanted:
            continue
        refusal = _why_not_aborted(one)
        if wanted or not refusal:
            ends.append(Ending(one, refusal))
    return ends


def _why_not_aborted(one: Found) -> str:
    if one.standing is Standing.STAGED:
        return f"the next start keeps it or aborts it: {one.text}"
    if one.standing not in (Standing.LEFTOVER, Standing.OF_NEWEST_OWNER):
        return f"a decision names it: {one.text}"
    return "" if one.state in _OPEN else f"nothing is open under it (state {one.state})"


def commit(job: Job, client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
    """Commit what each sink has in the decision, by the rules and in the order of the job's own committer."""
    done: list[Ending] = []
    for _, group in groupby(
        sorted(ends, key=lambda end: _order(end.found)), lambda end: _whole_of(end.found)
    ):
        done += _committed(job, client, list(group))
    return done


def _committed(job: Job, client: TransactionClient, ends: list[Ending]) -> list[Ending]:
    named = [end.found.named for end in ends]
    checkpoint = None if named[0] is None else named[0].checkpoint
    if checkpoint is None or any(end.refusal for end in ends):
        return ends
    committables = [Committable(one.sink, one.payload) for one in named if one is not None]
    answers = list(_committer(job, client, committables[0].sink).commit(checkpoint, committables))
    last = ends[len(answers) - 1].found.name
    behind = [replace(end, refusal=f"{last} comes before it and is not done") for end in ends[len(answers) :]]
    # Shorter where it stopped.
    tried = zip(ends, answers, strict=False)
    return [*(replace(end, answer=answer) for end, answer in tried), *behind]


def _committer(job: Job, client: TransactionClient, uid: str) -> KafkaCommitter:
    from pyspark.sql.types import StructType

    from flinkish_spark.config import CheckpointConfig
    from flinkish_spark.sinks.base import SinkContext
    from flinkish_spark.sinks.kafka_committer import KafkaCommitter

    context = SinkContext(
        job=job.uuid,
        owner_epoch=job.job_dir.newest_owner(),
        uid=uid,
        schema=StructType(),
        checkpoint=CheckpointConfig(),
        job_name=job.name,
        folder=job.root / "sinks" / uid,
        clock=job.clock,
    )
    return KafkaCommitter(client, context)


def abort(_job: Job, client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
    """Abort what is open under each id and fence whoever wrote it."""
    return [one if one.refusal else replace(one, answer=client.abort_open(one.found.name)) for one in ends]


def unknown(wanted: frozenset[str], found: Sequence[Found]) -> list[str]:
    """Return the ids that were named and are not among the job's transactions."""
    return sorted(wanted - {str(one.name) for one in found})


def _order(found: Found) -> tuple[int, str, int]:
    named = found.named
    if named is None or named.checkpoint is None:
        return (0, "", 0)
    return (int(named.checkpoint), named.sink, named.place)


def _whole_of(found: Found) -> tuple[int, str]:
    """Return what a transaction is committed together with."""
    return _order(found)[:2]
