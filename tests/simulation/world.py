"""Everything outside the product that one run has: time, disk, brokers, input, processes, faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flinkish_spark.protocol.timeline import Mark
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.input_topic import InputTopic
from tests.simulation.memory_store import MemoryStore
from tests.simulation.outputs import Broker, StagedFile, Table, Transaction
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import US_PER_MS, Process, ProcessDied, Scheduler
from tests.simulation.worker_pool import WorkerPool

T = TypeVar("T")


class InvariantBroken(AssertionError):
    """The product did what it must never do; `rule` is the name of the invariant."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(rule, detail)
        self.rule, self.detail = rule, detail

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


class DestroysDecided(Protocol):
    """Destroys what is decided, right before somebody wants to commit it."""

    def about_to_commit(self, one: Transaction) -> None:
        """Perhaps end a decided transaction, and others with it."""

    def about_to_add(self, one: StagedFile) -> None:
        """Perhaps delete a decided file, and others with it."""

    def about_to_write(self, process: Process, key: str) -> None:
        """Perhaps let a write go wrong that a replay depends on."""


class _DestroysNothing:
    def about_to_commit(self, one: Transaction) -> None:
        """Do nothing."""

    def about_to_add(self, one: StagedFile) -> None:
        """Do nothing."""

    def about_to_write(self, process: Process, key: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class OtherTimeline:
    """The job directory is an older copy of itself, or a copy of it has committed elsewhere.

    Parameters
    ----------
    is_older
        Whether the directory was put back from a copy: then nothing at all may happen.
    undo
        What people do when a start was refused.
    sink
        Of a copy that has committed what was given up here: the sink in which nothing may become visible.
    """

    is_older: bool
    undo: Callable[[], None]
    sink: str = ""


class World:
    """One run's surroundings.

    Parameters
    ----------
    scenario
        What it is about.
    pool
        Real threads.
    trace
        Takes every event as a line of text; None to keep none.
    """

    def __init__(self, scenario: Scenario, pool: WorkerPool, trace: list[str] | None) -> None:
        self.scenario, self.trace = scenario, trace
        self.scheduler = Scheduler(self.stream("order"), pool)
        self.faults = FaultPlan(self.stream("faults"), dict(scenario.weights), scenario.mean_fault_gap)
        self.destruction = FaultPlan(
            self.stream("destruction"), dict(scenario.destruction), scenario.mean_destruction_gap
        )
        self.destruction.counts = self.faults.counts
        self.chance = self.stream("world")
        self._latency = self.stream("latency").random
        self.disk = MemoryStore()
        self.broker, self.tables = Broker(), {uid: Table() for uid in scenario.sink_uids}
        self.input = InputTopic(scenario)
        self.steps = 0
        #: What the next driver is started with; stands for the number of shuffle partitions.
        self.layout = 1
        #: Set once the job refuses to run over a damaged object, as it should.
        self.is_refused = False
        #: When the last owner was told to stop for good.
        self.told_to_stop_us = 0
        #: Names of drivers that people have stopped or cancelled.
        self.told_to_end: set[str] = set()
        #: Does a fault of PROCESS_FAULTS; set by whoever owns the processes.
        self.strike: Callable[[FaultKind], None] = lambda kind: None
        #: Suspends a process and gives its lock to another one; set by whoever owns the processes.
        self.depose: Callable[[Process], None] = lambda process: None
        #: What the running micro-batch has staged and no file names yet, by identity.
        self.in_flight: set[int] = set()
        #: What the master hook gave, by checkpoint id.
        self.hook_states: dict[int, dict[str, int]] = {}
        #: Whether a decision names something staged; set by whoever knows.
        self.is_decided: Callable[[object], bool] = lambda staged: False
        #: Destroys what is decided; set by whoever knows what that is.
        self.destroyer: DestroysDecided = _DestroysNothing()
        #: Told of a sink that stages for a replay: its owner, uid and micro-batch; set by whoever looks.
        self.on_staged_again: Callable[[int, str, int], None] = lambda owner, sink, batch: None
        #: By key, the id of the create that wrote it, if the store is a bucket.
        self.write_ids: dict[str, str] = {}
        #: The id of the create that arrives in the bucket; empty on a disk.
        self.arriving = ""
        #: Until when nobody reaches the bucket.
        self.bucket_back_us = 0
        #: What brokers keep as the mark of a sink or source, by uid.
        self.marks: dict[str, Mark] = {}
        #: How far the input's group was when the mark beside its offsets was written.
        self.noted: dict[int, int] = {}
        #: How often another job directory was put in the place of the one that was there.
        self._put_backs = 0
        #: What the job refuses to run beside, until somebody sees to it: takes it back. None if all is well.
        self.other_timeline: OtherTimeline | None = None
        #: The checkpoint that the last driver could not replay, rightly; None if none did since then.
        self.not_replayable: int | None = None

    def note_beside(self, source: str, mark: Mark, ends: Mapping[int, int]) -> None:
        """Keep a mark beside the offsets of a source's group, if one of them grows by it."""
        if any(at > self.noted.get(partition, -1) for partition, at in ends.items()):
            self.noted.update({p: max(at, self.noted.get(p, -1)) for p, at in ends.items()})
            self.marks[source] = mark

    def stream(self, name: str) -> random.Random:
        """Return chance that belongs to one purpose, so that others do not shift it."""
        return random.Random(f"{self.scenario.seed}/{name}")

    # -- what everything outside does first -----------------------------------------------------
    def step(self, what: str, subject: object = "") -> None:
        """Count an event, let a fault strike, let others run.

        Raises
        ------
        ProcessDied
            The calling process has died.
        """
        self.scheduler.check()
        self.steps += 1
        for kind in (self.faults.step(), self.destruction.step()):
            if kind is not None:
                self.faults.counts[kind] += 1
                self.note("fault", kind.value)
                self.strike(kind)
        # Most operations are quick, some are slow.
        self.scheduler.pause(int(self._latency() ** 4 * 6_000))
        if self.trace is not None:
            self.note(what, subject)

    def note(self, what: str, subject: object = "") -> None:
        """Write a line into the trace."""
        scheduler = self.scheduler
        thread = scheduler.current
        if self.trace is not None and (thread is None or thread.process.is_alive):
            who = "-" if thread is None else thread.name
            self.trace.append(f"{scheduler.now_us / US_PER_MS:10.3f} ms  {who:34} {what:18} {subject}")

    def struck(self, *kinds: FaultKind) -> FaultKind | None:
        """Return which of these faults strikes here."""
        kind = self.faults.any_of(*kinds) or self.destruction.any_of(*kinds)
        if kind is not None:
            self.note("fault", kind.value)
        return kind

    def calm(self) -> None:
        """Let nothing fail from now on."""
        self.faults.end()
        self.destruction.end()

    def later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Do something at a later time, by nobody; it must not wait."""
        self.scheduler.call_at(self.scheduler.now_us + delay_ms * US_PER_MS, action)

    def later_in_directory(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Change the job directory at a later time, unless it is another one by then.

        People put a directory back when nothing that was sent before can arrive in it.
        """
        put_backs = self._put_backs

        def act() -> None:
            if self._put_backs == put_backs:
                action()

        self.later(delay_ms, act)

    def put_back(self, directory: MemoryStore) -> None:
        """Put a copy in the place of the job directory."""
        self.disk.become(directory)
        self._put_backs += 1

    # -- calls between processes ----------------------------------------------------------------
    def call(self, process: Process, work: Callable[[], T], gone: Callable[[], BaseException]) -> T:
        """Run `work` in another process, in the same thread, as a remote call does.

        Raises
        ------
        BaseException
            What `gone` makes, if the other process is or becomes dead.
        """
        thread = self.scheduler.current
        assert thread is not None
        caller = thread.process
        if not process.is_alive:
            raise gone()
        thread.process = process
        try:
            self._wake_up(process)
            return work()
        except ProcessDied:
            if _has_died(process) and not _has_died(caller):
                raise gone() from None
            raise
        finally:
            thread.process = caller
            self.scheduler.check()
            self._wake_up(caller)

    def _wake_up(self, process: Process) -> None:
        if process.stopped_until_us > self.scheduler.now_us:
            self.scheduler.pause(0)

    # -- rules ----------------------------------------------------------------------------------
    def broken(self, rule: str, detail: str) -> None:
        """End the run: an invariant does not hold."""
        self.note("BROKEN", f"{rule}: {detail}")
        self.scheduler.end(InvariantBroken(rule, detail))


def _has_died(process: Process) -> bool:
    return not process.is_alive
