"""Kills of two chained jobs: nothing lost or doubled in either topic, and every checkpoint a cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.process import Victim
from flinkish_spark.testing import LocalBroker
from tests.crash.chained_harness import CHAINED, UPSTREAM, At, ChainRun, Crash, InFlight, Shot

#: Around the steps that decide what becomes of barrier records and of what is read behind them. A
#: rewind needs a kept micro-batch, so it is led up to by a crash between commits/N and the decision.
CRASHES: dict[str, tuple[Crash, ...]] = {
    UPSTREAM: (
        At("sink-commit:before:2"),
        At("staged-file:before:3"),
        At("decision:after:2"),
        Shot(Victim.JVM),
    ),
    CHAINED: (
        At("decision:before:2"),
        At("rewind-delete:after:1", finds_dead=True),
        At("sink-commit:after:1"),
        InFlight(Victim.GROUP),
        Shot(Victim.WORKER),
    ),
}


@pytest.mark.nightly(by_day="tests/integration/broker/test_chained_jobs.py")
@pytest.mark.timeout(1_200)
def test_kills_of_chained_jobs_leave_both_topics_exact_and_every_cut_true(
    run_directory: Path, broker: LocalBroker
) -> None:
    outcome = ChainRun(run_directory, broker, seed=5).run(CRASHES)

    assert outcome.is_exact, outcome
    assert outcome.crashes == 9
    assert outcome.sent > 500, outcome
    assert len(set(outcome.checked.cuts)) >= 5, outcome
    assert outcome.checked.unaligned >= 1, outcome
