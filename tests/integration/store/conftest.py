"""The HDFS that all tests share; those that ruin a NameNode's answers do so on a wire of their own.

And a state store that has snapshots all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flinkish_spark.checkpoint.retention import BucketPins
from tests.support.hdfs import LocalHdfs
from tests.support.services import BUILD


@pytest.fixture(scope="session")
def hdfs(service: Callable[[str], Any]) -> Any:
    why_not = LocalHdfs.why_not(BUILD / "hdfs-jars")
    if why_not:
        pytest.skip(why_not)
    return service("hdfs")


@pytest.fixture
def snapshots_all_the_time(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spark uploads a snapshot of each state every second, and as often the job looks for what may go."""
    monkeypatch.setattr(BucketPins, "clean_every_ms", 1_000)
    often = {"maintenanceInterval": "1s", "minDeltasForSnapshot": "2"}
    names = {f"spark.sql.streaming.stateStore.{name}": value for name, value in often.items()}
    for name, value in names.items():
        spark.conf.set(name, value)
    yield
    for name in names:
        spark.conf.unset(name)
