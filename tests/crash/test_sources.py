"""Kills of a job over files, a socket, a generator and a source of one's own: output equals input."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from tests.crash.harness import At, Shot
from tests.crash.lives import SEED_VARIABLE, Crash, Life, chosen_crashes, wanted_kills
from tests.crash.sources_app import SOURCES
from tests.crash.sources_rig import Left, LineServer, Writer, is_part_of, made, socket_lines

APP = ROOT / "tests" / "crash" / "sources_app.py"
#: Between the sinks' commits and what the sources are told; at night at moments of chance, too.
FEW: tuple[Crash, ...] = (At("group-offsets:after:2"),)
CRASHES: tuple[Crash, ...] = (
    Shot(Victim.WORKER),
    Shot(Victim.JVM),
    At("group-offsets:after:2"),
    Shot(Victim.GROUP),
)


def job_in(directory: Path, port: int, chance: random.Random) -> JobProcess:
    command = [
        sys.executable, str(APP), "--directory", str(directory), "--port", str(port),
        "--scratch", str(directory / "scratch"),
    ]  # fmt: skip
    return JobProcess(command, _environment(), directory / "driver.log", chance)


def is_all_out(left: Left, writer: Writer) -> bool:
    """Whether everything that was written or received is visible."""
    wanted = {"files": writer.files, "books": writer.books, "socket": socket_lines(left.received())}
    return all(left.out(uid) == lines for uid, lines in wanted.items())


def is_enough(left: Left, server: LineServer, writer: Writer) -> bool:
    """Whether something has come from every source, and more than a little."""
    made = min(map(len, left.out("made").values()), default=0)
    few = (len(left.received()), len(server.sent), len(writer.files))
    return min(few) > 20 and len(writer.books) > 1 and made > 500


@pytest.mark.timeout(900)
def test_a_kill_over_sources_leaves_output_equal_to_input(run_directory: Path) -> None:
    """Of the socket: the lines that were received, each once, in their order. Behaviours 165, 166."""
    survive(run_directory, FEW)


@pytest.mark.nightly
@pytest.mark.timeout(900 + 90 * wanted_kills())
def test_kills_over_sources_leave_output_equal_to_input(run_directory: Path) -> None:
    """Behaviours 165, 166 again, by more kills, or as many as are asked for."""
    survive(run_directory, CRASHES)


def survive(run_directory: Path, crashes: Sequence[Crash]) -> None:
    """Let all of them happen to a job, and compare everything in the end."""
    chance = random.Random(int(os.environ.get(SEED_VARIABLE, "9")))
    shutil.rmtree(run_directory, ignore_errors=True)
    run_directory.mkdir(parents=True)
    server, writer = LineServer(random.Random(1)), Writer(run_directory, random.Random(2))
    left = Left(run_directory)
    job = job_in(run_directory, server.port, chance)
    server.start()
    writer.start()
    try:
        life = Life(job, run_directory / "job", chance, left.check_told)
        life.through(chosen_crashes(crashes, chance))
        life.await_that(lambda: is_enough(left, server, writer), "live until there is enough input", 1.0)
        server.stop()
        writer.stop()
        life.await_that(lambda: is_all_out(left, writer), "bring everything out", 1.0)
        life.stop()
    finally:
        job.reap()
    received = left.received()
    assert [left.holes(uid) for uid in SOURCES] == [[]] * len(SOURCES)
    assert left.out("files") == writer.files
    assert left.out("books") == writer.books
    assert left.out("socket") == socket_lines(received)
    assert left.out("made") == made(left.position("made"))
    assert is_part_of(received, server.sent)
    left.check_told()
    assert left.told("committed")[-1] == {name: len(lines) for name, lines in writer.books.items()}
    counts = {"received": len(received), "sent": len(server.sent), "files": len(writer.files)}
    assert is_enough(left, server, writer), counts
    print(counts)
