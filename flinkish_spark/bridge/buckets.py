"""Checks of a job directory in a bucket from Spark and its executors."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import ask_executors, jvm
from flinkish_spark.core.errors import EnvironmentFault, StoreError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.store import Store
from flinkish_spark.core.store_spec import StoreSpec

#: A temporary key below the job directory.
_PROBES = ".probes"
_HADOOP_AWS = "hadoop-aws, in the version of Spark's hadoop-client, and the AWS SDK for it"
_PACKAGES = {
    "s3a": _HADOOP_AWS,
    "abfss": "hadoop-azure",
    "gs": "Google's gcs-connector",
    "hdfs": "hadoop-client",
}


@contextmanager
def _probe(store: Store) -> Iterator[str]:
    key = f"{_PROBES}/{uuid.uuid4().hex}"
    store.put(key, b"")
    try:
        yield key
    finally:
        store.delete(key)


def copy_in_tasks(spark: SparkSession, place: StoreSpec, names: Sequence[tuple[str, str]]) -> None:
    """Copy objects within a store without server-side copies (HDFS), in tasks on all executors."""
    text = place.to_text()

    def copy(some: Iterable[tuple[str, str]]) -> None:
        from flinkish_spark.core.store_spec import StoreSpec

        files = StoreSpec.from_text(text).open_bucket()
        for key, other in some:
            files.copy(key, other)

    parts = min(len(names), spark.sparkContext.defaultParallelism)
    try:
        if names:
            spark.sparkContext.parallelize(names, parts).foreachPartition(copy)
    except Exception as error:
        raise StoreError(
            f"cannot copy {len(names)} files of {place.url} in tasks",
            why=describe_error(error),
            what_to_do="see the executors' errors: they read and write these files as the driver does",
        ) from error


def pass_on(spark: SparkSession, place: StoreSpec) -> None:
    """Pass the options of an S3 bucket to Hadoop, unless the session has set them."""
    if not place.hadoop_url.startswith("s3a:"):
        return
    bucket = place.hadoop_url.removeprefix("s3a://").partition("/")[0]
    conf: Any = jvm(spark) and spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in _s3a_settings(place).items():
        key = f"fs.s3a.bucket.{bucket}.{name}"
        if conf.get(key) is None:
            conf.set(key, value)


def _s3a_settings(place: StoreSpec) -> dict[str, str]:
    given = {name.lower().removeprefix("aws_"): value for name, value in place.resolve().items()}
    endpoint = given.get("endpoint") or given.get("endpoint_url")
    found = {
        "endpoint": endpoint,
        "endpoint.region": given.get("region") or given.get("default_region"),
        "access.key": given.get("access_key_id"),
        "secret.key": given.get("secret_access_key"),
        "session.token": given.get("session_token") or given.get("token"),
    }
    if endpoint is not None:
        is_virtual = given.get("virtual_hosted_style_request", "false").lower() in ("true", "1")
        found["path.style.access"] = "false" if is_virtual else "true"
        found["connection.ssl.enabled"] = "false" if endpoint.startswith("http:") else "true"
    return {name: value for name, value in found.items() if value is not None}


def check_bucket(spark: SparkSession, place: StoreSpec, store: Store) -> None:
    """Refuse a bucket that Spark, through Hadoop, does not see as this process does."""
    pass_on(spark, place)
    url = place.hadoop_url
    with _probe(store) as key:
        try:
            path = jvm(spark).org.apache.hadoop.fs.Path(f"{url}/{key}")
            is_there = path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).exists(path)
        except Exception as error:
            scheme = url.partition(":")[0]
            what_to_do = f"set spark.hadoop.fs.{scheme}.* as for any table there"
            if "ClassNotFound" in str(error) or "No FileSystem for scheme" in str(error):
                what_to_do = (
                    f"put the JARs of {_PACKAGES[scheme]} on Spark's class path (spark.driver.extraClassPath "
                    "and spark.executor.extraClassPath), or into spark.jars.packages"
                )
            elif scheme == "hdfs":
                what_to_do = "set HADOOP_CONF_DIR before the session starts, or spark.hadoop.dfs.*, as for "
                what_to_do += "any table there"
            raise EnvironmentFault(
                f"Spark cannot reach the job directory {url}",
                why=describe_error(error),
                what_to_do=what_to_do,
            ) from error
    if not is_there:
        raise EnvironmentFault(
            f"Spark does not see in {url} what this process has written to {place.url}",
            why="the two reach different stores: the options of the store and Spark's Hadoop settings differ",
            what_to_do="give both the same endpoint",
        )


def check_bucket_in_tasks(spark: SparkSession, place: StoreSpec, store: Store) -> None:
    """Refuse a bucket that Python in tasks does not see as this process does."""
    # Needed even if tasks run in the driver's JVM: their Python may have another environment.
    text = place.to_text()

    def why_blind(_: Iterable[int]) -> Iterable[str]:
        import socket

        try:
            from flinkish_spark.core.store_spec import StoreSpec

            StoreSpec.from_text(text).open().read(key)
        except Exception as error:
            return [f"{socket.gethostname()}: {type(error).__name__}: {error}"]
        return []

    with _probe(store) as key:
        blind = sorted(set(ask_executors(spark, why_blind)))
    if blind:
        is_hdfs = place.url.startswith("hdfs:")
        given = (
            "HADOOP_CONF_DIR and the rights"
            if is_hdfs
            else "the credentials that the driver has: an instance profile, or environment variables"
        )
        raise EnvironmentFault(
            f"executors do not reach the job directory {place.url}",
            why="; ".join(blind[:3]),
            what_to_do=f"{how_to_install('hdfs' if is_hdfs else 'object-store')} on the executors, "
            f"and give them {given} by spark.executorEnv",
        )
