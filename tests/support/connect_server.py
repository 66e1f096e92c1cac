"""A server of Spark Connect for tests: a process tree of its own, on a port of its own, to be killed."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyspark

from demo.process import JobFailed, JobProcess, Victim

_HOST = "127.0.0.1"
_PATIENCE_S = 120.0
#: A server lives for a minute: what generated code would gain comes too late.
_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.connect.grpc.binding.address": _HOST,
}


class ConnectServer:
    """Starts a server over the same port again and again; use it as a context manager.

    Parameters
    ----------
    folder
        For its log and its temporary files.
    environment
        Of the server, and so of the Python processes that it starts.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        # 15002, the usual one, may be somebody else's.
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            self._port = int(probe.getsockname()[1])
        folder.mkdir(parents=True, exist_ok=True)
        self._process = JobProcess(
            self._command(folder), {**environment, "SPARK_NO_DAEMONIZE": "1"}, folder / "server.log",
            random.Random(0),
        )  # fmt: skip

    @property
    def url(self) -> str:
        """What a client is told."""
        return f"sc://{_HOST}:{self._port}"

    def start(self) -> Self:
        """Start it; returns when it listens."""
        self._process.start()
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((_HOST, self._port)) == 0:
                    return self
            if not self._process.is_alive or time.monotonic() > deadline:
                raise self._process.failed("of the Connect server did not listen")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server, its daemon and all workers."""
        self._process.kill(Victim.GROUP)

    def kill_worker(self) -> None:
        """Kill a Python process that reads, plans, writes or commits; the server lives on."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            for process in self._process.members(self._process.pid):
                # One may end while it is looked at.
                with contextlib.suppress(psutil.Error):
                    if any(word.endswith("daemon") for word in process.cmdline()) and process.children():
                        process.children()[0].kill()
                        return
            time.sleep(0.05)
        raise JobFailed("the Connect server had no Python worker")

    def tail(self) -> str:
        """Return the end of its log."""
        return self._process.tail()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.reap()

    def _command(self, folder: Path) -> list[str]:
        conf = {
            **_CONF,
            "spark.connect.grpc.binding.port": str(self._port),
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        }
        return [
            str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
            "--master", "local[2,4]", "--driver-memory", "1g",
            *[f"--conf={name}={value}" for name, value in conf.items()],
            "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal",
        ]  # fmt: skip
