"""A check that runs beside others: what it raises is raised where its turn is, and not before."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.core.clock import SystemThreads
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.job.preflight import _start_check

SETTINGS: Any = SimpleNamespace(threads=SystemThreads())


def test_what_it_raises_comes_where_its_turn_is() -> None:
    def check() -> None:
        raise ConfigError("the topic 'orders' does not exist")

    end = _start_check(check, SETTINGS)
    with pytest.raises(ConfigError, match="does not exist"):
        end()


def test_its_end_is_waited_for() -> None:
    goes_on, seen = threading.Event(), []

    def check() -> None:
        goes_on.wait(10)
        seen.append("checked")

    end = _start_check(check, SETTINGS)
    assert not seen
    goes_on.set()
    end()
    assert seen == ["checked"]
