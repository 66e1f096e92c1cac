"""The checker must see what it is there to see: two protocols that are not exactly-once.

Each run ends as soon as there is something to see. Of all sinks the first two are enough: the demo's checker
and the one of all families both look at them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.families import FAMILIES
from tests.crash.families_rig import FamiliesRun, Servers
from tests.crash.harness import At

_FEW = FAMILIES[:2]


@pytest.mark.timeout(600)
def test_a_decision_written_after_the_commits_is_noticed(run_directory: Path, servers: Servers) -> None:
    """The process dies with one sink committed and nothing decided."""
    run = FamiliesRun(run_directory, servers, seed=1, families=_FEW, broken="decide-after-commits")

    outcome = run.run([At("sink-commit:after:1:kafka")], ends_well=False)

    assert outcome.verdict.partial_checkpoints > 0, str(outcome)
    assert not outcome.verdict.is_exact
    assert any("kafka" in said for said in outcome.verdict.undecided), str(outcome)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_leftovers_committed_instead_of_aborted_are_noticed(run_directory: Path, servers: Servers) -> None:
    """The process dies with a micro-batch staged that Spark will run again."""
    run = FamiliesRun(run_directory, servers, seed=2, families=_FEW, broken="commit-leftovers")

    outcome = run.run([At("spark-commit:before:1"), At("receipt:after:1")], ends_well=False)

    assert outcome.verdict.duplicated > 0, str(outcome)
    assert not outcome.verdict.is_exact
    assert any("surplus" in said for said in outcome.verdict.wrong), str(outcome)
