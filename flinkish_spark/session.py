"""A SparkSession that can run this package: the shim, Kafka and Delta on the class path.

JARs are fixed when the JVM starts, so this has to happen before ``getOrCreate()``; a session that runs
already cannot be completed. On a platform that starts Spark for you, put the entries of :func:`spark_conf`
into its configuration and the JARs where it expects libraries.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.jars import ivy_settings, pinned, pinned_jars, shim_jar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What makes ``format("delta")`` and SQL on Delta tables work.
DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"

#: Workers that have imported what they need when they start; see :mod:`flinkish_spark.runtime.python_daemon`.
PRELOADING_CONF = {"spark.python.daemon.module": "flinkish_spark.runtime.python_daemon"}


def spark_conf(jars: Iterable[str | Path]) -> dict[str, str]:
    """Return the Spark settings that this package needs, with these JARs beside the shim.

    Parameters
    ----------
    jars
        The pinned third-party JARs and any of your own; empty if Spark finds them another way.

    Returns
    -------
    dict
        To be set before the session starts. ``spark.sql.extensions`` and ``spark.jars`` are lists with
        commas: add your own entries to them, do not replace them.

    Raises
    ------
    JarMissing
        If the shim was not built.

    Examples
    --------
    >>> conf = spark_conf([])
    >>> conf["spark.sql.extensions"]
    'io.delta.sql.DeltaSparkSessionExtension'
    """
    return {**DELTA_CONF, "spark.jars": ",".join(str(jar) for jar in [shim_jar(), *jars])}


def configure_spark_with_jars(
    builder: SparkSession.Builder,
    directory: str | Path,
    *,
    extra_jars: Iterable[str | Path] = (),
    class_archive: str | Path | None = None,
) -> SparkSession.Builder:
    """Let a session builder use JARs that are on this machine; nothing is downloaded.

    Call it before ``getOrCreate()`` and before settings of yours that should win.

    Parameters
    ----------
    builder
        ``SparkSession.builder``, or what its methods returned.
    directory
        Holds the pinned JARs, as `make jars` leaves them in ``build/jars``.
    extra_jars
        JARs of your own.
    class_archive
        A folder, made if missing, in which the driver's JVM keeps the classes that it has loaded (some
        200 MB), for the next one on this machine: a start then takes some seconds less. Written when the
        JVM ends, which takes some seconds more that once. None: nothing is kept. A setting of yours for
        ``spark.driver.extraJavaOptions`` has to come before this call, and stays.

    Returns
    -------
    SparkSession.Builder
        The same builder.

    Raises
    ------
    JarMissing
        If a JAR is not there; the message says which and how to get it.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> builder = SparkSession.builder.master("local[2,4]")
    >>> spark = configure_spark_with_jars(builder, "build/jars").getOrCreate()  # doctest: +SKIP
    """
    jars = [*pinned_jars(directory), *extra_jars]
    kept = {} if class_archive is None else _class_sharing(builder, Path(class_archive), jars)
    return builder.config(map={**spark_conf(jars), **_preloading(builder), **kept})


def configure_spark_with_delta_jars(
    builder: SparkSession.Builder, directory: str | Path
) -> SparkSession.Builder:
    """Let a session builder use Delta's JARs from this machine, and no other JAR.

    For jobs whose Kafka sources and sinks run in Python (``reader="python"``, ``writer="python"``),
    where neither Spark's Kafka connector nor the JAR of this package is needed. A job without Delta
    needs no call at all.

    Parameters
    ----------
    builder
        ``SparkSession.builder``, or what its methods returned.
    directory
        Holds the pinned JARs of Delta, as `make jars` leaves them in ``build/jars``; others may be missing.

    Returns
    -------
    SparkSession.Builder
        The same builder.

    Raises
    ------
    JarMissing
        If a JAR is not there.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> spark = configure_spark_with_delta_jars(  # doctest: +SKIP
    ...     SparkSession.builder.master("local[2,4]"), "build/jars"
    ... ).getOrCreate()
    """
    jars = pinned_jars(directory, group="io.delta")
    own_jars = ",".join(str(jar) for jar in jars)
    return builder.config(map={**DELTA_CONF, "spark.jars": own_jars, **_preloading(builder)})


def configure_spark_with_packages(
    builder: SparkSession.Builder, *, extra_packages: Iterable[str] = ()
) -> SparkSession.Builder:
    """Let a session builder download the pinned JARs with Spark's own resolver when the session starts.

    The counterpart of Delta's ``configure_spark_with_delta_pip``; it replaces that call. It brings its own
    resolver settings, so a site with a private mirror should use :func:`configure_spark_with_jars`.
    Downloads are kept in ``spark.jars.ivy`` (by default under the home directory).

    Parameters
    ----------
    builder
        ``SparkSession.builder``, or what its methods returned.
    extra_packages
        Maven coordinates of your own, resolved with all they depend on. Do not name Delta or Kafka here.

    Returns
    -------
    SparkSession.Builder
        The same builder.

    Raises
    ------
    JarMissing
        If the shim was not built; it is never downloaded.

    Examples
    --------
    >>> from pyspark.sql import SparkSession
    >>> builder = SparkSession.builder.config("spark.jars.ivy", "build/ivy")
    >>> spark = configure_spark_with_packages(builder).getOrCreate()  # doctest: +SKIP
    """
    return builder.config(
        map={
            **spark_conf([]),
            **_preloading(builder),
            "spark.jars.packages": ",".join([*pinned("spark"), *extra_packages]),
            "spark.jars.ivySettings": str(ivy_settings()),
        }
    )


def _preloading(builder: SparkSession.Builder) -> dict[str, str]:
    """Return the setting for preloaded workers, where it is sure that they find this package."""
    # A cluster's executors may get it with --py-files, which come too late for a daemon.
    master = str(builder._options.get("spark.master", ""))
    return PRELOADING_CONF if master.startswith("local") else {}


def _class_sharing(builder: SparkSession.Builder, folder: Path, jars: Iterable[str | Path]) -> dict[str, str]:
    """Return the setting by which the JVM reads its classes from an archive, or writes it when it ends.

    The name tells apart what an archive is good for. What it does not (a changed class path) the JVM finds
    out by itself, and goes on without.
    """
    import pyspark

    java = shutil.which("java", path=os.path.join(os.environ.get("JAVA_HOME", ""), "bin")) or shutil.which(
        "java"
    )
    files = [*([] if java is None else [os.path.realpath(java)]), *map(str, jars)]
    facts = [pyspark.__version__, *(f"{file} {os.stat(file).st_mtime_ns}" for file in files)]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder.resolve() / f"{name}.jsa"
    option = "SharedArchiveFile" if archive.exists() else "ArchiveClassesAtExit"
    given = str(builder._options.get(_JAVA_OPTIONS, ""))
    # Without its remarks on classes that cannot be kept, and on archives that it cannot use.
    sharing = f'"-XX:{option}={archive}" -Xlog:cds=off -Xlog:cds+dynamic=off'
    return {_JAVA_OPTIONS: f"{given} {sharing}".strip()}
