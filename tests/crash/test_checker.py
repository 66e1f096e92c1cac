"""The checker must see what it is there to see: two protocols that are not exactly-once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.harness import At, CrashRun


@pytest.mark.timeout(600)
def test_a_decision_written_after_the_commits_is_noticed(run_directory: Path) -> None:
    """The process dies with one sink committed and nothing decided."""
    run = CrashRun(run_directory, seed=1, broken="decide-after-commits")

    outcome = run.run([At("sink-commit:after:1:totals-kafka")])

    assert outcome.verdict.partial_checkpoints > 0, str(outcome)
    assert not outcome.verdict.is_exact


@pytest.mark.timeout(600)
def test_leftovers_committed_instead_of_aborted_are_noticed(run_directory: Path) -> None:
    """The process dies with a micro-batch staged that Spark will run again."""
    run = CrashRun(run_directory, seed=2, broken="commit-leftovers")

    outcome = run.run([At("spark-commit:before:1")])

    assert outcome.verdict.duplicated > 0, str(outcome)
    assert not outcome.verdict.is_exact
