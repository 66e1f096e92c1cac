"""A job goes on from a job directory and from a savepoint that were kept, exactly once.

What was written, and where it was ended is said in `tests/golden/README.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import RestoreSettings, StopMode
from flinkish_spark.core.errors import JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.jars import running_minor
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
from tests.support.savepoint_support import started

#: Files in all, of which the last one was not there yet when the job was killed.
FILES = STAGED + 1


@pytest.fixture
def root() -> Iterator[Path]:
    with place() as empty:
        for file in range(STAGED):
            orders.put(empty, file)
        yield empty


def go_on(env: Any, root: Path, **how: Any) -> None:
    """Run a job over all files and to the end of event time."""
    with started(env, **how) as client:
        orders.put(root, STAGED)
        await_position(Path(env.job_dir), client, {"orders": FILES, "payments": FILES})
        answer = client.stop_with_savepoint(str(root / "drained"), StopMode.DRAIN).wait(120_000)
        assert answer is not None and answer.is_completed, answer
        assert client.wait(60_000), "the job did not stop"


def test_a_killed_job_goes_on_from_its_directory(spark: Any, root: Path) -> None:
    unpack("job.tar.gz", root)
    shown, wanted = outputs(root / job.JOB), expected.expected(FILES)
    # There is something to go on from, and something to do.
    assert shown["delta"] and shown["delta"] < wanted["delta"]
    assert all(shown[name] <= rows for name, rows in wanted.items())
    job_dir = JobDir(LocalStore(root / job.JOB / "job"))
    decided = job_dir.newest_commit()
    assert decided is not None and job_dir.receipt(decided.checkpoint) is None
    # Run alone, also in a session that has had no query.
    check_states(spark, root / job.JOB / "job", DECIDED)
    if running_minor() == "4.1":
        # Spark 4.2 wrote it. The savepoint, below, is of no version.
        with pytest.raises(JobDirError, match=r"Spark 4\.2\.0 has run on this job directory"):
            go_on(job.build(spark, root), root)
        return
    go_on(job.build(spark, root), root)
    assert job_dir.receipt(decided.checkpoint) is not None
    assert outputs(root / job.JOB) == wanted


@pytest.mark.nightly
def test_a_new_job_goes_on_from_the_savepoint_with_other_partitions(spark: Any, root: Path) -> None:
    unpack("savepoint.tar.gz", root)
    check_states(spark, root / "savepoint", AT_SAVEPOINT)
    restore = RestoreSettings(str(root / "savepoint"))
    go_on(job.build(spark, root, "restored"), root, restore=restore, partitions=3)
    before, behind = kept_rows(root / "before.json"), outputs(root / "restored")
    for name, rows in expected.expected(FILES).items():
        found = before[name] + behind[name]
        if name == "delta":
            # The items of an operator list state are dealt to the partitions anew: nobody has all of them.
            found, rows = without_recent(found), without_recent(rows)
        assert found == rows, name


def without_recent(rows: expected.Rows) -> expected.Rows:
    """Leave out how many of the last orders were of the same user."""
    found = expected.Rows()
    for (user, what, n, said), count in rows.items():
        values = None if said is None else json.loads(said)
        if values is not None:
            values["limited"][0] = None
        found[user, what, n, json.dumps(values)] += count
    return found


def check_states(spark: Any, path: Path, files: int) -> None:
    """Compare states of all forms with what they have to be when so many files have been read."""
    read = [one for file in range(files) for one in orders.orders(file)]
    numbers = {user: [n for name, n, _, _ in read if name == user] for user in orders.USERS}
    watermark_ms = read[-1][3] - 1

    lists = read_state(spark, path, "states", "seen").collect()
    assert {row.key: list(row.value) for row in lists} == numbers
    means = read_state(spark, path, "states", "mean").collect()
    assert {row.key: row.n for row in means} == {user: len(own) for user, own in numbers.items()}
    # These lie in base files, in a job directory.
    texts = (
        read_state(spark, path, "limited", "texts").selectExpr("key", "map_keys(value) AS texts").collect()
    )
    assert {row.key: list(row.texts) for row in texts} == numbers
    timers = read_timers(spark, path, "states").where("clock = 'EVENT_TIME'").collect()
    alarms = {(user, at_ms + job.ALARM_MS) for user, _, _, at_ms in read}
    assert {(row.key, row.time_ms) for row in timers} == {one for one in alarms if one[1] > watermark_ms}
    limits = read_broadcast_state(spark, path, "limited", "limits").collect()
    assert {row.key: row.value for row in limits} == {name: most for name, most, _ in job.RULES}
    recent = [row.item for row in read_list_state(spark, path, "remembering", "recent").collect()]
    assert [(one.user, one.n) for one in recent] == [(user, n) for user, n, _, _ in read[-5:]]

    bounds = ["unix_millis(window_start) AS since", "unix_millis(window_end) AS until"]
    doubled, totals = expected.doubled(read), expected.tumbled(read, watermark_ms)
    columns = ["key", *bounds, "amount"]
    looped = read_state(spark, path, "looped-sliding", "window/open").selectExpr(*columns).collect()
    assert {(row.until - 1, row.key, row.amount) for row in looped} == still_open(doubled, watermark_ms)
    folded = read_state(spark, path, "columnar-tumbling", "window/open").selectExpr(*columns).collect()
    assert {(row.until - 1, row.key, row.amount) for row in folded} == still_open(totals, watermark_ms)
    assert looped and folded
    waiting = read_state(spark, path, "element-session", "window/open").selectExpr("key", *bounds, "value")
    found = {(row.key, tuple((one.amount, one.most) for one in row.value)) for row in waiting.collect()}
    assert found and found == expected.waiting(read, watermark_ms)


def still_open(results: list[expected.Timed], watermark_ms: int) -> set[expected.Timed]:
    """Return the windows whose end the watermark has not reached."""
    return {one for one in results if one[0] > watermark_ms}
