"""Samples of a living job every few seconds: its processes, its transactions, its files.

Each is a line of ``samples.jsonl``, so that a run can be read later:

    {"at_s": 412.0, "minute": 7, "start": 8, "age_s": 24.1, "driver MB": 212.4, "jvm threads": 71, ...}

`age_s` is the time since the first checkpoint of this start; before it there is none. What could not be
asked at the moment, such as transactions while the broker is down, is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from demo.process import JobFailed
from demo.rig import Rig
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.errors import FlinkishError

INTERVAL_S = 4.0
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    minute: int
    #: Number of the driver's start.
    start: int
    age_s: float | None
    values: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        head = {"at_s": self.at_s, "minute": self.minute, "start": self.start, "age_s": self.age_s}
        return {**head, **self.values}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Sample:
        rest = dict(value)
        return cls(rest.pop("at_s"), rest.pop("minute"), rest.pop("start"), rest.pop("age_s"), rest)


def read_samples(path: Path) -> list[Sample]:
    """Return a run's samples; a last line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Sample.from_json(json.loads(line)) for line in lines if line.endswith("\n")]


class Sampler(threading.Thread):
    """Takes samples of a rig's job until :meth:`stop`.

    The soak says which minute it is, and when a start has its first checkpoint.
    """

    def __init__(self, rig: Rig, path: Path) -> None:
        super().__init__(name="sampler", daemon=True)
        self._rig, self._path = rig, path
        self._began = time.monotonic()
        self._is_stopping = threading.Event()
        self._client: TransactionClient | None = None
        self._first_checkpoints: dict[int, float] = {}
        self.minute = 1
        self.failure: BaseException | None = None

    def note_first_checkpoint(self) -> None:
        """Remember that the newest start has a checkpoint, from which its age counts."""
        self._first_checkpoints.setdefault(self._rig.job.starts, time.monotonic())

    @property
    def age_s(self) -> float | None:
        """Time since the first checkpoint of the newest start; None before it."""
        first = self._first_checkpoints.get(self._rig.job.starts)
        return None if first is None else time.monotonic() - first

    def run(self) -> None:
        try:
            with self._path.open("w", encoding="utf-8") as file:
                while not self._is_stopping.wait(INTERVAL_S):
                    if not self._rig.job.is_alive:
                        continue
                    file.write(json.dumps(self._sample().to_json()) + "\n")
                    file.flush()
        except BaseException as error:
            self.failure = error
        finally:
            self._forget_client()

    def stop(self) -> None:
        """End with the sample that is being taken."""
        self._is_stopping.set()
        self.join(30)

    def _sample(self) -> Sample:
        rig, age_s = self._rig, self.age_s
        at_s, minute, start = time.monotonic() - self._began, self.minute, rig.job.starts
        values = {**self._processes(), **self._transactions(), **_sizes(rig)}
        rounded = {name: round(value, 2) for name, value in values.items()}
        return Sample(round(at_s, 1), minute, start, None if age_s is None else round(age_s, 1), rounded)

    def _processes(self) -> dict[str, float]:
        """Return memory, threads and open files by role, as far as a process has not just ended."""
        try:
            pid = self._rig.job.pid
        except JobFailed:
            # It has just been killed.
            return {}
        found: dict[str, float] = {}
        for process in self._rig.job.members(pid):
            with contextlib.suppress(psutil.Error, OSError):
                role = _role(process, driver=pid)
                seen = {
                    f"{role} MB": process.memory_info().rss / _MB,
                    f"{role} threads": process.num_threads(),
                    f"{role} files": process.num_fds(),
                    f"{role} processes": 1,
                }
                for name, value in seen.items():
                    found[name] = found.get(name, 0) + value
        return found

    def _transactions(self) -> dict[str, float]:
        job = self._rig.reader.book.job_uuid()
        if job is None:
            return {}
        try:
            if self._client is None:
                self._client = TransactionClient(KafkaConnection(self._rig.servers))
            return {"open transactions": len(self._client.list_open_transactions(job))}
        except FlinkishError:
            # The broker is down for a moment; the next sample asks anew.
            self._forget_client()
            return {}

    def _forget_client(self) -> None:
        if self._client is not None:
            with contextlib.suppress(FlinkishError):
                self._client.close()
            self._client = None


def _role(process: psutil.Process, *, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    return "jvm" if process.name() == "java" else "workers"


def _sizes(rig: Rig) -> dict[str, float]:
    job_dir, table = rig.directory / "job", rig.directory / "table"
    files = dict(_files_below(job_dir))
    logs = [path for path in files if path.parent.name in ("offsets", "commits")]
    states = [path for path in files if "state" in path.parts]
    # One small file for each start, by which a zombie sees that it is no longer the owner: never deleted.
    owners = [path for path in files if path.parent.name == "owners"]
    return {
        "job directory files": len(files) - len(owners),
        "job directory KB": sum(files.values()) / 1024,
        "Spark log files": len(logs),
        "Spark log begins": min((int(path.name) for path in logs if path.name.isdecimal()), default=0),
        "state files": len(states),
        "state KB": sum(files[path] for path in states) / 1024,
        "driver.log KB": rig.job.log.stat().st_size / 1024,
        "table files": len(list(table.glob("*.parquet"))),
        "table log files": len(list((table / "_delta_log").glob("*"))),
    }


def _files_below(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield files with their sizes; the job deletes some meanwhile."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat().st_size
