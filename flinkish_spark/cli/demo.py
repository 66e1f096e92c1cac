"""`flinkish demo`: runs the job of `flinkish new`, kills and restarts it, and checks its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from flinkish_spark.cli.client import ExitStatus, end_with, say
from flinkish_spark.cli.new import write_project
from flinkish_spark.core.errors import EnvironmentFault

#: Rate of orders, and checkpoint interval, of the project's job.
_ORDERS, _INTERVAL_S = 10_000, 2.0
#: Time limit for a start of the job to show rows, or to end.
_PATIENCE_S = 300.0
_GLANCE_S = 0.1
_LOG_LINES = 15


@click.command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
def demo(folder: Path | None) -> None:
    """Run a job on made-up orders, kill and restart it, and check its output.

    Takes about a minute, and needs Java but no Kafka. The job is that of `flinkish new`. It is written to
    DIR, by default a new temporary folder, and stays there. The exit status is 1 if a row is lost,
    duplicated, or has a wrong total.
    """
    # Imported here, since it imports pyspark.
    from flinkish_spark.bridge.session import check_java

    check_java()
    folder = Path(tempfile.mkdtemp(prefix="flinkish-demo-")) if folder is None else folder.absolute()
    write_project(folder)
    began = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - began:04.1f} s  {text}")

    tell(f"wrote a job with a test and a notebook: {folder}")
    with _run_job(folder) as job:
        tell(
            f"started it: {_ORDERS:,} orders, a running total per user, a checkpoint every {_INTERVAL_S:g} s"
        )
        seen = job.wait_until(lambda: sum(1 for _ in rows_in(folder)))
        tell(f"{seen:,} rows are committed")
        # By now the next checkpoint has staged rows, which are not visible yet.
        time.sleep(_INTERVAL_S / 2)
        was_faster = job.has_ended
    if was_faster:
        raise EnvironmentFault(
            "the demo's job has ended before it could be killed", what_to_do="run it again"
        )
    tell("killed it with SIGKILL in the middle of the next checkpoint: driver, JVM, workers")
    with _run_job(folder) as job:
        tell("started it again: it continues from its last checkpoint")
        job.wait_until(lambda: job.has_ended)
    tell("it has read all orders, and has ended by itself")
    found = count(rows_in(folder), _ORDERS)
    say(str(found))
    say(f"the rows: {folder / 'data' / 'totals'}; what to do next: {folder / 'README.md'}")
    if not found.is_exact:
        end_with(ExitStatus.NOT_DONE)


@dataclass(frozen=True, slots=True)
class Count:
    orders: int
    rows: int
    lost: int
    twice: int
    wrong_totals: int

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.twice or self.wrong_totals)

    def __str__(self) -> str:
        verdict = "EXACTLY ONCE" if self.is_exact else "NOT EXACTLY ONCE"
        counts = f"{self.orders:,} orders, {self.rows:,} rows, {self.lost} lost, {self.twice} twice"
        return f"{verdict}: {counts}, {self.wrong_totals} wrong totals"


def count(rows: Iterable[dict[str, object]], orders: int) -> Count:
    """Compare the rows with the correct results of the orders 0, 1, ..., for any users and amounts."""
    times: dict[object, int] = defaultdict(int)
    amounts: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        times[row["id"]] += 1
        total, amount = row["total"], row["amount"]
        assert isinstance(total, int) and isinstance(amount, int)
        amounts[row["user"]].append((total, amount))
    wrong = 0
    for of_user in amounts.values():
        before = 0
        # Amounts are positive, so totals rise in the order of the orders.
        for total, amount in sorted(of_user):
            wrong += total != before + amount
            before = total
    return Count(
        orders,
        sum(times.values()),
        sum(1 for order in range(orders) if order not in times),
        sum(seen - 1 for seen in times.values()),
        wrong,
    )


def rows_in(folder: Path) -> Iterator[dict[str, object]]:
    for file in sorted((folder / "data" / "totals").glob("*.json")):
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


class _Job:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def has_ended(self) -> bool:
        return self._process.poll() == 0

    def wait_until(self, look: Callable[[], int]) -> int:
        """Poll until the result is not empty, and return it; raise EnvironmentFault if the job ends first."""
        until = time.monotonic() + _PATIENCE_S
        while not (seen := look()):
            status = self._process.poll()
            if status is not None and not look():
                raise self._make_error(f"ended with status {status}")
            if time.monotonic() > until:
                raise self._make_error(f"made no progress for {_PATIENCE_S:g} s")
            time.sleep(_GLANCE_S)
        return seen

    def _make_error(self, what: str) -> EnvironmentFault:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()][-_LOG_LINES:]
        return EnvironmentFault(
            f"the job of the demo {what}",
            why=f"its log, {self._log}, ends with: {' / '.join(said)}",
            what_to_do="run `flinkish doctor`",
        )


@contextlib.contextmanager
def _run_job(folder: Path) -> Iterator[_Job]:
    """Run the job in its own process session; kill all of its processes after the block."""
    log = folder / "job.log"
    with log.open("ab") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "flinkish_spark.cli", "run", "--target", "local", "job.py"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _Job(process, log)
    finally:
        # The daemon of Python workers has its own process group, and ends with the JVM.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
