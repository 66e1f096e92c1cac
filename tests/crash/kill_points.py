"""Which kills a run makes of the job with a sink of every family: some always, some drawn by chance.

The draw depends on the seed alone, and the seed on the commit: a run that failed is repeated with the
``SEED=...`` that it has printed, and the next commit meets other moments.
"""

from __future__ import annotations

import os
import random
import subprocess

from demo.process import Victim
from demo.rig import ROOT
from flinkish_spark.core.steps import Step
from flinkish_spark.testing.crash_points import KillPoint, Moment
from tests.crash.families import FAMILIES
from tests.crash.harness import At, Crash, Shot

SEED_VARIABLE = "SEED"
_MIDDLE, _LAST = FAMILIES[2], FAMILIES[-1]

#: One job, one checkpoint, one decision: each of these hits the sinks of all families. The recovery is the
#: first to take a step where a decided checkpoint is left behind; the second time is the coordinator's.
ALWAYS: tuple[Crash, ...] = (
    # Staged in all sinks, and nobody knows: leftovers to be cleaned away.
    At("staged-file:before:1"),
    # Right before the decision, which leaves kept micro-batches to a recovery that takes them for dead ...
    At("decision:before:1"),
    # ... and dies in the middle of going back.
    At("rewind-delete:after:1", finds_dead=True),
    # Right behind the decision: nothing of it is committed ...
    At("decision:after:1"),
    # ... until the recovery dies between two of its commits.
    At(f"sink-commit:after:1:{_MIDDLE}"),
    # All have committed, and none knows that the others have.
    At(f"sink-commit:after:2:{_LAST}"),
)

#: The others come by in any life. Right behind a trigger nothing is durable; a rewind has to be led up to.
_NOT_DRAWN = {Step.TRIGGER, Step.MANIFEST, Step.RESTAGED, Step.REWIND_INTENT, Step.REWIND_DELETE}
_DRAWN = tuple(step for step in Step if step not in _NOT_DRAWN)
_OF_A_SINK = {Step.SINK_COMMIT, Step.SINK_COMPLETE}


def seed() -> str:
    """Return what SEED says, or else the commit."""
    told = os.environ.get(SEED_VARIABLE, "")
    if told:
        return told
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no-commit"


def drawn(chance: random.Random, points: int, shots: int) -> list[Crash]:
    """Return kills at points of chance, and at moments of chance, in an order of chance."""
    crashes: list[Crash] = [_point(chance) for _ in range(points)]
    crashes += [Shot(victim, within_s=2.0) for victim in chance.sample(list(Victim), shots)]
    chance.shuffle(crashes)
    return crashes


def _point(chance: random.Random) -> At:
    step = chance.choice(_DRAWN)
    moment, occurrence = chance.choice(list(Moment)), chance.randint(1, 2)
    subject = chance.choice(FAMILIES) if step in _OF_A_SINK else ""
    return At(str(KillPoint(step, moment, occurrence, subject)))
