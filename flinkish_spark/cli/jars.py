"""`flinkish jars`: what spark-submit is told, so that a session has the JARs of this package."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from flinkish_spark.cli.client import complain


@click.command()
@click.option("--packages", is_flag=True, help="Download nothing now: Spark does, at its start.")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
def jars(packages: bool, folder: Path | None) -> None:
    """Put the pinned JARs into DIR (by default ./jars), and print what spark-submit needs.

    JARs that lie there already stay; the others are downloaded by the resolver that Spark brings. Each line
    printed is an option: spark-submit $(flinkish jars DIR) job.py. Programs take the folder by
    configure_spark_with_jars, and flinkish run by --jars.
    """
    # Here and not above: it imports pyspark.
    from flinkish_spark.bridge.session import check_java, packages_conf, spark_conf
    from flinkish_spark.jars import download

    if packages and folder is not None:
        raise click.UsageError("--packages puts nothing into a DIR; leave one of them out.")
    if packages:
        conf = packages_conf()
    else:
        check_java()
        found = download(Path("jars") if folder is None else folder)
        complain(f"{len(found)} JARs are in {found[0].parent}")
        conf = spark_conf(found)
    for name, value in conf.items():
        is_list = name == "spark.jars.packages"
        click.echo(f"--packages {value}" if is_list else f"--conf {shlex.quote(f'{name}={value}')}")
