"""The program that `flinkish sql` runs: a script in SQL as one job."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from flinkish_spark import CheckpointConfig, StreamExecutionEnvironment
from flinkish_spark.job.configuration import read_outside
from flinkish_spark.sql.script import add_sql_script


def main() -> None:
    """Run a script; `flinkish sql` gives the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", default="")
    parser.add_argument("--job-dir", default="")
    parser.add_argument("--checkpoint-interval", default="")
    parser.add_argument("--py", action="append", default=[])
    parser.add_argument("script")
    given = parser.parse_args()
    interval = given.checkpoint_interval
    checkpoint = CheckpointConfig(interval_ms=interval) if interval else None
    job = given.job or ("" if "pipeline.name" in read_outside() else Path(given.script).stem)
    env = StreamExecutionEnvironment.get_execution_environment(job, given.job_dir, checkpoint=checkpoint)
    for file in given.py:
        runpy.run_path(file, {"spark": env.spark})
    add_sql_script(env, Path(given.script).read_text(encoding="utf-8"))
    env.execute()


if __name__ == "__main__":
    main()
