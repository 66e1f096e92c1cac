"""Whoever starts drivers, sends them signals and asks them for checkpoints; and what faults do to them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

from flinkish_spark.checkpoint.pins import CheckpointPins
from flinkish_spark.connectors.delta.table import app_id, checkpoint_note
from flinkish_spark.core.errors import CorruptObjectError, EnvironmentFault, JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.job import rewind as rewinding
from flinkish_spark.job.engine import Standby
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.protocol.timeline import Mark
from tests.simulation.clock import SimClock
from tests.simulation.destroying import goes_back
from tests.simulation.drivers import Driver
from tests.simulation.engine import JOB
from tests.simulation.faults import FaultKind as K
from tests.simulation.invariants import Invariants
from tests.simulation.memory_store import MemoryStore
from tests.simulation.pins import SimPins
from tests.simulation.rules import Rule
from tests.simulation.scenario import SinkKind, StoreKind
from tests.simulation.scheduler import US_PER_MS, Process
from tests.simulation.spark_files import SimBucketLog, SimBucketPins, SimSparkLog
from tests.simulation.store_faults import SimStore
from tests.simulation.world import OtherTimeline, World

#: Virtual milliseconds, and steps, in which a job must come to its end once faults have stopped.
_END_WITHIN_MS, _END_WITHIN_STEPS = 60_000, 12_000
_POLL_MS = 10


class Cluster:
    """All drivers of a run."""

    def __init__(self, world: World, invariants: Invariants) -> None:
        self._world, self._invariants = world, invariants
        self.drivers: list[Driver] = []
        self._lock_holder: list[Process] = []
        self._is_start_due = False
        self._backup: MemoryStore | None = None
        world.strike, world.depose = self._strike, self._depose

    # -- starting -------------------------------------------------------------------------------
    def start(self, standby: Standby = Standby.REFUSE) -> Driver:
        """Start a driver."""
        driver = Driver(self._world, self._invariants, len(self.drivers) + 1, self._lock_holder, standby)
        self.drivers.append(driver)
        driver.process.on_death.append(self._look)
        return driver

    def start_later(self, delay_ms: int) -> None:
        """Start one driver more, unless one is due already."""
        if self._is_start_due:
            return
        self._is_start_due = True

        def go() -> None:
            self._is_start_due = False
            if not self._world.scheduler.is_over:
                self.start()

        self._world.later(delay_ms, go)

    def _look(self) -> None:
        """Somebody has died: see that the job goes on."""
        if not any(d.is_alive and not self._is_zombie(d) for d in self.drivers):
            self.start_later(self._world.chance.choice((5, 40, 300)))

    def _is_zombie(self, driver: Driver) -> bool:
        return driver.process.stopped_until_us > self._world.scheduler.now_us or (
            driver.process in self._invariants.epochs and not self._invariants.is_owner(driver.process)
        )

    @property
    def owner(self) -> Driver | None:
        """Return the living driver that owns the job."""
        for driver in reversed(self.drivers):
            if driver.is_alive and self._invariants.is_owner(driver.process):
                return driver
        return None

    # -- faults ---------------------------------------------------------------------------------
    def _victim(self) -> Driver | None:
        living = [d for d in self.drivers if d.is_alive]
        return self._world.chance.choice(living) if living else None

    def _strike(self, kind: K) -> None:
        driver, world = self._victim(), self._world
        if driver is None:
            return
        world.note("struck", driver.process.name)
        if kind is K.DRIVER_CRASH:
            world.scheduler.kill(driver.process)
        elif kind is K.JVM_CRASH:
            world.scheduler.kill(driver.jvm)
        elif kind is K.MACHINE_CRASH:
            world.scheduler.kill(driver.jvm, driver.process)
        elif kind is K.WALL_CLOCK_STEP:
            driver.clock.wall_offset_ms += world.chance.choice((-86_400_000, -5_000, 3_600_000))
        elif kind is K.OLDER_DIRECTORY:
            self._put_older_back()
        elif kind is K.COPY_COMMITS:
            self._commit_elsewhere()
        elif kind is K.STALLED_THREAD:
            world.scheduler.pause(world.chance.choice((50, 400, 2_000)) * US_PER_MS)
        else:
            self._suspend(driver.process)
            if kind is K.ZOMBIE:
                self._tell_others()

    def _suspend(self, process: Process) -> None:
        world = self._world
        length_ms = world.chance.choice((100, 800, 4_000))
        process.stopped_until_us = world.scheduler.now_us + length_ms * US_PER_MS

    def _tell_others(self) -> None:
        """Tell another machine that the owner is gone."""
        self._lock_holder.clear()
        self.start_later(self._world.chance.choice((0, 20, 100)))

    def _depose(self, process: Process) -> None:
        self._world.note("fault", f"{process.name} becomes a zombie")
        self._suspend(process)
        self._tell_others()

    def _put_older_back(self) -> None:
        """Keep a copy of the job directory, or put one back: all processes have ended by then."""
        world = self._world
        if world.other_timeline is not None:
            return
        if self._backup is None:
            self._backup = world.disk.copied()
            return
        backup, newest = self._backup, world.disk.copied()
        if not self._is_ahead_of(backup):
            # Nothing outside can tell the two apart, and nothing has to.
            self._backup = newest
            return
        self._backup = None
        world.note("fault", "an older copy of the job directory is put back")
        for driver in self.drivers:
            world.scheduler.kill(driver.jvm, driver.process)
        self._lock_holder.clear()
        world.put_back(backup)
        world.other_timeline = OtherTimeline(True, lambda: world.put_back(newest))

    def _is_ahead_of(self, backup: MemoryStore) -> bool:
        """Whether the outside knows a checkpoint that a copy of the directory has not decided."""
        folder = JobDir(backup)
        decided, nothing = folder.list_checkpoint_ids(), CheckpointId(0)
        newest = max((mark.checkpoint for mark in self._marks()), default=nothing)
        is_open = newest in decided and folder.first_decision(newest) is None
        return is_open or newest > max(decided, default=nothing)

    def _marks(self) -> list[Mark]:
        epochs = [table.committed_epoch(app_id(JOB, uid)) for uid, table in self._world.tables.items()]
        tables = [Mark(CheckpointId(epoch)) for epoch in epochs if epoch > 0]
        return [*self._world.marks.values(), *tables]

    def _commit_elsewhere(self) -> None:
        """Let a copy of the directory commit to a sink: the next checkpoint, or one that is given up here."""
        world = self._world
        if world.other_timeline is not None:
            return
        sinks = list(zip(world.scenario.sink_uids, world.scenario.sinks, strict=True))
        given_up = [(mark, *one) for mark in self._given_up() for one in sinks if self._may_be_at(mark, *one)]
        if given_up:
            # This directory is the copy, and the original goes on with what was open in both.
            mark, uid, kind = world.chance.choice(given_up)
            world.note("fault", f"checkpoint {mark.checkpoint}, given up here, is committed to {uid}")
            undo = self._leave(mark, uid, kind)
            world.other_timeline = OtherTimeline(False, undo, uid)
            return
        given_out = [
            *JobDir(world.disk).list_checkpoint_ids(),
            *map(CheckpointId, self._invariants.ledger.commits),
        ]
        newest = max(given_out, default=CheckpointId(0))
        is_open = newest in given_out and f"checkpoints/{newest}/decision.json" not in world.disk.objects
        mark = Mark(newest if is_open else newest.next(), "f" * 16)
        uid, kind = world.chance.choice(sinks)
        world.note("fault", f"a copy commits checkpoint {mark.checkpoint} to {uid}")
        world.other_timeline = OtherTimeline(False, self._leave(mark, uid, kind))

    def _given_up(self) -> list[Mark]:
        """Return what an original could leave while no checkpoint of this directory is being committed."""
        folder = JobDir(self._world.disk)
        try:
            decisions = [folder.first_decision(one) for one in folder.list_checkpoint_ids()]
            is_confirmed = all(
                folder.receipt(one.checkpoint) is not None
                for one in decisions
                if one is not None and one.verdict is Verdict.COMMIT
            )
            timeline = folder.timeline()
        except (CorruptObjectError, JobDirError):
            return []
        # Of what this owner gives up by itself no copy has it open: a copy is made before, and is taken over.
        ids = [checkpoint for stretch in timeline.stretches for checkpoint in stretch.given_up]
        return [timeline.mark_of(one) for one in ids] if is_confirmed else []

    def _may_be_at(self, mark: Mark, uid: str, kind: SinkKind) -> bool:
        """Whether a sink holds nothing newer, so that an original would commit."""
        if kind is SinkKind.TABLE:
            return self._world.tables[uid].committed_epoch(app_id(JOB, uid)) < int(mark.checkpoint)
        known = self._world.marks.get(uid)
        return known is None or known.checkpoint < mark.checkpoint

    def _leave(self, mark: Mark, uid: str, kind: SinkKind) -> Callable[[], None]:
        """Leave somebody else's mark at a sink; return what takes it back."""
        world = self._world
        if kind is SinkKind.TABLE:
            app = app_id(JOB, uid)
            return world.tables[uid].commit_elsewhere(app, int(mark.checkpoint), checkpoint_note(app, mark))
        before, world.marks[uid] = world.marks.get(uid), mark

        def undo() -> None:
            world.marks.pop(uid)
            if before is not None:
                world.marks[uid] = before

        return undo

    # -- what people do -------------------------------------------------------------------------
    def people(self) -> None:
        """Ask for checkpoints, stop, cancel and go back, now and then; a thread of its own."""
        world = self._world
        while world.steps < world.scenario.chaos_steps:
            world.scheduler.pause(world.chance.choice((20, 60, 150)) * US_PER_MS)
            if world.not_replayable is not None and world.chance.random() < 0.6:
                # As its message tells them to.
                self._order_rewind()
            driver, action = self.owner, world.chance.random()
            if driver is None or (action < 0.4 and not self._invariants.is_running):
                continue
            if action < 0.2:
                driver.ask(CheckpointPurpose.USER)
            elif action < 0.4:
                driver.ask(CheckpointPurpose.SAVEPOINT)
            elif action < 0.44:
                self._end_anybody()
            elif action < 0.47:
                driver.ask(CheckpointPurpose.FINAL_SAVEPOINT)
            elif action < 0.52:
                self.start(Standby.WAIT)
            elif action < 0.58:
                self._order_rewind()
            elif action < 0.61:
                # Who changes it stops the job first.
                world.layout += 1
                world.note("people", f"stop {driver.process.name} for layout {world.layout}")
                driver.supervisor.control.stop_with_checkpoint()
            elif action < 0.66 and not goes_back(world.disk):
                world.note("people", f"retention deletes input below {world.input.committed}")
                world.input.expire()
        self._bring_to_an_end()

    def _end_anybody(self) -> None:
        """Stop or cancel a driver, also one that stands by, recovers or is a zombie."""
        driver = self._victim()
        if driver is None:
            return
        end = self._world.chance.choice(("stop_with_checkpoint", "cancel"))
        self._world.note("people", f"{end} {driver.process.name}")
        self._world.told_to_end.add(driver.process.name)
        getattr(driver.supervisor.control, end)()

    def _order_rewind(self) -> None:
        """Order the job to go back to some checkpoint, as the command line does."""
        world, process = self._world, Process("cli")
        complete = [d.checkpoint for d in self._invariants.ledger.complete()]
        if not complete:
            return
        target = CheckpointId(world.chance.choice(complete[-4:]))
        tables = world.chance.choice((Tables.KEEP, Tables.RESTORE))
        store = SimStore(world, process, self._invariants, lambda process: False)
        clock = SimClock(world.scheduler, world.chance)
        name = f"{world.chance.getrandbits(128):032x}"
        world.note("people", f"order to go back to {target}, {tables.value}")
        try:
            with mock.patch("uuid.uuid4", lambda: SimpleNamespace(hex=name)):
                pins = self._pins(store, clock)
                rewinding.order_rewind(JobDir(store), pins, clock, target, tables, "simulated")
        except (rewinding.RewindError, EnvironmentFault, JobDirError, ObjectMissing) as refused:
            world.note("people", f"refused: {refused}")

    def _pins(self, store: SimStore, clock: SimClock) -> CheckpointPins:
        """Return the pins as the command line asks them."""
        if self._world.scenario.store is StoreKind.DISK:
            return SimPins(SimSparkLog(store, "spark/0", "/simulated/spark/0"))
        return SimBucketPins(SimBucketLog(store, "spark/0", "/simulated/spark/0"), clock)

    # -- the end --------------------------------------------------------------------------------
    def _bring_to_an_end(self) -> None:
        """No more faults: the job must read all of its input, confirm it, and stop when told to."""
        world = self._world
        world.calm()
        world.note("calm", "no more faults")
        # What could not be replayed because of a fault can be now.
        world.not_replayable = None
        for driver in self.drivers:
            driver.process.stopped_until_us = 0
        deadline_us = world.scheduler.now_us + _END_WITHIN_MS * US_PER_MS
        last_step = world.steps + _END_WITHIN_STEPS
        self._look()

        def wait() -> None:
            world.scheduler.pause(_POLL_MS * US_PER_MS)
            if world.is_refused or self._is_lost_for_good():
                world.scheduler.stop()
            if world.scheduler.now_us > deadline_us or world.steps > last_step:
                world.broken(Rule.NO_DEAD_END.name, self._where())
                world.scheduler.check()

        while True:
            while not self._is_done():
                wait()
            owner = self.owner
            while owner is None:
                wait()
                owner = self.owner
            world.note("people", f"stop {owner.process.name} for good")
            world.told_to_stop_us = world.scheduler.now_us
            owner.supervisor.control.stop_with_checkpoint()
            while owner.is_alive:
                wait()
            # A rewind that was ordered at the last moment takes its input back, and one that failed
            # twice while it was stopping leaves its last checkpoint to the next start.
            if owner.supervisor.states.status is JobStatus.FINISHED and self._is_done():
                world.scheduler.stop()

    def _is_done(self) -> bool:
        """Whether all input is read and confirmed, and nothing is asked for any more."""
        disk = self._world.disk
        return (
            self._world.input.committed == self._world.input.final
            and not self._is_unconfirmed()
            and not goes_back(disk)
        )

    def _is_lost_for_good(self) -> bool:
        """Whether the job has ended since it cannot replay, and nobody has ordered it to go back."""
        return self._invariants.lost_for_good() is not None and not goes_back(self._world.disk)

    def _is_unconfirmed(self) -> bool:
        commits = self._invariants.ledger.commits.values()
        return any(not d.has_receipt for d in commits if not d.is_dead)

    def _where(self) -> str:
        ended = [f"{d.process.name} {d.error}" for d in self.drivers[-3:] if d.error is not None]
        return f"input is done up to {self._world.input.committed}; last drivers: {ended}"
