"""Everything that can be refused before anything starts, in one place and in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge import probe
from flinkish_spark.errors import EnvironmentFault, GraphError
from flinkish_spark.graph.planner import PlannedJob, Planner
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch
from flinkish_spark.runtime.control_source import ControlSource
from flinkish_spark.runtime.query import query_conf
from flinkish_spark.sinks.base import SinkContext
from flinkish_spark.sinks.delta import DeltaSink, require_delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.graph.stream_graph import StreamGraph
    from flinkish_spark.runtime.supervisor import JobSettings

_NOBODY = JobUuid("0" * 32)


def check_before_start(
    spark: SparkSession, graph: StreamGraph, settings: JobSettings, job_dir: JobDir
) -> JobUuid:
    """Refuse what cannot work; then record the job's settings and return its uuid.

    Called once per process, holding the job's lock. Nothing outside has changed when it raises.
    """
    graph.check_complete()
    _check_session(spark, graph)
    for node in graph.sources:
        node.source.preflight(spark, job_dir, node.uid)
    control = str(settings.root / "control" / "none.json")
    with query_conf(spark, settings.shuffle_partitions):
        spark.dataSource.register(ControlSource)
        planned = Planner(spark, control, settings.shuffle_partitions).plan(graph)
    _check_loops(graph, planned)
    _check_delta_paths(planned)
    for sink in planned.sinks:
        context = SinkContext(_NOBODY, OwnerEpoch(0), sink.uid, sink.schema, settings.checkpoint)
        sink.sink.preflight(spark, context)
    job, _ = job_dir.read_or_create_job(fixed_settings(spark, graph, settings))
    return job


def fixed_settings(spark: SparkSession, graph: StreamGraph, settings: JobSettings) -> dict[str, Any]:
    """Return what must never change for one job directory."""
    return {
        "job": settings.name,
        "spark": spark.version,
        "shuffle_partitions": settings.shuffle_partitions,
        "sources": [node.uid for node in graph.sources],
        "max_parallelism": {node.uid: node.max_parallelism for node in graph.operators},
    }


def _check_session(spark: SparkSession, graph: StreamGraph) -> None:
    found = probe(spark)
    needs_kafka = any(node.source.topics for node in graph.sources)
    if needs_kafka and not found.has_kafka_source:
        raise EnvironmentFault(
            "this Spark session has no Kafka source",
            what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...)",
        )
    if not found.has_shim:
        raise EnvironmentFault(
            "this Spark session does not have the JAR of flinkish_spark",
            what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...)",
        )
    if any(isinstance(node.sink, DeltaSink) for node in graph.sinks):
        require_delta(found.has_delta)


def _check_loops(graph: StreamGraph, planned: PlannedJob) -> None:
    """Refuse a topic that is read and written; dead-letter topics count as written."""
    read = {topic for node in graph.sources for topic in node.source.topics}
    for sink in planned.sinks:
        both = sorted(read & set(sink.sink.topics))
        if both:
            raise GraphError(
                f"the topic '{both[0]}' is read and written by the same job",
                why="the job would feed itself for ever",
                what_to_do=f"let '{sink.uid}' write another topic",
                topic=both[0],
            )


def _check_delta_paths(planned: PlannedJob) -> None:
    seen: dict[str, str] = {}
    for sink in planned.sinks:
        if not isinstance(sink.sink, DeltaSink):
            continue
        path = sink.sink.path.rstrip("/")
        if path in seen:
            raise GraphError(
                f"the sinks '{seen[path]}' and '{sink.uid}' write the same Delta table {path}",
                why="their commits of one checkpoint would conflict with each other",
                what_to_do="union the streams, or use two tables",
            )
        seen[path] = sink.uid
