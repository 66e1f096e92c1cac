"""`flinkish adopt`: a plain Spark query becomes a job."""

from __future__ import annotations

from pathlib import Path

import click

from flinkish_spark.cli.client import absolute_path, say
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.job_dir import job_place


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT", callback=lambda ctx, param, value: absolute_path(value))
@click.argument("job_dir", metavar="JOB_DIR")
def adopt(checkpoint: Path, job_dir: str) -> None:
    """Make a job directory of a plain query's checkpoint: its offsets, its watermark and its state.

    CHECKPOINT is the checkpointLocation of the query, which must be stopped; it stays as it is. JOB_DIR is
    made.
    """
    # Imported here, since it imports Arrow and Spark, which other commands do not need.
    from flinkish_spark.job import adoption

    query = adoption.adopt(checkpoint, job_place(job_dir), SystemClock())
    say(
        f"adopted: micro-batch {query.batch} of {checkpoint} is checkpoint 1 of {job_dir}, with the state of "
        f"{len(query.operators)} operators; do not start the plain query again"
    )
