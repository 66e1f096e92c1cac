"""A Spark cluster for tests: a master and workers as processes on loopback, which tests may kill."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.jars import spark_home
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.testing.broker import free_port, watch

_POLL_S = 0.1
_MOST_WORKERS = 100
#: Minimum memory of a worker for executors.
_LEAST_MEMORY_MB = 512


class MiniCluster:
    """A Spark standalone cluster from pyspark's JARs; ends with its `with` block.

    Executors are separate processes, as on any cluster: data sent to them is really serialized, and they
    share only the disk with the driver. On Linux Spark sees each worker as a host with its own address
    (127.0.0.2, 127.0.0.3, ...). Any user of this machine may submit to the cluster.

    Parameters
    ----------
    directory
        For logs and files of executors; created if missing.
    workers, cores, memory_mb
        Number of workers, and the resources of each for executors.
    start_timeout_ms
        How long :meth:`start` waits for the workers.

    Examples
    --------
    >>> import subprocess
    >>> with MiniCluster("build/doc-cluster", workers=2) as cluster:  # doctest: +SKIP
    ...     subprocess.run(["flinkish", "run", "--target", cluster.master, "app.py"], check=True)
    """

    @check_arguments()
    def __init__(
        self,
        directory: str | Path,
        *,
        workers: Annotated[int, Range(1, _MOST_WORKERS)] = 2,
        cores: Annotated[int, Range(1)] = 1,
        memory_mb: Annotated[int, Range(_LEAST_MEMORY_MB)] = 1024,
        start_timeout_ms: Annotated[Milliseconds, Range(1)] = 60_000,
    ) -> None:
        self._directory = Path(directory).resolve()
        self._count, self._cores, self._memory_mb = workers, cores, memory_mb
        self._start_timeout_ms = start_timeout_ms
        self._port, self._running = 0, ExitStack()
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def master(self) -> str:
        """The URL for a session's master or `flinkish run --target`: ``spark://127.0.0.1:...``."""
        if not self._workers:
            raise RuntimeError("the cluster does not run; call start(), or use it in a `with` block")
        return f"spark://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the master and the workers, and wait until all workers are registered.

        Raises
        ------
        EnvironmentFault
            A process ended, or a worker did not register in time; all processes are stopped then.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        pages = free_port(self._port)
        java = "org.apache.spark.deploy"
        address = ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", str(pages)]
        with ExitStack() as started:
            master = self._process(started, "master", "127.0.0.1", [f"{java}.master.Master", *address])
            workers = []
            for number in range(self._count):
                # Other systems have only one loopback address.
                host = f"127.0.0.{2 + number}" if sys.platform == "linux" else "127.0.0.1"
                own = ["--host", host, "--webui-port", "0", "--cores", str(self._cores)]
                own += ["--memory", f"{self._memory_mb}m"]
                own += ["--work-dir", str(self._directory / f"worker-{number}")]
                command = [f"{java}.worker.Worker", *own, f"spark://127.0.0.1:{self._port}"]
                workers.append(self._process(started, f"worker-{number}", host, command))
            self._await_workers([master, *workers], f"http://127.0.0.1:{pages}/json/")
            self._workers, self._running = workers, started.pop_all()

    def stop(self) -> None:
        """Kill all processes; does nothing if the cluster does not run."""
        self._workers = []
        self._running.close()

    def kill_worker(self, number: int) -> None:
        """Kill a host, that is, its worker and executors, until the next start.

        Parameters
        ----------
        number
            From 0.
        """
        _kill(self._workers[number])

    def _process(self, stack: ExitStack, name: str, host: str, command: list[str]) -> subprocess.Popen[bytes]:
        home = spark_home()
        (core,) = (home / "jars").glob("spark-core_*.jar")
        environment = {
            **os.environ,
            # The variables that Spark's scripts set for a worker, which passes them to executors.
            "SPARK_HOME": str(home),
            "SPARK_SCALA_VERSION": core.name.removeprefix("spark-core_").split("-")[0],
            # This also binds Spark's web pages to loopback.
            "SPARK_LOCAL_IP": host,
        }
        # Spark's own scripts search in the same order.
        java = shutil.which("java", path=os.path.join(os.environ.get("JAVA_HOME", ""), "bin"))
        java = java or shutil.which("java")
        if java is None:
            raise EnvironmentFault(
                "the mini cluster did not start",
                why="there is no Java",
                what_to_do="install a JDK 17, or set JAVA_HOME",
            )
        log = stack.enter_context((self._directory / f"{name}.log").open("ab"))
        # A separate process group: Ctrl-C in the terminal reaches the test, which ends the cluster.
        process = subprocess.Popen(
            # The REST submission server, on a port of its own, is not needed.
            [java, "-Xmx256m", "-Dspark.master.rest.enabled=false", "-cp", f"{home}/jars/*", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        watcher = watch(process.pid)
        stack.callback(watcher.communicate, b"over\n")
        stack.callback(_kill, process)
        return process

    def _await_workers(self, processes: list[subprocess.Popen[bytes]], page: str) -> None:
        deadline = time.monotonic() + self._start_timeout_ms / 1000
        while True:
            ended = next((one for one in processes if one.poll() is not None), None)
            alive = _alive(page)
            if alive == self._count:
                return
            if ended is not None or time.monotonic() > deadline:
                raise EnvironmentFault(
                    "the mini cluster did not start",
                    why=f"{alive} of {self._count} workers came, and "
                    + ("all processes run" if ended is None else f"a process ended with {ended.returncode}"),
                    what_to_do=f"read the logs in {self._directory}",
                )
            time.sleep(_POLL_S)


def _alive(page: str) -> int:
    """Return the number of workers registered at a master; 0 if it does not answer."""
    with contextlib.suppress(OSError, ValueError):
        # Ignores proxies of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(page, timeout=5) as answer:
            return sum(worker["state"] == "ALIVE" for worker in json.load(answer)["workers"])
    return 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Executors are in their worker's process group; their Python processes end with them.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
