"""Accumulators in a job: each record counts once, whatever runs how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.accumulating import ORDER, accumulating, expected
from tests.support.jobs import environment

ORDERS = [(f"user{number % 7}", number % 5) for number in range(200)]


def test_each_record_counts_once(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    accumulating(env.from_collection(ORDERS, ORDER, uid="orders"))
    client = env.execute_async()
    while not client.wait(timeout_ms=200):
        pass
    assert client.progress.accumulators == expected(ORDERS)
