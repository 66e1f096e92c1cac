"""The job as a tree of processes that can be shot at.

The tree: the Python driver, its JVM, the daemon that forks Python workers, the workers. All of it
is one session of its own, so that it is found again by the session's id after its parent died, and
so that nothing else on the machine can be hit.
"""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

#: How long a driver may take to notice that its JVM is gone.
_DRIVER_NOTICES_S = 30.0
_APPEARS_S = 10.0
#: A driver that starts has no worker of the job's for a while.
_STARTS_S = 60.0
#: Processor time is counted in hundredths of a second.
_GLANCE_S = 0.03
#: How the names of modules end that fork Python workers: PySpark's own, or one with imports done.
_DAEMON = "daemon"


class Victim(enum.Enum):
    """What a kill hits."""

    DRIVER = "driver"
    JVM = "jvm"
    WORKER = "worker"
    GROUP = "group"


class JobFailed(Exception):
    """The job ended or stayed when it should not have; the message ends with its log's last lines."""


class JobProcess:
    """Starts a job's driver again and again, and kills parts of it.

    Parameters
    ----------
    command, environment
        The driver.
    log
        What all drivers write is appended here.
    chance
        Chooses among the workers.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, chance: random.Random
    ) -> None:
        self._command, self._environment = list(command), dict(environment)
        self.log = log
        self._chance = chance
        self._driver: subprocess.Popen[bytes] | None = None
        self._sessions: dict[int, float] = {}
        self.starts = 0

    def start(self, extra: Mapping[str, str] | None = None) -> None:
        """Start the driver in a session of its own; orphans of an earlier one may still be there."""
        if self.is_alive:
            raise RuntimeError("the job is running")
        self.starts += 1
        began = time.time()
        with self.log.open("ab") as log:
            log.write(f"---- start {self.starts} {dict(extra or {})}\n".encode())
            log.flush()
            self._driver = subprocess.Popen(
                self._command,
                env={**self._environment, **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._sessions[self._driver.pid] = began

    @property
    def pid(self) -> int:
        """Of the newest driver, which is the id of its session, too."""
        return self._running().pid

    @property
    def is_alive(self) -> bool:
        """Whether the driver runs."""
        return self._driver is not None and self._driver.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status of the newest driver; negative for a signal, None while it runs."""
        return None if self._driver is None else self._driver.poll()

    # -- killing --------------------------------------------------------------------------------
    def kill(self, victim: Victim) -> None:
        """Send SIGKILL to a part of the job, and wait until the driver has ended if it will.

        A worker's death does not end the driver: it restarts the query by itself.
        """
        driver = self._running()
        match victim:
            case Victim.DRIVER:
                driver.kill()
                driver.wait()
            case Victim.JVM:
                self._jvm().kill()
                self._wait_for(driver)
            case Victim.WORKER:
                self._worker().kill()
            case Victim.GROUP:
                self._kill_session(driver.pid)
                driver.wait()

    def terminate(self, timeout_s: float) -> int:
        """Ask the job to stop with a last checkpoint; return the driver's exit status."""
        driver = self._running()
        driver.send_signal(signal.SIGTERM)
        try:
            return driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not stop within {timeout_s:g} s of SIGTERM") from None

    def wait(self, timeout_s: float) -> int:
        """Wait for the driver to end by itself; return its exit status."""
        assert self._driver is not None
        try:
            return self._driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"was expected to end, but ran on for {timeout_s:g} s") from None

    def reap(self) -> None:
        """Kill whatever is left of all sessions started here."""
        for session in self._sessions:
            self._kill_session(session)
        if self._driver is not None:
            self._driver.wait()

    def failed(self, what: str) -> JobFailed:
        """Return the error to raise about this job."""
        return JobFailed(f"the job {what}\n  its log: {self.log}, which ends:\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(f"    {line[:300]}" for line in text.splitlines()[-lines:])

    # -- finding --------------------------------------------------------------------------------
    def members(self, session: int) -> list[psutil.Process]:
        """Return the living processes of a session that was started here."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                # The number of a session that has died out may be given to somebody else's later.
                is_ours = os.getsid(process.pid) == session
                if is_ours and process.create_time() >= self._sessions[session] - 2:
                    found.append(process)
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._driver is None or not self.is_alive:
            raise self.failed(f"ended by itself with status {self.status}")
        return self._driver

    @property
    def has_jvm(self) -> bool:
        """Whether the driver has started its JVM; a moment after its own start it has."""
        return self._find_jvm() is not None

    def _jvm(self) -> psutil.Process:
        # The last checkpoint of a driver that was killed may be confirmed when the next one has none yet.
        deadline = time.monotonic() + _APPEARS_S
        while (found := self._find_jvm()) is None:
            if time.monotonic() > deadline:
                raise self.failed(f"had no JVM for {_APPEARS_S:g} s")
            time.sleep(_GLANCE_S)
        return found

    def _find_jvm(self) -> psutil.Process | None:
        for process in psutil.Process(self._running().pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "java":
                    return process
        return None

    def _worker(self) -> psutil.Process:
        """Return a worker that computes right now; if none is seen at it, any one.

        Spark replaces an idle worker without a word: killing that would prove nothing.
        """
        began, workers = time.monotonic(), list[psutil.Process]()
        while time.monotonic() - began < (_APPEARS_S if workers else _STARTS_S):
            workers = self._workers()
            before = [_cpu_seconds(worker) for worker in workers]
            time.sleep(_GLANCE_S)
            busy = [w for w, cpu in zip(workers, before, strict=True) if _cpu_seconds(w) > cpu >= 0]
            if busy:
                return self._chance.choice(busy)
        if workers:
            return self._chance.choice(workers)
        raise self.failed(f"had no Python worker for {_STARTS_S:g} s")

    def _workers(self) -> list[psutil.Process]:
        """Return the Python processes below the JVM, but not the daemon that forks them."""
        jvm = self._jvm()
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in jvm.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    names_one = any(word.endswith(_DAEMON) for word in process.cmdline())
                    is_daemon = process.ppid() == jvm.pid and names_one
                    if "python" in process.name() and not is_daemon:
                        found.append(process)
        return found

    def _wait_for(self, driver: subprocess.Popen[bytes]) -> None:
        try:
            driver.wait(_DRIVER_NOTICES_S)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {_DRIVER_NOTICES_S:g} s of its JVM") from None

    def _kill_session(self, session: int) -> None:
        # The driver and its JVM are one process group and fall together; the daemon made a group of its
        # own. Twice round, since a daemon may fork between the look and the shot.
        for _ in range(2):
            members = self.members(session)
            if any(member.pid == session for member in members):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(session, signal.SIGKILL)
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time a process has used; -1 if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return -1.0
    return float(times.user + times.system)
