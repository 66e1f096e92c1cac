"""A real coordinator that a test drives by hand: clock, threads, store, Spark's log and sinks.

What is real: coordinator, completion, confirmation, initialisation, hooks, tracker, ownership, job
directory. Objects lie in memory. Threads run when the test says so, or at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.answers import CheckpointAnswer, CheckpointTriggerRequest
from flinkish_spark.checkpoint.commit import Confirmation
from flinkish_spark.checkpoint.completion import CoordinatorParts
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.control import AlignmentStatus
from flinkish_spark.checkpoint.coordinator import CheckpointCoordinator
from flinkish_spark.checkpoint.epoch_writer import AdmissionGate
from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership, take_over
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.statistics import CheckpointTracker
from flinkish_spark.checkpoint.transactional_ids import BlockPool
from flinkish_spark.contracts.hooks import MasterHook
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult, ObjectMissing
from flinkish_spark.core.watchdog import Waiting, skip_watch
from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.failures import FailureManager
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import (
    Barrier,
    CommitAnswer,
    Committable,
    Outcome,
    SinkAck,
    StagedBatch,
    TaskAck,
)
from tests.support.clocks import ManualClock
from tests.support.null_parts import NO_ACCUMULATORS, NO_TIME


class Fault(enum.Enum):
    """What goes wrong with a write."""

    REFUSED = "REFUSED"
    #: It happens, and whoever wrote is told that it did not.
    ANSWER_LOST = "ANSWER_LOST"


class MemoryStore:
    """A store in memory; `faults` are (end of a key, what goes wrong), each for one write."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[tuple[str, Fault]] = []
        self._listed: dict[str, tuple[str, ...]] = {}

    def read(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectMissing(key) from None

    def put(self, key: str, data: bytes) -> None:
        self._write(key, lambda: self.objects.__setitem__(key, data))

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        is_new = key not in self.objects
        self._write(key, lambda: self.objects.setdefault(key, data))
        return CreateResult.CREATED if is_new else CreateResult.EXISTS

    def list(self, prefix: str) -> tuple[str, ...]:
        if prefix not in self._listed:
            start = f"{prefix}/"
            names = {key[len(start) :].partition("/")[0] for key in self.objects if key.startswith(start)}
            self._listed[prefix] = tuple(start + name for name in sorted(names))
        return self._listed[prefix]

    def delete(self, key: str) -> None:
        self._write(key, lambda: self.objects.pop(key, None))

    def _write(self, key: str, write: Callable[[], object]) -> None:
        hit = next((one for one in self.faults if key.endswith(one[0])), None)
        if hit is not None:
            self.faults.remove(hit)
        self._listed.clear()
        if hit is None or hit[1] is Fault.ANSWER_LOST:
            write()
        if hit is not None:
            raise StoreError(f"cannot write {key}", why="the disk is full")


class HandThread:
    """Runs when it is told to; joining it tells it."""

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self.name, self._target, self._ran = name, target, False

    def run(self) -> None:
        if not self._ran:
            self._ran = True
            self._target()

    def is_alive(self) -> bool:
        return not self._ran

    def join(self) -> None:
        self.run()


class HandThreads:
    """Threads that run at once (`held` is empty), or wait until `let` names them."""

    def __init__(self) -> None:
        #: Beginnings of names, without `flinkish-`, of threads that wait.
        self.held: tuple[str, ...] = ()
        self.waiting: list[HandThread] = []

    def start(self, name: str, target: Callable[[], None]) -> HandThread:
        thread = HandThread(name.removeprefix("flinkish-"), target)
        if self.held and thread.name.startswith(self.held):
            self.waiting.append(thread)
        else:
            thread.run()
        return thread

    def let(self, name: str) -> None:
        """Run the thread of that name to its end."""
        thread = next(one for one in self.waiting if one.name == name)
        self.waiting.remove(thread)
        thread.run()

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.waiting]


class RiggedCommitter(Committer):
    """Notes what is asked of it; answers what it is told to, COMMITTED otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        #: Answers of the next calls of `commit`, one outcome for all of a call's committables.
        self.outcomes: list[Outcome] = []
        #: Results of the next calls of `why_dead`; an exception is raised.
        self.deaths: list[dict[int, str] | Exception] = []
        self.sweeping: list[Exception] = []
        self.on_call: Callable[[str], None] = lambda call: None

    def _note(self, call: str, subject: Any) -> None:
        self.calls.append((call, subject))
        self.on_call(call)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> list[CommitAnswer]:
        self._note("commit", (int(checkpoint), [c.payload["batch"] for c in committables]))
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.COMMITTED
        return [CommitAnswer(outcome, "as told") for _ in committables]

    def abort(self, committables: Sequence[Committable]) -> list[CommitAnswer]:
        self._note("abort", [c.payload["batch"] for c in committables])
        return [CommitAnswer(Outcome.COMMITTED) for _ in committables]

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        self._note("why_dead", [c.payload["batch"] for c in committables])
        answer = self.deaths.pop(0) if self.deaths else {}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        self._note("sweep", ([c.payload["batch"] for c in kept], sorted(running_blocks())))
        if self.sweeping:
            raise self.sweeping.pop(0)
        return 0

    def called(self, call: str) -> list[Any]:
        return [subject for name, subject in self.calls if name == call]


class RecordedHook(MasterHook):
    """Gives its number of calls as state."""

    def __init__(self, name: str = "catalog") -> None:
        self._name, self.calls = name, []
        self.failing: list[Exception] = []
        self.on_trigger: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self._name

    def trigger(self, checkpoint_id: int) -> Mapping[str, Any] | None:
        self.calls.append(("trigger", checkpoint_id))
        self.on_trigger()
        if self.failing:
            raise self.failing.pop(0)
        return {"version": len(self.calls)}

    def restore(self, checkpoint_id: int, state: Mapping[str, Any] | None) -> None:
        self.calls.append(("restore", checkpoint_id, state))

    def reset(self) -> None:
        self.calls.append(("reset",))

    def close(self) -> None:
        self.calls.append(("close",))


@dataclass
class RecordedControl:
    """The ids that were offered to the micro-batches."""

    offered: list[int] = field(default_factory=list)
    purposes: list[CheckpointPurpose] = field(default_factory=list)
    status: AlignmentStatus | None = None

    def offer(self, checkpoint: CheckpointId, purpose: CheckpointPurpose) -> None:
        self.offered.append(int(checkpoint))
        self.purposes.append(purpose)

    def withdraw(self, checkpoint: CheckpointId) -> bool:
        return self.offered[-1:] == [int(checkpoint)]

    def source_status(self) -> AlignmentStatus | None:
        return self.status


class StepLog:
    """The steps, as words."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def on_step_start(self, step: enum.Enum, subject: str) -> None:
        self.steps.append(f"-{step.value}:{subject}")

    def on_step_end(self, step: enum.Enum, subject: str) -> None:
        self.steps.append(f"+{step.value}:{subject}")


def by_hand(**settings: Any) -> CheckpointConfig:
    """Return settings under which only requests trigger, as long as a test does not wait for years."""
    return CheckpointConfig(**{"interval_ms": 10**10, "timeout_ms": 5_000, **settings})


def context_of(**given: Any) -> JobContext:
    """Return the context of a job of which only what is given counts."""
    clock = given.get("clock") or ManualClock(1_000)
    job_dir = given.get("job_dir") or JobDir(MemoryStore())
    neutral = {
        "job": JobUuid("b" * 32),
        "ownership": given.get("ownership") or take_over(job_dir, clock),
        "log": None,
        "pins": None,
        "committers": {},
        "sources": (),
        "tracker": CheckpointTracker(job_dir, clock),
        "hooks": MasterHooks(()),
        "blocks": BlockPool(),
        "config": by_hand(),
        "threads": HandThreads(),
        "observer": StepLog(),
        "must_give_up": lambda: False,
        "is_cancelled": lambda: False,
    }
    return JobContext(**{**neutral, "clock": clock, "job_dir": job_dir, **given})


class Rig:
    """A coordinator of a job with the sinks `a` and `b`, each with one channel.

    Parameters
    ----------
    config
        :func:`by_hand` if it is left out.
    store, ownership, tracker
        Of an earlier rig, for a restart.
    begin
        Whether the coordinator takes requests already, as :meth:`CheckpointCoordinator.run` makes it.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        store: MemoryStore | None = None,
        clock: Any = None,
        hooks: Sequence[MasterHook] = (),
        sinks: str = "ab",
        operators: tuple[str, ...] = ("sum",),
        kept: Sequence[StagedBatch] = (),
        failures: FailureManager | None = None,
        tracker: CheckpointTracker | None = None,
        ownership: Ownership | None = None,
        on_decided: Callable[[Decision], None] = lambda decision: None,
        on_receipt: Callable[[Decision], None] = lambda decision: None,
        begin: bool = True,
        time: Any = NO_TIME,
        waiting: Waiting = skip_watch,
        decided_at_ms: int | None = None,
    ) -> None:
        config = config or by_hand()
        self.store = MemoryStore() if store is None else store
        self.clock = ManualClock(1_000) if clock is None else clock
        self.threads, self.observer, self.control = HandThreads(), StepLog(), RecordedControl()
        self.job_dir = JobDir(self.store)
        self.ownership = ownership or take_over(self.job_dir, self.clock)
        self.log = SparkLog(self.store, "spark/1", Path("/nowhere"))
        self.committers = {uid: RiggedCommitter() for uid in sinks}
        self.blocks, self.gate = BlockPool(), AdmissionGate(self.clock)
        self.tracker = tracker or CheckpointTracker(self.job_dir, self.clock)
        self.confirmed: list[int] = []
        self.aborted: list[int] = []
        self.savepoints: list[tuple[int, str]] = []
        self.savepoint_error: Exception | None = None
        #: Called when a savepoint is about to be written.
        self.on_savepoint: Callable[[Decision], None] = lambda decision: None
        #: Answers to requests, as words, in the order in which they came.
        self.answers: list[str] = []
        self.next_batch = max((int(s.batch) + 1 for s in kept), default=0)
        self.attempt = 0
        self.job = context_of(
            job_dir=self.job_dir,
            ownership=self.ownership,
            log=self.log,
            committers=self.committers,
            tracker=self.tracker,
            hooks=MasterHooks(hooks),
            blocks=self.blocks,
            config=config,
            clock=self.clock,
            threads=self.threads,
            observer=self.observer,
            must_give_up=lambda: self.coordinator.is_stopping,
            uids=("orders", *operators, *sinks),
            operators=operators,
            waiting=waiting,
        )
        self.confirmation = Confirmation(self.job)
        self.parts = CoordinatorParts(
            job=self.job,
            control=self.control,  # type: ignore[arg-type]
            confirm=self.confirmation.confirm,
            channels={uid: frozenset({0}) for uid in sinks},
            gate=self.gate,
            failures=failures or FailureManager(config.tolerable_failures),
            on_confirmed=self._on_confirmed,
            on_aborted=lambda checkpoint: self.aborted.append(int(checkpoint)),
            write_savepoint=self._write_savepoint,
            on_decided=on_decided,
            on_receipt=on_receipt,
            time=time,
            accumulators=NO_ACCUMULATORS,
            decided_at_ms=decided_at_ms,
        )
        self.coordinator = CheckpointCoordinator(self.parts, kept)
        if begin:
            self.coordinator.begin()

    # -- what the coordinator calls -------------------------------------------------------------
    def _on_confirmed(self, decision: Decision, receipt: Receipt) -> None:
        assert receipt.checkpoint == decision.checkpoint
        self.confirmed.append(int(decision.checkpoint))

    def _write_savepoint(self, decision: Decision, target: str) -> None:
        self.on_savepoint(decision)
        if self.savepoint_error is not None:
            raise self.savepoint_error
        self.savepoints.append((int(decision.checkpoint), target))

    # -- what a test does -----------------------------------------------------------------------
    def tick(self, after_ms: int = 0) -> None:
        """Let time pass, then let the coordinator do what it can."""
        self.clock.now_ms += after_ms
        for _ in range(10):
            self.coordinator.tick()

    def ask(
        self,
        purpose: CheckpointPurpose = CheckpointPurpose.USER,
        target: str = "",
        name: str = "",
    ) -> None:
        """Ask for a checkpoint; its answer will be found in `answers` under `name`."""
        called = name or purpose.value.lower()
        self.coordinator.ask(
            CheckpointTriggerRequest(purpose, lambda answer: self._answered(called, answer), target)
        )
        self.tick()

    def _answered(self, name: str, answer: CheckpointAnswer) -> None:
        reason = "" if answer.reason is None else f":{answer.reason.value}"
        self.answers.append(f"{name}={answer.kind.value}{reason}")

    def stage(self, *checkpoints: int, sinks: str | None = None, committables: bool = True) -> int:
        """Let Spark run and stage one micro-batch with these barriers; return its number."""
        batch, self.next_batch = self.next_batch, self.next_batch + 1
        self.attempt += 1
        uids = self.committers if sinks is None else sinks
        staged = StagedBatch(
            Lineage(0),
            BatchId(batch),
            self.ownership.epoch,
            self.attempt,
            tuple(ack(uid, *(checkpoints if uid in uids else ())) for uid in self.committers),
            tuple(Committable(uid, {"batch": batch}) for uid in self.committers if committables),
            (self.blocks.lease(),),
        )
        self.job_dir.write_staged(staged)
        self.gate.on_staged(staged)
        self.coordinator.on_staged(staged, sync_ms=7)
        self.tick()
        return batch

    def commit_log(self, batch: int) -> None:
        """Let Spark write what it writes around a micro-batch."""
        for log in (OFFSETS, COMMITS):
            self.log.restore(log, BatchId(batch), "v1\n{}\n-")
        self.tick()

    def run_batch(self, *checkpoints: int, sinks: str | None = None) -> None:
        """Let Spark run a micro-batch from its offsets to commits/N."""
        self.commit_log(self.stage(*checkpoints, sinks=sinks))

    def take(self, purpose: CheckpointPurpose = CheckpointPurpose.USER, target: str = "") -> int:
        """Take one checkpoint from its request to its receipt; return its id."""
        self.ask(purpose, target)
        checkpoint = self.control.offered[-1]
        self.run_batch(checkpoint)
        return checkpoint

    # -- what a test looks at -------------------------------------------------------------------
    @property
    def open(self) -> str:
        """The checkpoints in flight and their states, as words."""
        return " ".join(f"{one.checkpoint}:{one.state.value}" for one in self.coordinator._state.open)

    @property
    def statistics(self) -> list[str]:
        """What the statistics say of each id, as words."""
        return [
            f"{e.checkpoint}:{e.status.value}" + (f":{e.failure.reason.value}" if e.failure else "")
            for e in self.tracker.history.entries
        ]

    def verdict(self, checkpoint: int) -> Verdict | None:
        decision = self.job_dir.decision(CheckpointId(checkpoint))
        return None if decision is None else decision.verdict

    def objects(self, checkpoint: int) -> list[str]:
        """The names of what is stored about a checkpoint."""
        return [key.rsplit("/", 1)[1] for key in self.store.list(f"checkpoints/{checkpoint}")]


def ack(sink: str, *checkpoints: int, channels: Sequence[int] = (0,)) -> SinkAck:
    """Return what a sink's one task saw: one barrier per checkpoint and channel."""
    barriers = tuple(Barrier(CheckpointId(c), channel) for c in checkpoints for channel in channels)
    return SinkAck(sink, (TaskAck(0, 1, 5, barriers),))


def hook_participant(name: str) -> Participant:
    """Return a hook as a participant."""
    return Participant(ParticipantKind.HOOK, name)
