"""What a forked child inherits: real forks, no JVM. A child says by its exit status whether all was well."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.bridge.jvm_process import ends_with_this_process
from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.connectors.jdbc.committer import Database
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.socket import SocketLogWriter
from flinkish_spark.core.errors import OwnedElsewhereError
from flinkish_spark.core.forks import OwnFile, close_in_children, skip_in_children
from flinkish_spark.datastream.environment import _stop_signals
from flinkish_spark.operators.context import close_with

WELL = 7


@contextmanager
def forked(does: Callable[[], Any] = lambda: None) -> Iterator[int]:
    """A child that does something and then waits until the block is over; it has to be well at the end."""
    end, ready = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            os.close(end[1])
            does()
            os.write(ready[1], b".")
            select.select([end[0]], [], [], 60)
            status = WELL
        os._exit(status)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"."
    try:
        yield child
    finally:
        os.close(end[1])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == WELL
        os.close(end[0])
        os.close(ready[0])


def exit_of(does: Callable[[], Any]) -> int:
    """Exit status of a child that does something: WELL if nothing was raised."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        status = 1
        with suppress(BaseException):
            does()
            status = WELL
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# -- the lock ---------------------------------------------------------------------------------------
OWNER = """
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from flinkish_spark.checkpoint.ownership import JobLock

def sleep():
    time.sleep(600)

lock = JobLock(Path(sys.argv[1]))
lock.acquire()
if sys.argv[2] == "os.fork":
    child = os.fork()
    if child == 0:
        sleep()
elif sys.argv[2] == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=sleep)
    process.start()
    child = process.pid
else:
    child = subprocess.Popen(["sleep", "600"], close_fds=False, preexec_fn=os.getpid).pid
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing", "subprocess"])
def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_next_start_out(
    tmp_path: Path, way: str
) -> None:
    path = tmp_path / "owner.lock"
    command = [sys.executable, "-c", OWNER, str(path), way]
    root = Path(__file__).parents[3]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        assert owner.wait(60) == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        lock = JobLock(path)
        lock.acquire()
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_parent_keeps_the_lock_whatever_a_child_does_with_it(tmp_path: Path) -> None:
    lock = JobLock(tmp_path / "owner.lock")
    lock.acquire()

    def child() -> None:
        lock.release()
        with pytest.raises(OwnedElsewhereError, match=f"process {os.getppid()} on .*, which is alive"):
            JobLock(tmp_path / "owner.lock").acquire()

    assert exit_of(child) == WELL
    with pytest.raises(OwnedElsewhereError, match=r"\(this one\)"):
        JobLock(tmp_path / "owner.lock").acquire()
    lock.release()


def test_an_owner_that_ends_well_frees_the_lock_of_a_child_that_was_forked_in_c(tmp_path: Path) -> None:
    """Python is not told of such a fork: the child has the file, and the lock, until it is unlocked."""
    lock, other = JobLock(tmp_path / "owner.lock"), JobLock(tmp_path / "owner.lock")
    lock.acquire()
    child = ctypes.CDLL(None).fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        lock.release()
        other.acquire()
        other.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_that_a_child_of_a_dead_owner_holds_is_not_said_to_be_an_owners(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with open(tmp_path / "owner.lock", "a+") as child:
        fcntl.flock(child, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.write(f"process {ended.pid} on {socket.gethostname()}")
        child.flush()
        with pytest.raises(OwnedElsewhereError, match=f"process {ended.pid} on .*, which has ended.*fuser"):
            JobLock(tmp_path / "owner.lock").acquire()


def test_a_lock_of_an_older_version_is_honoured_and_honours_ours(tmp_path: Path) -> None:
    """It is flock on the same file: what releases before this one take."""
    lock = JobLock(tmp_path / "owner.lock")
    with open(tmp_path / "owner.lock", "a+") as older:
        fcntl.flock(older, fcntl.LOCK_EX | fcntl.LOCK_NB)
        older.write("process 1 on elsewhere")
        older.flush()
        with pytest.raises(OwnedElsewhereError, match="owned by process 1 on elsewhere, which is alive"):
            lock.acquire()
    lock.acquire()
    assert (tmp_path / "owner.lock").read_text().startswith(f"process {os.getpid()} on ")
    with open(tmp_path / "owner.lock", "a+") as older, pytest.raises(BlockingIOError):
        fcntl.flock(older, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.release()


def test_the_log_of_a_socket_is_the_parents(tmp_path: Path) -> None:
    writer = SocketLogWriter.take(tmp_path)
    assert writer is not None and SocketLogWriter.take(tmp_path) is None
    with forked(writer.close):
        assert SocketLogWriter.take(tmp_path) is None, "the child's close() is not the parent's"
        writer.append([b"one"])
        writer.close()
        again = SocketLogWriter.take(tmp_path)
        assert again is not None, "the child does not keep the lock"
        again.close()


def test_a_file_of_our_own_is_closed_in_a_child_and_its_number_is_not_closed_again(tmp_path: Path) -> None:
    file = OwnFile(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    number = file.fileno()

    def child() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        with pytest.raises(ValueError, match="closed"):
            file.fileno()
        # Given that number by name: what `open` gives is the lowest that is free, and that may be another.
        null = os.open(os.devnull, os.O_RDONLY)
        if null != number:
            os.dup2(null, number)
        file.close()
        os.fstat(number)

    assert exit_of(child) == WELL
    os.fstat(number)
    file.close()
    file.close()
    assert not file.is_open


# -- connections ------------------------------------------------------------------------------------
class Client:
    """A connection that says good-bye when it is closed or forgotten, as those of databases do."""

    def __init__(self, said: int) -> None:
        self.said = said

    def close(self) -> None:
        os.write(self.said, b"bye")

    __del__ = close


@pytest.mark.parametrize("forgets", [False, True])
def test_a_child_says_nothing_on_connections_of_its_parent(forgets: bool) -> None:
    heard, said = os.pipe()
    os.set_blocking(heard, False)
    settings: Any = None
    database = Database(settings, "table", connect=lambda: Client(said))
    wire = KafkaWire(KafkaConnection("127.0.0.1:9"))
    with suppress(AttributeError), database.use() as session:
        assert isinstance(session.connection, Client)
    from flinkish_spark.connectors.jdbc.dialect import Session

    database._session, wire._admin = Session(Client(said)), Client(said)
    with suppress(BlockingIOError):
        os.read(heard, 100)
    holders = [database, wire]

    def child() -> None:
        if forgets:
            nonlocal database, wire
            holders.clear()
            del database, wire
        else:
            for one in holders:
                one.close()
        import gc

        gc.collect()

    assert exit_of(child) == WELL
    with pytest.raises(BlockingIOError):
        os.read(heard, 100)
    for one in holders:
        one.close()
    assert os.read(heard, 100).startswith(b"byebye")


def test_a_transaction_in_sqlite_is_not_rolled_back_by_a_child(tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "db", isolation_level=None)

    with connect() as plain:
        plain.execute("CREATE TABLE t (n INTEGER)")
    settings: Any = None
    database = Database(settings, "table", connect)
    from flinkish_spark.connectors.jdbc.dialect import Session

    session = database._session = Session(connect())
    session.run("BEGIN IMMEDIATE")
    session.run_many("INSERT INTO t VALUES (?)", [(n,) for n in range(1_000)])
    assert exit_of(database.close) == WELL
    session.run("INSERT INTO t VALUES (1000)")
    session.run("COMMIT")
    database.close()
    assert connect().execute("SELECT count(*), max(n) FROM t").fetchall() == [(1_001, 1_000)]
    assert connect().execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# -- pipes, clean-ups, signals ----------------------------------------------------------------------
def test_who_reads_our_pipe_sees_our_end_although_a_child_lives() -> None:
    reading, writing = os.pipe()
    pipe = os.fdopen(writing, "wb", buffering=0)
    close_in_children(pipe)
    with forked(lambda: pipe.write(b"from a child")):
        pipe.close()
        assert os.read(reading, 100) == b"", "neither a word of the child nor its copy of the end"
    os.close(reading)


def test_the_jvm_sees_the_end_of_its_driver_although_a_child_lives() -> None:
    """PySpark gives the JVM a pipe as its input, by whose end it knows that the driver is gone."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as jvm:
        gateway = type("Gateway", (), {"proc": jvm})
        spark: Any = type("Spark", (), {"sparkContext": type("Context", (), {"_gateway": gateway})})
        ends_with_this_process(spark)
        with forked():
            assert jvm.stdin is not None
            jvm.stdin.close()
            assert jvm.wait(20) == 0


def test_clean_ups_are_the_parents(tmp_path: Path) -> None:
    made = tmp_path / "scratch"
    made.mkdir()
    work = skip_in_children(made.rmdir)
    assert exit_of(work) == WELL and made.exists()
    work()
    assert not made.exists()


def test_a_child_that_ends_as_any_program_closes_no_function_of_its_parent(tmp_path: Path) -> None:
    program = """
        import os, sys
        from flinkish_spark.operators.context import close_with

        class Function:
            def close(self):
                print("closed", flush=True)

        class Holder:
            pass

        holder = Holder()
        close_with(holder, Function(), "totals")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            print("parent", flush=True)
        sys.exit()
    """
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd=root, check=True
    )
    assert ran.stdout.split() == ["parent", "closed"]
    assert close_with.__name__ == "close_with"


def test_a_worker_that_was_forked_while_a_job_executes_can_be_ended() -> None:
    """`execute()` turns SIGTERM into a last checkpoint; a child has no job and has to die of it."""
    stops: list[str] = []
    stop: Any = SimpleNamespace(on_signal=lambda: stops.append("stop"))
    with _stop_signals(stop):
        handler = signal.getsignal(signal.SIGTERM)
        for _ in range(30):
            # At once: Python forgets a signal that comes between the fork and the child's first line.
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            process.start()
            process.terminate()
            process.join(20)
            assert process.exitcode == -signal.SIGTERM
        assert stops == []
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.raise_signal(signal.SIGTERM)
    assert stops == ["stop"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
