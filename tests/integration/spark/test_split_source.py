"""Sources of one's own in jobs: their records take part in checkpoints, and their end ends the job."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import JobStatus, MemorySink, RestoreSettings
from flinkish_spark.core.errors import EnvironmentFault, UserFunctionError
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.job.job_control import LastCheckpoint, QueryEnd
from flinkish_spark.sources import RateLimit, SplitSource
from tests.support.jobs import (
    ORDER,
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    expected_totals,
    failure_of,
    running,
)

pytestmark = pytest.mark.timeout(600)
ORDERS = [(f"user-{n % 7}", n) for n in range(500)]


class Folder(SplitSource):
    """Lines of files in a folder: a split per file, which grows; notes what is committed in a file."""

    schema = ORDER

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def splits(self):
        return sorted(path.name for path in Path(self.folder).glob("*.jsonl"))

    def latest(self, split, start, limit):
        count = len(self._lines(split))
        return count if limit is None else min(count, start + limit)

    def read(self, split, start, end):
        for line in self._lines(split)[start:end]:
            record = json.loads(line)
            yield record["user"], record["amount"]

    def on_commit(self, offsets):
        with (Path(self.folder) / "committed").open("a") as file:
            file.write(json.dumps(offsets) + "\n")

    def _lines(self, split):
        return (Path(self.folder) / split).read_text().splitlines()

    def write(self, split, orders):
        with (Path(self.folder) / split).open("a") as file:
            file.writelines(json.dumps({"user": u, "amount": a}) + "\n" for u, a in orders)

    def told(self):
        text = (Path(self.folder) / "committed").read_text()
        return [json.loads(line) for line in text.splitlines()]


def totals(env, stream, sink) -> None:
    keyed = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    keyed.sink_to(sink, uid="out")


def expected(orders) -> Counter:
    amounts: dict[str, list[int]] = {}
    for user, amount in orders:
        amounts.setdefault(user, []).append(amount)
    return expected_totals(amounts)


def found(sink) -> Counter:
    return Counter((row.user, row.total) for row in sink.rows())


def run_to_its_end(env) -> object:
    with running(env) as client:
        assert client.wait(timeout_ms=240_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    return client


def test_a_job_ends_with_its_bounded_input_and_everything_is_committed(spark, tmp_path) -> None:
    """Behaviours 42, 160."""
    sink = MemorySink(str(tmp_path))

    def job():
        env = environment(spark, tmp_path / "job")
        totals(env, env.from_collection(ORDERS, ORDER, uid="orders"), sink)
        return env

    client = run_to_its_end(job())
    assert found(sink) == expected(ORDERS) and client.progress.checkpoints >= 1
    # Started again it has nothing more to do.
    run_to_its_end(job())
    assert found(sink) == expected(ORDERS)


def test_a_job_with_timers_left_behind_its_last_checkpoint_starts_again_and_ends(
    spark, tmp_path, monkeypatch
) -> None:
    """No operator leaves any, so the first answer is a made one."""
    real_end, ends = LastCheckpoint.end, []

    def end(last):
        ends.append(real_end(last))
        return QueryEnd.NOT_OVER if len(ends) == 1 else ends[-1]

    monkeypatch.setattr(LastCheckpoint, "end", end)
    sink, env = MemorySink(str(tmp_path)), environment(spark, tmp_path / "job")
    totals(env, env.from_collection(ORDERS, ORDER, uid="orders"), sink)
    client = run_to_its_end(env)
    assert ends == [QueryEnd.OVER] * 2 and client.progress.restarts == 0
    assert found(sink) == expected(ORDERS) and client.progress.checkpoints >= 2


class Stumble(EnvironmentFault):
    """A failure that a restart mends."""

    restartable = True


class Stumbling(SilentObserver):
    """Fails once before and once after each of some steps."""

    def __init__(self) -> None:
        self.left = {
            (when, step) for when in ("before", "after") for step in (Step.STAGED_FILE, Step.GROUP_OFFSETS)
        }

    def on_step_start(self, step, subject):
        self._maybe("before", step)

    def on_step_end(self, step, subject):
        self._maybe("after", step)

    def _maybe(self, when, step):
        if (when, step) in self.left:
            self.left.discard((when, step))
            raise Stumble(f"{when} {step}")


@pytest.mark.nightly
def test_nothing_is_lost_or_doubled_over_failures_and_a_savepoint(spark, tmp_path) -> None:
    """Splits grow and are added while the job runs; the savepoint keeps how far each was read."""
    sink, faults = MemorySink(str(tmp_path)), Stumbling()
    (tmp_path / "in").mkdir()
    folder = Folder(tmp_path / "in")
    sent: list[tuple[str, int]] = []

    def send(split, first, last):
        # A user's orders lie in one split, so that their order is known.
        orders = [(f"{split}-{n % 3}", n) for n in range(first, last)]
        folder.write(split, orders)
        sent.extend(orders)

    def job(name, restore=None):
        env = environment(spark, tmp_path / name, restore=restore)
        env.observe(faults)
        source = folder.limit_rate(RateLimit(records_per_batch=60))
        totals(env, env.from_source(source, uid="orders"), sink)
        return env

    send("b.jsonl", 0, 100)
    with running(job("one")) as client:
        await_that(lambda: not faults.left and client.progress.checkpoints >= 1, client)
        send("a.jsonl", 0, 80)
        send("b.jsonl", 100, 150)
        await_that(lambda: found(sink) == expected(sent), client)
        answer = client.stop_with_savepoint(str(tmp_path / "savepoint")).wait(90_000)
        assert answer is not None and answer.is_completed and client.wait(60_000)
        assert client.progress.restarts == 4
    assert folder.told()[-1] == {"b.jsonl": 150, "a.jsonl": 80}
    send("a.jsonl", 80, 120)
    send("c.jsonl", 0, 10)
    with running(job("two", RestoreSettings(str(tmp_path / "savepoint")))) as client:
        await_that(lambda: found(sink) == expected(sent), client)
        client.stop_with_checkpoint()
        assert client.wait(60_000)
    assert found(sink) == expected(sent)
    assert folder.told()[-1] == {"b.jsonl": 150, "a.jsonl": 120, "c.jsonl": 10}


class Broken(Folder):
    """Has an error in its code."""

    def latest(self, split, start, limit):
        return {}["nothing"]


def test_an_error_of_the_source_s_code_ends_the_job_with_its_name(spark, tmp_path) -> None:
    (tmp_path / "a.jsonl").touch()
    env = environment(spark, tmp_path / "job")
    totals(env, env.from_source(Broken(tmp_path), uid="orders"), MemorySink(str(tmp_path)))
    error = failure_of(env)
    assert isinstance(error, UserFunctionError), error
    assert "latest() of source 'orders' failed" in str(error) and "nothing" in str(error)
