"""Latency markers in real jobs: through operators to sinks, on an idle stream; no file knows of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import CheckpointConfig, DeltaSink, KeyedProcessFunction, MemorySink, OutputTag
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.latency import Latencies, MeasuredAt
from tests.support.jobs import await_that, environment, read_delta, rows, running

pytestmark = pytest.mark.timeout(400)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "latency-markers.md"
#: Shuffle partitions of the tests' session.
SUBTASKS = (0, 1)
ORDER = "user STRING, amount LONG"
#: So that one micro-batch counts, and no other.
ONCE_MS = 3_600_000
BIG = OutputTag("big", ORDER)


class Slow(KeyedProcessFunction):
    """Passes every order on, after some milliseconds; big ones come again in a side output."""

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        time.sleep(0.01)
        yield order.user, order.amount
        if order.amount >= 100:
            ctx.output(BIG, (order.user, order.amount))


class Plain(KeyedProcessFunction):
    """Passes every order on."""

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        yield order.user, order.amount


def feed(folder: Path, name: str, count: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"user": f"u{n % 20}", "amount": n}) + "\n" for n in range(count)]
    (folder / f".{name}").write_text("".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def orders(spark: Any, tmp_path: Path, **settings: Any) -> tuple[Any, Any]:
    settings = {"trigger_interval_ms": 50, "latency_tracking_interval_ms": 1, **settings}
    env = environment(spark, tmp_path / "job", **settings)
    files = spark.readStream.schema(ORDER).json(str(tmp_path / "in"))
    return env, env.from_dataframe(files, uid="files")


def stop(client: Any) -> None:
    client.stop_with_checkpoint()
    assert client.wait(timeout_ms=180_000), "the job did not stop"


def micro_batches(tmp_path: Path) -> int:
    entries = (tmp_path / "job" / "spark").glob("*/commits/*")
    return len([entry for entry in entries if entry.name.isdecimal()])


def places(latencies: Latencies) -> set[tuple[str, str | None, int | None]]:
    return {(at.operator, at.source, at.subtask) for at in latencies}


@pytest.mark.nightly
def test_two_operators_and_two_sinks_are_measured_in_every_subtask(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", 100)
    env, source = orders(spark, tmp_path, latency_tracking_interval_ms=ONCE_MS)
    first = source.key_by("user").process(Slow(), output=ORDER, uid="first")
    second = first.key_by("user").process(Plain(), output=ORDER, uid="second")
    left, right = MemorySink(f"{tmp_path}/left"), DeltaSink(str(tmp_path / "right"))
    second.sink_to(left, uid="left")
    second.transform(lambda frame: frame.where("amount < 50")).sink_to(right, uid="right")
    with running(env) as client:
        await_that(lambda: rows(client, "left") == 100, client)
        stop(client)
    names = ("first", "second", "left", "right")
    found = client.latencies
    assert places(found) == {(name, "files", subtask) for name in names for subtask in SUBTASKS}
    # A micro-batch ran behind it, at least that of the last checkpoint; one an hour counts.
    assert all(histogram.count == 1 for _, histogram in found.items())
    for subtask in SUBTASKS:
        of = {name: found[MeasuredAt(name, "files", subtask)].max_ms for name in names}
        assert all(ms is not None and 0 < ms < 200_000 for ms in of.values()), of
        assert of["first"] <= of["second"] <= of["left"] <= of["right"], of
    # Markers come behind the records: a hundred records of 10 ms, in two partitions.
    assert max(found[MeasuredAt("first", "files", subtask)].max_ms or 0 for subtask in SUBTASKS) >= 500
    assert sorted(row["amount"] for row in left.rows()) == list(range(100))
    assert sorted(row["amount"] for row in read_delta(tmp_path / "right")) == list(range(50))
    _no_trace_of_markers_in(tmp_path / "job")


def _no_trace_of_markers_in(root: Path) -> None:
    """Neither in staged files nor in decisions."""
    job_dir = JobDir(LocalStore(root))
    decided = [batch for decision in job_dir.live_commits() for batch in decision.batches]
    staged = [*decided, *job_dir.list_staged(job_dir.lineage()).values()]
    assert decided and not [t for batch in staged for ack in batch.acks for t in ack.tasks if t.reports]


@pytest.mark.nightly
def test_an_idle_stream_stays_idle_and_a_job_goes_on_with_and_without(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", 10)
    sink, rare = MemorySink(f"{tmp_path}/rows"), CheckpointConfig(interval_ms=600_000)

    def run(count: int, **settings: Any) -> Latencies:
        env, source = orders(spark, tmp_path, checkpoint=rare, **settings)
        passed = source.key_by("user").process(Plain(), output=ORDER, uid="passed")
        passed.sink_to(sink, uid="out")
        with running(env) as client:
            await_that(lambda: micro_batches(tmp_path) >= count, client)

            def is_quiet() -> bool:
                before = micro_batches(tmp_path)
                time.sleep(2)
                return micro_batches(tmp_path) == before

            # Markers come all the time: if one asked for a micro-batch, there would be no such pause.
            await_that(is_quiet, client)
            stop(client)
        return client.latencies

    assert places(run(1)) >= {("out", "files", 0), ("passed", "files", 1)}
    feed(tmp_path / "in", "1", 10)
    assert run(micro_batches(tmp_path) + 1, latency_tracking_interval_ms=None) == Latencies()
    feed(tmp_path / "in", "2", 10)
    assert run(micro_batches(tmp_path) + 1).of("passed").count > 0
    assert sorted(row["amount"] for row in sink.rows()) == sorted([*range(10)] * 3)


@pytest.mark.nightly
def test_streams_without_operators_and_side_outputs_are_measured(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", 120)
    env, source = orders(spark, tmp_path)
    plain, big, passed = (MemorySink(f"{tmp_path}/{name}") for name in ("plain", "big", "passed"))
    source.transform(lambda frame: frame.where("amount >= 0")).sink_to(plain, uid="plain")
    slow = source.key_by("user").process(Slow(), output=ORDER, uid="slow")
    slow.sink_to(passed, uid="passed")
    slow.get_side_output(BIG).sink_to(big, uid="big")
    with running(env) as client:
        await_that(lambda: (rows(client, "plain"), rows(client, "big")) == (120, 20), client)
        stop(client)
    found = places(client.latencies)
    wanted = {(name, "files", subtask) for name in ("slow", "passed", "big") for subtask in SUBTASKS}
    assert found == {("plain", "files", 0), *wanted}
    assert (len(plain.rows()), len(passed.rows()), len(big.rows())) == (120, 120, 20)


@pytest.mark.nightly
def test_markers_of_each_source_of_a_union_arrive(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job", latency_tracking_interval_ms=1)
    left, right = (env.from_collection([("ann", 1), ("bob", 2)], ORDER, uid=uid) for uid in ("left", "right"))
    both, kept = left.union(right), MemorySink(f"{tmp_path}/kept")
    passed = both.key_by("user").process(Plain(), output=ORDER, uid="passed")
    passed.sink_to(kept, uid="out")
    both.sink_to(MemorySink(f"{tmp_path}/plain"), uid="plain")
    with running(env) as client:
        assert client.wait(timeout_ms=240_000), "the job does not end"
    found = places(client.latencies)
    of_operator = {
        (name, source, subtask)
        for name in ("passed", "out")
        for source in ("left", "right")
        for subtask in SUBTASKS
    }
    assert found == {("plain", "left", 0), ("plain", "right", 0), *of_operator}
    assert sorted(row["amount"] for row in kept.rows()) == [1, 1, 2, 2]


def test_the_job_on_the_page_measures_itself(spark: Any, tmp_path: Path, capsys: Any) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    # As in a notebook: what is defined in `__main__` travels to workers with its code.
    exec(code, {"__name__": "__main__", "spark": spark, "job_dir": str(tmp_path / "job")})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("orders -> ")]
    assert [line.split()[2] for line in printed] == ["doubled", "out"]
    assert all(int(line.split()[3]) > 0 for line in printed)
