"""A function without a key has tasks with resources of its own; where Spark gives none, it is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from flinkish_spark import MemorySink
from flinkish_spark.core.errors import ConfigError
from tests.support.jobs import ORDER, environment

pytestmark = pytest.mark.timeout(600)


def same(order: Any) -> Any:
    return order.user, order.amount


def test_a_local_spark_has_no_such_tasks(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection([("ann", 1)], ORDER, uid="orders").map(same, output=ORDER, name="scored")
    orders.set_resources(ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build)
    orders.sink_to(MemorySink(f"{tmp_path}"), uid="out")
    with pytest.raises(ConfigError, match=r"set_resources.*scored.*TaskResourceProfiles are only"):
        env.execute()
    assert not (tmp_path / "job" / "checkpoints").exists()


_APP = Path(__file__).parents[2] / "support" / "resourceful_app.py"


@pytest.mark.nightly
def test_tasks_on_a_cluster_have_what_was_asked_for(tmp_path: Path) -> None:
    """On a cluster of two cores: of functions in front of state, and in front of a sink behind it."""
    command = [sys.executable, str(_APP), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert told, done.stderr[-3000:]
    assert json.loads(told[-1]) == {"plain": [1], "in front": [2], "state": [1], "behind": [2], "rows": 40}
