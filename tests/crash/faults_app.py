"""The demo's job where the sinks' patience is short, and with a task that dawdles at its first attempt.

Takes the arguments of `demo/app.py`. FLINKISH_DAWDLE is a directory: once there is a file ``may`` in it, the
first task to see it leaves a file there and sleeps, so that Spark may start the task a second time beside it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from demo.app import RunningTotal, parse_args, session
from flinkish_spark import (
    CheckpointConfig,
    DeltaSink,
    FixedDelay,
    Json,
    KafkaSink,
    KafkaSource,
    RecordHeaders,
    StreamExecutionEnvironment,
)

#: As short as interval and restart budget allow: a broker that sleeps longer aborts what is staged.
TRANSACTION_TIMEOUT_MS = 12_000
DAWDLE_VARIABLE, MASTER_VARIABLE = "FLINKISH_DAWDLE", "FLINKISH_MASTER"
TIMEOUT_VARIABLE = "FLINKISH_TRANSACTION_TIMEOUT_MS"
_DAWDLES_S = 60.0


class DawdlingTotal(RunningTotal):
    """Sleeps once, in the middle of a task."""

    def __init__(self, folder):
        self.folder = folder

    def process_element(self, order, ctx):
        if self.folder and (Path(self.folder) / "may").exists() and self._is_first():
            time.sleep(_DAWDLES_S)
            (Path(self.folder) / "woke").touch()
        return super().process_element(order, ctx)

    def _is_first(self):
        try:
            os.close(os.open(Path(self.folder) / "slept", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def build(spark, args):
    env = StreamExecutionEnvironment(
        spark,
        job="orders",
        job_dir=args.job_dir,
        checkpoint=CheckpointConfig(interval_ms=args.interval_ms, restart_budget_ms=8_000),
        restart_strategy=FixedDelay(attempts=100, delay_ms=300),
    )
    source = KafkaSource(
        args.bootstrap_servers,
        ["orders"],
        group_id="orders-app",
        value=Json("user STRING, product STRING, amount LONG, at TIMESTAMP"),
    )
    totals = (
        env.from_source(source, uid="orders")
        .key_by("user")
        .process(
            DawdlingTotal(os.environ.get(DAWDLE_VARIABLE, "")),
            output="user STRING, total LONG, orders LONG",
            uid="totals",
        )
    )
    kafka = KafkaSink(
        args.bootstrap_servers,
        "totals",
        key="user",
        value=Json(),
        record_headers=RecordHeaders.BATCH,
        transaction_timeout_ms=int(os.environ.get(TIMEOUT_VARIABLE, TRANSACTION_TIMEOUT_MS)),
    )
    totals.sink_to(kafka, uid="totals-kafka")
    totals.sink_to(DeltaSink(args.table), uid="totals-delta")
    return env


def main():
    args = parse_args()
    args.master = os.environ.get(MASTER_VARIABLE, args.master)
    build(session(args), args).execute()


if __name__ == "__main__":
    main()
