"""The control source in the JVM and the one in Python: a job goes on with either, from its offsets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from flinkish_spark import DeltaSink
from flinkish_spark.bridge import shim
from flinkish_spark.bridge.session import CONTROL_SOURCE
from tests.support.jobs import ORDER, TOTAL, RunningTotal, await_that, environment, read_delta, rows
from tests.support.savepoint_support import started, stop

USERS = 20


def feed(folder: Path, name: str, amount: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"user": f"u{n}", "amount": amount * n}) for n in range(USERS))
    (folder / f".{name}").write_text("\n".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def job(spark, job_dir: Path, tmp_path: Path):
    env = environment(spark, job_dir)
    frame = spark.readStream.schema(ORDER).json(str(tmp_path / "in"))
    totals = env.from_dataframe(frame, uid="files").key_by("user")
    totals = totals.process(RunningTotal(), output=TOTAL, uid="totals")
    totals.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
    return env


def test_a_query_goes_on_with_the_other_control_source(spark, job_dir, tmp_path, monkeypatch) -> None:
    sources, total, expected = [], 0, Counter()
    for turn, has_jar in enumerate((True, False, True)):
        asked = CONTROL_SOURCE if has_jar else "of.a.jar.that.is.not.There"
        monkeypatch.setattr(shim, "CONTROL_SOURCE", asked)
        feed(tmp_path / "in", str(turn), turn + 1)
        total += turn + 1
        expected += Counter((f"u{n}", total * n) for n in range(USERS))
        with started(job(spark, job_dir, tmp_path)) as client:
            await_that(lambda: rows(client, "table") == USERS, client)
            progress = spark.streams.active[0].lastProgress
            sources.append(any(one.description.startswith("flinkish-control ") for one in progress.sources))
            stop(client)
    assert Counter((row["user"], row["total"]) for row in read_delta(tmp_path / "table")) == expected
    # It was the one that is meant here.
    assert sources == [True, False, True]
