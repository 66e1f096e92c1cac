"""`flinkish rewind`: what is asked before, what is ordered, and what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.answers import CheckpointAnswer
from flinkish_spark.cli import rewind
from flinkish_spark.cli.rewind import OrderOutcome
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.job_dir import REWIND_ORDER_KEY
from flinkish_spark.job import asking
from flinkish_spark.job.requests import Inbox, OutsideRequest, Reply, ReplyKind, RequestKind
from flinkish_spark.job.rewind import RewindState
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindOrder, Tables
from tests.support.cli_rig import JobOnDisk, flinkish, said

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "command-line.md"
#: For a job that does not run.
QUICK = ("--timeout-s", "0.3")
#: For one that takes the message; this machine may be busy.
PATIENT = ("--timeout-s", "2")
OBEYS = CheckpointAnswer.make_completed(CheckpointId(1))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a second where a user waits for five."""
    monkeypatch.setattr(rewind, "_TAKEN_WITHIN_MS", 1_000)


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    job = JobOnDisk(tmp_path / "job")
    job.complete(1, 2, 3)
    return job


def order_of(job: JobOnDisk) -> RewindOrder:
    order = job.job_dir.rewind_order()
    assert order is not None
    return order


def give_order(job: JobOnDisk, target: int, tables: Tables = Tables.KEEP) -> RewindOrder:
    at_ms = SystemClock().wall_ms()
    order = RewindOrder("order-1", CheckpointId(target), tables, "by a test", at_ms)
    job.job_dir.create_rewind_order(order)
    return order


def test_a_job_that_does_not_run_obeys_at_its_next_start(job: JobOnDisk) -> None:
    """Behaviour 60."""
    result = flinkish("rewind", job.root, 1, "--yes", *QUICK)
    assert result.exit_code == 0
    # Not beside it that the message was taken back: the order is not.
    assert result.stdout == "ordered: the next start goes back to checkpoint 1; the job does not run\n"
    assert (order_of(job).target, order_of(job).tables) == (CheckpointId(1), Tables.KEEP)
    assert not [name for name in job.files() if name.startswith("requests/")]


def test_a_running_job_is_told_and_watched(job: JobOnDisk) -> None:
    def obey(request: OutsideRequest) -> CheckpointAnswer:
        job.went_back(target=1, lineage=1, order_id=request.target)
        return OBEYS

    with job.running(obey) as seen:
        result = flinkish("rewind", job.root, 1, "--tables", "restore", "--yes", "--json")
    assert result.exit_code == 0
    assert [request.kind for request in seen] == [RequestKind.REWIND]
    assert said(result) == {
        "job_dir": str(job.root),
        "job": "orders",
        "job_uuid": str(job.uuid),
        "outcome": "DONE",
        "text": "the job has gone back to checkpoint 1: lineage 1",
        "order_id": seen[0].target,
        "checkpoint": 1,
        "tables": "RESTORE",
        "left_behind": [2, 3],
        "lineage": 1,
        "first_removed": 4,
    }


def test_what_will_happen_is_said_before_it_is_confirmed(job: JobOnDisk) -> None:
    result = flinkish("rewind", job.root, 1, *QUICK, answers="y\n")
    assert result.exit_code == 0
    assert "become dead for good: 2, 3" in result.stderr
    assert "tables keep rows that were committed since" in result.stderr
    assert "Go back? [y/N]" in result.stderr
    order = order_of(job)
    assert order.reason == "ordered by `flinkish rewind`"


def test_many_that_are_left_behind_are_counted(job: JobOnDisk) -> None:
    job.complete(*range(4, 9))
    result = flinkish("rewind", job.root, 3, "--yes", *QUICK)
    assert "become dead for good: 4, 5, 6, 7, 8\n" in result.stderr
    job.job_dir.store.delete(REWIND_ORDER_KEY)
    result = flinkish("rewind", job.root, 2, "--yes", *QUICK)
    assert "become dead for good: 6, from 3 to 8\n" in result.stderr


@pytest.mark.parametrize("answers", ["n\n", ""])
def test_nothing_is_ordered_without_a_yes(job: JobOnDisk, answers: str) -> None:
    before = job.files()
    result = flinkish("rewind", job.root, 1, "--tables", "restore", answers=answers)
    assert result.exit_code == 1
    assert "tables become what they were then" in result.stderr
    assert job.files() == before


def test_a_program_has_to_say_yes_itself(job: JobOnDisk) -> None:
    result = flinkish("rewind", job.root, 1, "--json")
    assert result.exit_code == 2 and "add --yes" in result.stderr
    assert job.job_dir.rewind_order() is None


def test_the_newest_may_be_gone_back_to(job: JobOnDisk) -> None:
    result = flinkish("rewind", job.root, 3, "--yes", *QUICK)
    assert result.exit_code == 0 and "become dead for good: none so far" in result.stderr


@pytest.mark.parametrize(
    ("target", "why"), [(9, "It does not exist"), (4, "It was not completed"), (5, "not every sink")]
)
def test_checkpoints_that_cannot_be_gone_back_to_are_refused(job: JobOnDisk, target: int, why: str) -> None:
    job.abort(4, "EXPIRED: 60 s")
    job.commit(5)
    result = flinkish("rewind", job.root, target, "--yes", *QUICK)
    assert result.exit_code == 1
    assert why in result.stderr and result.stderr.count("\n") == 1
    assert job.job_dir.rewind_order() is None


def test_a_checkpoint_whose_kept_state_is_damaged_is_refused(job: JobOnDisk) -> None:
    job.pin(1, {"0/0/1.zip": 10})
    result = flinkish("rewind", job.root, 1, "--yes", *QUICK)
    assert result.exit_code == 1 and "0/0/1.zip is gone" in result.stderr


def test_another_order_that_waits_is_named(job: JobOnDisk) -> None:
    give_order(job, 2)
    result = flinkish("rewind", job.root, 1, "--yes", *QUICK)
    assert result.exit_code == 1
    assert "An order to go back to checkpoint 2 waits" in result.stderr
    assert order_of(job).target == CheckpointId(2)


def test_asking_again_waits_for_the_order_that_was_given_before(job: JobOnDisk) -> None:
    given = give_order(job, 1)
    with job.running(lambda request: OBEYS) as seen:
        result = flinkish("rewind", job.root, 1, *PATIENT)
    assert [request.target for request in seen] == [given.order_id]
    assert "it was ordered before" in result.stderr
    assert order_of(job) == given


def test_the_same_checkpoint_with_another_choice_for_tables_is_another_order(job: JobOnDisk) -> None:
    give_order(job, 1, Tables.RESTORE)
    result = flinkish("rewind", job.root, 1, "--yes", *QUICK)
    assert result.exit_code == 1 and "waits" in result.stderr


def test_a_job_that_takes_longer_leaves_the_order(job: JobOnDisk) -> None:
    with job.running(lambda request: OBEYS):
        result = flinkish("rewind", job.root, 1, "--yes", *PATIENT)
    assert result.exit_code == 3
    assert "not done within 2 s: the job has begun to obey; the order stays" in result.stderr
    assert order_of(job).target == CheckpointId(1)


def test_a_job_that_takes_the_message_and_dies_leaves_the_order(job: JobOnDisk) -> None:
    with job.running(lambda request: None):
        result = flinkish("rewind", job.root, 1, "--yes", *PATIENT)
    assert result.exit_code == 3 and "the order stays" in result.stderr


def test_a_job_that_refuses_the_message_leaves_the_order(job: JobOnDisk) -> None:
    refusal = CheckpointAnswer.make_refused(CheckpointFailureReason.SHUT_DOWN)
    with job.running(lambda request: refusal):
        result = flinkish("rewind", job.root, 1, "--yes", "--json", *PATIENT)
    assert result.exit_code == 3
    assert said(result)["outcome"] == "NOT_ANSWERED" and "refused: SHUT_DOWN" in said(result)["text"]
    assert "the order stays" in said(result)["text"]
    assert order_of(job).target == CheckpointId(1)


def test_a_successor_that_refuses_the_message_obeys_the_order(job: JobOnDisk) -> None:
    """Owner 2 has taken over when the message for owner 1 comes; it finds the order by itself."""

    def obey() -> None:
        time.sleep(0.3)
        job.went_back(target=1, lineage=1, order_id=order_of(job).order_id)

    thread = threading.Thread(target=obey)

    def take_over(request: OutsideRequest) -> CheckpointAnswer:
        thread.start()
        return CheckpointAnswer.make_refused(CheckpointFailureReason.SHUT_DOWN)

    with job.running(take_over):
        result = flinkish("rewind", job.root, 1, "--yes", "--timeout-s", "200")
    thread.join()
    assert (result.exit_code, result.stdout) == (0, "the job has gone back to checkpoint 1: lineage 1\n")


def test_a_job_that_finds_the_order_by_itself_is_waited_for(job: JobOnDisk) -> None:
    """It goes back while nobody takes the message: it has stopped its query and takes over again."""
    job.went_back(target=3, lineage=1)

    def start_again() -> None:
        while job.job_dir.rewind_order() is None:
            time.sleep(0.01)
        job.take_over(2)
        time.sleep(1.2)
        job.went_back(target=1, lineage=2, order_id=order_of(job).order_id)

    thread = threading.Thread(target=start_again)
    thread.start()
    result = flinkish("rewind", job.root, 1, "--yes", "--timeout-s", "200")
    thread.join()
    assert (result.exit_code, result.stdout) == (0, "the job has gone back to checkpoint 1: lineage 2\n")


def test_an_order_that_the_job_refuses_says_why(job: JobOnDisk) -> None:
    def refuse(request: OutsideRequest) -> CheckpointAnswer:
        job.job_dir.refuse_rewind_order(order_of(job), "the table was vacuumed")
        return OBEYS

    with job.running(refuse):
        result = flinkish("rewind", job.root, 1, "--yes")
    assert result.exit_code == 1
    assert "cannot go back to checkpoint 1: the table was vacuumed" in result.stderr


def test_an_order_that_somebody_deleted_is_not_done(job: JobOnDisk) -> None:
    def lose(request: OutsideRequest) -> CheckpointAnswer:
        (job.root / "orders/rewind.json").unlink()
        return OBEYS

    with job.running(lose):
        result = flinkish("rewind", job.root, 1, "--yes")
    assert result.exit_code == 1 and "somebody deleted it by hand" in result.stderr


# -- interrupts -------------------------------------------------------------------------------------
def interrupt(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
    """Let Ctrl-C come at the first wait."""

    def interrupted(self: SystemClock, duration_ms: int) -> None:
        before()
        raise KeyboardInterrupt

    monkeypatch.setattr(SystemClock, "sleep_ms", interrupted)


@pytest.mark.parametrize("is_taken", [True, False])
def test_an_interrupt_is_no_answer_and_leaves_the_order(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """A job that runs may obey a moment later, whether it has taken the message or not."""
    inbox = Inbox(job.job_dir, SystemClock())
    inbox.took_over(OwnerEpoch(1))
    interrupt(monkeypatch, inbox.take if is_taken else lambda: None)
    result = flinkish("rewind", job.root, 1, "--yes", "--json")
    assert result.exit_code == 3
    assert said(result)["outcome"] == "NOT_ANSWERED" and said(result)["lineage"] is None
    assert "interrupted; the order to go back to checkpoint 1 stays" in said(result)["text"]
    assert order_of(job).order_id == said(result)["order_id"]
    assert not [name for name in job.files() if name.startswith("requests/")]


def test_an_interrupt_behind_the_answer_is_no_answer_either(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ask_until_interrupted", lambda *words, **more: Reply(ReplyKind.COMPLETED))
    interrupt(monkeypatch)
    result = flinkish("rewind", job.root, 1, "--yes")
    assert result.exit_code == 3 and "the order to go back to checkpoint 1 stays" in result.stderr


def test_an_interrupt_behind_the_end_says_how_it_ended(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = give_order(job, 1)
    interrupt(monkeypatch, lambda: job.went_back(target=1, lineage=1, order_id=given.order_id))
    result = flinkish("rewind", job.root, 1)
    assert (result.exit_code, result.stdout) == (0, "the job has gone back to checkpoint 1: lineage 1\n")


@pytest.mark.parametrize("is_written", [True, False])
def test_an_interrupt_while_the_order_is_written_tells_whether_it_is(
    job: JobOnDisk, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    def interrupted(job_on_disk: object, target: CheckpointId, tables: Tables) -> RewindOrder:
        if is_written:
            give_order(job, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(rewind, "_order", interrupted)
    result = flinkish("rewind", job.root, 1, "--yes")
    assert result.exit_code == (3 if is_written else 1)
    assert ("the order to go back to checkpoint 1 stays" in result.stderr) is is_written


def test_every_end_of_an_order_is_documented() -> None:
    assert {state.value for state in RewindState if state.is_closed} <= {one.value for one in OrderOutcome}
    row = next(
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if "WAITS_FOR_START" in line
    )
    assert all(f"`{outcome.value}`" in row for outcome in OrderOutcome)


def test_checkpoints_that_are_dead_already_are_not_named_again(job: JobOnDisk) -> None:
    job.went_back(target=2, lineage=1)
    job.complete(4, lineage=1)
    result = flinkish("rewind", job.root, 1, "--yes", "--json", *QUICK)
    assert said(result)["left_behind"] == [2, 4]
    assert said(result)["outcome"] == "WAITS_FOR_START" and said(result)["lineage"] is None


@pytest.mark.parametrize("words", [("0",), ("x",), ("1", "--tables", "maybe"), ("1", "--timeout-s", "0")])
def test_wrong_usage_is_told_from_a_refusal(job: JobOnDisk, words: tuple[str, ...]) -> None:
    assert flinkish("rewind", job.root, *words).exit_code == 2
