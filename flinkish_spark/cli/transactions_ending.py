"""Which of a job's transactions a command may end, why not the others, and ending them.

Everything here runs with the job's lock held, so that no owner stages, decides or ends anything
meanwhile. A commit is what the next start would do; an abort touches nothing that anybody names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flinkish_spark.cli.params import Job
from flinkish_spark.cli.transactions_found import UNKNOWN_STATE, Found
from flinkish_spark.cli.transactions_named import Standing
from flinkish_spark.errors import OwnedElsewhereError
from flinkish_spark.protocol.outcomes import CommitAnswer

if TYPE_CHECKING:
    from flinkish_spark.kafka import TransactionClient

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

    What is lost must be the end of what a sink staged, so nothing is committed before what stands
    in front of it in the decision.
    """
    chosen = [one for one in found if not wanted or str(one.name) in wanted]
    decided = [one for one in found if one.standing is Standing.DECIDED]
    ends = []
    for one in chosen:
        if one.standing is Standing.DECIDED:
            ends.append(Ending(one, _why_not_decided(one, decided, wanted)))
        elif wanted:
            ends.append(Ending(one, f"no decision waits for it: {one.text}"))
    return ends


def _why_not_decided(one: Found, decided: Sequence[Found], wanted: frozenset[str]) -> str:
    if one.state == UNKNOWN_STATE:
        return (
            "these brokers do not know it: it expired, or is on another cluster; the next start looks closer"
        )
    if not wanted or one.named is None:
        return ""
    before = [
        str(other.name)
        for other in decided
        if other.named is not None
        and (other.named.checkpoint, other.named.sink) == (one.named.checkpoint, one.named.sink)
        and other.named.place < one.named.place
        and str(other.name) not in wanted
        and other.state in _OPEN
    ]
    return f"{len(before)} of its sink come before it, such as {before[0]}; name them, too" if before else ""


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


def commit(client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
    """Commit in the order of the decision; of each sink nothing behind what is not done."""
    from flinkish_spark.sinks.kafka_barriers import KafkaStaged, committed

    done: list[Ending] = []
    stopped: dict[str, str] = {}
    for one in sorted(ends, key=lambda end: _order(end.found)):
        named = one.found.named
        if one.refusal or named is None or named.checkpoint is None:
            done.append(one)
            continue
        if named.sink in stopped:
            done.append(replace(one, refusal=f"{stopped[named.sink]} comes before it and is not done"))
            continue
        answer = committed(client, named.checkpoint, KafkaStaged.of(named.payload))
        if not answer.outcome.is_done:
            stopped[named.sink] = str(one.found.name)
        done.append(replace(one, answer=answer))
    return done


def abort(client: TransactionClient, ends: Sequence[Ending]) -> list[Ending]:
    """Abort what is open under each id and fence whoever wrote it."""
    return [one if one.refusal else replace(one, answer=client.abort_open(one.found.name)) for one in ends]


def unknown(wanted: frozenset[str], found: Sequence[Found]) -> list[str]:
    """Return the ids that were named and are not among the job's transactions."""
    return sorted(wanted - {str(one.name) for one in found})


def _order(found: Found) -> tuple[str, int, int]:
    named = found.named
    if named is None or named.checkpoint is None:
        return ("", 0, 0)
    return (named.sink, int(named.checkpoint), named.place)
