"""A job between Kafka topics whose directory is kept to be read; without its broker it cannot go on."""

from __future__ import annotations

from typing import Any

from flinkish_spark import (
    CheckpointConfig,
    Json,
    KafkaManifest,
    KafkaSink,
    KafkaSource,
    StreamExecutionEnvironment,
)
from tests.support import ORDER, TOTAL, RunningTotal

JOB, INPUT, OUTPUT, MANIFEST = "golden-kafka", "orders", "totals", "checkpoints"
USERS = ("ann", "ben", "eve")


def build(spark: Any, job_dir: str, servers: str) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job=JOB,
        job_dir=job_dir,
        checkpoint=CheckpointConfig(interval_ms=3_600_000, retained=2),
        max_parallelism=8,
        trigger_interval_ms=100,
        manifest=KafkaManifest(servers, MANIFEST),
    )
    orders = env.from_source(KafkaSource(servers, [INPUT], value=Json(ORDER)), uid="orders")
    totals = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(KafkaSink(servers, OUTPUT, key="user", value=Json()), uid="totals-out")
    return env
