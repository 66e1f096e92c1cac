"""The shared `broker` and `topic` are in tests/conftest.py; here is a broker that one test may ruin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flinkish_spark.testing.broker import LocalBroker

BROKER_JARS = Path(__file__).resolve().parents[2] / "build" / "broker-jars"


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """A broker for this test alone, to be killed, paused and started again; not started yet."""
    own = LocalBroker(tmp_path / "broker", jars_dir=BROKER_JARS)
    yield own
    own.kill()
