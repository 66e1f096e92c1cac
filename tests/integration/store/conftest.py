"""The HDFS that all tests share; those that ruin a NameNode's answers do so on a wire of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.hdfs import LocalHdfs
from tests.support.services import BUILD


@pytest.fixture(scope="session")
def hdfs(service: Callable[[str], Any]) -> Any:
    why_not = LocalHdfs.why_not(BUILD / "hdfs-jars")
    if why_not:
        pytest.skip(why_not)
    return service("hdfs")
