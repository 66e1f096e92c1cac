"""The driver's session and its JVM: configuration, access, warm-up."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from flinkish_spark.bridge.no_session import is_pretended
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.foreign_errors import describe_error, describe_failure
from flinkish_spark.jars import (
    find_pinned,
    find_pinned_jars,
    has_pinned_delta,
    is_delta,
    ivy_settings,
    log_settings,
    running_minor,
    shim_jar,
    spark_home,
)
from flinkish_spark.protocol.errors import Chain

LOG = logging.getLogger(__name__)


#: Classes that write a query's checkpoint files, on a disk or in a bucket; see their Javadoc.
LOCAL_CHECKPOINT_FILES = "io.github.flinkishspark.shim.LocalCheckpointFiles"
BUCKET_CHECKPOINT_FILES = "io.github.flinkishspark.shim.BucketCheckpointFiles"
#: Advice for a session of Spark Connect.
WITHOUT_JVM = (
    "use a classic session for jobs: spark-submit, or a notebook with dedicated compute; "
    'format("flinkish-kafka") works here, as source and as sink, and foreachBatch(SinkGroup(...))'
)


#: PySpark converts the exceptions that it knows, including Delta's, into its own.
FROM_THE_JVM = (Py4JJavaError, CapturedException, PySparkException)


def jvm(spark: SparkSession) -> Any:
    """Return the JVM view; raise an error if there is none (Spark Connect)."""
    view = getattr(spark, "_jvm", None)
    if view is None:
        raise EnvironmentFault(
            "this Spark session has no JVM of its own",
            why="it is a Spark Connect session",
            what_to_do=WITHOUT_JVM,
        )
    return view


#: Spark's master of `flinkish run --target`.
TARGET_SETTING = "spark.flinkish.target"
#: Set to "caught-up" by `flinkish run --until-caught-up`.
UNTIL_SETTING = "spark.flinkish.until"
UNTIL_CAUGHT_UP = "caught-up"
#: Local property of the thread that runs a micro-batch.
_QUERY_ID = "sql.streaming.queryId"
#: The id of a run is the group of its Spark jobs.
_RUN_ID = "spark.jobGroup.id"


def is_until_caught_up(spark: SparkSession) -> bool:
    context: Any = getattr(spark, "sparkContext", None)
    return context is not None and context.getConf().get(UNTIL_SETTING) == UNTIL_CAUGHT_UP


def has_gateway() -> bool:
    """Return True if spark-submit has started the JVM before this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def refuse_other_target(spark: SparkSession) -> None:
    """Raise ConfigError if the session's master differs from the target of `flinkish run`."""
    context: Any = getattr(spark, "sparkContext", None)
    target = None if context is None else context.getConf().get(TARGET_SETTING)
    # Spark normalizes the URL of a Kubernetes cluster.
    is_kubernetes = target is not None and target.startswith("k8s:") and context.master.startswith("k8s:")
    if target is None or target == context.master or is_kubernetes:
        return
    raise ConfigError(
        f"the program's session runs on {context.master}, and --target says {target}",
        why="SparkSession.builder.master() in a program overrides --target",
        what_to_do="take .master(...) out of the program; without `flinkish run` Spark's default is local[*]",
    )


def session_time_zone(spark: SparkSession) -> str:
    return spark.conf.get("spark.sql.session.timeZone") or "UTC"


def find_spark_ui(spark: SparkSession) -> str | None:
    return getattr(getattr(spark, "sparkContext", None), "uiWebUrl", None)


def has_class(spark: SparkSession, name: str) -> bool:
    """Return True if the driver's JVM can load a class."""
    try:
        loader = jvm(spark).java.lang.Thread.currentThread().getContextClassLoader()
        jvm(spark).java.lang.Class.forName(name, False, loader)
    except Py4JJavaError:
        return False
    return True


def has_shim(spark: SparkSession) -> bool:
    return has_class(spark, "io.github.flinkishspark.shim.JobMetrics")


def show_metrics(spark: SparkSession, job: str, values: Mapping[str, int | float]) -> None:
    jvm(spark).io.github.flinkishspark.shim.JobMetrics.show(job, json.dumps(dict(values)))


def has_kafka_source(spark: SparkSession) -> bool:
    return has_class(spark, "org.apache.spark.sql.kafka010.KafkaSourceProvider")


def has_avro(spark: SparkSession) -> bool:
    return has_class(spark, "org.apache.spark.sql.avro.AvroFileFormat")


def has_delta_format(spark: SparkSession) -> bool:
    """Return True if ``format("delta")`` exists, whoever provides it."""
    if is_pretended(spark):
        return False
    if getattr(spark, "_jvm", None) is None:
        # The lookup is not possible; the first access to a table will fail.
        return True
    try:
        sources = jvm(spark).org.apache.spark.sql.execution.datasources.DataSource
        sources.lookupDataSource("delta", spark._jsparkSession.sessionState().conf())
    except FROM_THE_JVM:
        return False
    return True


def default_file_system(spark: SparkSession) -> str:
    """Return Hadoop's default file system, for paths without a scheme."""
    if getattr(spark, "_jvm", None) is None:
        # Of the files of Hadoop's settings, a server of Spark Connect shows none.
        return spark.conf.get("spark.hadoop.fs.defaultFS", "file:///") or "file:///"
    found: str = (
        jvm(spark)
        .org.apache.hadoop.fs.FileSystem.getDefaultUri(spark.sparkContext._jsc.hadoopConfiguration())
        .toString()
    )
    return found


def find_hadoop_setting(spark: SparkSession, name: str) -> str | None:
    """Return a setting of Hadoop's, or its default; None for a session of Spark Connect."""
    if getattr(spark, "_jvm", None) is None:
        return None
    found: str | None = spark.sparkContext._jsc.hadoopConfiguration().get(name)
    return found


def has_checkpoint_files(spark: SparkSession) -> bool:
    return getattr(spark, "_jvm", None) is not None and has_class(spark, LOCAL_CHECKPOINT_FILES)


def calls_python(frame: DataFrame) -> bool:
    """Return True if Spark calls Python functions to compute a frame, or does not tell (Spark Connect)."""
    if getattr(frame, "_jdf", None) is None:
        return True
    return "EvalPython" in str(frame._jdf.queryExecution().executedPlan().toString())


def avro_schema_of(spark: SparkSession, fields: T.StructType, name: str, namespace: str) -> str:
    view = jvm(spark)
    kind = view.org.apache.spark.sql.types.DataType.fromJson(fields.json())
    return str(
        view.org.apache.spark.sql.avro.SchemaConverters.toAvroType(kind, False, name, namespace).toString()
    )


@contextmanager
def active_session(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread, so that Spark uses its settings."""
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


def move_to_session(frame: DataFrame, spark: SparkSession) -> DataFrame:
    datasets = jvm(spark).org.apache.spark.sql.classic.Dataset
    return DataFrame(datasets.ofRows(spark._jsparkSession, frame._jdf.logicalPlan()), spark)


def hold_stage_bars(spark: SparkSession) -> None:
    bars = spark.sparkContext._jsc.sc().progressBar()
    if bars.isDefined():
        bars.get().finishAll()


#: Spark's loggers of failures that become errors of the job; names differ by version.
_TRACERS = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.sql.execution.streaming.MicroBatchExecution",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.storage.BlockManager",
    "org.apache.spark.util.Utils",
)


@contextmanager
def suppress_traces(spark: SparkSession) -> Iterator[None]:
    """Switch off the driver's loggers of failure traces, except loggers that the user has configured."""
    ours: list[str] = []
    with suppress(Py4JError, OSError, TypeError):
        log4j = jvm(spark).org.apache.logging.log4j
        context = log4j.LogManager.getContext(False)
        config = context.getConfiguration()
        for name in _TRACERS:
            if not config.getLoggers().containsKey(name):
                log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
                ours.append(name)
    try:
        yield
    finally:
        with suppress(Py4JError, OSError):
            for name in ours:
                config.removeLogger(name)
                context.updateLoggers()


def why_no_resources(spark: SparkSession, profile: ResourceProfile) -> str:
    """Return why stage-level resources are not supported here, in words; empty if they are."""
    known = profile._java_resource_profile
    if known is None:
        return "its profile was built before there was a session; build it again"
    try:
        spark.sparkContext._jsc.sc().resourceProfileManager().isSupported(known)
    except Py4JJavaError as error:
        return Chain.of(describe_failure(error)).headline
    return ""


def _nodes(plan: Any) -> list[Any]:
    found, queue = [], [plan]
    while queue:
        node = queue.pop(0)
        found.append(node)
        children = node.children()
        queue += [children.apply(i) for i in range(children.size())]
    return found


def streaming_sources(frame: DataFrame) -> list[str]:
    names = []
    for node in _nodes(frame._jdf.queryExecution().analyzed()):
        kind = node.getClass().getSimpleName()
        if kind == "StreamingRelationV2" or kind in ("StreamingRelation", "StreamingExecutionRelation"):
            names.append(str(node.sourceName()))
    return names


def streaming_options(frame: DataFrame) -> list[Mapping[str, str]]:
    """Return the options of every streaming source in a DataFrame's plan; they may contain secrets."""
    found: list[Mapping[str, str]] = []
    for node in _nodes(frame._jdf.queryExecution().analyzed()):
        kind = node.getClass().getSimpleName()
        if kind == "StreamingRelationV2":
            found.append(dict(node.extraOptions().asCaseSensitiveMap()))
        elif kind == "StreamingRelation":
            converters = jvm(frame.sparkSession).scala.jdk.javaapi.CollectionConverters
            found.append(dict(converters.asJava(node.dataSource().options())))
    return found


_KAFKA_STREAM = "org.apache.spark.sql.kafka010.KafkaMicroBatchStream"


def ask_kafka_first(
    spark: SparkSession, writer: Callable[[DataFrame, int], None]
) -> Callable[[DataFrame, int], None]:
    """Wrap a foreachBatch writer so that Spark 4.1's Kafka source fetches the newest offsets first."""
    # A user's DataFrame may read from that source. After a restart the first micro-batch is already logged.
    # The source has not fetched the newest offsets then, and its metrics end the query with a
    # NullPointerException (SPARK-55271, fixed in 4.2).
    if running_minor() != "4.1":
        return writer
    has_asked = False

    def first_asked(frame: DataFrame, batch_id: int) -> None:
        nonlocal has_asked
        if not has_asked:
            has_asked = True
            try:
                # The frame has its own session, which has no queries.
                _ask_kafka(spark)
            except Py4JError as error:
                # Another build of Spark may have other internals; without this the query restarts once.
                LOG.debug(
                    "the newest offsets of Kafka's sources could not be fetched: %s", describe_error(error)
                )
        writer(frame, batch_id)

    return first_asked


@dataclass(frozen=True, slots=True)
class QueryRun:
    """A run of a query: Spark's ids of the query, and of its run."""

    query: str | None
    run: str | None


def find_query_run(spark: SparkSession) -> QueryRun | None:
    """Return the run whose foreachBatch this thread is in; None through Spark Connect."""
    if not hasattr(spark, "_jsparkSession"):
        return None
    context = spark.sparkContext
    return QueryRun(context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_RUN_ID))


def _ask_kafka(spark: SparkSession) -> None:
    """Make the Kafka sources of this thread's query fetch the newest offsets of their topics."""
    query = spark._jsparkSession.streams().get(spark.sparkContext.getLocalProperty(_QUERY_ID))
    everything = jvm(spark).org.apache.spark.sql.connector.read.streaming.ReadLimit.allAvailable()
    sources = query.streamingQuery().sources()
    for source in (sources.apply(n) for n in range(sources.size())):
        if source.getClass().getName() == _KAFKA_STREAM:
            source.latestOffset(source.deserializeOffset("{}"), everything)


# JARs are fixed when the JVM starts, so these functions must be called before ``getOrCreate()``.


#: Settings for ``format("delta")`` and SQL on Delta tables.
_DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def delta_conf(jars: Iterable[str | Path] = ()) -> dict[str, str]:
    # Without the JAR the catalog cannot be loaded, and the session would fail.
    return _DELTA_CONF if has_pinned_delta(running_minor()) or any(map(is_delta, jars)) else {}


_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
#: The environment variable with Log4j's configuration file.
_LOG_VARIABLE = "LOG4J_CONFIGURATION_FILE"
#: Java versions for Spark 4; up to 8 a version began with "1.".
_LEAST_JAVA, _JAVA_VERSION = 17, re.compile(r'version "(?:1\.)?(\d+)')

#: Kills an executor if a cancelled task does not end; as Flink's `task.cancellation.timeout`.
REAPING_CONF = {"spark.task.reaper.enabled": "true", "spark.task.reaper.killTimeout": "180s"}


def spark_conf(jars: Iterable[str | Path]) -> dict[str, str]:
    """Return the Spark settings that this package needs, with the shim and these JARs."""
    own = list(jars)
    names = ",".join(str(jar) for jar in [shim_jar(), *own])
    return {**delta_conf(own), **REAPING_CONF, "spark.jars": names}


def configure_spark_with_jars(
    builder: SparkSession.Builder,
    directory: str | Path,
    *,
    extra_jars: Iterable[str | Path] = (),
    class_archive: str | Path | None = None,
) -> SparkSession.Builder:
    """Configure a session builder with JARs on this machine; nothing is downloaded.

    Call it before ``getOrCreate()`` and before your own settings, which override these.

    Parameters
    ----------
    builder
        ``SparkSession.builder``, or what its methods returned.
    directory
        A directory with the pinned JARs, written by ``flinkish jars DIR``.
    extra_jars
        JARs of your own.
    class_archive
        A folder, created if missing, for an archive of the classes loaded by the driver's JVM (about 200 MB),
        which makes the next start on this machine some seconds faster. It is written when the JVM ends, which
        takes some seconds once. None: no archive. Set your own ``spark.driver.extraJavaOptions`` before this
        call; they are kept.

    Returns
    -------
    SparkSession.Builder
        The same builder.

    Raises
    ------
    JarMissing
        If a JAR is missing; the message tells which one and how to get it.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> builder = SparkSession.builder.master("local[2,4]")
    >>> spark = configure_spark_with_jars(builder, "jars").getOrCreate()  # doctest: +SKIP
    """
    jars = [*find_pinned_jars(directory), *extra_jars]
    kept = {} if class_archive is None else _class_sharing(builder, Path(class_archive), jars)
    _log_quietly(builder)
    return builder.config(map={**spark_conf(jars), **kept})


def configure_spark_with_delta_jars(
    builder: SparkSession.Builder, directory: str | Path
) -> SparkSession.Builder:
    """Configure a session builder with Delta's JARs on this machine, and no other JAR.

    A job that reads and writes Kafka needs neither Spark's Kafka connector nor the JAR of this package. A job
    without Delta needs no call at all.

    Parameters
    ----------
    builder
        ``SparkSession.builder``, or what its methods returned.
    directory
        A directory with Delta's pinned JARs, written by ``flinkish jars DIR``; others may be missing.

    Returns
    -------
    SparkSession.Builder
        The same builder.

    Raises
    ------
    JarMissing
        If a JAR is missing.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> spark = configure_spark_with_delta_jars(  # doctest: +SKIP
    ...     SparkSession.builder.master("local[2,4]"), "jars"
    ... ).getOrCreate()
    """
    jars = find_pinned_jars(directory, group="io.delta")
    own_jars = ",".join(str(jar) for jar in jars)
    _log_quietly(builder)
    return builder.config(map={**delta_conf(jars), **REAPING_CONF, "spark.jars": own_jars})


def configure_spark_with_packages(
    builder: SparkSession.Builder, *, extra_packages: Iterable[str] = ()
) -> SparkSession.Builder:
    """Configure a session builder to download the pinned JARs with Spark's resolver at the session's start.

    The counterpart of Delta's ``configure_spark_with_delta_pip``; it replaces that call. It brings its own
    resolver settings, so a site with a private mirror should use :func:`configure_spark_with_jars`.
    Downloads are kept in ``spark.jars.ivy`` (by default under the home directory).

    Parameters
    ----------
    builder
        ``SparkSession.builder``, or what its methods returned.
    extra_packages
        Maven coordinates of your own, resolved with all they depend on. Do not name Kafka here, and
        Delta only for a version of Spark for which it is not pinned.

    Returns
    -------
    SparkSession.Builder
        The same builder.

    Raises
    ------
    JarMissing
        If the shim was not built; it is not downloaded.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> builder = SparkSession.builder.config("spark.jars.ivy", "build/ivy")
    >>> spark = configure_spark_with_packages(builder).getOrCreate()  # doctest: +SKIP
    """
    _log_quietly(builder)
    return builder.config(map={**packages_conf(extra_packages)})


def packages_conf(extra_packages: Iterable[str] = ()) -> dict[str, str]:
    packages = [*find_pinned("spark"), *extra_packages]
    return {
        **spark_conf([]),
        **delta_conf(packages),
        "spark.jars.packages": ",".join(packages),
        "spark.jars.ivySettings": str(ivy_settings()),
    }


def _log_quietly(builder: SparkSession.Builder) -> None:
    os.environ.update(log_variables(str(builder._options.get(_JAVA_OPTIONS, ""))))


def _class_sharing(builder: SparkSession.Builder, folder: Path, jars: Iterable[str | Path]) -> dict[str, str]:
    """Return the JVM option that reads classes from an archive, or writes the archive at exit."""
    # The name depends on what an archive is valid for; the JVM itself detects a changed class path.
    import pyspark

    java = _java()
    files = [*([] if java is None else [os.path.realpath(java)]), *map(str, jars)]
    facts = [pyspark.__version__, *(f"{file} {os.stat(file).st_mtime_ns}" for file in files)]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder.resolve() / f"{name}.jsa"
    option = "SharedArchiveFile" if archive.exists() else "ArchiveClassesAtExit"
    given = str(builder._options.get(_JAVA_OPTIONS, ""))
    # Without warnings about classes that cannot be archived, and about unusable archives.
    sharing = f'"-XX:{option}={archive}" -Xlog:cds=off -Xlog:cds+dynamic=off'
    return {_JAVA_OPTIONS: f"{given} {sharing}".strip()}


def log_variables(java_options: str = "") -> dict[str, str]:
    """Return the environment variable for quiet logging, unless the user has configured Spark's logging."""
    folders = [os.environ.get("SPARK_CONF_DIR", ""), str(spark_home() / "conf")]
    has_file = any(list(Path(folder).glob("log4j2.*")) for folder in folders if folder)
    if _LOG_VARIABLE in os.environ or "log4j" in java_options or has_file:
        return {}
    return {_LOG_VARIABLE: str(log_settings())}


def check_java() -> None:
    """Raise EnvironmentFault if Java is missing or unsuitable; Spark says only that its gateway exited."""
    conf = Path(os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf")
    if os.environ.get("SPARK_REMOTE") or (conf / "spark-env.sh").exists():
        # Java is on another machine, or that script finds it.
        return
    install = f"install a JDK, {_LEAST_JAVA} or newer; let JAVA_HOME name its folder, or PATH its bin"
    java = _java()
    if java is None:
        where = "JAVA_HOME names a folder without one" if os.environ.get("JAVA_HOME") else "PATH has none"
        raise EnvironmentFault("there is no Java", why=f"{where}, and Spark runs on it", what_to_do=install)
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvironmentFault(
            "there is no Java", why=f"{java} does not run: {error}", what_to_do=install
        ) from None
    version = _JAVA_VERSION.search(answer.stderr)
    if version is not None and int(version[1]) < _LEAST_JAVA:
        raise EnvironmentFault(f"Java {version[1]} is too old", why=f"Spark runs {java}", what_to_do=install)


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")


_PYTHON = "spark.pyspark.python"


def scratch_folder(spark: SparkSession) -> Path:
    """Return a new path among a session's temporary files, which Spark deletes with the session."""
    context: Any = getattr(spark, "_sc", None)
    # A session without its own JVM is refused elsewhere.
    parent = tempfile.gettempdir() if context is None else context._temp_dir
    return Path(parent, f"flinkish-{uuid.uuid4().hex}")


def runs_tasks_itself(spark: SparkSession) -> bool:
    """Return True if tasks run in this session's JVM, and so see the driver's files."""
    if getattr(spark, "_jvm", None) is None:
        return False
    master = spark.sparkContext.master or ""
    return master == "local" or master.startswith("local[")


def run_tasks_in_this_python(spark: SparkSession) -> None:
    """Make tasks in this session's JVM use this Python, unless the user has set one."""
    # Spark would use `python3` from the path, which may be another one in an environment that is not
    # activated.
    if "PYSPARK_PYTHON" in os.environ or not runs_tasks_itself(spark):
        return
    if spark.conf.get(_PYTHON, None) is None:
        spark.sparkContext.pythonExec = sys.executable


def ask_executors(spark: SparkSession, ask: Callable[[Iterable[int]], Iterable[Any]]) -> list[Any]:
    tasks = 2 * spark.sparkContext.defaultParallelism
    return spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(ask).collect()


def nearest_folder(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def blind_hosts(spark: SparkSession, folder: Path) -> list[str]:
    """Return the hosts of executors whose tasks do not see files that the driver writes into a folder."""
    there = nearest_folder(folder)
    marker = there / f".flinkish-{uuid.uuid4().hex}"
    try:
        marker.touch()
    except OSError as error:
        LOG.debug("it could not be checked whether executors see %s: %s", there, error)
        return []
    path = str(marker)

    def blind(_: Iterable[int]) -> Iterable[str]:
        import os
        import socket

        return [] if os.path.exists(path) else [socket.gethostname()]

    try:
        return sorted(set(ask_executors(spark, blind)))
    finally:
        marker.unlink(missing_ok=True)
