"""The checks before a start, in one place and in a fixed order; they change nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge.session import (
    blind_hosts,
    runs_tasks_itself,
)
from flinkish_spark.bridge.stores import spark_stores
from flinkish_spark.connectors.delta.sink import require_tables_apart
from flinkish_spark.connectors.kafka.client.admin import TopicPattern
from flinkish_spark.contracts.manifest import ManifestContext
from flinkish_spark.core.clock import span
from flinkish_spark.core.errors import EnvironmentFault, GraphError, JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.adoption import check_adopted
from flinkish_spark.job.engine import JobSettings
from flinkish_spark.planning.planner import Planner
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.planning.stream_graph import QueryNode, find_paths, find_scans, find_sources, find_uid
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION
from flinkish_spark.protocol.restore import find_changed_meaning
from flinkish_spark.protocol.versions import SparkMinor, VersionStep, find_version_step
from flinkish_spark.savepoints.restore import Restore, check_rescale, find_begun_chains
from flinkish_spark.savepoints.seeds import BUNDLES, RESTORED_FROM, find_claimant

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.contracts.source import SourceNode
    from flinkish_spark.planning.stream_graph import StreamGraph
    from flinkish_spark.protocol.time_plan import TimePlan
    from flinkish_spark.savepoints.files import RestoreSettings

LOG = logging.getLogger(__name__)


def check_source_names(sources: Sequence[SourceNode]) -> None:
    """Raise GraphError if two inputs would store their facts under the same name."""
    seen: dict[str, SourceNode] = {}
    for node in sources:
        for uid in node.source.list_uids(node.uid):
            for name in (f"source-{uid}", *(f"topic-{uid}-{topic}" for topic in node.source.topics)):
                other = seen.setdefault(name, node)
                if other is not node:
                    raise GraphError(
                        f"the sources '{other.uid}' and '{node.uid}' cannot be told apart",
                        why=f"the job would keep facts about the input of both under the name '{name}'",
                        what_to_do="give one of them another uid",
                    )


def check_loops(graph: StreamGraph, planned: PlannedJob) -> None:
    """Refuse topics that a job reads twice, or both reads and writes; dead-letter topics are written."""
    for first, second in permutations(graph.sources, 2):
        topic = next((one for one in second.source.topics if _reads(first, one)), None)
        if topic is not None:
            raise GraphError(
                f"the sources '{first.uid}' and '{second.uid}' read the same topic '{topic}'",
                why="Spark's log could not tell which of the two has read an offset",
                what_to_do="read the topic with one source, and use its stream twice",
            )
    for first, second in combinations((node for node in graph.sources if node.source.topic_pattern), 2):
        ours, theirs = first.source.topic_pattern, second.source.topic_pattern
        if TopicPattern(ours).may_overlap(TopicPattern(theirs)):
            raise GraphError(
                f"the patterns of the sources '{first.uid}' and '{second.uid}' may match the same topic",
                why=f"{ours!r} and {theirs!r} do not begin with different letters; if both read a topic, "
                "Spark's log could not tell which of the two has read an offset",
                what_to_do='read all of these topics with one source with metadata=["topic"]; '
                "or use KafkaRecordsSource, which logs its offsets under its uid",
            )
    for sink in planned.sinks:
        both = sorted({topic for topic in sink.sink.topics for node in graph.sources if _reads(node, topic)})
        if both:
            raise GraphError(
                f"the topic '{both[0]}' is read and written by the same job",
                why="the job would feed itself for ever",
                what_to_do=f"let '{sink.uid}' write another topic",
            )


def _reads(node: SourceNode, topic: str) -> bool:
    pattern = node.source.topic_pattern
    return topic in node.source.topics or (bool(pattern) and topic in TopicPattern(pattern))


_NOBODY = JobUuid("0" * 32)
#: The field of job.json with the meaning of operators' states.
_MEANING = "meaning"


def check_before_start(
    spark: SparkSession,
    graph: StreamGraph,
    settings: JobSettings,
    job_dir: JobDir,
) -> PlannedJob:
    """Refuse a job that cannot work; return its checked plan.

    A start plans again, since the first and last offsets of its sources are fixed after this check.
    """
    restore = settings.restore
    # Without the job's lock: a refused job leaves no file, and does not disturb a process that runs the job.
    graph.check_complete()
    _check_can_be_written(settings.job_dir)
    check_spark_version(job_dir, spark.version)
    # Brokers and the planner are both slow and independent of each other, so they run in parallel.
    begun = {
        node.uid: _start_check(partial(_check_source, spark, node, settings, job_dir), settings)
        for node in graph.sources
        if node.source.is_checked_apart
    }
    with span("Spark to access the job directory"):
        _check_seen(spark, graph, settings, job_dir, restore)
    graph = replace(graph, begun_chains=find_begun_chains(graph, job_dir, settings.job_dir, restore))
    with span("the plan to be checked before the start"):
        looked_at = settings.place(settings.scratch / "none.json")
        planned = Planner(spark, looked_at, settings.shuffle_partitions).plan(graph)
    # Raises if Spark's own aggregates have different output modes.
    _ = planned.output_mode
    _check_sink_uids(graph, planned)
    check_source_names(graph.sources)
    check_loops(graph, planned)
    check_times_of_queries(graph)
    check_alignment(graph, planned.time)
    require_tables_apart(part for one in planned.sinks for part in one.sink.parts(one.uid))
    for node in graph.sources:
        if node.uid in begun:
            begun[node.uid]()
        else:
            _check_source(spark, node, settings, job_dir)
    owner = job_dir.find_uuid() or _NOBODY
    for sink in planned.sinks:
        context = settings.sink_context(sink.uid, sink.schema, owner, OwnerEpoch(0))
        with span(f"sink '{sink.uid}' to be checked"):
            sink.sink.preflight(spark, context)
    if settings.manifest is not None:
        context_of_manifest = ManifestContext(owner, OwnerEpoch(0), settings.name, job_dir.store)
        settings.manifest.preflight(spark, context_of_manifest)
    _restore(restore, graph, planned, settings, job_dir).check()
    _check_meaning(planned, job_dir)
    check_adopted(job_dir, planned.layout, settings.shuffle_partitions)
    natives = planned.layout.natives
    check_rescale(job_dir, settings.job_dir, graph.sources, settings.shuffle_partitions, natives)
    return planned


def _start_check(check: Callable[[], None], settings: JobSettings) -> Callable[[], None]:
    """Start a check in a separate thread; return a function that waits for it and raises its error."""
    end: Future[None] = Future()

    def run() -> None:
        try:
            check()
        except BaseException as error:
            end.set_exception(error)
        else:
            end.set_result(None)

    settings.threads.start("flinkish-check-source", run)
    return end.result


def _check_source(spark: SparkSession, node: SourceNode, settings: JobSettings, job_dir: JobDir) -> None:
    with span(f"source '{node.uid}' to be checked"):
        node.source.preflight(spark, job_dir, node.uid)
        node.source.check_retention(node.uid, settings.checkpoint.replay_ms)


def record_job(
    spark: SparkSession,
    graph: StreamGraph,
    planned: PlannedJob,
    settings: JobSettings,
    job_dir: JobDir,
) -> JobUuid:
    """Record the job's settings at the first start, compare them later; the caller holds the job's lock."""
    # Checked again: while this process waited for the lock, a later version of Spark may have run here.
    check_spark_version(job_dir, spark.version)
    restore = _restore(settings.restore, graph, planned, settings, job_dir)
    savepoint = restore.prepare(settings.shuffle_partitions)
    at_first: dict[str, Any] = {
        "spark": spark.version,
        "shuffle_partitions": settings.shuffle_partitions,
        BUNDLES: BUNDLES_PER_PARTITION,
        RESTORED_FROM: savepoint,
        _MEANING: {uid: dict(shape.meaning) for uid, shape in planned.operators.items()},
    }
    claimed_as = find_claimant(job_dir)
    if claimed_as is not None:
        # A claimed savepoint names its job by this.
        at_first["uuid"] = str(claimed_as)
    job, _ = job_dir.read_or_create_job(collect_fixed_settings(graph, planned, settings), at_first)
    _check_meaning(planned, job_dir)
    _record_spark_version(job_dir, spark.version)
    return job


def _restore(
    restore: RestoreSettings | None,
    graph: StreamGraph,
    planned: PlannedJob,
    settings: JobSettings,
    job_dir: JobDir,
) -> Restore:
    hooks = [hook.uid for hook in settings.hooks.participants()]
    return Restore(restore, graph, planned, job_dir, settings.job_dir, hooks)


def collect_fixed_settings(graph: StreamGraph, planned: PlannedJob, settings: JobSettings) -> dict[str, Any]:
    """Return the settings that must never change for one job directory."""
    return {
        "job": settings.name,
        "sources": [" ".join(filter(None, (n.uid, n.source.plan_name))) for n in graph.sources],
        "max_parallelism": {node.uid: node.max_parallelism for node in graph.operators},
        # Spark finds state and offsets by position in the plan, and the plan follows the streams
        # in the order in which sinks read them.
        "operators": [node.uid for node in graph.operators],
        "streams": _streams(planned),
    }


def _check_meaning(planned: PlannedJob, job_dir: JobDir) -> None:
    """Raise JobDirError if an operator would read stored state with another meaning."""
    recorded = (job_dir.find_settings() or {}).get(_MEANING, {})
    for uid, shape in planned.operators.items():
        changed = find_changed_meaning(recorded.get(uid, {}), shape.meaning)
        if changed:
            raise JobDirError(
                f"the state of operator '{uid}' would mean something else: {changed}",
                why="the job directory has state that was made one way, and it would be read the other way",
                what_to_do="leave the operator as it was; or stop the job as it was with a savepoint, give "
                "the operator another uid, and restore into a new job_dir with "
                "non_restored=NonRestoredState.ALLOW",
            )


def _check_can_be_written(place: StoreSpec) -> None:
    if not place.is_local:
        return
    there = next(one for one in (place.folder, *place.folder.parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise JobDirError(
            f"the job directory {place.folder} cannot be written",
            why=f"this user may not create files in {there}",
            what_to_do="check that its disk is there and may be written by this user, or name another one",
        )


def check_spark_version(job_dir: JobDir, running: str) -> VersionStep:
    """Refuse a version of Spark earlier than one that has run here; return the kind of the version change."""
    before = {one: _minor(one) for one in job_dir.spark_versions()}
    ours = _minor(running)
    step = find_version_step(ours, before.values())
    if step in (VersionStep.NONE, VersionStep.FORWARD):
        return step
    newest = max(before, key=before.__getitem__)
    theirs = before[newest]
    raise JobDirError(
        f"Spark {newest} has run on this job directory, and this is Spark {running}",
        why="it is not known whether another major version of Spark can read Spark's checkpoint"
        if step is VersionStep.ANOTHER_MAJOR
        else f"Spark {ours} need not read what Spark {theirs} has written into Spark's checkpoint",
        what_to_do=f"start with Spark {theirs} again; to go to Spark {ours}, take a savepoint with "
        f"Spark {theirs} and begin a new job_dir with it",
        wanted=running,
    )


def _minor(version: str) -> SparkMinor:
    try:
        return SparkMinor.of(version)
    except ValueError as error:
        raise EnvironmentFault(
            "versions of Spark cannot be compared",
            why=str(error),
            what_to_do="use a release of Spark whose version begins like 4.2",
        ) from error


def _record_spark_version(job_dir: JobDir, running: str) -> None:
    """Record that this version of Spark runs here; the caller holds the lock."""
    if check_spark_version(job_dir, running) is VersionStep.FORWARD:
        before = max(map(_minor, job_dir.spark_versions()))
        LOG.warning(
            "Spark %s continues a job directory of Spark %s; from now on the directory refuses Spark %s",
            running,
            before,
            before,
        )
    job_dir.record_spark(running)


def _streams(planned: PlannedJob) -> list[str]:
    """Return the origin of each stream that sinks read, in the plan's order, dead letters last."""
    bases: dict[int, str] = {}
    for sink in planned.sinks:
        own = planned.logical.ends.get(sink.uid)
        ends = [(sink.uid,)] if own is None else [tuple(map(find_uid, end.paths)) for end in own]
        for stream, uids in zip(sink.streams, ends, strict=True):
            bases.setdefault(stream, "+".join(dict.fromkeys(uids)))
    return [bases[stream] for stream in sorted(bases)]


def _check_seen(
    spark: SparkSession,
    graph: StreamGraph,
    settings: JobSettings,
    job_dir: JobDir,
    restore: RestoreSettings | None,
) -> None:
    """Refuse executors that do not see the job directory, if tasks read or write it."""
    if not settings.job_dir.is_local:
        # Spark's log and state are there, buffers of sinks, and first positions of sources.
        stores = spark_stores()
        stores.check_bucket(spark, settings.job_dir, job_dir.store)
        stores.check_bucket_in_tasks(spark, settings.job_dir, job_dir.store)
        return
    if runs_tasks_itself(spark):
        return
    parts = [(uid, sink) for node in graph.sinks for uid, sink in node.sink.parts(node.uid)]
    needing = [f"the state of operator '{node.uid}'" for node in graph.operators]
    needing += [f"the rows of sink '{uid}'" for uid, sink in parts if sink.stages_in_job_dir]
    needing += [] if restore is None else ["the state of the savepoint"]
    blind = blind_hosts(spark, settings.job_dir.folder) if needing else []
    if blind:
        raise EnvironmentFault(
            f"the executors on {', '.join(blind)} do not see the job directory {settings.job_dir.url}",
            why=f"tasks keep {needing[0]} there, and whichever executor runs the next task must find it",
            what_to_do="put job_dir on a file system that the hosts of driver and executors share; "
            "a job from Kafka to Kafka without keyed state runs with job_dir on the driver's disk",
        )


def check_times_of_queries(graph: StreamGraph) -> None:
    """Refuse event times behind a query whose sources could end, or be held back, before its rows come."""
    for node in graph.timed:
        for query in [path.base for path in find_paths(node) if isinstance(path.base, QueryNode)]:
            ending = next((scan.uid for scan in find_scans(query) if scan.source.is_bounded), None)
            if node.strategy.alignment is not None:
                what, why = "watermark alignment", "it has several sources, and its rows are those of none"
                what_to_do = "leave with_watermark_alignment() out"
            elif ending is not None:
                what, why = (
                    "event times",
                    f"'{ending}' ends, and rows that the query still holds would be late",
                )
                what_to_do = "read it without an end, and run the job with until=CaughtUp()"
            else:
                continue
            raise GraphError(
                f"the rows of the query '{query.uid}' cannot have {what}", why=why, what_to_do=what_to_do
            )


def check_alignment(graph: StreamGraph, time: TimePlan) -> None:
    """Refuse watermark alignment of a source that cannot pause channels, has two groups, or no watermarks."""
    groups: dict[str, str] = {}
    asked = {one.source for one in time.assigners.values() if one.rules.alignment is not None}
    aligned = [(node.strategy.alignment, source) for node in graph.timed for source in find_sources(node)]
    for alignment, node in aligned:
        if alignment is None:
            continue
        uid = node.uid
        node.source.check_alignable(uid)
        if groups.setdefault(uid, alignment.group) != alignment.group:
            raise GraphError(
                f"the source '{uid}' is aligned with the groups '{groups[uid]}' and '{alignment.group}'",
                why="it can be held back only as a whole, for all of its readers",
                what_to_do="give all of its strategies one group",
            )
        if uid not in asked:
            raise GraphError(
                f"the source '{uid}' is aligned with the group '{alignment.group}', and has no watermarks",
                why="none of its records reach a keyed operator, and only those use watermarks",
                what_to_do="leave with_watermark_alignment() out",
            )


def _check_sink_uids(graph: StreamGraph, planned: PlannedJob) -> None:
    """Refuse a user's uid that dead letters of a source or sink need."""
    taken = [(sink.uid, "a source's dead-letter sink has") for sink in planned.sinks[len(graph.sinks) :]]
    for node in graph.sinks:
        parts = (uid for uid, _ in node.sink.parts(node.uid) if uid != node.uid)
        taken += [(uid, f"the dead letters of sink '{node.uid}' have") for uid in parts]
    for uid, who in taken:
        if uid in graph.uids():
            raise GraphError(
                f"the uid '{uid}' is used twice", why=f"{who} that uid", what_to_do="choose another uid"
            )
