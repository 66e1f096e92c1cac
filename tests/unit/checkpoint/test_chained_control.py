"""Between a chained source and its coordinator: what is on offer, what is asked for, what an expiry says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.barriers import SourceWaits
from flinkish_spark.checkpoint.control import (
    AlignmentStatus,
    ControlFile,
    read_control,
    read_status,
    write_status,
)
from flinkish_spark.connectors.control_source import ControlReader
from flinkish_spark.connectors.kafka.chaining.reader import _parse_offer
from flinkish_spark.connectors.kafka.chaining.upstream import SharedPlan
from flinkish_spark.protocol.checkpoint import (
    FinishedParticipants,
    JobPhase,
    Participant,
    ParticipantKind,
    ParticipantStatus,
)
from flinkish_spark.protocol.coordination import Abort, Coordination, CoordinationRules, Initialise
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, OwnerEpoch
from tests.support.clocks import ManualClock

INTERVAL_MS = 60_000
STANDS = AlignmentStatus(True, "stands at upstream checkpoint 7", cut=7)


class Job:
    """A coordination without a coordinator: it ticks, and checkpoints go as a test says."""

    def __init__(self, folder: Path, interval_ms: int = INTERVAL_MS) -> None:
        self.control = ControlFile.create_for_start(folder / "control", OwnerEpoch(1), 0)
        self.clock = ManualClock(5_000)
        rules = CoordinationRules(
            interval_ms=10**9,
            min_pause_ms=0,
            timeout_ms=10**9,
            max_concurrent=1,
            finished=FinishedParticipants.ALLOWED,
        )
        participants = [Participant(ParticipantKind.SINK, "out")]
        self.state = Coordination(rules, participants, CheckpointId(1), self.clock.now_ms)
        self.state.on_phase(JobPhase.RUNNING, {"out": ParticipantStatus.RUNNING})
        self.waits = SourceWaits(self.control, self.state, self.clock, interval_ms)
        self.begun: list[CheckpointId] = []

    def says(self, status: AlignmentStatus) -> None:
        write_status(str(self.control.path), status)

    def tick(self) -> None:
        self.clock.now_ms += 20
        if self.waits.must_ask():
            self.ask()

    def ask(self) -> None:
        now_ms = self.clock.now_ms
        request = self.state.new_request(CheckpointPurpose.FOLLOW_UP, now_ms)
        effects = self.state.on_request(request, now_ms)
        self.begun += [effect.checkpoint for effect in effects if isinstance(effect, Initialise)]

    def offer(self) -> None:
        self.state.on_initialised(self.begun[-1], {})
        self.control.offer(self.begun[-1])

    def fails(self, reason: Reason = Reason.HOOK_FAILED) -> Abort:
        effects = self.state.on_declined(self.begun[-1], reason, "why", self.clock.now_ms)
        return next(self.waits.on_aborted(effect) for effect in effects if isinstance(effect, Abort))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


# -- asking ---------------------------------------------------------------------------------------------


def test_a_checkpoint_is_asked_for_at_once_and_once(job: Job) -> None:
    job.tick()
    assert job.begun == []
    job.says(STANDS)
    for _ in range(100):
        job.tick()
    assert len(job.begun) == 1


def test_behind_a_failure_the_source_waits_as_long_as_the_timer_would(job: Job) -> None:
    """A hook that fails is not called fifty times a second."""
    job.says(STANDS)
    for _ in range(500):
        job.tick()
        if len(job.begun) == 1 and job.state.open:
            job.fails()
    assert len(job.begun) == 1
    job.clock.now_ms += INTERVAL_MS
    job.tick()
    assert len(job.begun) == 2


def test_an_interval_of_milliseconds_is_still_a_pause(tmp_path: Path) -> None:
    job = Job(tmp_path, interval_ms=5)
    job.says(STANDS)
    job.tick()
    job.fails()
    for _ in range(49):
        job.tick()
    assert len(job.begun) == 1
    job.tick()
    assert len(job.begun) == 2


def test_a_failure_that_nobody_asked_for_makes_a_pause_too(job: Job) -> None:
    job.ask()
    job.fails(Reason.EXPIRED)
    job.says(STANDS)
    job.tick()
    assert len(job.begun) == 1
    job.clock.now_ms += INTERVAL_MS
    job.tick()
    assert len(job.begun) == 2


def test_the_next_cut_is_asked_for_without_a_pause(job: Job) -> None:
    job.says(STANDS)
    job.tick()
    job.state.on_stop(Reason.JOB_STOPPED, "")
    job.state.on_phase(JobPhase.RUNNING, {"out": ParticipantStatus.RUNNING})
    job.tick()
    assert len(job.begun) == 1
    job.says(AlignmentStatus(True, "stands at upstream checkpoint 8", cut=8))
    job.tick()
    assert len(job.begun) == 2


def test_a_request_that_came_to_nothing_is_made_again(job: Job) -> None:
    job.state.on_phase(JobPhase.STARTING, {})
    job.says(STANDS)
    job.tick()
    job.state.on_phase(JobPhase.RUNNING, {"out": ParticipantStatus.RUNNING})
    job.tick()
    assert job.begun == []
    job.clock.now_ms += INTERVAL_MS
    job.tick()
    assert len(job.begun) == 1


# -- what an expiry says ----------------------------------------------------------------------------------


def test_an_expired_checkpoint_says_what_the_source_waited_for(job: Job) -> None:
    job.ask()
    job.offer()
    job.says(AlignmentStatus(False, "waits for t-1"))
    assert job.fails(Reason.EXPIRED).text == "why; the source waits for t-1"


def test_a_source_that_was_not_asked_is_not_to_blame(job: Job) -> None:
    """A micro-batch that runs for ever: the source still says what it said before the offer."""
    job.says(STANDS)
    job.tick()
    job.offer()
    text = job.fails(Reason.EXPIRED).text
    assert text.startswith("why; the source stands at upstream checkpoint 7, and was not asked for input")


def test_before_the_offer_and_behind_the_barrier_the_source_has_nothing_to_do_with_it(job: Job) -> None:
    """A hook hangs, or a sink does; what the source waits for by then is the next checkpoint's."""
    job.says(AlignmentStatus(False, "reads on"))
    job.ask()
    assert job.fails(Reason.EXPIRED).text == "why"
    job.ask()
    job.offer()
    job.says(AlignmentStatus(False, "reads on", drawn=int(job.begun[-1])))
    assert job.fails(Reason.EXPIRED).text == "why"


def test_other_failures_are_told_as_they_are(job: Job) -> None:
    job.says(AlignmentStatus(False, "reads on"))
    job.ask()
    job.offer()
    assert job.fails(Reason.DECLINED).text == "why"


# -- what is on offer -------------------------------------------------------------------------------------


def seen_at(path: str) -> tuple[int, dict[str, int]]:
    """Return what a chained source and the control source see."""
    offered = _parse_offer(read_control(path), 0)
    return int(offered.checkpoint), ControlReader(path).latestOffset(start(0), None)


def test_an_aborted_checkpoint_is_drawn_no_more(job: Job) -> None:
    """Drawn, its id would be dead and the cut used up."""
    path = str(job.control.path)
    job.ask()
    job.offer()
    assert seen_at(path) == (1, start(1))
    job.fails(Reason.EXPIRED)
    assert seen_at(path) == (0, start(0))


def start(checkpoint: int) -> dict[str, int]:
    return {"flinkish:checkpoint": checkpoint}


def test_only_what_is_on_offer_is_withdrawn(job: Job) -> None:
    job.control.offer(CheckpointId(1))
    job.control.offer(CheckpointId(2))
    assert not job.control.withdraw(CheckpointId(1))
    assert int(_parse_offer(read_control(str(job.control.path)), 0).checkpoint) == 2
    assert job.control.withdraw(CheckpointId(2))
    assert not job.control.withdraw(CheckpointId(2))


def test_what_an_earlier_start_of_the_query_left_is_not_believed(tmp_path: Path) -> None:
    """An id that was offered and not drawn is sealed with ABORT, and rounds begin at 1 again."""
    folder = tmp_path / "control"
    (folder / "first-offsets").mkdir(parents=True)
    (folder / "first-offsets" / "1.json").write_text("{}")
    before = ControlFile.create_for_start(folder, OwnerEpoch(1), 0)
    before.offer(CheckpointId(5))
    write_status(str(before.path), STANDS)
    rounds = SharedPlan(before.path.with_suffix(".rounds"))
    assert rounds.plan_once({"t": 1}, lambda: {"t": 2}) == {"t": 2}

    now = ControlFile.create_for_start(folder, OwnerEpoch(1), 1)
    assert [path.name for path in folder.iterdir()] == ["first-offsets"]
    assert list((folder / "first-offsets").iterdir())
    # A Python process of the earlier start goes on for a while.
    write_status(str(before.path), STANDS)
    rounds.plan_once({"t": 2}, lambda: {"t": 3})
    assert int(_parse_offer(read_control(str(now.path)), 4).checkpoint) == 4
    assert now.source_status() is None
    fresh = SharedPlan(now.path.with_suffix(".rounds"))
    assert fresh.plan_once({"t": 1}, lambda: {"t": 9}) == {"t": 9}


def test_a_newer_owners_files_are_left_alone(tmp_path: Path) -> None:
    """A process that was deposed may not know it yet when it starts its query again."""
    for name in ("1.json", "2-0.json", "2-0.rounds", "2-3.alignment", "2-0.tmp", "3-0.json", "3-0.rounds"):
        (tmp_path / name).write_text(json.dumps({}))
    (tmp_path / "notes.json").write_text("mine")
    assert ControlFile.create_for_start(tmp_path, OwnerEpoch(2), 4).path == tmp_path / "2-4.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-0.json", "3-0.rounds", "notes.json"]


def test_a_status_of_nobody_is_none(tmp_path: Path) -> None:
    assert read_status(str(tmp_path / "1-0.json")) is None
