"""A job that a test kills: running totals into the SQLite sink of the documents' page.

``python -m tests.support.two_phase_app <root> <checkpoints> [<kill point>]`` ends when that many checkpoints
are complete, or where it is killed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flinkish_spark import RefusedRecordError
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.testing.crash_points import KillAt, KillPoint, kill_process_group
from tests.support.jobs import TOTAL, RunningTotal, await_that, environment, failure_of, running
from tests.support.two_phase_page import Ledger

USERS = 5


def totals_of(env: Any) -> Any:
    """A keyed stream of (user, total) of an endless source of numbers."""
    # One partition: then the numbers come in order, and the totals can be foreseen.
    rate = env.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20)
    rate = rate.option("numPartitions", 1).load()
    frame = rate.selectExpr(f"CAST(value % {USERS} AS STRING) AS user", "value AS amount")
    return (
        env.from_dataframe(frame, uid="rate").key_by("user").process(RunningTotal(), output=TOTAL, uid="sum")
    )


def check_each_once(rows: Iterable[tuple[str, int]]) -> int:
    """Fail unless the totals of each user are the first ones, each once; return how many there are."""
    found: dict[str, list[int]] = defaultdict(list)
    for user, total in rows:
        found[user].append(total)
    for user, totals in found.items():
        expected = [sum(int(user) + USERS * k for k in range(n + 1)) for n in range(len(totals))]
        assert sorted(totals) == expected, f"user {user}: {sorted(totals)[:10]}"
    return sum(map(len, found.values()))


def run_for(env: Any, checkpoints: int) -> Any:
    """Run the job until that many checkpoints are complete; slow machines have time."""
    with running(env) as client:
        await_that(lambda: client.progress.checkpoints >= checkpoints, client, timeout_s=240)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=120_000), "the job did not stop"
    return client


class Crash(EnvironmentFault):
    """Ends a start of a job for good, at a point that a test chose."""


def crash_at(env: Any, point: str) -> None:
    """Run a job until it ends there; sooner or otherwise is an error."""

    def crash() -> None:
        raise Crash(point)

    env.observe(KillAt(KillPoint.parse(point), kill=crash))
    error = failure_of(env)
    assert isinstance(error, Crash), error


def flaky(kind: Any) -> Any:
    """The class with a flush that fails in the first attempt of every task."""

    def flush(self: Any, handle: Any) -> Any:
        from pyspark import TaskContext

        committable = kind.flush(self, handle)
        if TaskContext.get().attemptNumber() == 0:
            raise OSError("the answer got lost")
        return committable

    return type("FlakySink", (kind,), {"flush": flush})


def picky(kind: Any, divisor: int, **more: Any) -> Any:
    """The class that refuses the totals that can be divided."""

    def write(self: Any, handle: Any, record: Any) -> None:
        if record.total % divisor == 0:
            raise RefusedRecordError(f"{record.total} is refused")
        kind.write(self, handle, record)

    return type("PickySink", (kind,), {"write": write, **more})


def main(root: Path, checkpoints: int, kill: str = "") -> None:
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import configure_spark_with_jars
    from tests.conftest import spark_test_conf
    from tests.support.services import BUILD
    from tests.support.two_phase_page import sqlite_sink_class

    builder = SparkSession.builder.master("local[2,4]").config(map={**spark_test_conf(root / "scratch")})
    spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    env = environment(spark, root / "job", trigger_interval_ms=100)
    env.observe(KillAt(KillPoint.parse(kill), kill=kill_process_group) if kill else SilentObserver())
    totals_of(env).sink_to(Ledger(root).sink(flaky(sqlite_sink_class())), uid="ledger")
    run_for(env, checkpoints)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
