"""The demo's job with a gun in its hand, and with mistakes that a checker must notice.

Its key groups move into bases from a thousand bytes on, as those with thousands of keys do: files that state
values name have to survive, too. Takes the arguments of `demo/app.py`. What goes wrong is said by environment
variables, because it changes from one start to the next:

FLINKISH_KILL_AT
    Where the process kills itself, see `flinkish_spark.testing.crash_points`.
FLINKISH_FIND_DEAD
    Set: the recovery takes kept micro-batches for dead once, so that it rewinds.
FLINKISH_BROKEN
    One of the names in BROKEN: a protocol that is not exactly-once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from demo.app import build, parse_args, session
from flinkish_spark.checkpoint.completion import Completion
from flinkish_spark.checkpoint.decision_point import decide
from flinkish_spark.job.recovery import Recovery
from flinkish_spark.planning import keyed as keyed_plan
from flinkish_spark.protocol.decisions import Decision, Receipt
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.state.key_group import BasePolicy
from tests.support.killing import observer_from

FIND_DEAD_VARIABLE = "FLINKISH_FIND_DEAD"
BROKEN_VARIABLE = "FLINKISH_BROKEN"


def decide_after_the_commits() -> None:
    """Make data visible first and decide afterwards."""

    def complete(self: Completion, decision: Decision, on_decided: Callable[[], None]) -> Receipt:
        job, receipt = self._job, self._parts.confirm(decision)
        decide(decision, job.ownership, job.clock, job.observer, "nothing: the test is broken on purpose")
        on_decided()
        self._clean_up(decision)
        return receipt

    Completion.complete = complete  # type: ignore[method-assign]


def commit_the_leftovers() -> None:
    """Commit what a cut-off micro-batch left behind; Spark runs that micro-batch again."""

    def commit(self: Recovery, sink: str, committables: Sequence[Committable]) -> None:
        # An id below all others: later checkpoints still commit.
        self._committers[sink].commit(CheckpointId(0), committables)

    Recovery._abort_sink = commit  # type: ignore[method-assign]


def find_dead_once() -> None:
    """Let the recovery believe, once, that a kept micro-batch can no longer be committed."""
    find_out = Recovery._why_dead
    reasons = ["the test says that it is dead"]

    def why_dead(self: Recovery, staged: StagedBatch) -> str:
        return reasons.pop() if reasons else find_out(self, staged)

    Recovery._why_dead = why_dead  # type: ignore[method-assign]


BROKEN: Mapping[str, Callable[[], None]] = {
    "decide-after-commits": decide_after_the_commits,
    "commit-leftovers": commit_the_leftovers,
}


#: Most of the key groups get a base, and a new one when some of their keys have changed.
SMALL_BASES = BasePolicy(smallest_bytes=1_000, smallest_delta_rows=4)


def break_as_told() -> None:
    """Do what the environment variables of this start say, but for the kill."""
    broken = os.environ.get(BROKEN_VARIABLE)
    if broken:
        BROKEN[broken]()
    if os.environ.get(FIND_DEAD_VARIABLE):
        find_dead_once()


def main() -> None:
    keyed_plan.BASE_POLICY = SMALL_BASES
    break_as_told()
    args = parse_args()
    env = build(session(args), args)
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
