"""Orders in, running totals by user out into a sink of every family: a process that is shot.

What goes wrong is said by the environment variables of `tests/crash/app.py`, and by

FLINKISH_FAILURES
    A directory where each task that fails leaves a file, FLINKISH_FAILURE_COUNT at most.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from demo.app import RunningTotal
from flinkish_spark import CheckpointConfig, FixedDelay, Json, KafkaSource, StreamExecutionEnvironment
from flinkish_spark.planning import keyed as keyed_plan
from tests.crash.app import SMALL_BASES, break_as_told
from tests.crash.cluster_app import FlakyTotal
from tests.crash.families import Whereabouts
from tests.crash.light_session import light_session
from tests.crash.sweep.sinks import SINKS
from tests.support.killing import observer_from

ORDER = "user STRING, product STRING, amount LONG, at TIMESTAMP"
TOTAL = "user STRING, total LONG, orders LONG"
#: Tasks are small, and some of them are to fail.
_FAILS_AFTER = 10


def build(spark: Any, where: Whereabouts) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job="families",
        job_dir=str(where.job_dir),
        checkpoint=CheckpointConfig(interval_ms=200, retained=100_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
        max_parallelism=4,
        trigger_interval_ms=250,
    )
    source = KafkaSource(where.servers, [where.source_topic], group_id=where.group, value=Json(ORDER))
    orders = env.from_source(source, uid="orders").key_by("user")
    totals = orders.process(_function(), output=TOTAL, uid="totals")
    for place in where.places:
        totals.sink_to(SINKS[place.sink].make(place), uid=place.sink)
    return env


def _function() -> RunningTotal:
    folder, count = os.environ.get("FLINKISH_FAILURES"), int(os.environ.get("FLINKISH_FAILURE_COUNT", "0"))
    return FlakyTotal(folder, count, after=_FAILS_AFTER) if folder and count else RunningTotal()


def main() -> None:
    keyed_plan.BASE_POLICY = SMALL_BASES
    break_as_told()
    where = Whereabouts.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # A master whose tasks run again when they fail.
    env = build(light_session("families", where.scratch, master="local[2,4]"), where)
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
