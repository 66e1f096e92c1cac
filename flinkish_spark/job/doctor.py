"""Checks of a session and its environment before the first job: what a job would refuse, and why."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import (
    WITHOUT_JVM,
    ask_executors,
    blind_hosts,
    has_avro,
    has_class,
    has_delta_format,
    has_kafka_source,
    has_shim,
    jvm,
    nearest_folder,
    runs_tasks_itself,
)
from flinkish_spark.bridge.settings import find_job_settings
from flinkish_spark.bridge.stores import spark_stores
from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.connectors.delta.sink import DeltaSink
from flinkish_spark.connectors.kafka.checks import check_topic_retention
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import FlinkishError, StoreError
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.job_dir import job_place, open_job_dir
from flinkish_spark.core.store import BucketStore, CreateResult, LocalStore, UnknownOutcomeError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.jars import JarMissing, how_to_get_delta, shim_jar
from flinkish_spark.job.configuration import fill_arguments, read_configuration
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.html import html_table
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch

#: Packages that Spark's Python workers need, by their names in pip.
_PACKAGES = ("flinkish-spark", "pyspark", "pyarrow", "pandas", "kafka-python")
#: A smaller difference between the clocks of two machines is ignored.
_SKEW_MS, _LITTLE_ROOM = 1_000, 1 << 30
_PATIENCE_MS = 10_000


class Health(Choice):
    """The verdict of a check."""

    FINE = "ok"
    #: It works, but the user should know.
    WARNING = "warning"
    #: A job that needs it is refused.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis.

    Parameters
    ----------
    about
        What was looked at.
    says
        What was found.
    what_to_do
        Empty where nothing has to be done.
    """

    about: str
    health: Health
    says: str
    what_to_do: str = ""

    def __str__(self) -> str:
        line = f"{self.health.value:8} {self.about}: {self.says}"
        return f"{line}. To do: {self.what_to_do}" if self.what_to_do else line


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of :func:`doctor`, in the order of its checks; prints one line for each."""

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Return True if nothing is refused."""
        return all(one.health is not Health.REFUSED for one in self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(one.health.value, one.about, one.says, one.what_to_do) for one in self.findings]
        return html_table(rows, columns=("", "what", "found", "to do"))


def doctor(
    spark: SparkSession,
    *,
    job_dir: str | os.PathLike[str] = "",
    store_options: Mapping[str, str] | None = None,
    bootstrap_servers: str = "",
    options: Mapping[str, str] = MappingProxyType({}),
    topics: Sequence[str] = (),
    tables: Sequence[str] = (),
    checkpoint: CheckpointConfig | None = None,
) -> Diagnosis:
    """Check a session, and what its first job will use, before the job is started.

    Changes nothing: what it writes to try a directory is deleted again. Called by users, in a notebook or
    through ``flinkish doctor``; it takes seconds, more where something does not answer.

    Parameters
    ----------
    job_dir
        Where the job is to keep its checkpoints.
    store_options
        Of the bucket that it is in.
    bootstrap_servers, options
        How Kafka is reached, as a KafkaSource is told; secrets among the options are never shown.
    topics
        That a job reads or writes.
    tables
        Paths of Delta tables that a job appends to.
    checkpoint
        Of the job; its interval and restart budget are what topics and tables are compared with.

    Returns
    -------
    Diagnosis
        An error during a check is a finding, too.

    Examples
    --------
    >>> from flinkish_spark import doctor
    >>> print(doctor(spark, job_dir="/data/jobs/orders"))  # doctest: +SKIP
    ok       Python: 3.11.7
    ...
    """
    config = CheckpointConfig() if checkpoint is None else checkpoint
    steps: list[tuple[str, Callable[[], Iterable[Finding]]]] = [("Python", _software)]
    steps.append(("session", lambda: _session(spark)))
    steps.append(("settings", lambda: _configuration(spark)))
    if getattr(spark, "_jvm", None) is not None:
        steps.append(("executors", lambda: _executors(spark)))
        if job_dir:
            steps.append(("job_dir", lambda: _job_dir(spark, job_dir, store_options or {})))
        steps += [(f"table {path}", partial(_table, spark, path, config)) for path in tables]
    if bootstrap_servers:
        kafka = KafkaConnection(bootstrap_servers, options)
        steps.append(("brokers", lambda: _brokers(kafka, topics, config)))
    return Diagnosis(tuple(one for about, look in steps for one in _run_check(about, look)))


def _run_check(about: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except FlinkishError as error:
        says = f"{error.what}, because {error.why}" if error.why else error.what
        yield Finding(about, Health.REFUSED, says, error.what_to_do)
    except Exception as error:
        yield Finding(about, Health.REFUSED, describe_error(error) or type(error).__name__, "see the error")


def _software() -> Iterator[Finding]:
    yield Finding("Python", Health.FINE, platform.python_version())
    found = _versions()
    yield Finding("packages", Health.FINE, ", ".join(f"{name} {version}" for name, version in found.items()))


def _configuration(spark: SparkSession) -> Iterator[Finding]:
    found = read_configuration(find_job_settings(spark))
    fill_arguments({}, found)  # Raises if a value is out of range.
    if found:
        yield Finding("settings", Health.FINE, ", ".join(map(str, found.values())))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _session(spark: SparkSession) -> Iterator[Finding]:
    if getattr(spark, "_jvm", None) is None:
        says = f"Spark {spark.version} through Spark Connect, without a JVM"
        yield Finding("session", Health.REFUSED, says, WITHOUT_JVM)
        return
    java = jvm(spark).java.lang.System.getProperty("java.version")
    master = spark.sparkContext.master
    yield Finding("session", Health.FINE, f"Spark {spark.version} at {master}, Java {java}")
    # A fork of Delta Lake may have other classes.
    has_delta = has_class(spark, "org.apache.spark.sql.delta.DeltaLog") or has_delta_format(spark)
    own = (has_shim(spark), has_kafka_source(spark), has_delta, has_avro(spark))
    yield from _jars(spark.version, [name for name, is_there in zip(_JARS, own, strict=True) if is_there])


_JARS = ("flinkish_spark", "Spark's Kafka source", "Delta Lake", "Spark's Avro")


def _jars(version: str, there: Sequence[str]) -> Iterator[Finding]:
    """Report the JARs of a session; a missing one is no fault, unless it cannot be downloaded."""
    start = "for a job that needs it: configure_spark_with_packages(...), or `flinkish jars DIR`"
    why_no_delta, get_delta = how_to_get_delta(".".join(version.split(".")[:2]))
    has_own, own, get_own = True, "its JAR is in this package", start
    try:
        shim_jar()
    except JarMissing as error:
        has_own, own, get_own = False, error.what, error.what_to_do
    for about, can_be_had, without, to_do in zip(
        _JARS,
        (has_own, True, not why_no_delta, True),
        (
            f"{own}; jobs work without it",
            'jobs without a frame of format("kafka") work without it',
            "jobs without Delta tables work without it",
            "jobs without files of Avro work without it",
        ),
        (get_own, start, get_delta if why_no_delta else start, start),
        strict=True,
    ):
        if about in there:
            yield Finding(f"JAR of {about}", Health.FINE, "it is there")
        else:
            health = Health.FINE if can_be_had else Health.WARNING
            yield Finding(f"JAR of {about}", health, f"not in this session; {without}", to_do)


def _executors(spark: SparkSession) -> Iterator[Finding]:
    """Check the packages and the clock of the Python workers on executors."""
    names, driver = _PACKAGES, {"Python": platform.python_version(), **_versions()}

    def ask(_: Iterable[int]) -> Iterable[tuple[str, int, dict[str, str]]]:
        # Pickled by value: it must work where this package is not installed.
        import importlib.metadata
        import platform
        import socket
        import time

        there = {"Python": platform.python_version()}
        for name in names:
            try:
                there[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                there[name] = "missing"
        return [(socket.gethostname(), time.time_ns() // 1_000_000, there)]

    began_ms = time.time_ns() // 1_000_000
    answers = ask_executors(spark, ask)
    ended_ms = time.time_ns() // 1_000_000
    for host in sorted({host for host, _, _ in answers}):
        (there, *_) = [found for name, _, found in answers if name == host]
        other = {name: version for name, version in there.items() if version != driver[name]}
        told = ", ".join(f"{name} {version} and here {driver[name]}" for name, version in other.items())
        if "missing" in other.values():
            todo = "install the same packages into the Python of the executors; --py-files come too late"
            yield Finding(f"executors on {host}", Health.REFUSED, told, todo)
        elif other:
            todo = "install the same versions there: functions and rows travel between the two"
            yield Finding(f"executors on {host}", Health.WARNING, told, todo)
        else:
            yield Finding(f"executors on {host}", Health.FINE, "the same Python and packages as here")
        off_ms = max(max(began_ms - at_ms, at_ms - ended_ms, 0) for name, at_ms, _ in answers if name == host)
        if off_ms > _SKEW_MS:
            says = f"it differs from the driver's by {off_ms} ms or more"
            yield Finding(
                f"clock of {host}", Health.WARNING, says, "let both hosts follow one time server (NTP)"
            )


def _job_dir(
    spark: SparkSession, job_dir: str | os.PathLike[str], options: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Finding]:
    place = job_place(job_dir, options)
    if not place.is_local:
        yield from _bucket(spark, place)
        return
    path = place.folder
    there = nearest_folder(path)
    yield _probe_folder(there)
    free = shutil.disk_usage(there).free
    if free < _LITTLE_ROOM:
        says = f"{free >> 20} MiB are free in {there}"
        yield Finding(
            "job_dir", Health.WARNING, says, "make room: state and pins of checkpoints are kept there"
        )
    yield from _owner(place)
    if not runs_tasks_itself(spark):
        blind = blind_hosts(spark, path)
        if blind:
            says = f"executors on {', '.join(blind)} do not see {path}"
            todo = "share one file system; jobs from Kafka to Kafka without keyed state work as it is"
            yield Finding("job_dir", Health.REFUSED, says, todo)
        else:
            yield Finding("job_dir", Health.FINE, "executors see it")


def _probe_folder(folder: Path) -> Finding:
    """Try a job's operations on its directory, and undo them."""
    about = f"disk of {folder}"
    try:
        place = Path(tempfile.mkdtemp(prefix=".flinkish-", dir=folder))
    except OSError as error:
        return Finding(
            about, Health.REFUSED, f"it cannot be written: {error}", "give the driver's user the right"
        )
    try:
        store, began_ms = LocalStore(place), SystemClock().monotonic_ms()
        # `put` renames a file, and `create_if_absent` makes a hard link.
        store.put("tried/one", b"1")
        store.create_if_absent("tried/two", b"2")
        took_ms = SystemClock().monotonic_ms() - began_ms
        lock = JobLock(place / "lock")
        lock.acquire()
        lock.release()
        os.rename(place / "tried", place / "renamed")
    except (FlinkishError, OSError) as error:
        todo = "use a disk with atomic renames, hard links and locks: a local one, or NFS 4"
        return Finding(about, Health.REFUSED, f"a job cannot work on it: {error}", todo)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Finding(about, Health.FINE, f"renames, links and locks work; two durable writes took {took_ms} ms")


def _bucket(spark: SparkSession, place: StoreSpec) -> Iterator[Finding]:
    """Try a job's operations on a bucket from this process, Spark and tasks, and undo them."""
    is_hdfs = place.url.startswith("hdfs:")
    about = f"{'HDFS at' if is_hdfs else 'bucket of'} {place.url}"
    store, began_ms = place.open_bucket(), SystemClock().monotonic_ms()
    key = f".probes/{uuid.uuid4().hex}"
    try:
        first, second = (store.create_if_absent(key, b"") for _ in range(2))
        # Without the stored write id, nobody can tell which of two creates was first.
        knows_writers = not isinstance(store, BucketStore) or store.write_id_at(key) is not None
        store.delete(key)
    except (FlinkishError, UnknownOutcomeError) as error:
        yield Finding(about, Health.REFUSED, f"a job cannot work in it: {error}", "see the store's error")
        return
    if (first, second) != (CreateResult.CREATED, CreateResult.EXISTS) or not knows_writers:
        says = "when two processes create the same object, not exactly one of them succeeds"
        yield Finding(about, Health.REFUSED, says, "use a store with conditional puts and metadata")
        return
    took_ms = SystemClock().monotonic_ms() - began_ms
    works = "creates without overwriting work" if is_hdfs else "conditional puts work"
    yield Finding(about, Health.FINE, f"{works}; {'three' if is_hdfs else 'five'} requests took {took_ms} ms")
    stores = spark_stores()
    checks = (("Spark", stores.check_bucket), ("Python in tasks", stores.check_bucket_in_tasks))
    for what, check in checks:
        try:
            check(spark, place, store)
            yield Finding(about, Health.FINE, f"{what} sees what the driver writes")
        except FlinkishError as error:
            yield Finding(about, Health.REFUSED, f"{what}: {error.what}: {error.why}", error.what_to_do)
    yield from _owner(place)


def _owner(place: StoreSpec) -> Iterator[Finding]:
    with contextlib.suppress(StoreError):
        known = open_job_dir(place).find_settings()
        if known is not None:
            says = f"it belongs to the job '{known.get('job')}', begun with Spark {known.get('spark')}"
            yield Finding("job_dir", Health.FINE, says)


def _table(spark: SparkSession, path: str, config: CheckpointConfig) -> Iterator[Finding]:
    """Report why a sink that appends to the table would refuse it."""
    detail: Any = spark.sql(f"DESCRIBE DETAIL delta.`{path.replace('`', '``')}`").first()
    schema = spark.read.format("delta").load(path).schema
    nobody = JobUuid("0" * 32)
    context = SinkContext(
        nobody, OwnerEpoch(0), "doctor", schema, config, "doctor", StoreSpec("/nowhere"), SystemClock()
    )
    DeltaSink(path).preflight(spark, context)
    features = ", ".join(detail["tableFeatures"] or ()) or "none"
    yield Finding(f"table {path}", Health.FINE, f"a sink can append to it; its features: {features}")


def _brokers(
    connection: KafkaConnection, topics: Sequence[str], config: CheckpointConfig
) -> Iterator[Finding]:
    needed_ms = config.interval_ms + config.restart_budget_ms
    with KafkaAdmin(connection, timeout_ms=_PATIENCE_MS) as admin:
        most_ms = admin.broker_transaction_max_timeout_ms()
        says = f"they answer, and allow transactions of {most_ms} ms"
        if most_ms < needed_ms:
            says += f", shorter than checkpoint interval + restart budget = {needed_ms} ms"
            todo = (
                f"raise transaction.max.timeout.ms of the brokers to {needed_ms}, or lower restart_budget_ms"
            )
            yield Finding("brokers", Health.REFUSED, says, todo)
        else:
            yield Finding("brokers", Health.FINE, says)
        known = admin.topics(topics)
        for topic in topics:
            if topic not in known:
                yield Finding(
                    f"topic {topic}", Health.REFUSED, "there is none of that name", "create it first"
                )
                continue
            look = partial(_topic, connection, admin, topic, known[topic].partitions, needed_ms)
            yield from _run_check(f"topic {topic}", look)


def _topic(
    connection: KafkaConnection, admin: KafkaAdmin, topic: str, partitions: int, needed_ms: int
) -> Iterator[Finding]:
    check_topic_retention(connection, [topic], "doctor", needed_ms)
    places = [(topic, partition) for partition in range(partitions)]
    stable, all_of_it = admin.end_offsets(places), admin.end_offsets(places, Isolation.READ_UNCOMMITTED)
    hidden = sorted(
        partition for _, partition in places if stable[topic, partition] < all_of_it[topic, partition]
    )
    if hidden:
        says = f"a transaction is open in partition {hidden[0]}; read_committed readers wait for its end"
        todo = "if it stays, find its producer: flinkish transactions list --all, or kafka-transactions.sh"
        yield Finding(f"topic {topic}", Health.WARNING, says, todo)
    yield Finding(
        f"topic {topic}", Health.FINE, f"{partitions} partitions, records are kept for {needed_ms} ms or more"
    )
