"""More than twenty kills of one job with both sinks: nothing lost, nothing twice, nothing in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.process import Victim
from flinkish_spark.core.steps import Step
from flinkish_spark.testing.crash_points import KillPoint, Moment
from tests.crash.harness import EVERY_POINT, At, CrashRun, Shot
from tests.support.buckets import LocalS3
from tests.support.hdfs import LocalHdfs
from tests.support.services import BUILD


def test_the_list_holds_every_victim_and_both_sides_of_every_step() -> None:
    points = [KillPoint.parse(crash.point) for crash in EVERY_POINT if isinstance(crash, At)]
    # Nothing is durable at a trigger, and right after the intent comes the first delete.
    steps = set(Step) - {Step.TRIGGER, Step.REWIND_INTENT}
    # The job has no manifest and loses nothing that is decided: `make crash-sweep` and the simulator
    # strike there.
    steps -= {Step.MANIFEST, Step.RESTAGED}
    assert {(p.step, p.moment) for p in points} == {(step, moment) for step in steps for moment in Moment}
    subjects = {(p.subject, p.moment) for p in points if p.step is Step.SINK_COMMIT}
    assert subjects == {(sink, moment) for sink in ("totals-kafka", "totals-delta") for moment in Moment}
    assert {crash.victim for crash in EVERY_POINT if isinstance(crash, Shot)} == set(Victim)
    assert len(EVERY_POINT) == 22


# Seven to nine minutes alone on two cores; far more if they are shared. A few of them are in every run:
# `tests/crash/test_all_families.py`.
@pytest.mark.nightly
@pytest.mark.timeout(2_700)
def test_twenty_kills_lose_nothing_and_double_nothing(run_directory: Path) -> None:
    """Behaviours 127, 133, 142, 146, 155. What is compared, open transactions too, is in demo/verify.py."""
    outcome = CrashRun(run_directory, seed=20).run(EVERY_POINT)

    assert not outcome.failure, str(outcome)
    assert len(outcome.crashes) == len(EVERY_POINT)
    assert outcome.verdict.is_exact, str(outcome)
    assert outcome.verdict.orders > 0
    assert outcome.verdict.checkpoints >= 8
    assert list(run_directory.rglob("state/bases/totals/*")), "key groups were to move into bases"


#: Who dies, and where a bucket is written right then.
_IN_A_BUCKET = [
    crash
    for crash in EVERY_POINT
    if isinstance(crash, Shot)
    or KillPoint.parse(crash.point).step in (Step.STAGED_FILE, Step.DECISION, Step.SINK_COMMIT, Step.RECEIPT)
]


@pytest.mark.nightly
@pytest.mark.timeout(2_700)
@pytest.mark.parametrize("store", ["s3", "hdfs"])
def test_kills_of_a_job_of_which_everything_lies_in_a_bucket(run_directory: Path, store: str) -> None:
    """The job directory, and Spark's checkpoint in it; each start fences the one before by copies."""
    why_not = LocalHdfs.why_not(BUILD / "hdfs-jars") if store == "hdfs" else ""
    if why_not:
        pytest.skip(why_not)
    with LocalHdfs(BUILD / "hdfs-jars") if store == "hdfs" else LocalS3() as buckets:
        outcome = CrashRun(run_directory, seed=21, buckets=buckets).run(_IN_A_BUCKET)

    assert not outcome.failure, str(outcome)
    assert len(outcome.crashes) == len(_IN_A_BUCKET) >= 10
    assert outcome.verdict.is_exact, str(outcome)
    assert outcome.verdict.orders > 0
