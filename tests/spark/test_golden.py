"""A job directory and a savepoint that an earlier version has written: today's goes on from both, exactly once.

What was written, by which version, and where it was ended is said in `tests/golden/README.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import RestoreSettings, StopMode
from flinkish_spark.state_processor import read_broadcast_state, read_list_state, read_state, read_timers
from tests.golden import expected, job, orders
from tests.golden.place import (
    AT_SAVEPOINT,
    DECIDED,
    STAGED,
    await_position,
    kept_rows,
    outputs,
    place,
    unpack,
)
from tests.savepoint_support import started

#: Files in all, of which the last one was not there yet when the job was killed.
FILES = STAGED + 1


@pytest.fixture
def root() -> Iterator[Path]:
    with place() as empty:
        yield empty


def go_on(env: Any, root: Path, **how: Any) -> None:
    """Run a job over all files and to the end of event time."""
    with started(env, **how) as client:
        orders.put(root, STAGED)
        await_position(Path(env.job_dir), client, {"orders": FILES, "payments": FILES})
        answer = client.stop_with_savepoint(str(root / "drained"), StopMode.DRAIN).wait(90_000)
        assert answer is not None and answer.is_completed, answer
        assert client.wait(60_000), "the job did not stop"


def test_a_killed_job_goes_on_from_its_directory(spark: Any, root: Path) -> None:
    unpack("job.tar.gz", root)
    for file in range(STAGED):
        orders.put(root, file)
    shown = outputs(root / job.JOB)
    go_on(job.build(spark, root), root)
    found, wanted = outputs(root / job.JOB), expected.expected(FILES)
    for name, rows in wanted.items():
        assert found[name] == rows, name
        # Otherwise nothing was left to do, and what was committed before would not count.
        assert shown[name] != rows, name
    assert shown["delta"] < wanted["delta"] and shown["delta"]


def test_a_new_job_goes_on_from_the_savepoint_with_other_partitions(spark: Any, root: Path) -> None:
    unpack("savepoint.tar.gz", root)
    for file in range(STAGED):
        orders.put(root, file)
    restore = RestoreSettings(str(root / "savepoint"))
    go_on(job.build(spark, root, "restored"), root, restore=restore, partitions=3)
    before, behind = kept_rows(root / "before.json"), outputs(root / "restored")
    for name, rows in expected.expected(FILES).items():
        assert before[name] + behind[name] == rows, name


def test_state_of_the_savepoint_is_read(spark: Any, root: Path) -> None:
    unpack("savepoint.tar.gz", root)
    check_states(spark, root / "savepoint", AT_SAVEPOINT)


def test_state_of_a_retained_checkpoint_is_read(spark: Any, root: Path) -> None:
    unpack("job.tar.gz", root)
    check_states(spark, root / job.JOB / "job", DECIDED)
