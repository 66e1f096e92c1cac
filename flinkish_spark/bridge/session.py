"""Questions to the driver's JVM: what is there, is it alive, what is in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.sql import DataFrame, SparkSession

from flinkish_spark.errors import EnvironmentFault, causes_of
from flinkish_spark.forks import close_in_children
from flinkish_spark.protocol.causes import Chain

#: Writes a query's checkpoint files; see its Javadoc.
LOCAL_CHECKPOINT_FILES = "io.github.flinkishspark.shim.LocalCheckpointFiles"
#: Barriers and watermarks, by asking this process; see its Javadoc.
CONTROL_SOURCE = "io.github.flinkishspark.shim.ControlSource"
#: Parses JSON as from_json does; see its Javadoc.
JSON_ROWS = "io.github.flinkishspark.shim.JsonRows"
#: Of one failure; a chain that is longer says nothing new.
_MOST_CAUSES = 12


@dataclass(frozen=True, slots=True)
class SparkProbe:
    """What this Spark can do for us."""

    version: str
    has_shim: bool
    has_kafka_source: bool
    has_delta: bool
    has_avro: bool


def jvm(spark: SparkSession) -> Any:
    """Return the JVM view, or raise where there is none (Spark Connect)."""
    view = getattr(spark, "_jvm", None)
    if view is None:
        raise EnvironmentFault(
            "this Spark session has no JVM of its own",
            why="it is a Spark Connect session",
            what_to_do="use a classic SparkSession",
        )
    return view


def ends_with_this_process(spark: SparkSession) -> None:
    """Let the JVM see our end, by that of its input, although a child that was forked lives on."""
    process = getattr(getattr(spark.sparkContext, "_gateway", None), "proc", None)
    if process is not None and process.stdin is not None:
        close_in_children(process.stdin)


def has_class(spark: SparkSession, name: str) -> bool:
    """Whether the driver's JVM has a class, and can load it."""
    try:
        loader = jvm(spark).java.lang.Thread.currentThread().getContextClassLoader()
        jvm(spark).java.lang.Class.forName(name, False, loader)
    except Py4JJavaError:
        return False
    return True


def has_local_checkpoint_files(spark: SparkSession) -> bool:
    """Whether :data:`LOCAL_CHECKPOINT_FILES` can be loaded: the JAR is there, and fits this Spark."""
    return getattr(spark, "_jvm", None) is not None and has_class(spark, LOCAL_CHECKPOINT_FILES)


def probe(spark: SparkSession) -> SparkProbe:
    """Look once, at the start, what is on the class path."""
    return SparkProbe(
        version=spark.version,
        has_shim=has_class(spark, "io.github.flinkishspark.shim.KafkaStager"),
        has_kafka_source=has_class(spark, "org.apache.spark.sql.kafka010.KafkaSourceProvider"),
        has_delta=has_class(spark, "org.apache.spark.sql.delta.DeltaLog"),
        has_avro=has_class(spark, "org.apache.spark.sql.avro.AvroFileFormat"),
    )


@contextmanager
def active_session(spark: SparkSession) -> Iterator[None]:
    """Let a session's settings hold for what Spark does in this thread, which may have another or none."""
    sessions = jvm(spark).org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def in_session(frame: DataFrame, spark: SparkSession) -> DataFrame:
    """Return a DataFrame of one session as one of another: whose settings it runs under, and whose views."""
    datasets = jvm(spark).org.apache.spark.sql.classic.Dataset
    return DataFrame(datasets.ofRows(spark._jsparkSession, frame._jdf.logicalPlan()), spark)


def is_gateway_gone(error: BaseException) -> bool:
    """Whether `error` means that the JVM died, rather than that it refused something."""
    return any(
        isinstance(one, Py4JNetworkError | ConnectionError | EOFError)
        or (type(one) is Py4JError and _says_nobody_answered(str(one)))
        for one in causes_of(error)
    )


def _says_nobody_answered(text: str) -> bool:
    # What the JVM refuses comes with its trace; a JVM that is gone leaves one bare line.
    return "Answer from Java side is empty" in text or (
        text.startswith("An error occurred while calling") and "Trace:" not in text
    )


def describe_failure(error: BaseException) -> str:
    """Return the text of an exception with everything the JVM says caused it, the innermost last."""
    parts = [_without_plan(_text(error))]
    seen: Any = error
    # PySpark makes exceptions of its own of what the JVM says; those that it does not know have no origin.
    while seen is not None and len(parts) < _MOST_CAUSES:
        java = getattr(seen, "java_exception", None) or getattr(seen, "_origin", None)
        if java is not None:
            return "\n".join(parts + _java_causes(java))
        seen = getattr(seen, "_cause", None)
        if seen is not None:
            parts.append(_without_plan(str(getattr(seen, "_desc", "") or "")))
    return "\n".join(parts)


def said(error: BaseException) -> str:
    """Return class and message of an exception for people, its innermost cause first.

    Examples
    --------
    >>> said(KeyError("user"))
    "KeyError: 'user'"
    """
    inner = _raised_first(error, _MOST_CAUSES)
    return _named(error) if inner is error else f"{_named(inner)}, and so {_named(error)}"


def _raised_first(error: BaseException, most: int) -> BaseException:
    """Return what an exception of Python was raised from, in the end; of a group the first of its own."""
    group = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
    cause = error.__cause__ or group
    if cause is None or most == 0 or is_of_the_jvm(error):
        return error
    return _raised_first(cause, most - 1)


def _named(error: BaseException) -> str:
    if is_of_the_jvm(error):
        return Chain.of(describe_failure(error)).headline
    return f"{type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a user's class
        return "<an exception that has no text>"


def is_of_the_jvm(error: BaseException) -> bool:
    """Whether Py4J or PySpark has made an exception of one of Java's."""
    return type(error).__module__.startswith(("py4j.", "pyspark."))


def _java_causes(java: Any) -> list[str]:
    found: list[str] = []
    while java is not None and len(found) < _MOST_CAUSES:
        try:
            found.append(_without_plan(str(java.toString())))
            java = java.getCause()
        except Exception:  # the JVM may be gone; what was read so far is still useful
            break
    return found


def _without_plan(text: str) -> str:
    # Behind this line Spark prints the whole plan, with every literal of ours in it.
    return text.split("=== Streaming Query ===", 1)[0]


def _nodes(plan: Any) -> list[Any]:
    found, queue = [], [plan]
    while queue:
        node = queue.pop(0)
        found.append(node)
        children = node.children()
        queue += [children.apply(i) for i in range(children.size())]
    return found


def streaming_sources(frame: DataFrame) -> list[str]:
    """Return the format name of every streaming source in a DataFrame's plan."""
    names = []
    for node in _nodes(frame._jdf.queryExecution().analyzed()):
        kind = node.getClass().getSimpleName()
        if kind == "StreamingRelationV2" or kind in ("StreamingRelation", "StreamingExecutionRelation"):
            names.append(str(node.sourceName()))
    return names


#: Plan nodes that keep state or a watermark of Spark's own, and what a user calls them.
_STATEFUL = {
    "Aggregate": "an aggregate (groupBy/agg/distinct)",
    "Distinct": "distinct()",
    "Deduplicate": "dropDuplicates()",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark()",
    "EventTimeWatermark": "withWatermark()",
    "FlatMapGroupsWithState": "mapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState",
    "GlobalLimit": "limit()",
    "Sort": "orderBy()",
}


def stateful_parts(frame: DataFrame) -> list[str]:
    """Return what in a streaming DataFrame keeps state or order of Spark's own."""
    found = []
    for node in _nodes(frame._jdf.queryExecution().analyzed()):
        kind = node.getClass().getSimpleName()
        if kind == "Sort" and not getattr(node, "global")():
            # A task sorts its own rows of a micro-batch, and keeps nothing.
            continue
        if kind in _STATEFUL and node.isStreaming():
            found.append(_STATEFUL[kind])
        if kind == "Join" and all(node.children().apply(i).isStreaming() for i in range(2)):
            found.append("a join of two streams")
    return found
