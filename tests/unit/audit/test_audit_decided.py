"""What the outputs show against what was decided, with nothing of Kafka or Spark."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flinkish_spark.audit.decided import JobDecisions, Visible, partial_checkpoints
from flinkish_spark.core.errors import UserError
from flinkish_spark.protocol.decisions import RewindIntent
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import RewindKind
from tests.support.cli_rig import JobOnDisk


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    """Checkpoint n has the micro-batches 2n and 2n + 1, with 3 rows each."""
    return JobOnDisk(tmp_path / "job")


def found(job: JobOnDisk, by_batch: dict[str, int] | None = None, **more: dict[int, int]) -> list[str]:
    decided = JobDecisions.read(job.job_dir)
    batches = None if by_batch is None else Counter(by_batch)
    checkpoints = Counter(more["checkpoints"]) if more else None
    visible = Visible("out", batches, checkpoints)
    partial = partial_checkpoints(decided, visible, decided)
    return [f"{one.what} {one.decided_rows} {one.visible_rows}" for one in partial]


EXACT = {"0/2": 3, "0/3": 3, "0/4": 3, "0/5": 3}


def test_a_checkpoint_is_whole_if_each_micro_batch_is(job: JobOnDisk) -> None:
    job.complete(1, 2)
    assert found(job, EXACT) == []
    assert found(job, {**EXACT, "0/3": 2}) == ["checkpoint 1 6 5"]
    assert found(job, {**EXACT, "0/4": 2, "0/5": 4}) == ["checkpoint 2 6 6"], "one for another is not whole"
    assert found(job, {}) == ["checkpoint 1 6 0", "checkpoint 2 6 0"]
    assert found(job, checkpoints={1: 6, 2: 6}) == [] and found(job, checkpoints={1: 6}) == [
        "checkpoint 2 6 0"
    ]


def test_what_is_visible_is_decided(job: JobOnDisk) -> None:
    job.complete(1, 2)
    assert found(job, {**EXACT, "0/6": 1}) == ["micro-batch 0/6 0 1"]
    assert found(job, checkpoints={1: 6, 2: 6, 3: 1}) == ["checkpoint 3 0 1"]
    # Decided and not confirmed: some of it may be visible.
    job.commit(3)
    assert found(job, {**EXACT, "0/6": 1}) == [] and found(job, {**EXACT, "0/6": 3, "0/8": 3}) != []
    # Older than the oldest decision: nobody knows any more.
    assert found(job, {**EXACT, "0/1": 99}) == [] and found(job, checkpoints={0: 5, 1: 6, 2: 6}) == []


def test_what_a_rewind_left_behind_is_not_compared(job: JobOnDisk) -> None:
    job.complete(1, 2)
    job.went_back(1, 1)
    job.complete(3, lineage=1)
    decided = JobDecisions.read(job.job_dir)
    assert decided.newest is not None and int(decided.newest.checkpoint) == 3
    assert [decided.is_dead_batch(name) for name in ("0/3", "0/4", "1/6", "nonsense")] == [
        False,
        True,
        False,
        False,
    ]
    live = {"0/2": 3, "0/3": 3, "1/6": 3, "1/7": 3}
    assert found(job, live) == [] and found(job, {**live, "0/4": 3}) == []
    assert found(job, checkpoints={1: 6, 2: 6, 3: 6}) == [] and found(job, checkpoints={1: 6, 3: 6}) == []


def test_what_was_given_up_undecided_must_not_be_visible(job: JobOnDisk) -> None:
    """A plain rewind takes back nothing that a reader could have seen: if one sees it, it is a fault."""
    job.complete(1)
    plain = RewindIntent(BatchId(4), Lineage(1), "died", {}, RewindKind.PLAIN, CheckpointId(1))
    job.job_dir.create_rewind(plain)
    job.job_dir.close_rewind(plain)
    job.complete(2, lineage=1)
    live = {"0/2": 3, "0/3": 3, "1/4": 3, "1/5": 3}
    assert found(job, live) == []
    assert found(job, {**live, "0/4": 3}) == ["micro-batch 0/4 0 3"]


def test_what_became_visible_meanwhile_is_looked_up_again(job: JobOnDisk) -> None:
    job.complete(1)
    before = JobDecisions.read(job.job_dir)
    job.complete(2)
    after = JobDecisions.read(job.job_dir)
    assert partial_checkpoints(before, Visible("out", Counter(EXACT)), after) == []
    assert partial_checkpoints(before, Visible("out", Counter(EXACT)), before) != []


def test_what_was_deleted_between_two_looks_is_not_judged(job: JobOnDisk) -> None:
    """A job with short intervals has deleted by the second look all that the first one saw."""
    job.complete(1, 2)
    before = JobDecisions.read(job.job_dir)
    job.complete(5, 6)
    after = replace(found := JobDecisions.read(job.job_dir), checkpoints={5: found.checkpoints[5]})
    batches = Counter({**EXACT, "0/6": 3, "0/9": 3, "0/10": 3, "0/11": 3})
    assert partial_checkpoints(before, Visible("out", batches), after) == []
    ids = Counter({1: 6, 2: 6, 3: 6, 4: 6, 5: 6})
    assert partial_checkpoints(before, Visible("out", None, ids), after) == []
    # Where the looks meet nothing lies between them, and behind the last one nothing is known to be decided.
    later = partial_checkpoints(before, Visible("out", batches + Counter({"0/12": 1})), after)
    assert [one.what for one in later] == ["micro-batch 0/12"]
    met = replace(found, checkpoints={2: found.checkpoints[2], 5: found.checkpoints[5]})
    assert [one.what for one in partial_checkpoints(before, Visible("out", None, ids), met)] == [
        "checkpoint 3",
        "checkpoint 4",
    ]


def test_a_sink_is_one_of_the_job_s(job: JobOnDisk) -> None:
    job.complete(1)
    decided = JobDecisions.read(job.job_dir)
    decided.check_sink("out")
    with pytest.raises(UserError, match=r"no sink 'in'.*out"):
        decided.check_sink("in")
