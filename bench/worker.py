"""A process of the bench that stays warm: asked a line at a time, watched with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
#: How much is shown of the log of a process that ended.
_LAST_LINES = 60
_LOOK_S = 0.5


def end_on_sigterm():
    """Let whoever ends this process early leave no broker and no sessions behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early; --resume goes on"))


class Worker:
    """A process that answers each line with a line of JSON.

    Parameters
    ----------
    variant
        What it runs; names its log.
    command
        Starts it. It says that it is ready with a first line of JSON.
    directory
        Of its log.
    """

    def __init__(self, variant, command, directory):
        own = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        self._log = Path(directory) / f"{variant}.log"
        log = open(self._log, "w")  # noqa: SIM115 - the child's
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        self.variant = variant
        #: How long its runs have taken so far.
        self.worked_s = 0.0

    def wait_until_ready(self):
        """Return what it says of itself."""
        return self._answer()

    def run(self, command):
        """Ask for one run; the answer also has the CPU seconds and the most memory of the process tree."""
        before, begun = self._cpu_seconds(), time.monotonic()
        memory = _Memory(self)
        answer = self.ask(command)
        self.worked_s += time.monotonic() - begun
        answer["cpu_seconds"] = self._cpu_seconds() - before
        answer["peak_mib"] = memory.most_mib()
        return answer

    def ask(self, command):
        """Send one line, and return the answer."""
        self.tell(command)
        return self._answer()

    def tell(self, command):
        """Send one line that has no answer."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def end(self):
        """Let it end by itself."""
        self.process.stdin.close()
        self.process.wait()

    def close(self):
        """End it with all that it has started, by SIGKILL."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.process.stdin.close()

    def tree(self):
        """Return the process and all below it."""
        try:
            own = psutil.Process(self.process.pid)
            return [*own.children(recursive=True), own]
        except psutil.NoSuchProcess:
            return []

    def _answer(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        # The next group empties the directory.
        last = "\n".join(self._log.read_text().splitlines()[-_LAST_LINES:])
        raise SystemExit(f"{last}\n{self.variant} ended; above are the last lines of its log")

    def _cpu_seconds(self):
        total = 0.0
        for process in self.tree():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total


class _Memory(threading.Thread):
    """Watches how much memory a process tree has; pages that several share count once."""

    def __init__(self, worker):
        super().__init__(daemon=True)
        self._worker, self._most, self._over = worker, 0, threading.Event()
        self.start()

    def run(self):
        while not self._over.is_set():
            total = 0
            for process in self._worker.tree():
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self._most = max(self._most, total)
            self._over.wait(_LOOK_S)

    def most_mib(self):
        """Stop watching, and return the most there was."""
        self._over.set()
        self.join()
        return self._most >> 20
