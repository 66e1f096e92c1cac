"""`flinkish jars`: prints the options of spark-submit for the JARs of this package."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from flinkish_spark.cli.client import complain


@click.command()
@click.option("--packages", is_flag=True, help="Download nothing now: Spark does, at its start.")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
def jars(packages: bool, folder: Path | None) -> None:
    """Download the pinned JARs into DIR (by default ./jars), and print options for spark-submit.

    Existing JARs stay; Spark's resolver downloads the others. Each printed line is an option: spark-submit
    $(flinkish jars DIR) job.py. Programs use the folder with configure_spark_with_jars, and flinkish run with
    --jars.
    """
    # Imported here, since it imports pyspark.
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
