"""What is measured by coverage, and how much hypothesis draws (tests/support/effort.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import effort

#: These cover all of protocol/; the others would only run slower under coverage.
_COVERING = tuple(
    str(Path(__file__).parent / name)
    for name in (
        "protocol",
        "checkpoint",
        "connectors/test_watermark_alignment.py",
        "core/test_records_and_store.py",
        "job/test_notebook_views.py",
        "planning/test_job_graph.py",
        "planning/test_latency_tracking.py",
        "planning/test_time_plans.py",
    )
)


def pytest_configure() -> None:
    # No deadline: a machine that is busy is no failure. By day the same examples at every run, so that what
    # is covered is so always; what the night finds it prints as a line to repeat it with.
    settings.register_profile(
        "flinkish",
        deadline=None,
        database=None,
        derandomize=not effort.is_night,
        print_blob=True,
        max_examples=effort.examples(100),
    )
    settings.load_profile("flinkish")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    # `no_cover` of pytest-cov does this in one process; in those of xdist coverage traces on.
    tracers = sys.gettrace(), threading.gettrace()
    is_covering = str(item.path).startswith(_COVERING)
    if not is_covering:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    try:
        return (yield)
    finally:
        if not is_covering:
            sys.settrace(tracers[0])
            threading.settrace(tracers[1])  # type: ignore[arg-type]
