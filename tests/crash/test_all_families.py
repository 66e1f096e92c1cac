"""Kills of one job with a sink of every family: nothing lost, nothing twice, nothing in part, in any of them.

`make test` runs this; the whole list of points is `tests/crash/test_crash.py`, and every call of a checkpoint
is `make crash-sweep`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flinkish_spark.core.steps import Step
from flinkish_spark.testing.crash_points import KillPoint, Moment
from tests.crash.families import FAMILIES
from tests.crash.families_rig import FamiliesRun, Servers
from tests.crash.harness import At
from tests.crash.kill_points import ALWAYS, SEED_VARIABLE, drawn, seed
from tests.crash.sweep.sinks import SINKS

_POINTS, _SHOTS, _FAILING_TASKS = 1, 1, 3


# Less than three minutes on two cores that do nothing else; far more if they are shared.
@pytest.mark.timeout(2_700)
def test_kills_that_are_always_made_and_some_that_are_drawn(run_directory: Path, servers: Servers) -> None:
    """Behaviours 127, 133, 142, 146, 155. What is compared is in `FamiliesRig.verify` and demo/verify.py."""
    told = seed()
    print(f"to repeat these kills: {SEED_VARIABLE}={told}", flush=True)
    crashes = [*ALWAYS, *drawn(random.Random(told), _POINTS, _SHOTS)]
    run = FamiliesRun(run_directory, servers, seed=20, failures=_FAILING_TASKS)

    outcome = run.run(crashes)

    assert not outcome.failure, str(outcome)
    assert outcome.crashes == [str(crash) for crash in crashes]
    assert outcome.verdict.is_exact, str(outcome)
    assert outcome.verdict.orders > 500
    assert outcome.verdict.checkpoints >= 4
    # Spark ran tasks again whose first attempts had written to the sinks.
    assert len(list(run.failures.iterdir())) == _FAILING_TASKS
    assert list(run_directory.rglob("state/bases/totals/*")), "key groups were to move into bases"


def test_every_family_meets_both_sides_of_the_decision() -> None:
    assert {"kafka", "kafka-second", "delta", "files", "two-phase"} <= set(FAMILIES) <= set(SINKS)
    assert any(name.startswith("jdbc") for name in FAMILIES)
    points = [KillPoint.parse(crash.point) for crash in ALWAYS if isinstance(crash, At)]
    around = [(point.step, point.moment) for point in points]
    assert {(Step.DECISION, moment) for moment in Moment} <= set(around)
    # In front of the decision, behind it, and in the recovery of either.
    assert {Step.STAGED_FILE, Step.SINK_COMMIT, Step.REWIND_DELETE} <= {step for step, _ in around}


def test_a_draw_depends_on_its_seed_alone() -> None:
    one, two = (drawn(random.Random("a1b2c3"), _POINTS, _SHOTS) for _ in range(2))
    assert one == two and len(one) == _POINTS + _SHOTS
    assert any(drawn(random.Random(str(number)), _POINTS, _SHOTS) != one for number in range(5))
