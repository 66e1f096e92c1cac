"""The public API: every name is there, and a worker that needs little imports little."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flinkish_spark


def test_every_public_name_is_there_and_documented() -> None:
    assert set(flinkish_spark.__all__) == set(flinkish_spark._MODULES)
    for name in flinkish_spark.__all__:
        assert getattr(flinkish_spark, name).__doc__, name
    assert set(flinkish_spark.__all__) <= set(dir(flinkish_spark))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flinkish_spark.nothing


def test_a_task_that_writes_kafka_does_not_import_the_driver() -> None:
    code = (
        "import sys, flinkish_spark.drop_in.stream_writer, flinkish_spark.kafka.staging; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    for unwanted in ("pandas", "flinkish_spark.runtime.supervisor", "flinkish_spark.environment"):
        assert unwanted not in loaded
