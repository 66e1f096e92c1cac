"""The engine behind the product's supervisor: plans without Spark, committers that are the product's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.ownership import BeatLease, Ownership
from flinkish_spark.checkpoint.pins import CheckpointPins
from flinkish_spark.checkpoint.retention import fence_in_bucket
from flinkish_spark.checkpoint.spark_log import BucketLog, SparkLog
from flinkish_spark.checkpoint.staging import OwnerLock, Staging, StagingContext
from flinkish_spark.connectors.delta.committing import DeltaCommitter
from flinkish_spark.connectors.delta.sink import DeltaSink
from flinkish_spark.connectors.kafka.writer import KafkaCommitter
from flinkish_spark.contracts.manifest import NO_MANIFEST, ManifestWriter
from flinkish_spark.contracts.sink import Committer, SinkContext, StageResult
from flinkish_spark.contracts.source import Source, SourceNode
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import (
    BrokerUnavailableError,
    EnvironmentFault,
    InputLostError,
    OwnedElsewhereError,
    SparkGoneError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.engine import QueryPlan, RestoredSavepoint, RunningQuery
from flinkish_spark.job.recovery import Reseeding
from flinkish_spark.job.spark_engine import SinkStaging
from flinkish_spark.planning.sink_rows import PlannedSink, SinkPart
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.protocol.timeline import Mark
from tests.simulation.clock import SimThreads
from tests.simulation.faults import FaultKind as K
from tests.simulation.input_topic import GROUP, SOURCE, TOPIC
from tests.simulation.pins import SimPins
from tests.simulation.reseeding import Beginning, SimReseeding
from tests.simulation.rules import Rule, require
from tests.simulation.scenario import SinkKind, StoreKind
from tests.simulation.scheduler import US_PER_MS, Process
from tests.simulation.sinks import (
    SimDeltaCommits,
    SimDeltaWriter,
    SimKafkaWriter,
    SimMarks,
    SimTransactionClient,
    SinkCall,
)
from tests.simulation.spark import SimQuery, SimReplayQuery
from tests.simulation.spark_files import SimBucketLog, SimBucketPins, SimSparkLog, fence
from tests.simulation.world import World
from tests.support.null_parts import NoTallies
from tests.support.vertices import vertices_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.simulation.invariants import Invariants

JOB = JobUuid("5" * 32)
OPERATOR = "count"


class SimKafkaCommitter(KafkaCommitter):
    """The product's committer over simulated transactions."""

    def __init__(self, context: SinkContext, call: SinkCall, client: Any, marks: Any) -> None:
        super().__init__(client, context, marks)
        self._call = call

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit."""
        self._call.begins()
        return super().commit(checkpoint, committables)

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort."""
        self._call.begins()
        return super().abort(committables)

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort leftovers."""
        self._call.begins()
        return super().sweep(kept, running_blocks)


class SimDeltaCommitter(DeltaCommitter):
    """The product's committer over a simulated table."""

    def __init__(self, path: str, commits: Any, context: SinkContext, call: SinkCall) -> None:
        super().__init__(DeltaSink(path), commits, context)
        self._call = call

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit."""
        self._call.begins()
        return super().commit(checkpoint, committables)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Ask."""
        self._call.begins(is_question=True)
        return super().why_dead(committables)

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Take back."""
        self._call.begins()
        return super().supersede(target, lineage)


class SimSource(Source):
    """A source with a consumer group."""

    topics = (TOPIC,)

    def __init__(self, world: World, invariants: Invariants) -> None:
        self._world, self._invariants = world, invariants

    def load(self, spark: SparkSession, control_path: str) -> DataFrame:
        """Refuse: the simulated Spark reads by itself."""
        raise NotImplementedError

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Look for the input."""
        self._ask("input there?")
        lost = "" if position is None else self._world.input.why_lost(_ends(position))
        if lost:
            raise InputLostError(f"simulated retention has deleted {lost}")

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Look whether it is the same input."""
        self._ask("input same?")

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Raise the group's offsets."""
        self._ask("group offsets")
        mark = Mark.parse(note, JOB)
        if mark is not None:
            self._world.note_beside(SOURCE, mark, _ends(position))
        self._invariants.offsets_raised(_ends(position))
        self._world.input.committed.update(
            {p: max(at, self._world.input.committed.get(p, 0)) for p, at in _ends(position).items()}
        )
        return {GROUP: {TOPIC: {str(p): at for p, at in self._world.input.committed.items()}}}

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        """Return what stands beside the group's offsets."""
        self._ask("mark of the group?")
        mark = self._world.marks.get(SOURCE)
        return () if mark is None else (mark,)

    def lower_offsets(self, position: LoggedOffsets) -> None:
        """Set the group's offsets back."""
        self._ask("lower group offsets")
        self._world.noted.update(_ends(position))
        self._world.input.committed.update(_ends(position))

    def _ask(self, what: str) -> None:
        self._world.step(what)
        if self._world.struck(K.SOURCE_UNAVAILABLE):
            self._world.scheduler.pause(30 * US_PER_MS)
            raise BrokerUnavailableError("no simulated broker answers")


class SimLock:
    """An :class:`~flinkish_spark.checkpoint.staging.OwnerLock` that a suspended machine can lose."""

    def __init__(self, world: World, process: Process, holder: list[Process]) -> None:
        self.world, self.process, self._holder = world, process, holder
        self._has_waited = False

    def acquire(self) -> None:
        """Take the lock, unless a living process has it."""
        self.wanted()
        if self._holder and self._holder[0].is_alive:
            raise OwnedElsewhereError(f"{self._holder[0].name} owns the simulated job", holder="another")
        self._holder[:] = [self.process]

    def wanted(self) -> None:
        """Look whether its process may want it."""
        gives_up = self._has_waited and self.process.name in self.world.told_to_end
        require(self.world, not gives_up, Rule.TOLD_TO_END, f"{self.process.name} wants the job all the same")
        self._has_waited = True
        self.world.step("lock")

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        """Do nothing: it is held."""

    def release(self) -> None:
        """Drop it."""
        if self._holder == [self.process]:
            self._holder.clear()


class SimLease(BeatLease):
    """The product's :class:`BeatLease`, which is lost in a moment: while its owner is suspended, or cut off.

    Parameters
    ----------
    lock
        Looks at who wants it.
    """

    def __init__(self, lock: SimLock, job_dir: JobDir, clock: Clock) -> None:
        threads = SimThreads(lock.world.scheduler, lock.process)
        super().__init__(job_dir, "the simulated bucket", clock, threads, beat_ms=50, lease_ms=300)
        self._lock = lock

    def acquire(self) -> None:
        """Return if nobody lives who has the job."""
        self._lock.wanted()
        super().acquire()


class SimTallies(NoTallies):
    """What the tasks of the micro-batch at hand have said beside their rows."""

    def __init__(self) -> None:
        self._bases: tuple[str, ...] = ()

    def told(self, bases: Sequence[str]) -> None:
        """Be told of all bases that they have written."""
        self._bases = tuple(sorted(bases))

    def bases(self) -> tuple[str, ...]:
        """Return them."""
        return self._bases


class SimEngine:
    """A :class:`~flinkish_spark.job.engine.QueryEngine` of one driver.

    Parameters
    ----------
    store, jvm_store
        The job directory as the driver and its JVM reach it.
    lock_holder
        Shared by all drivers of a run.
    layout
        Stands for the number of shuffle partitions.
    """

    def __init__(
        self,
        world: World,
        invariants: Invariants,
        driver: Process,
        jvm: Process,
        store: Store,
        jvm_store: Store,
        lock_holder: list[Process],
        layout: int,
        clock: Clock,
    ) -> None:
        self._layout, self._clock = layout, clock
        self._world, self._invariants = world, invariants
        self._driver, self._jvm_process = driver, jvm
        self._store, self._jvm_store, self._lock_holder = store, jvm_store, lock_holder
        self.sources: Sequence[SourceNode] = (SourceNode(SOURCE, SimSource(world, invariants)),)
        self.operators = (OPERATOR,)
        self.told = SimTallies()
        self._is_on_disk = world.scenario.store is StoreKind.DISK
        self.uids = (SOURCE, OPERATOR, *world.scenario.sink_uids)
        self.vertices = vertices_of(self.uids)

    def check(self) -> None:
        """Find nothing wrong."""
        self._world.step("preflight")

    def lock(self) -> OwnerLock:
        """Return the lock; in a bucket the product's lease."""
        lock = SimLock(self._world, self._driver, self._lock_holder)
        return lock if self._is_on_disk else SimLease(lock, JobDir(self._store), self._clock)

    def record_job(self) -> JobUuid:
        """Return the job's uuid; note what the first log begins with."""
        nothing = dict.fromkeys(range(self._world.scenario.partitions), 0)
        log = SimSparkLog(self._store, "spark/0", "/simulated/spark/0")
        self._reseeding(log).record(Beginning(self._layout, nothing, {}))
        return JOB

    def fence_log(self, ownership: Ownership) -> SparkLog:
        """Rename Spark's folder."""
        self._world.step("fence", f"owner {ownership.epoch}")
        if self._is_on_disk:
            log: SparkLog = fence(self._world.disk, self._store, ownership)
        else:
            folder = f"spark/{ownership.epoch}"
            log = in_bucket = SimBucketLog(self._store, folder, f"/simulated/{folder}")
            fence_in_bucket(in_bucket, JobDir(self._store), self.pins)
        self._invariants.took_over(self._driver, int(ownership.epoch))
        return log

    def pins(self, log: SparkLog) -> CheckpointPins:
        """Return the pins."""
        return SimBucketPins(log, self._clock) if isinstance(log, BucketLog) else SimPins(log)

    def committers(self, job: JobUuid, ownership: Ownership) -> dict[str, Committer]:
        """Return the product's committers over simulated systems."""
        found: dict[str, Committer] = {}
        for uid, kind in zip(self._world.scenario.sink_uids, self._world.scenario.sinks, strict=True):
            context = self._context(job, ownership, uid)
            call = SinkCall(self._driver, self._invariants.has_newer_owner)
            if kind is SinkKind.TRANSACTIONS:
                client, marks = SimTransactionClient(self._world, call), SimMarks(self._world, call, uid)
                found[uid] = SimKafkaCommitter(context, call, client, marks)
            else:
                table = self._world.tables[uid]
                commits = SimDeltaCommits(self._world, call, table)
                found[uid] = SimDeltaCommitter(f"/{uid}", commits, context, call)
        return found

    def manifest(self, job: JobUuid, ownership: Ownership) -> ManifestWriter:
        """Return none."""
        return NO_MANIFEST

    def plan(self, control: ControlFile) -> QueryPlan:
        """Plan; from here on the control file is a number in memory."""
        offered = [0]
        control.offer = functools.partial(self._offer, offered)  # type: ignore[method-assign]
        control.withdraw = functools.partial(self._withdraw, offered)  # type: ignore[method-assign]
        control.source_status = lambda: None  # type: ignore[method-assign]
        return SimPlan(self._world, self._invariants, self, lambda: offered[0])

    def _offer(self, offered: list[int], checkpoint: CheckpointId, purpose: CheckpointPurpose) -> None:
        self._world.step("offer", checkpoint)
        self._invariants.offered(self._driver, int(checkpoint))
        offered[0] = int(checkpoint)

    def _withdraw(self, offered: list[int], checkpoint: CheckpointId) -> bool:
        was_offered = offered[0] == int(checkpoint)
        offered[0] = 0 if was_offered else offered[0]
        return was_offered

    def why_no_savepoint_at(self, target: str) -> str:
        """Return nothing: savepoints are only noted."""
        return ""

    def write_savepoint(self, decision: Decision, target: str, log: SparkLog) -> None:
        """Note that a checkpoint was exported."""
        self._world.step("savepoint", decision.checkpoint)
        self._invariants.exported(self._driver, int(decision.checkpoint))
        if self._world.struck(K.SAVEPOINT_FAILURE):
            raise EnvironmentFault("the simulated target refuses")

    def reseeding(self, log: SparkLog) -> Reseeding:
        """Return what begins the log anew when the layout has changed."""
        return self._reseeding(log)

    def _reseeding(self, log: SparkLog) -> SimReseeding:
        return SimReseeding(JobDir(self._store), log, self._layout)

    def find_restored(self) -> RestoredSavepoint | None:
        """Return none: no lineage begins with a savepoint."""
        return None

    def on_confirmed(self, decision: Decision) -> None:
        """Do nothing."""

    # -- for the plan ---------------------------------------------------------------------------
    def start(self, log: SparkLog, write: Callable[[Any, int], None], offered: Callable[[], int]) -> SimQuery:
        """Start the query thread in the JVM."""
        self._world.step("start query")
        if not self._jvm_process.is_alive:
            raise SparkGoneError("the simulated JVM is gone")
        beginning = self._beginning(log)
        self._invariants.query_started(self._driver, log.folder)
        ended = functools.partial(self._invariants.query_ended, self._driver)
        processes = (self._world, self._driver, self._jvm_process, self._jvm_store)
        return SimQuery(*processes, log.folder, write, offered, beginning, ended, self.told.told)

    def start_once(
        self, log: SparkLog, write: Callable[[Any, int], None], offered: Callable[[], int]
    ) -> SimQuery:
        """Start the query thread of a replay in the JVM."""
        self._world.step("start replay")
        if not self._jvm_process.is_alive:
            raise SparkGoneError("the simulated JVM is gone")
        processes = (self._world, self._driver, self._jvm_process, self._jvm_store)
        beginning, tell = self._beginning(log), self.told.told
        query = SimReplayQuery(*processes, log.folder, write, offered, beginning, lambda: None, tell)
        query.on_other_rows = functools.partial(self._invariants.replays.confused.add, self._driver)
        return query

    def _beginning(self, log: SparkLog) -> Beginning:
        return self._reseeding(log).beginning(JobDir(self._store).history().log_began_in)

    def in_jvm(self, work: Callable[[], StageResult]) -> StageResult:
        """Run a Spark job from the driver's Python."""
        return self._world.call(self._jvm_process, work, lambda: SparkGoneError("the simulated JVM is gone"))

    def _context(self, job: JobUuid, ownership: Ownership, uid: str) -> SinkContext:
        checkpoint, place = self._world.scenario.checkpoint, StoreSpec(f"/nowhere/{uid}")
        return SinkContext(
            job,
            ownership.epoch,
            uid,
            T.StructType([]),
            checkpoint,
            "simulated",
            place,
            self._clock,
            ownership.timeline,
        )

    def context(self, context: StagingContext, uid: str) -> SinkContext:
        """Return what a writer works for."""
        return self._context(context.job, context.ownership, uid)


class SimPlan:
    """A :class:`~flinkish_spark.job.engine.QueryPlan`."""

    def __init__(
        self, world: World, invariants: Invariants, engine: SimEngine, offered: Callable[[], int]
    ) -> None:
        self._world, self._invariants, self._engine, self._offered = world, invariants, engine, offered
        self._channels = frozenset(range(world.scenario.tasks))

    @property
    def channels(self) -> Mapping[str, ExpectedChannels]:
        """Return one channel per task, for every sink."""
        return dict.fromkeys(self._world.scenario.sink_uids, self._channels)

    @property
    def time(self) -> TimePlan:
        """Return nothing: no simulated job knows event time."""
        return TimePlan()

    def staging(self, context: StagingContext) -> Staging:
        """Return the product's staging, over simulated writers."""
        scenario = self._world.scenario
        planned, writers = [], {}
        for number, (uid, kind) in enumerate(zip(scenario.sink_uids, scenario.sinks, strict=True)):
            schema, stream = T.StructType([]), number % scenario.scans
            part = SinkPart(stream, (), (), self._channels)
            planned.append(PlannedSink(uid, DeltaSink("/"), schema, (part,)))
            writer = SimKafkaWriter if kind is SinkKind.TRANSACTIONS else SimDeltaWriter
            writers[uid] = writer(self._world, self._engine.context(context, uid), self._engine.in_jvm)
        return SinkStaging(planned, writers, context, self._engine.told)

    def start(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        """Start the query."""
        return self._engine.start(log, write, self._offered)

    def start_once(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        """Start a query for one micro-batch."""
        return self._engine.start_once(log, write, self._offered)


def _ends(position: LoggedOffsets) -> dict[int, int]:
    return position.kafka(frozenset({TOPIC}))[TOPIC]
