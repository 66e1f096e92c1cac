"""What became of an order to go back: read from the job directory, at every step of its life."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.job.rewind import RewindState, RewindStatus, find_rewind_status
from flinkish_spark.protocol.decisions import RewindIntent
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import RewindKind, RewindOrder, Tables
from tests.support.cli_rig import JobOnDisk

ORDER = RewindOrder("order-1", CheckpointId(1), Tables.KEEP, "by a test", 1)
INTENT = RewindIntent(
    BatchId(4), Lineage(1), "ordered", {}, RewindKind.TO_CHECKPOINT, CheckpointId(1), order_id="order-1"
)


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    job = JobOnDisk(tmp_path / "job")
    job.complete(1, 2)
    job.job_dir.create_rewind_order(ORDER)
    return job


def status(job: JobOnDisk) -> RewindStatus:
    return find_rewind_status(job.job_dir, ORDER)


def test_an_order_waits_for_the_next_start(job: JobOnDisk) -> None:
    assert status(job) == RewindStatus(
        RewindState.WAITING, "the next start of the query goes back to checkpoint 1"
    )


def test_an_order_is_begun_when_its_intent_is_durable(job: JobOnDisk) -> None:
    job.job_dir.create_rewind(INTENT)
    assert status(job) == RewindStatus(RewindState.BEGUN, "the job is going back to checkpoint 1")
    assert not status(job).state.is_closed


def test_an_order_that_is_deleted_after_it_was_begun_is_finished_all_the_same(job: JobOnDisk) -> None:
    job.job_dir.create_rewind(INTENT)
    (job.root / "orders/rewind.json").unlink()
    assert status(job).state is RewindState.BEGUN


def test_an_order_is_done_as_soon_as_its_lineage_has_begun(job: JobOnDisk) -> None:
    """The owner may die before it has taken order and intent away."""
    job.job_dir.create_rewind(INTENT)
    order, intent = (job.root / "orders/rewind.json"), (job.root / "rewinding/1.json")
    left = {path: path.read_bytes() for path in (order, intent)}
    job.job_dir.close_rewind(INTENT)
    text = "the job has gone back to checkpoint 1: lineage 1"
    done = RewindStatus(RewindState.DONE, text, Lineage(1), INTENT.first_removed)
    assert status(job) == done
    for path, data in left.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert status(job) == done


def test_an_order_stays_done_when_later_ones_wait_and_are_done(job: JobOnDisk) -> None:
    job.went_back(target=1, lineage=1, order_id="order-1")
    job.job_dir.create_rewind_order(RewindOrder("order-2", CheckpointId(1), Tables.KEEP, "", 2))
    assert status(job).lineage == Lineage(1)
    job.went_back(target=1, lineage=2, order_id="order-2")
    assert status(job).lineage == Lineage(1)


def test_a_rewind_that_nobody_ordered_is_not_the_order_s(job: JobOnDisk) -> None:
    job.went_back(target=1, lineage=1)
    assert status(job).state is RewindState.WAITING
    job.job_dir.create_rewind(RewindIntent(BatchId(4), Lineage(2), "something died", {}))
    assert status(job).state is RewindState.WAITING


def test_an_order_is_refused_with_the_reason(job: JobOnDisk) -> None:
    job.job_dir.refuse_rewind_order(ORDER, "the table was vacuumed")
    assert status(job) == RewindStatus(
        RewindState.REFUSED, "the job cannot go back to checkpoint 1: the table was vacuumed"
    )


def test_an_order_that_is_in_none_of_its_places_was_deleted_by_hand(job: JobOnDisk) -> None:
    (job.root / "orders/rewind.json").unlink()
    assert status(job).state is RewindState.GONE and status(job).state.is_closed
    assert "somebody deleted it by hand" in status(job).text


def test_an_order_that_is_closed_between_two_looks_is_not_gone(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner closes it after the first object was read, and before the second."""
    look, is_open = job.job_dir.rewind_order, [True]

    def closed_behind_the_look() -> RewindOrder | None:
        order = look()
        if is_open.pop():
            job.went_back(target=1, lineage=1, order_id="order-1")
        is_open.append(False)
        return order

    monkeypatch.setattr(job.job_dir, "rewind_order", closed_behind_the_look)
    assert status(job).state is RewindState.WAITING
    assert status(job).state is RewindState.DONE


def test_an_order_that_is_closed_behind_the_look_for_its_intent_is_done(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.root / "orders/rewind.json").unlink()
    job.job_dir.create_rewind(INTENT)

    def finished() -> RewindIntent | None:
        job.job_dir.close_rewind(INTENT)
        return None

    monkeypatch.setattr(job.job_dir, "open_rewind", finished)
    assert status(job).state is RewindState.DONE


def test_looking_changes_nothing(job: JobOnDisk) -> None:
    before = job.files()
    status(job)
    assert job.files() == before


def test_a_damaged_order_is_an_error(job: JobOnDisk) -> None:
    job.damage("orders/rewind.json")
    with pytest.raises(CorruptObjectError):
        status(job)


def test_a_client_gets_no_command_line_with_it() -> None:
    code = (
        "import sys, flinkish_spark.job.rewind\n"
        "print([m for m in ('click', 'rich', 'flinkish_spark.cli') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.strip() == "[]"
