"""Switches in Spark's Python workers: they ask the driver, who counts for all processes of a job.

Workers get here by `in_tasks/sitecustomize.py`, which every Python process below the driver loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.crash.sweep import databases, files
from tests.crash.sweep.points import Call, Fault
from tests.crash.sweep.switch import Switch

#: Tells workers where the driver listens, and which jobs there are.
TASKS_VARIABLE = "FLINKISH_SWEEP_TASKS"
FOLDER = Path(__file__).with_name("in_tasks")
_PREFIX = "task."


class Answers:
    """The driver's side: passes the calls of workers by the switches, each connection in a thread."""

    def __init__(self, path: Path, base: Path, switches: Mapping[str, Switch]) -> None:
        self._switches = switches
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="answers", daemon=True).start()
        told = {"socket": str(path), "base": str(base), "jobs": list(switches)}
        os.environ[TASKS_VARIABLE] = json.dumps(told)

    def _accept(self) -> None:
        while True:
            worker, _ = self._socket.accept()
            threading.Thread(target=self._answer, args=(worker,), name="answer", daemon=True).start()

    def _answer(self, worker: socket.socket) -> None:
        with contextlib.suppress(OSError), worker, worker.makefile("rw", encoding="utf-8") as lines:
            asked = json.loads(lines.readline())
            # A frozen job's worker waits here for its end.
            fault = self._switches[asked["job"]].passing(Call.from_json(asked["call"]))
            lines.write(f"{fault.value if fault is not None else ''}\n")
            lines.flush()


class RemoteSwitch(Switch):
    """The worker's side of one job."""

    def __init__(self, path: str, job: str) -> None:
        super().__init__(lambda event: None)
        self._path, self._job = path, job

    def passing(self, call: Call) -> Fault | None:
        """Ask the driver what is to be done to a call."""
        # A driver that is gone takes its workers along in a moment.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as driver:
            driver.connect(self._path)
            with driver.makefile("rw", encoding="utf-8") as lines:
                lines.write(json.dumps({"job": self._job, "call": call.to_json()}) + "\n")
                lines.flush()
                answer = lines.readline().strip()
            return Fault(answer) if answer else None
        return None


def install(told: str) -> None:
    """Watch this process."""
    where = json.loads(told)
    switches = {job: RemoteSwitch(where["socket"], job) for job in where["jobs"]}
    jobs = files.Jobs(Path(where["base"]), switches, _PREFIX)
    files.hook_files(jobs)
    databases.hook_sqlite(jobs)
