"""`flinkish doctor`: checks the environment before the first job."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from flinkish_spark.cli.client import (
    ExitStatus,
    config_option,
    connection_of,
    end_with,
    json_option,
    print_table,
    store_option,
    store_options,
)
from flinkish_spark.core.errors import EnvironmentFault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.job.doctor import Diagnosis

_STDERR = 2
#: Number of lines of Spark's output in the message about a failed start.
_LINES = 12


@click.command()
@click.option("--master", metavar="URL", help="Spark's master; by default that of spark-defaults.conf.")
@click.option(
    "--jars", metavar="DIR", help="Directory with the pinned JARs, as for configure_spark_with_jars."
)
@click.option("--job-dir", default="", metavar="PATH", help="Where the job is to keep its checkpoints.")
@store_option
@click.option("--bootstrap-servers", "servers", metavar="HOST:PORT,...", help="Where Kafka is.")
@config_option
@click.option("--topic", "topics", multiple=True, metavar="TOPIC", help="A topic that a job reads or writes.")
@click.option("--table", "tables", multiple=True, metavar="PATH", help="A Delta table that a job appends to.")
@json_option
def doctor(
    master: str | None,
    jars: str | None,
    job_dir: str,
    servers: str | None,
    config: Any,
    topics: tuple[str, ...],
    tables: tuple[str, ...],
    as_json: bool,
) -> None:
    """Report what works here, what a job would refuse, and what to do about it.

    Starts a Spark session and ends it; changes nothing. In a notebook call flinkish_spark.doctor(spark). The
    exit status is 1 if a job would be refused.
    """
    from flinkish_spark.job import doctor as running

    if topics and not servers:
        raise click.UsageError("--topic needs --bootstrap-servers.")
    kafka = connection_of(servers, config) if servers else None
    where, how = ("", {}) if kafka is None else (kafka.servers, kafka.options)
    # PySpark's warnings about versions of libraries, which the table shows.
    warnings.simplefilter("ignore", FutureWarning)
    spark = _session(master, jars)
    try:
        found = running.doctor(
            spark,
            job_dir=job_dir,
            store_options=store_options(),
            bootstrap_servers=where,
            options=how,
            topics=topics,
            tables=tables,
        )
    finally:
        spark.stop()
    _print(found, as_json)
    if not found.is_well:
        end_with(ExitStatus.NOT_DONE)


def _session(master: str | None, jars: str | None) -> SparkSession:
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import check_java, configure_spark_with_jars

    check_java()
    builder = SparkSession.builder.appName("flinkish doctor").config("spark.ui.showConsoleProgress", "false")
    builder = builder if master is None else builder.master(master)
    builder = builder if jars is None else configure_spark_with_jars(builder, jars)
    with _errors_in_file() as said:
        try:
            spark = builder.getOrCreate()
        except Exception as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").split("\n")
            raise EnvironmentFault(
                "Spark does not start here",
                why=" / ".join([*(line.strip() for line in lines[-_LINES:] if line.strip()), str(error)]),
                what_to_do="correct this error; Spark needs a JDK, 17 or newer",
            ) from error
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextmanager
def _errors_in_file() -> Iterator[IO[bytes]]:
    """Redirect standard error to a file, so that the table is not hidden among Spark's log lines."""
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), _STDERR)
        try:
            yield file
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)


def _print(found: Diagnosis, as_json: bool) -> None:
    if as_json:
        lines = [
            {"about": o.about, "health": o.health.value, "says": o.says, "what_to_do": o.what_to_do}
            for o in found.findings
        ]
        click.echo(json.dumps({"is_well": found.is_well, "findings": lines}))
        return
    print_table(
        ["", "what", "found", "to do"],
        [[o.health.value, o.about, o.says, o.what_to_do] for o in found.findings],
    )
