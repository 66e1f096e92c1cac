"""A cancel ends a micro-batch in which a user's code hangs, with its processes; the rest is exact."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from flinkish_spark import (
    AsyncDataStream,
    AsyncFunction,
    DeltaSink,
    JobStatus,
    KeyedProcessFunction,
    TaskState,
    ValueStateDescriptor,
)
from tests.support.effort import sampled
from tests.support.jobs import ORDER, TOTAL, environment, eventually, read_delta, running

pytestmark = pytest.mark.timeout(600)
ROWS = [(f"user{number % 5}", number) for number in range(400)]
#: For minutes, beside the seconds that a cancel may take.
_FOR_LONG_S = 600


class Hangs:
    """Hangs on one record until a file is there; writes down in which process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hang(self, amount: int) -> bool:
        """Whether to hang at a record."""
        if amount != 300 or (self.folder / "go on").exists():
            return False
        (self.folder / f"pid{os.getpid()}").touch()
        return True


class Sleeping(Hangs):
    def __call__(self, order: Any) -> Any:
        if self.hang(order.amount):
            time.sleep(_FOR_LONG_S)
        return [(order.user, order.amount)]


class LoopingOn(Hangs):
    """Catches whatever would end it."""

    def __call__(self, order: Any) -> Any:
        until = time.monotonic() + _FOR_LONG_S * self.hang(order.amount)
        while time.monotonic() < until:
            try:
                sum(range(10_000))
            except BaseException:
                continue
        return [(order.user, order.amount)]


class Asking(AsyncFunction, Hangs):
    async def async_invoke(self, value: Any) -> Any:
        if self.hang(value.amount):
            await asyncio.sleep(_FOR_LONG_S)
        return [(value.user, value.amount)]


class Total(KeyedProcessFunction, Hangs):
    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG"))

    def process_element(self, order: Any, ctx: Any) -> Any:
        if self.hang(order.amount):
            time.sleep(_FOR_LONG_S)
        self.total.update((self.total.value() or 0) + order.amount)
        yield order.user, self.total.value()


class Free(Total):
    def hang(self, amount: int) -> bool:
        return False


def job(spark: Any, folder: Path, way: str) -> Any:
    env = environment(spark, folder / "job")
    orders = env.from_collection(ROWS, ORDER, uid="orders")
    if way == "an async call hangs":
        orders = AsyncDataStream.ordered_wait(orders, Asking(folder), 900_000, output=ORDER, uid="asked")
    elif way != "state is kept":
        orders = orders.flat_map({"it sleeps": Sleeping, "it loops": LoopingOn}[way](folder), output=ORDER)
    total = Total(folder) if way == "state is kept" else Free(folder)
    totals = orders.key_by("user").process(total, output=TOTAL, uid="totals")
    totals.sink_to(DeltaSink(f"{folder}/out"), uid="out")
    return env


def pids(folder: Path) -> list[int]:
    return [int(one.name.removeprefix("pid")) for one in folder.glob("pid*")]


def expected() -> Counter[tuple[str, int]]:
    totals: dict[str, int] = {}
    found: Counter[tuple[str, int]] = Counter()
    for user, amount in ROWS:
        totals[user] = totals.get(user, 0) + amount
        found[user, totals[user]] += 1
    return found


@pytest.mark.parametrize(
    "way", sampled(["it sleeps", "it loops", "an async call hangs", "state is kept"], one_in=4)
)
def test_a_cancel_ends_what_hangs_in_a_worker(spark: Any, tmp_path: Path, way: str) -> None:
    env = job(spark, tmp_path, way)
    with running(env) as client:
        assert eventually(lambda: bool(pids(tmp_path)), 60)
        (hanging,) = pids(tmp_path)
        began = time.monotonic()
        client.cancel()
        assert client.wait(timeout_ms=20_000), "the cancel waits for the function"
        assert time.monotonic() - began < 15
        assert client.status is JobStatus.CANCELED
        assert {one.state for one in client.vertices} == {TaskState.CANCELED}
    assert eventually(lambda: not psutil.pid_exists(hanging), 10), "the worker goes on"
    (tmp_path / "go on").touch()
    job(spark, tmp_path, way).execute()
    rows = read_delta(tmp_path / "out")
    assert Counter((row["user"], row["total"]) for row in rows) == expected()


_APP = Path(__file__).parents[2] / "support" / "hanging_app.py"


#: Where it hangs; what is told of that, nothing if interrupts end it; whether the JVM goes on.
WHERE = {
    "a function on the driver": ("hang_on_the_driver", "ended"),
    "an expression": ("catalyst.expressions", "ended"),
    "a commit": ("sink 'called'", "runs"),
    "a commit of Delta's": ("", "runs"),
    "a signal": ("hang_on_the_driver", "ended"),
}


@pytest.mark.parametrize("where", sampled(list(WHERE), one_in=5))
def test_what_does_not_end_is_ended_or_left(tmp_path: Path, where: str) -> None:
    """In a process of its own; a second one finishes the job."""
    hangs_in, jvm = WHERE[where]
    first = _app(tmp_path, where)
    assert first["status"] == "CANCELED" and first["jvm"] == jvm, first
    assert first.get("error") == ("CancellationTimedOut" if hangs_in else "JobCancelledError"), first
    if hangs_in:
        assert 5_000 <= int(first["for_ms"]) < 15_000
        assert hangs_in in first["hangs_in"], first
    (tmp_path / "go on").touch()
    for pipe in (tmp_path / "table").glob("_delta_log/*.json"):
        if pipe.is_fifo():
            pipe.unlink()
    second = _app(tmp_path, where)
    assert second == {"status": "FINISHED", "rows": "3", "jvm": "runs"}
    if "commit" in where:
        assert sorted(row["text"] for row in read_delta(tmp_path / "table")) == ["a", "b", "c"]


def _app(folder: Path, where: str) -> dict[str, str]:
    command = [sys.executable, str(_APP), str(folder), where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = [line.split("=", 1) for line in done.stdout.splitlines() if "=" in line and line[0] == "@"]
    assert told, done.stderr[-3000:]
    return {name.removeprefix("@"): value for name, value in told}
