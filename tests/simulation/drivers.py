"""One driver process: the product's supervisor on simulated surroundings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.answers import CheckpointAnswer, CheckpointTriggerRequest
from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.contracts.hooks import MasterHook
from flinkish_spark.core.errors import (
    AnotherTimelineError,
    CommittableLostError,
    CorruptObjectError,
    EnvironmentFault,
    FencedError,
    InputLostError,
    InternalError,
    JobDirError,
    NotReplayableError,
)
from flinkish_spark.core.job_dir import JobDir, is_written_once
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import CachedReads
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.engine import JobSettings, Standby
from flinkish_spark.job.rewind import RewindError
from flinkish_spark.job.supervisor import Supervisor
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.job_status import Change, JobStatus, JobStatusChange
from tests.simulation.clock import SimClock, SimThreads
from tests.simulation.engine import SimEngine
from tests.simulation.faults import FaultKind as K
from tests.simulation.invariants import Invariants
from tests.simulation.rules import Rule, require
from tests.simulation.scenario import StoreKind, Tearing
from tests.simulation.scheduler import Process, ProcessDied
from tests.simulation.store_faults import SimStore
from tests.simulation.world import World


class Outcome(enum.Enum):
    """How a driver ended."""

    #: It returned: it was stopped or cancelled.
    DONE = "done"
    #: It raised.
    FAILED = "failed"


class SimHook(MasterHook):
    """A catalog whose version belongs to a checkpoint."""

    def __init__(self, world: World, invariants: Invariants, process: Process) -> None:
        self._world, self._invariants, self._process = world, invariants, process

    @property
    def name(self) -> str:
        """Return the name."""
        return "catalog"

    def trigger(self, checkpoint_id: int) -> Mapping[str, Any]:
        """Give a version."""
        self._world.step("hook trigger", checkpoint_id)
        if self._world.struck(K.HOOK_FAILURE):
            raise OSError("the simulated catalog refuses")
        self._world.hook_states[checkpoint_id] = {"version": self._world.steps}
        return self._world.hook_states[checkpoint_id]

    def restore(self, checkpoint_id: int, state: Mapping[str, Any] | None) -> None:
        """Go back to a version."""
        self._world.step("hook restore", checkpoint_id)
        if self._world.struck(K.HOOK_FAILURE):
            raise OSError("the simulated catalog refuses")
        if self._invariants.is_owner(self._process):
            newest = self._invariants.decisions.newest_live()
            expected = None if newest is None else self._world.hook_states[newest.checkpoint]
            require(
                self._world,
                newest is not None and (checkpoint_id, state) == (newest.checkpoint, expected),
                Rule.HOOKS_RESTORED,
                f"restored {checkpoint_id} with {state}, expected {newest and newest.checkpoint}",
            )

    def reset(self) -> None:
        """Begin from nothing."""
        newest = self._invariants.decisions.newest_live()
        require(
            self._world,
            newest is None or not self._invariants.is_owner(self._process),
            Rule.HOOKS_RESTORED,
            "reset although there is a checkpoint",
        )


class SimListener:
    """Hears what the job tells; sometimes fails."""

    def __init__(self, world: World, invariants: Invariants) -> None:
        self._world, self._invariants = world, invariants

    def on_change(self, change: Change) -> None:
        """Note a change."""
        if isinstance(change, JobStatusChange):
            self._world.note("status", f"{change.before.value} -> {change.after.value} {change.cause}")
        self._fail()

    def on_checkpoint_complete(self, checkpoint: CheckpointId) -> None:
        """Check that it is true."""
        self._world.note("complete", checkpoint)
        self._invariants.notified(int(checkpoint))
        self._fail()

    def on_checkpoint_aborted(self, checkpoint: CheckpointId, newest: CheckpointId | None) -> None:
        """Note it."""
        self._world.note("aborted", checkpoint)
        self._fail()

    def _fail(self) -> None:
        if self._world.struck(K.LISTENER_FAILURE):
            raise RuntimeError("a simulated listener fails")


class SimObserver:
    """Kills the driver at a step of a checkpoint, when that fault strikes."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def on_step_start(self, step: Step, subject: str) -> None:
        """Perhaps die right before a step."""
        self._perhaps_die(step, subject, "before")

    def on_step_end(self, step: Step, subject: str) -> None:
        """Perhaps die right after a step."""
        self._perhaps_die(step, subject, "after")

    def _perhaps_die(self, step: Step, subject: str, moment: str) -> None:
        self._world.note(f"{moment} {step.value}", subject)
        if self._world.chance.random() < 0.12 and self._world.struck(K.CRASH_AT_STEP):
            self._world.scheduler.kill(self._process)
            self._world.scheduler.check()


class Driver:
    """A driver process with its JVM.

    Parameters
    ----------
    number
        Counts the drivers of a run from 1.
    lock_holder
        Shared by all of them.
    standby
        What it does while another one owns the job.
    """

    def __init__(
        self, world: World, invariants: Invariants, number: int, lock_holder: list[Process], standby: Standby
    ) -> None:
        self._world, self._invariants = world, invariants
        self.process, self.jvm = Process(f"driver-{number}"), Process(f"jvm-{number}")
        self.process.on_death.append(self._outlived)
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.asked, self.answered = 0, 0
        chance = world.stream(f"driver-{number}")
        store = SimStore(world, self.process, invariants, invariants.has_newer_owner)
        self.clock = SimClock(world.scheduler, chance)
        engine = SimEngine(
            world,
            invariants,
            self.process,
            self.jvm,
            store,
            SimStore(world, self.jvm, invariants, invariants.has_newer_owner),
            lock_holder,
            world.layout,
            self.clock,
        )
        threads = SimThreads(world.scheduler, self.process)
        is_bucket = world.scenario.store is StoreKind.BUCKET
        self.job_dir = JobDir(CachedReads(store, is_written_once) if is_bucket else store)
        settings = JobSettings(
            name="simulated",
            job_dir=StoreSpec("/simulated"),
            checkpoint=world.scenario.checkpoint,
            restart=world.scenario.restart,
            trigger_ms=world.scenario.trigger_ms,
            shuffle_partitions=world.scenario.tasks,
            clock=self.clock,
            threads=threads,
            observer=SimObserver(world, self.process),
            scratch=Path("/simulated/scratch"),
            hooks=MasterHooks([SimHook(world, invariants, self.process)]),
            listeners=(SimListener(world, invariants),),
            random=chance.random,
            token=lambda: f"{chance.getrandbits(64):016x}",
            standby=standby,
        )
        self.engine = engine
        self.supervisor = Supervisor(engine, settings, self.job_dir)
        self._thread = threads.start("supervisor", self._main)

    # -- what others ask of it ------------------------------------------------------------------
    def ask(self, purpose: CheckpointPurpose) -> None:
        """Ask for a checkpoint, from another thread of the driver."""
        self.asked += 1
        target = "/savepoint" if purpose.is_savepoint else ""
        self.supervisor.control.ask(CheckpointTriggerRequest(purpose, self._answer, target))

    def _answer(self, answer: CheckpointAnswer) -> None:
        self.answered += 1
        self._world.note("answer", f"{answer.kind.value} {answer.checkpoint} {answer.text}")

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process.is_alive and self.outcome is None

    # -- its life -------------------------------------------------------------------------------
    def _main(self) -> None:
        try:
            self.supervisor.run()
            self.outcome = Outcome.DONE
            self._check_status()
        except ProcessDied:
            raise
        except Exception as error:
            self.outcome, self.error = Outcome.FAILED, error
            self._world.note("driver fails", f"{type(error).__name__}: {error}")
            self._check_end(error)
        require(
            self._world,
            self.asked == self.answered,
            Rule.ANSWERED,
            f"{self.process.name} was asked {self.asked} times and answered {self.answered} times",
        )
        self._world.scheduler.kill(self.jvm, self.process)

    def _check_status(self) -> None:
        """Require that a driver that was told to end says so, and took nothing over if it stood by."""
        control, status = self.supervisor.control, self.supervisor.states.status
        # One that was cancelled may have come to its end, or stood by, before it heard of it.
        ends = {JobStatus.FINISHED, JobStatus.SUSPENDED, JobStatus.CANCELED}
        if not control.cancel_wanted.is_set():
            ends.remove(JobStatus.CANCELED)
        require(self._world, status in ends, Rule.TOLD_TO_END, f"{self.process.name} ends as {status.value}")

    def _check_end(self, error: Exception) -> None:
        """Require that the surroundings caused it."""
        expected = isinstance(error, EnvironmentFault | RewindError) and not isinstance(
            error, CorruptObjectError
        )
        if isinstance(error, AnotherTimelineError):
            expected = self._see_to_timeline()
        if isinstance(error, InternalError):
            expected = self._invariants.log_changed_late and "was changed by another process" in str(error)
        if isinstance(error, FencedError):
            expected = self._invariants.has_newer_owner(self.process)
        if self._world.scenario.tearing is Tearing.VISIBLE:
            self._world.is_refused = isinstance(error, CorruptObjectError | JobDirError)
            expected = expected or self._world.is_refused
        if isinstance(error, CommittableLostError | InputLostError):
            expected = isinstance(error, CommittableLostError) and self._is_lost(error)
        require(
            self._world,
            expected or self._is_zombie(),
            Rule.NO_SURPRISE,
            f"{self.process.name} ended with {type(error).__name__}: {error}",
        )

    def _see_to_timeline(self) -> bool:
        """Take back what the job refuses to run beside; return whether there was anything."""
        other = self._world.other_timeline
        if other is None:
            return False
        if other.is_older or not self._is_zombie():
            self._world.other_timeline = None
            other.undo()
        return True

    def _is_lost(self, error: CommittableLostError) -> bool:
        """Whether decided data was destroyed and, if that is what the error says, cannot be replayed."""
        replays, checkpoint = self._invariants.replays, int(str(error.facts["checkpoint"]))
        if not isinstance(error, NotReplayableError):
            return replays.is_lost(checkpoint)
        why = replays.why_not(checkpoint, self.process)
        if why and self._invariants.is_owner(self.process):
            self._world.not_replayable = checkpoint
        return bool(why)

    def _is_zombie(self) -> bool:
        """Whether somebody else has the job, so that what it reads may vanish under it."""
        return self._invariants.has_newer_owner(self.process)

    def _outlived(self) -> None:
        """Let the JVM of the dead driver live on for a while."""
        self._invariants.query_ended(self.process)
        delay_ms = self._world.chance.choice((0, 5, 80, 600))
        self._world.later(delay_ms, lambda: self._world.scheduler.kill(self.jvm))
