"""State of a retained checkpoint, seen from outside: what is linked where, what is said if it is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.retention import SparkPins
from flinkish_spark.core.errors import JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import RewindIntent
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.plan_layout import OperatorInstance, PlanLayout, Scan, ScanRole, StateInstance
from flinkish_spark.savepoints import reader as retained
from flinkish_spark.savepoints.files import CheckpointNotRetainedError
from flinkish_spark.savepoints.reader import RetainedState, find_retained_state, is_job_dir
from tests.support.state_folder import SparkFolder

TOTALS = StateInstance("totals", "totals", 0, 0)
LAYOUT = PlanLayout((Scan(ScanRole.RECORDS, "orders", "totals"),), (OperatorInstance("totals", "totals"),))


class Job:
    """A job directory with checkpoints 1 and 2 behind micro-batches 2 and 5, both pinned."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job_dir = JobDir(LocalStore(root))
        self.job_dir.read_or_create_job({"name": "orders"})
        self.job_dir.record_fact("layout-0", LAYOUT.to_json())
        self.spark = SparkFolder(root)
        for batch in range(6):
            self.spark.run(batch, snapshot=batch == 3)
        base = self.spark.state / "bases" / "totals" / "3-2-0123456789abcdef"
        base.parent.mkdir(parents=True)
        base.write_bytes(b"base")
        self.pins = SparkPins(self.spark.log, root)
        for checkpoint, batch in ((1, 2), (2, 5)):
            decision = self.spark.decision(checkpoint, batch)
            self.job_dir.create_decision(decision)
            self.pins.pin(decision)

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "job")


def state_of(root: Path, checkpoint: int | None) -> RetainedState:
    return find_retained_state(StoreSpec(str(root)), checkpoint)


def view_of(state: RetainedState, scratch: Path) -> Path:
    return state.view(TOTALS.number, TOTALS.uid, StoreSpec(str(scratch))).folder


def seen(view: Path) -> set[str]:
    return {str(p.relative_to(view)) for p in view.rglob("*") if p.is_file() and p.suffix != ".crc"}


def test_a_view_has_the_log_entries_and_the_files_of_one_checkpoint(job, tmp_path) -> None:
    before = job.files()
    state = state_of(job.root, 2)
    assert (int(state.manifest.batch), state.operators("totals"), state.operators("other")) == (
        5,
        {"totals": TOTALS},
        {},
    )
    view = view_of(state, tmp_path / "scratch")
    assert seen(view) == {"offsets/5", "commits/5"} | {f"state/{name}" for name in state.manifest.files}
    assert "state/bases/totals/3-2-0123456789abcdef" in seen(view)
    assert (view / "commits/5").read_text() == job.spark.log.read("commits", BatchId(5))
    assert (view / "state/0/0/.6_a6p0.changelog.crc").is_file()
    assert job.files() == before and view.parent == tmp_path / "scratch"


def test_what_is_linked_stays_when_the_job_gives_the_checkpoint_up(job, tmp_path) -> None:
    view = view_of(state_of(job.root, 1), tmp_path)
    before = seen(view)
    job.pins.unpin(CheckpointId(1))
    assert seen(view) == before
    with pytest.raises(
        CheckpointNotRetainedError, match=r"checkpoint 1 .* is not kept any more.*choose from: 2"
    ):
        state_of(job.root, 1)


def test_where_no_link_is_possible_there_are_symbolic_ones(job, tmp_path, monkeypatch) -> None:
    def refuse(*names: object) -> None:
        raise OSError(18, "another file system")

    monkeypatch.setattr(retained.os, "link", refuse)
    view = view_of(state_of(job.root, 2), tmp_path)
    (one, *_) = [path for path in view.rglob("*.zip")]
    assert one.is_symlink() and one.is_file()


def test_the_newest_is_read_if_none_is_named(job) -> None:
    assert int(state_of(job.root, None).manifest.checkpoint) == 2


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [(3, "does not exist; the newest id is 2.*choose from: 1, 2"), (9, "newest id is 2")],
)
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(job, checkpoint, says) -> None:
    with pytest.raises(CheckpointNotRetainedError, match=says):
        state_of(job.root, checkpoint)


def test_a_file_that_vanished_meanwhile_is_said(job, tmp_path) -> None:
    state = state_of(job.root, 2)
    os.unlink(job.root / "pins/state/0/0/6_a6p0.changelog")
    with pytest.raises(CheckpointNotRetainedError, match=r"6_a6p0\.changelog is gone"):
        view_of(state, tmp_path)


def test_a_checkpoint_that_a_rewind_left_behind_is_refused(job) -> None:
    intent = RewindIntent(
        BatchId(3), Lineage(1), "test", {}, RewindKind.TO_CHECKPOINT, target=CheckpointId(1)
    )
    job.job_dir.create_rewind(intent)
    job.job_dir.close_rewind(intent)
    with pytest.raises(CheckpointNotRetainedError, match=r"left it behind.*choose from: 1"):
        state_of(job.root, 2)
    assert int(state_of(job.root, None).manifest.checkpoint) == 1


def test_a_checkpoint_of_before_a_rescale_is_read_with_the_names_of_its_time(job) -> None:
    intent = RewindIntent(BatchId(0), Lineage(1), "rescale", {}, RewindKind.RESEED, target=CheckpointId(2))
    job.job_dir.create_rewind(intent)
    job.job_dir.close_rewind(intent)
    now = PlanLayout(LAYOUT.scans, (OperatorInstance("other", "other"), *LAYOUT.operators))
    job.job_dir.record_fact("layout-1", now.to_json())
    assert state_of(job.root, None).operators("totals") == {"totals": TOTALS}


def test_a_job_directory_without_checkpoints_or_layout_is_said(tmp_path) -> None:
    root = tmp_path / "job"
    assert not is_job_dir(StoreSpec(str(root)))
    JobDir(LocalStore(root)).read_or_create_job({"name": "orders"})
    with pytest.raises(CheckpointNotRetainedError, match="there is no checkpoint to read"):
        state_of(root, None)
    job = Job(tmp_path / "other")
    (job.root / "facts/layout-0.json").unlink()
    with pytest.raises(JobDirError, match="layout-0 is gone"):
        state_of(job.root, 2)
