"""How much hypothesis draws, see tests/support/effort.py; the rest is in tests/conftest.py."""

from __future__ import annotations

import gc

from hypothesis import settings

from tests.support import effort


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


def pytest_collection_finish() -> None:
    # Ten thousand tests and what they import stay until the end: no collection need look at them again.
    gc.collect()
    gc.freeze()
