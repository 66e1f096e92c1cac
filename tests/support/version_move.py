"""A job that one version of Spark begins and another goes on with, each in an environment of its own.

    python -m tests.support.version_move begin FOLDER    killed with SIGKILL in the middle, behind a savepoint
    python -m tests.support.version_move go-on FOLDER    the same job directory, under what runs this
    python -m tests.support.version_move restore FOLDER  a new job directory, with the savepoint
    python -m tests.support.version_move back FOLDER     a new one, with the savepoint that go-on has taken
    python -m tests.support.version_move refused FOLDER  the job directory must be refused

No Delta and no broker: whatever version runs, this job can. Each prints one line of JSON, and fails unless
what came out is exactly what a recomputation from the input says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from flinkish_spark import (
    CheckpointConfig,
    FileFormat,
    FileSink,
    KeyedProcessFunction,
    ListStateDescriptor,
    RestoreSettings,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
    WatermarkStrategy,
    configure_spark_with_jars,
)
from flinkish_spark.core.errors import JobDirError
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from tests.conftest import spark_test_conf
from tests.support.services import BUILD

USERS = ("ann", "ben", "cid")
ORDERS_A_FILE = 50
#: How many files of the input there are at the savepoint, when the first process is killed, and in the end.
AT_SAVEPOINT, AT_KILL, AT_END = 3, 5, 8
WITHIN_S = 150.0


class Totals(KeyedProcessFunction):
    """Counts and adds the orders of a user, in two kinds of state; timers of event time are in it, too."""

    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "orders LONG, total LONG"))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        orders, total = self.total.value() or (0, 0)
        self.total.update((orders + 1, total + order.amount))
        self.seen.add(order.n)
        ctx.timer_service().register_event_time_timer(order.at + 1)
        yield order.user, order.n, orders + 1, total + order.amount, len(list(self.seen))

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        """Say nothing: when one fires depends on how the input falls into micro-batches."""
        yield from ()


def orders_of(file: int) -> list[dict[str, Any]]:
    """Return the orders of a file of the input."""
    numbers = range(file * ORDERS_A_FILE, (file + 1) * ORDERS_A_FILE)
    return [{"user": USERS[n % 3], "n": n, "amount": n * 7 % 11, "at": n * 1_000} for n in numbers]


def expected(first: int, last: int) -> list[tuple[Any, ...]]:
    """Return what comes out of the files `first` to `last` - 1, behind all before them."""
    counts: dict[str, tuple[int, int]] = {}
    found = []
    for order in (one for file in range(last) for one in orders_of(file)):
        count, total = counts.get(order["user"], (0, 0))
        counts[order["user"]] = (count + 1, total + order["amount"])
        if order["n"] >= first * ORDERS_A_FILE:
            found.append((order["user"], order["n"], count + 1, total + order["amount"], count + 1))
    return sorted(found)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def shown(folder: Path) -> list[tuple[Any, ...]]:
    """Return what the sink shows."""
    found = [one for one in folder.rglob("*.json") if not _is_hidden(one.relative_to(folder))]
    rows = [json.loads(line) for file in found for line in file.read_text().splitlines()]
    return sorted((r["user"], r["n"], r["orders"], r["total"], r["seen"]) for r in rows)


class Move:
    """One process of the move."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.input = self.folder / "orders"
        self.input.mkdir(parents=True, exist_ok=True)
        settings = {**spark_test_conf(self.folder / "scratch"), "spark.ui.showConsoleProgress": "false"}
        builder = SparkSession.builder.master("local[2,4]").config(map=settings)
        self.spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
        self.spark.sparkContext.setLogLevel("ERROR")

    def job(
        self, job_dir: str, out: str, restore: RestoreSettings | None = None
    ) -> StreamExecutionEnvironment:
        """Return the job with its directory and the folder of its sink."""
        env = StreamExecutionEnvironment(
            self.spark,
            job="moved",
            job_dir=str(self.folder / job_dir),
            checkpoint=CheckpointConfig(interval_ms=500),
            restore=restore,
        )
        orders = env.from_source(
            FileSource(
                str(self.input),
                JsonLines(),
                "user STRING, n LONG, amount LONG, at LONG",
                discovery=Discovery.CONTINUOUS,
                discover_every_ms=200,
            ),
            WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at"),
            uid="orders",
        )
        columns = "user STRING, n LONG, orders LONG, total LONG, seen LONG"
        totals = orders.key_by("user").process(Totals(), output=columns, uid="totals")
        totals.sink_to(FileSink(str(self.folder / out), FileFormat.JSON), uid="out")
        return env

    def put(self, *files: int) -> None:
        """Add files to the input, each whole at once; one that is there stays, since a job knows it."""
        for file in files:
            target, hidden = self.input / f"{file:03d}.json", self.folder / f"{file}.tmp"
            if not target.exists():
                hidden.write_text("".join(json.dumps(one) + "\n" for one in orders_of(file)))
                hidden.replace(target)

    def await_rows(self, out: str, wanted: list[tuple[Any, ...]]) -> None:
        """Return when the sink shows exactly this; fail when it shows other rows, or too late."""
        deadline = time.monotonic() + WITHIN_S
        found: list[tuple[Any, ...]] = []
        while time.monotonic() < deadline:
            found = shown(self.folder / out)
            if found == wanted:
                return
            time.sleep(0.2)
        sys.exit(f"{out} shows {len(found)} rows, wanted {len(wanted)}; wrong: {set(found) - set(wanted)}")

    def begin(self) -> None:
        """Read some of the input, take a savepoint, read more, and be killed with more to read."""
        client = self.job("job", "out").execute_async()
        self.put(*range(AT_SAVEPOINT))
        self.await_rows("out", expected(0, AT_SAVEPOINT))
        answer = client.trigger_savepoint(str(self.folder / "savepoint")).wait(150_000)
        assert answer is not None and answer.is_completed, answer
        self.put(*range(AT_SAVEPOINT, AT_KILL - 1))
        self.await_rows("out", expected(0, AT_KILL - 1))
        self.put(AT_KILL - 1)
        time.sleep(0.4)
        print(json.dumps({"spark": self.spark.version}), flush=True)
        os.killpg(0, signal.SIGKILL)

    def go_on(self) -> None:
        """Go on with the job directory, read the rest, and stop with a savepoint."""
        client = self.job("job", "out").execute_async()
        self.put(*range(AT_KILL, AT_END))
        self.await_rows("out", expected(0, AT_END))
        answer = client.stop_with_savepoint(str(self.folder / "later")).wait(150_000)
        assert answer is not None and answer.is_completed, answer
        client.wait()
        self.said(AT_END * ORDERS_A_FILE)

    def restore(self) -> None:
        """Begin a new job directory with the savepoint; the input is whole."""
        self.put(*range(AT_SAVEPOINT, AT_END))
        savepoint = RestoreSettings(str(self.folder / "savepoint"))
        client = self.job("restored", "restored-out", savepoint).execute_async()
        self.await_rows("restored-out", expected(AT_SAVEPOINT, AT_END))
        client.stop_with_checkpoint()
        client.wait()
        self.said((AT_END - AT_SAVEPOINT) * ORDERS_A_FILE)

    def back(self) -> None:
        """Begin a new job directory with the savepoint of the other version, and read one file more."""
        client = self.job("back", "back-out", RestoreSettings(str(self.folder / "later"))).execute_async()
        self.put(AT_END)
        self.await_rows("back-out", expected(AT_END, AT_END + 1))
        client.stop_with_checkpoint()
        client.wait()
        self.said(ORDERS_A_FILE)

    def refused(self) -> None:
        """Try to go on with a directory that a later version has run on."""
        try:
            self.job("job", "out").execute()
        except JobDirError as error:
            self.said(0, refused=str(error))
        else:
            sys.exit("the job directory was not refused")

    def said(self, rows: int, **more: Any) -> None:
        """Say what was seen."""
        versions = sorted(one.stem for one in (self.folder / "job" / "spark-versions").glob("*"))
        print(json.dumps({"spark": self.spark.version, "exact_rows": rows, "later": versions, **more}))


def main(step: str, folder: str) -> None:
    move = Move(Path(folder))
    {
        "begin": move.begin,
        "go-on": move.go_on,
        "restore": move.restore,
        "back": move.back,
        "refused": move.refused,
    }[step]()


if __name__ == "__main__":
    main(*sys.argv[1:])
