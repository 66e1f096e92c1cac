"""Replays over files and foreign state: staged files vanish behind a decision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import CheckpointConfig
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.restore import UnpositionedSources
from flinkish_spark.savepoints.files import RestoreSettings
from tests.integration.spark.test_savepoints import expected, feed, plain_job, sums, two_operators
from tests.support.jobs import await_that, read_delta, run_until
from tests.support.savepoint_support import started, stop, stop_with


class DeleteStaged:
    """Deletes the staged files of a table behind a decision that names some, once."""

    def __init__(self, job_dir: Path, sink: str, spared: int = 0) -> None:
        self._job_dir, self._sink, self._spared = JobDir(LocalStore(job_dir)), sink, spared
        self.struck: list[int] = []
        #: Micro-batches that were staged, those of replays left out.
        self.staged = 0

    def on_step_start(self, step, subject):
        pass

    def on_step_end(self, step, subject):
        self.staged += step is Step.STAGED_FILE
        if step is not Step.DECISION or self.struck:
            return
        decision = self._job_dir.decision(CheckpointId(int(subject)))
        staged = [c for _, c in decision.group_by_sink().get(self._sink, [])]
        if decision.verdict is not Verdict.COMMIT or not staged:
            return
        self._spared -= 1
        if self._spared < 0:
            self.struck.append(int(subject))
            table = Path(staged[0].payload["path"])
            for committable in staged:
                for action in committable.payload["actions"]:
                    if "add" in action:
                        (table / action["add"]["path"]).unlink()

    def check(self) -> None:
        """The epoch was replayed, and nothing of that is left."""
        (checkpoint,) = self.struck
        assert self._job_dir.find_restaged(CheckpointId(checkpoint)).number == 1
        assert not list(Path(self._job_dir.store.root).glob("replay/*"))


def total_rows(table: Path) -> int:
    return len(read_delta(table)) if (table / "_delta_log").exists() else 0


@pytest.mark.nightly(by_day="tests/integration/broker/test_replay.py")
def test_an_epoch_of_files_and_two_operators_is_replayed_for_one_table_only(spark, job_dir, tmp_path) -> None:
    """Several micro-batches, an operator that a sink and another one read, a source with a log of its own."""
    folder, table, counts = tmp_path / "in", tmp_path / "table", tmp_path / "counts"
    feed(folder, "0", 1)
    env = two_operators(spark, job_dir, folder, table, counts)
    env.checkpoint = CheckpointConfig(interval_ms=4_000)
    vandal = DeleteStaged(job_dir, "counted", spared=1)
    env.observe(vandal)
    with started(env) as client:
        await_that(lambda: total_rows(counts) == 300, client)
        for number in (1, 2):
            before = vandal.staged
            feed(folder, str(number), number + 1)
            await_that(lambda before=before: vandal.staged > before, client)
        await_that(lambda: total_rows(counts) == 900, client, timeout_s=200)
        stop(client)
    vandal.check()
    assert sums(table) == expected(1, 3, 6)
    assert total_rows(counts) == 900
    versions = {int(p.stem) for p in (table / "_delta_log").glob("*.json")}
    # The other table has got nothing a second time.
    assert len(versions) == len(set(versions)) and total_rows(table) == 900


@pytest.mark.nightly
def test_the_first_epoch_of_a_restored_job_is_replayed_with_its_seed(spark, job_dir, tmp_path) -> None:
    savepoint, folder, rest, again = (
        tmp_path / "savepoint",
        tmp_path / "in",
        tmp_path / "rest",
        tmp_path / "again",
    )
    feed(folder, "0", 1)
    feed(rest, "1", 2)
    with started(plain_job(spark, job_dir, folder, tmp_path / "table")) as client:
        await_that(lambda: total_rows(tmp_path / "table") == 300, client)
        stop_with(client, savepoint)
    begin = UnpositionedSources.BEGIN_WHERE_THEY_ARE
    restore = RestoreSettings(str(savepoint), unpositioned=begin)
    env = plain_job(spark, again, rest, tmp_path / "other", restore=restore)
    vandal = DeleteStaged(again, "table")
    env.observe(vandal)
    run_until(env, lambda client: total_rows(tmp_path / "other") == 300)
    vandal.check()
    assert sums(tmp_path / "other") == Counter((f"u{n}", 3 * n) for n in range(300))
