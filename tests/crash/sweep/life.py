"""One life of the process under test, from its start to its death, seen by its parent."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.process import JobProcess, Victim
from demo.rig import BROKER_JARS, ROOT, _environment
from flinkish_spark.testing.broker import LocalBroker, free_port
from tests.crash import class_path
from tests.crash.sweep.places import JVM_VARIABLE, Fleet, Place
from tests.crash.sweep.points import Run
from tests.crash.sweep.tasks import FOLDER
from tests.support.jvm_flags import JVM_FLAGS

APP = ROOT / "tests" / "crash" / "sweep" / "app.py"
_UP_S = 180.0
#: What `tests/conftest.py` says of short-lived JVMs.
_JVM = f"{JVM_FLAGS} -XX:-UsePerfData"


class SweptBroker(LocalBroker):
    """A broker with one more listener per job, which advertises the address of the job's proxy.

    Parameters
    ----------
    sinks
        Names of the jobs.
    """

    def __init__(self, directory: Path, sinks: tuple[str, ...]) -> None:
        super().__init__(directory, jars_dir=BROKER_JARS)
        taken = [self._port, self._controller_port]
        self.wires: dict[str, tuple[int, int]] = {}
        for sink in sinks:
            proxy, upstream = free_port(*taken), 0
            upstream = free_port(*taken, proxy)
            taken += [proxy, upstream]
            self.wires[sink] = (proxy, upstream)

    def _security_properties(self) -> dict[str, str]:
        properties = super()._security_properties()
        for number, (proxy, upstream) in enumerate(self.wires.values()):
            properties["listeners"] += f",W{number}://127.0.0.1:{upstream}"
            properties["advertised.listeners"] += f",W{number}://127.0.0.1:{proxy}"
            properties["listener.security.protocol.map"] += f",W{number}:PLAINTEXT"
        return properties

    def place(self, base: Path, sink: str) -> Place:
        return Place(sink, base / sink, *self.wires[sink], self.bootstrap_servers)


@dataclass(frozen=True, slots=True)
class Event:
    """What the process told about a job."""

    name: str
    facts: dict[str, Any]


class DiedEarly(Exception):
    """The process ended when it should not have."""


class Life:
    """Starts the process, talks to it, and kills it.

    Parameters
    ----------
    process
        Starts drivers; the same for all lives of a fleet.
    """

    def __init__(self, fleet: Fleet, process: JobProcess) -> None:
        self._process = process
        self._events: dict[str, queue.SimpleQueue[Event]] = {
            place.sink: queue.SimpleQueue() for place in fleet.places
        }
        self._lock = threading.Lock()
        settings = Path(f"{fleet.control}.json")
        settings.write_text(fleet.to_json(), encoding="utf-8")
        fleet.control.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(fleet.control))
            listener.listen(1)
            listener.settimeout(1)
            process.start({JVM_VARIABLE: _JVM, **class_path.variables()})
            self._socket = self._accepted(listener)
        threading.Thread(target=self._listen, name="life", daemon=True).start()

    def _accepted(self, listener: socket.socket) -> socket.socket:
        deadline = time.monotonic() + _UP_S
        while time.monotonic() < deadline and self._process.is_alive:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
        raise self._process.failed("did not come up")

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                facts = json.loads(line)
                name, job = facts.pop("event"), facts.pop("job")
                for sink in [job] if job else list(self._events):
                    self._events[sink].put(Event(name, facts))

    # -- talking --------------------------------------------------------------------------------
    def say(self, sink: str, command: str, **facts: Any) -> None:
        """Tell a job what to do; returns at once."""
        line = json.dumps({"op": command, "job": sink, **facts}) + "\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line.encode())

    def begin(self, sink: str, run: Run | None) -> None:
        """Open a window at a job, and wait until it is open."""
        facts = {} if run is None else {"point": str(run.point), "fault": run.fault.value}
        self.say(sink, "begin", **facts)
        self.wait_for(sink, "begun", 60)

    def next(self, sink: str, timeout_s: float) -> Event | None:
        """Return what a job tells next, or None if that takes too long."""
        if not self._process.is_alive:
            raise DiedEarly(str(self._process.failed(f"ended by itself with status {self._process.status}")))
        try:
            return self._events[sink].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_for(self, sink: str, name: str, timeout_s: float) -> Event:
        """Return the next event of a name; others before it are passed over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            event = self.next(sink, 0.5)
            if event is not None and event.name == name:
                return event
        raise DiedEarly(f"{sink} did not tell '{name}' within {timeout_s:g} s\n{self._process.tail()}")

    # -- dying ----------------------------------------------------------------------------------
    def kill(self) -> None:
        """Kill driver, JVM and workers with SIGKILL."""
        if self._process.is_alive:
            self._process.kill(Victim.GROUP)
        self._socket.close()


def job_process(fleet: Fleet, chance: random.Random) -> JobProcess:
    """Return what starts drivers of a fleet."""
    command = [sys.executable, str(APP), f"{fleet.control}.json"]
    log = fleet.base / "driver.log"
    path = f"{FOLDER}{os.pathsep}{ROOT}"
    environment = {**_environment(), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    return JobProcess(command, environment, log, chance)
