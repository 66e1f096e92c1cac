"""A Spark cluster of two hosts without a common disk, on this machine.

Each host is a network namespace with an address of its own on a bridge, and a mount namespace in which the
folders of the driver are hidden behind an empty file system. Spark's master and workers are of pip's JARs. It
needs root; nothing of it is reachable from outside of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark

_MEMORY_MB, _PATIENCE_S = 1024, 60.0
#: After so long without a word from a worker the master gives it up.
_LOST_AFTER_S = 15
_JARS = Path(pyspark.__file__).parent / "jars"


def why_not() -> str:
    """Return why there can be no hosts on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "two hosts need root, for network and mount namespaces"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    return f"two hosts need {missing[0]}" if missing else ""


@dataclass
class Cluster:
    """Master and workers.

    Parameters
    ----------
    address
        Of this machine, as the hosts see it: a driver and a broker are here.
    workers
        The process of each host's worker; its executors are its children.
    links
        The end of each host's cable.
    """

    address: str
    workers: list[subprocess.Popen[bytes]]
    links: list[str]

    @property
    def master(self) -> str:
        return f"spark://{self.address}:7077"

    def executors(self, host: int) -> list[psutil.Process]:
        """Return the executors that run on a host now."""
        started = psutil.Process(self.workers[host].pid).children(recursive=True)
        words = {process: process.as_dict(["cmdline"])["cmdline"] or () for process in started}
        return [p for p, line in words.items() if any("CoarseGrainedExecutorBackend" in w for w in line)]

    def cut_off(self, host: int) -> None:
        """Pull the cable of a host."""
        _run("ip", "link", "set", self.links[host], "down")

    def plug_in(self, host: int) -> None:
        """Put it back."""
        _run("ip", "link", "set", self.links[host], "up")


@contextlib.contextmanager
def two_hosts(folder: Path, hidden: Sequence[Path]) -> Iterator[Cluster]:
    """Run a cluster.

    Parameters
    ----------
    folder
        For what the processes write.
    hidden
        Folders that the hosts do not see; they find empty ones of their own there.
    """
    number = os.getpid() % 250
    bridge, address = f"fsb{number}", f"10.77.{number}.1"
    names = [f"fsh{number}-{host}" for host in range(2)]
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "addr", "add", f"{address}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host, name in enumerate(names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", name, "master", bridge, "up")
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"10.77.{number}.{2 + host}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")
        master = ["org.apache.spark.deploy.master.Master", "--host", address, "--port", "7077"]
        _start(stack, folder / "master", [*master, "--webui-port", "8077"])
        workers = []
        for host, name in enumerate(names):
            hide = " && ".join(f"mount -t tmpfs none '{path}'" for path in hidden)
            shell = [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--mount",
                "sh",
                "-c",
                f'{hide} && exec "$@"',
                "sh",
            ]
            worker = ["org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", f"{_MEMORY_MB}m"]
            worker += ["--host", f"10.77.{number}.{2 + host}", "--work-dir", str(folder / f"work-{host}")]
            worker += [f"spark://{address}:7077"]
            workers.append(_start(stack, folder / name, worker, shell))
        _await_workers(f"http://{address}:8077/json/")
        yield Cluster(address, workers, names)


def _start(
    stack: contextlib.ExitStack, place: Path, arguments: list[str], shell: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True)
    environment = {**os.environ, "SPARK_SCALA_VERSION": "2.13", "SPARK_LOCAL_DIRS": str(place / "local")}
    environment |= {"SPARK_NO_DAEMONIZE": "1", "SPARK_HOME": str(_JARS.parent)}
    environment.pop("SPARK_LOCAL_IP", None)
    # Workers listen in their own network; who is on this machine reaches them by the bridge.
    java = ["java", "-Xmx256m", f"-Dspark.worker.timeout={_LOST_AFTER_S}", "-cp", f"{_JARS}/*", *arguments]
    log = stack.enter_context((place / "log").open("wb"))
    process = subprocess.Popen(
        [*shell, *java], stdout=log, stderr=log, env=environment, start_new_session=True, cwd=place
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(end)
    return process


def _await_workers(url: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            said = urllib.request.urlopen(url, timeout=5).read().decode()
            if said.count('"state" : "ALIVE"') >= 2:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("Spark's workers did not come")
        time.sleep(0.2)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
