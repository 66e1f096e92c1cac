"""The Spark engine: checks, plans, starts and stops the one query of a job, and stages in its sinks."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from flinkish_spark.bridge.accumulators import TaskTallies
from flinkish_spark.bridge.jvm_process import ends_with_this_process
from flinkish_spark.bridge.query_threads import JobThreads
from flinkish_spark.bridge.session import (
    active_session,
    ask_kafka_first,
    runs_tasks_itself,
)
from flinkish_spark.bridge.settings import SETTINGS, query_conf
from flinkish_spark.bridge.stores import spark_stores
from flinkish_spark.bridge.worker_processes import is_cold, preload_workers, warm_up
from flinkish_spark.checkpoint.control import ControlFile
from flinkish_spark.checkpoint.event_time import TrackedStaging
from flinkish_spark.checkpoint.ownership import BeatLease, JobLock, Ownership
from flinkish_spark.checkpoint.pins import CheckpointPins
from flinkish_spark.checkpoint.retention import fence_in_bucket, pins_of
from flinkish_spark.checkpoint.spark_log import (
    BucketLog,
    SparkLog,
    fence_spark_folder,
    log_of,
    place_of_bases,
)
from flinkish_spark.checkpoint.staging import OwnerLock, Staging, StagingContext, micro_batch_in
from flinkish_spark.checkpoint.state_files import correct_schema_paths
from flinkish_spark.checkpoint.statistics import PendingRecords
from flinkish_spark.connectors.task_staging import (
    JoiningWriter,
    StagePlan,
    name_sinks,
    plan_writers,
    stage_alone,
    stage_together,
)
from flinkish_spark.contracts.calls import AsyncStatistics, CallPlace, Retention
from flinkish_spark.contracts.manifest import NO_MANIFEST, ManifestContext, ManifestWriter
from flinkish_spark.contracts.sink import (
    Committer,
    GroupOffsets,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.distributed_cache import CACHED_FILES_PROPERTY
from flinkish_spark.core.errors import (
    MAKE_DETERMINISTIC,
    CancellationTimedOut,
    RetriableError,
    StoreError,
    UnavailableError,
)
from flinkish_spark.core.foreign_errors import describe_error, is_gateway_gone
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.micro_batch import MICRO_BATCH_PROPERTY
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.cancellation import QueryCancellation
from flinkish_spark.job.engine import JobSettings, QueryPlan, RunningQuery
from flinkish_spark.job.inputs import DroppedRecords, pending_records
from flinkish_spark.job.preflight import check_before_start, record_job
from flinkish_spark.job.recovery import Reseeding, RestoredSavepoint
from flinkish_spark.planning.job_graph import describe_job, name_operators
from flinkish_spark.planning.planner import Planner
from flinkish_spark.planning.sink_rows import (
    DeferredPass,
    JoinedByWorkers,
    JoinedRows,
    PlannedJob,
    PlannedSink,
    ReadingSink,
    UnionRows,
    WorkersRows,
)
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import BatchId, JobUuid
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.micro_batches import STATE
from flinkish_spark.protocol.plan_layout import source_of
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch
from flinkish_spark.protocol.time_plan import TimePlan
from flinkish_spark.protocol.user_metrics import UserMetrics
from flinkish_spark.savepoints.files import why_no_savepoint_at
from flinkish_spark.savepoints.job import JobSavepoints
from flinkish_spark.savepoints.seeds import check_layout

LOG = logging.getLogger(__name__)


#: The micro-batch that is being staged.
Rows = UnionRows | WorkersRows


def start_query(
    spark: SparkSession,
    job: PlannedJob,
    writer: Callable[[Any, int], None],
    *,
    name: str,
    checkpoint_location: str,
    trigger: Mapping[str, Any],
    shuffle_partitions: int,
    job_dir: StoreSpec,
) -> StreamingQuery:
    with query_conf(spark, shuffle_partitions, job_dir) as wanted:
        frame = job.frame if job.deferred is None else job.deferred.frame
        stream = frame.writeStream.outputMode(job.output_mode).foreachBatch(ask_kafka_first(spark, writer))
        stream = stream.option("checkpointLocation", checkpoint_location)
        taken = {query.name for query in spark.streams.active}
        stream = stream.queryName(f"{name} ({checkpoint_location})" if name in taken else name)
        query = stream.trigger(**trigger).start()
        changed = SETTINGS.find_changed(spark, wanted)
    if changed:
        query.stop()
        raise UnavailableError(
            f"the setting {changed[0]} of the session was changed while the query started",
            why="Spark copies the settings of a session into a query when it starts",
            what_to_do="nothing; the query starts again with the settings that it needs",
            setting=changed[0],
        )
    return query


def run_in_order(works: Sequence[Callable[[], Any]]) -> list[Any]:
    return [work() for work in works]


@dataclass(frozen=True)
class SinkPass:
    sinks: tuple[PlannedSink, ...]
    #: Number of times that the rows are read.
    readings: int = 1
    joined: JoinedRows | JoinedByWorkers | None = None


@dataclass(frozen=True)
class StagePlans:
    """The requests of a micro-batch's sinks, and the plans of those that can share a pass."""

    batch: BatchId
    requests: Mapping[str, StageRequest]
    plans: Mapping[str, StagePlan]

    @property
    def joining(self) -> frozenset[str]:
        return frozenset(uid for uid, plan in self.plans.items() if plan.select is None)


def _plan_joint_pass(
    rows: Rows, sinks: Sequence[PlannedSink], writers: Mapping[str, SinkWriter]
) -> SinkPass | None:
    """Return the pass in which sinks stage together; None if there are fewer than two."""
    reading = []
    for sink in sinks:
        writer = writers[sink.uid]
        assert isinstance(writer, JoiningWriter)
        reading.append(ReadingSink(sink, writer.columns, writer.reads_fields_alone))
    joined = rows.join(reading)
    if joined is None:
        return None
    return SinkPass(tuple(sink for sink in sinks if sink.uid in joined.columns), joined=joined)


class SinkStaging:
    """A :class:`~flinkish_spark.checkpoint.staging.Staging` over Spark DataFrames."""

    def __init__(
        self,
        sinks: Sequence[PlannedSink],
        writers: Mapping[str, SinkWriter],
        context: StagingContext,
        tallies: TaskTallies,
        bases: StoreSpec | None = None,
        cached_files: Mapping[str, str] = MappingProxyType({}),
        run_all: Callable[[Sequence[Callable[[], Any]]], list[Any]] = run_in_order,
        sources: Sequence[SourceNode] = (),
        measures: Callable[[UserMetrics], None] = lambda measured: None,
        deferred: DeferredPass | None = None,
    ) -> None:
        self._deferred = deferred
        self._run_all, self._sources, self._measures = run_all, tuple(sources), measures
        self._tallies, self._bases = tallies, None if bases is None else bases.to_text()
        self._cached_files = json.dumps(dict(cached_files))
        self._sinks, self._writers, self._context = tuple(sinks), writers, context
        self._streams = len({stream for sink in sinks for stream in sink.streams})
        self._passes: dict[tuple[frozenset[str], frozenset[str]], Sequence[SinkPass]] = {}

    def stage(self, frame: DataFrame, batch: BatchId, attempt: int) -> StagedBatch:
        staged = self.stage_only(frame, batch, attempt, frozenset(self._writers))
        # Compare the digests of sinks that read the same stream; a transform makes another stream.
        acks = {ack.sink: ack for ack in staged.acks}
        plain = [sink for sink in self._sinks if sink.rows is not None]
        for left, right in itertools.combinations(plain, 2):
            one, other = acks[left.uid], acks[right.uid]
            same = (one.rows, one.digest) == (other.rows, other.digest)
            if left.rows == right.rows and not same:
                raise RetriableError(
                    f"in micro-batch {staged.batch} sink '{left.uid}' saw {one.rows} rows and "
                    f"sink '{right.uid}' {other.rows}, or other ones",
                    why="the micro-batch was evaluated twice with different results",
                    what_to_do=MAKE_DETERMINISTIC,
                    kind="evaluation",
                )
        return staged

    def stage_only(
        self, frame: DataFrame, batch: BatchId, attempt: int, sinks: frozenset[str]
    ) -> StagedBatch:
        # This order matters: every evaluation of the rows below passes this micro-batch to its tasks.
        here = micro_batch_in(self._context.log, batch)
        here = replace(here, lineage=self._context.lineage.value, bases=self._bases)
        told = json.dumps(here.to_json())
        frame.sparkSession.sparkContext.setLocalProperty(MICRO_BATCH_PROPERTY, told)
        frame.sparkSession.sparkContext.setLocalProperty(CACHED_FILES_PROPERTY, self._cached_files)
        self._tallies.begin()
        rows: Rows = (
            UnionRows(frame, self._streams) if self._deferred is None else self._deferred.make_rows(frame)
        )
        if not sinks:
            rows.run()
        plans = self._plan(batch, [sink for sink in self._sinks if sink.uid in sinks])
        passes = self._passes_of(rows, sinks, plans.joining)
        if sum(one.readings for one in passes) > 1:
            # Otherwise each sink would run the operators again, and a retried task could stage other rows for
            # one sink, or another barrier for the same one.
            kept = rows.keep()
            try:
                return self._stage_sinks(kept, batch, attempt, passes, plans)
            finally:
                kept.release()
        return self._stage_sinks(rows, batch, attempt, passes, plans)

    def _plan(self, batch: BatchId, sinks: Sequence[PlannedSink]) -> StagePlans:
        """Lease a block for each sink; with several sinks, let those plan that stage in tasks."""
        context = self._context
        inputs = partial(self._input_offsets, batch)
        nothing: Any = None
        place = (nothing, context.lineage, batch)
        requests = {
            sink.uid: StageRequest(*place, context.blocks.lease(), context.checkpoint_of(batch), inputs)
            for sink in sinks
        }
        writers = {uid: self._writers[uid] for uid in requests} if len(requests) > 1 else {}
        return StagePlans(batch, requests, plan_writers(writers, requests))

    def _passes_of(self, rows: Rows, sinks: frozenset[str], joining: frozenset[str]) -> Sequence[SinkPass]:
        found = self._passes.get((sinks, joining))
        if found is None:
            own = [sink for sink in self._sinks if sink.uid in sinks]
            joint = _plan_joint_pass(rows, [sink for sink in own if sink.uid in joining], self._writers)
            joined = () if joint is None else (joint,)
            apart = [sink for sink in own if all(sink not in one.sinks for one in joined)]
            alone = (SinkPass((sink,), self._writers[sink.uid].passes * sink.readings) for sink in apart)
            found = self._passes[sinks, joining] = (*joined, *alone)
        return found

    def _stage_sinks(
        self, rows: Rows, batch: BatchId, attempt: int, passes: Sequence[SinkPass], plans: StagePlans
    ) -> StagedBatch:
        context = self._context
        began_at_ms = context.clock.wall_ms()
        works = [partial(self._stage_pass, rows, one, plans) for one in passes]
        # This order matters: the first sink evaluates the rows. Sinks in parallel could run an operator
        # twice.
        staged = [one for work in (works[:1], works[1:]) for found in self._run_all(work) for one in found]
        found = {ack.sink: (ack, payloads) for ack, payloads in staged}
        ordered = [found[uid] for uid in plans.requests]
        self._measures(self._tallies.metrics())
        return StagedBatch(
            context.lineage,
            batch,
            context.ownership.epoch,
            attempt,
            tuple(ack for ack, _ in ordered),
            tuple(Committable(ack.sink, payload) for ack, payloads in ordered for payload in payloads),
            tuple(request.block for request in plans.requests.values()),
            began_at_ms,
            accumulators=self._tallies.collect(),
            bases=self._tallies.bases(),
        )

    def _stage_pass(
        self, rows: Rows, over: SinkPass, plans: StagePlans
    ) -> list[tuple[SinkAck, Sequence[Any]]]:
        uids = [sink.uid for sink in over.sinks]
        if over.joined is not None:
            joined: Any = over.joined
            columns = [joined.columns[uid] for uid in uids]
            own = [plans.plans[uid] for uid in uids]
            return self._stage(
                uids, plans.batch, lambda: stage_together(rows.select_joined(joined), own, columns)
            )
        (sink,) = over.sinks
        uid, writer = sink.uid, self._writers[sink.uid]
        request = replace(plans.requests[uid], source=rows.select_sink(sink))
        return self._stage(uids, plans.batch, lambda: [stage_alone(writer, request, plans.plans.get(uid))])

    def _stage(
        self, uids: Sequence[str], batch: BatchId, stage: Callable[[], Sequence[StageResult]]
    ) -> list[tuple[SinkAck, Sequence[Any]]]:
        clock = self._context.clock
        began_ms = clock.monotonic_ms()
        with name_sinks(uids, batch):
            results = stage()
        took_ms = clock.monotonic_ms() - began_ms
        return [
            (SinkAck(uid, result.tasks, took_ms, result.bytes), result.payloads)
            for uid, result in zip(uids, results, strict=True)
        ]

    def _input_offsets(self, batch: BatchId) -> list[GroupOffsets]:
        position = self._context.find_position_after(batch)
        found = (node.source.group_offsets(position) for node in self._sources)
        return [offsets for offsets in found if offsets is not None]


class AsyncCosts(AccumulatorParam[Mapping[str, AsyncStatistics]]):
    """Sums the reports of tasks by operator; calls of repeated tasks count, too."""

    def zero(self, value: Mapping[str, AsyncStatistics]) -> Mapping[str, AsyncStatistics]:
        return {}

    def addInPlace(
        self, value1: Mapping[str, AsyncStatistics], value2: Mapping[str, AsyncStatistics]
    ) -> Mapping[str, AsyncStatistics]:
        nothing = AsyncStatistics()
        both = value1.keys() | value2.keys()
        return {uid: value1.get(uid, nothing).merge(value2.get(uid, nothing)) for uid in sorted(both)}


def _add_cost(costs: Accumulator[Mapping[str, AsyncStatistics]], uid: str, cost: AsyncStatistics) -> None:
    costs.add({uid: cost})


#: Interval at which Spark's progress is read; Spark keeps the last hundred micro-batches.
_PROGRESS_MS = 1_000


class SparkEngine:
    """A :class:`~flinkish_spark.job.engine.QueryEngine` over a classic SparkSession."""

    def __init__(
        self, spark: SparkSession, graph: StreamGraph, settings: JobSettings, job_dir: JobDir
    ) -> None:
        self._spark, self._graph, self._settings, self._job_dir = spark, graph, settings, job_dir
        self._checked: PlannedJob | None = None
        self._job = ""
        self._retentions: dict[str, Retention] = {}
        self._dropped = DroppedRecords()

    @property
    def sources(self) -> Sequence[SourceNode]:
        return self._graph.sources

    @property
    def uids(self) -> tuple[str, ...]:
        return self._graph.uids()

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(node.uid for node in self._graph.operators)

    @property
    def vertices(self) -> tuple[JobVertex, ...]:
        settings = self._settings
        return describe_job(settings.name, self._graph, settings.shuffle_partitions).vertices

    def check(self) -> None:
        settings = self._settings
        preload_workers(self._spark)
        if is_cold(self._spark):
            settings.threads.start("flinkish-warm-up", partial(warm_up, self._spark))
        planned = check_before_start(self._spark, self._graph, settings, self._job_dir)
        self._checked = planned
        self._graph = replace(self._graph, begun_chains=frozenset(chain.name for chain in planned.chains))

    def lock(self) -> OwnerLock:
        ends_with_this_process(self._spark)
        settings, place = self._settings, self._settings.job_dir
        if place.is_local:
            return JobLock.from_folder(place.folder)
        lease_ms = settings.checkpoint.owner_lease_ms
        return BeatLease(self._job_dir, place.url, settings.clock, settings.threads, lease_ms)

    def record_job(self) -> JobUuid:
        settings = self._settings
        job = record_job(self._spark, self._graph, self._planned, settings, self._job_dir)
        self._job = str(job)
        return job

    def fence_log(self, ownership: Ownership) -> SparkLog:
        place, epoch = self._settings.job_dir, ownership.epoch
        if place.is_local:
            fence_spark_folder(place.folder, epoch)
        log = log_of(self._job_dir.store, place, epoch)
        if isinstance(log, BucketLog):
            fence_in_bucket(log, self._job_dir, self.pins)
        return log

    def pins(self, log: SparkLog) -> CheckpointPins:
        place, spark = self._settings.job_dir, self._spark
        # HDFS has no server-side copy: the bytes go through executors, if there are any besides the driver.
        in_tasks = place.url.startswith("hdfs:") and not runs_tasks_itself(spark)
        copies = partial(spark_stores().copy_in_tasks, spark, place) if in_tasks else None
        return pins_of(log, place, self._settings.clock, copies)

    def committers(self, job: JobUuid, ownership: Ownership) -> dict[str, Committer]:
        made = {}
        for one in self._planned.sinks:
            context = self._settings.sink_context(
                one.uid, one.schema, job, ownership.epoch, ownership.timeline
            )
            made[one.uid] = one.sink.create_committer(self._spark, context)
        return made

    def manifest(self, job: JobUuid, ownership: Ownership) -> ManifestWriter:
        wanted = self._settings.manifest
        if wanted is None:
            return NO_MANIFEST
        name, store = self._settings.name, self._job_dir.store
        context = ManifestContext(job, ownership.epoch, name, store, ownership.timeline)
        return wanted.create_writer(self._spark, context)

    def plan(self, control: ControlFile) -> QueryPlan:
        settings, partitions = self._settings, self._savepoints.shuffle_partitions()
        beginning = self._savepoints.beginning()
        workers = self._spark.sparkContext.defaultParallelism
        name_operators(self._graph, partitions)
        planner = Planner(
            self._spark,
            settings.place(control.path),
            partitions,
            beginning,
            marks_latency=settings.latencies is not None,
            calls=CallPlace(settings.job_dir, self._job, workers, partial(_add_cost, self._costs)),
            bundles_per_partition=self._savepoints.bundles_per_partition(beginning),
            recorded=self._savepoints.find_layout(),
        )
        planned = planner.plan(self._graph)
        check_layout(self._job_dir, planned)
        self._job_dir.put_job_graph(describe_job(settings.name, self._graph, partitions, planned))
        self._keeper = self._savepoints.keeper()
        dropped = self._dropped if any(n.source.drops_records for n in self.sources) else None
        return SparkPlan(self._spark, planned, settings, dropped, partitions, self._costs, self.sources)

    def why_no_savepoint_at(self, target: str) -> str:
        return self._savepoints.why_none_possible() or why_no_savepoint_at(target, self._settings.job_dir)

    def write_savepoint(self, decision: Decision, target: str, log: SparkLog) -> None:
        self._savepoints.write(decision, target, log)

    def reseeding(self, log: SparkLog) -> Reseeding:
        return self._savepoints.reseeding(log)

    def find_restored(self) -> RestoredSavepoint | None:
        seed = self._savepoints.beginning().seed
        return None if seed is None else RestoredSavepoint(seed.checkpoint, seed.hooks, seed.path, seed.times)

    def on_confirmed(self, decision: Decision) -> None:
        """Release the seed of the lineage, and the recorded answers that the checkpoint has used."""
        self._keeper.on_confirmed(decision)
        batches = [staged.batch.value for staged in decision.batches]
        for recording in self._planned.recordings if batches else ():
            retention = self._retentions.setdefault(
                recording.folder, recording.make_retention(self._job_dir.store)
            )
            try:
                self._job_dir.delete_all(retention.find_unneeded(decision.lineage.value, batches))
            except StoreError as error:
                LOG.warning("answers that are not needed any more are deleted later: %s", error)

    @cached_property
    def _costs(self) -> Accumulator[Mapping[str, AsyncStatistics]]:
        return self._spark.sparkContext.accumulator({}, AsyncCosts())

    @cached_property
    def _savepoints(self) -> JobSavepoints:
        settings, partitions = self._settings, self._settings.shuffle_partitions
        place = self._spark, settings.name, settings.job_dir, partitions, self._job_dir
        return JobSavepoints(*place, self._planned, self.sources)

    @property
    def planned(self) -> PlannedJob | None:
        return self._checked

    @property
    def _planned(self) -> PlannedJob:
        assert self._checked is not None, "check() comes first"
        return self._checked


@dataclass(frozen=True)
class SparkPlan:
    spark: SparkSession
    planned: PlannedJob
    settings: JobSettings
    dropped: DroppedRecords | None
    shuffle_partitions: int
    costs: Accumulator[Mapping[str, AsyncStatistics]]
    sources: Sequence[SourceNode]

    @property
    def channels(self) -> Mapping[str, ExpectedChannels]:
        return {sink.uid: sink.channels for sink in self.planned.sinks}

    @property
    def time(self) -> TimePlan:
        return self.planned.time

    def staging(self, context: StagingContext) -> Staging:
        owner, writers = context.ownership, {}
        for one in self.planned.sinks:
            of_sink = self.settings.sink_context(
                one.uid, one.schema, context.job, owner.epoch, owner.timeline
            )
            writers[one.uid] = one.sink.create_writer(self.spark, of_sink)
        staging = SinkStaging(
            self.planned.sinks,
            writers,
            context,
            TaskTallies(self.spark),
            place_of_bases(self.settings.job_dir, context.log),
            self.settings.cached_files,
            JobThreads(self.spark),
            self.sources,
            self.settings.user_metrics.on_staged,
            self.planned.deferred,
        )
        tracker = self.settings.latencies
        if tracker is None:
            return staging
        uids = [source_of(one.uid) for one in self.planned.time.reporters]
        return TrackedStaging(staging, tracker, uids, context.clock)

    def start(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        trigger = {"processingTime": f"{self.settings.trigger_ms} milliseconds"}
        return self._start(log, write, trigger)

    def start_once(self, log: SparkLog, write: Callable[[Any, int], None]) -> RunningQuery:
        return self._start(log, write, {"once": True})

    def _start(
        self, log: SparkLog, write: Callable[[Any, int], None], trigger: Mapping[str, Any]
    ) -> RunningQuery:
        settings = self.settings
        if self.planned.layout.natives:
            state = f"{log.folder}/{STATE}"
            correct_schema_paths(log.store, state, f"{log.hadoop_url}/{STATE}")
        # Spark builds a frame's encoder with the settings of the thread's active session, not of the frame's.
        with active_session(self.spark):
            query = start_query(
                self.spark,
                self.planned,
                write,
                name=settings.name,
                checkpoint_location=log.hadoop_url,
                trigger=trigger,
                shuffle_partitions=self.shuffle_partitions,
                job_dir=settings.job_dir,
            )
        return SparkQuery(self, query)


class SparkQuery:
    def __init__(self, plan: SparkPlan, query: StreamingQuery) -> None:
        settings = plan.settings
        self._query, self._clock, self._dropped, self._costs = query, settings.clock, plan.dropped, plan.costs
        self._sources = plan.sources
        self._cancellation = QueryCancellation(
            plan.spark, query, settings.cancellation, settings.clock, settings.threads
        )
        self._asked_ms = self._clock.monotonic_ms()

    @property
    def is_active(self) -> bool:
        return self._query.isActive

    def exception(self) -> BaseException | None:
        return self._query.exception()

    def stop(self) -> None:
        try:
            self._cancellation.run()
            self._read_dropped()
        except CancellationTimedOut:
            raise
        except Exception as error:
            if not is_gateway_gone(error):
                LOG.warning("stopping the query failed: %s", describe_error(error))

    def count_dropped(self) -> int:
        if self._dropped is None:
            return 0
        if self._clock.monotonic_ms() - self._asked_ms >= _PROGRESS_MS:
            self._read_dropped()
        return self._dropped.total

    def pending_records(self) -> PendingRecords:
        return pending_records(self._sources, self._query)

    def async_calls(self) -> Mapping[str, AsyncStatistics]:
        return self._costs.value

    def _read_dropped(self) -> None:
        if self._dropped is not None:
            self._dropped.read(self._query)
            self._asked_ms = self._clock.monotonic_ms()
