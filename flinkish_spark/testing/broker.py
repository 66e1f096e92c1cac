"""A real Kafka broker for tests: one node in one process, on loopback only, which tests may kill.

- The broker is a process group of its own, so that Ctrl-C in the terminal reaches the test, not the broker.
- It does not outlive the process that started it, however that ends: a watcher, which holds the read end of
  a pipe from us, kills it when the pipe closes.
- Ports are chosen below the range from which the system gives ports to clients. A client that reconnects
  while the broker is down could otherwise be given the broker's own port and talk to itself.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.forks import close_in_children
from flinkish_spark.core.validation import to_ms
from flinkish_spark.protocol.durations import Duration


def watch(pid: int) -> subprocess.Popen[bytes]:
    """Start a process that kills the server `pid` when this process ends (its input ends then)."""
    command = ["/bin/sh", "-c", 'read -r word || kill -9 "$0"', str(pid)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    close_in_children(watcher.stdin)
    return watcher


_HOST = "127.0.0.1"
_PORTS = range(20_000, 30_000)
_POLL_S = 0.05


class LocalBroker:
    """A single-node Kafka broker (KRaft) on 127.0.0.1 that a test starts, pauses, kills and restarts.

    Data and port stay the same over restarts. Not thread-safe. Topics are not created on first use, and keep
    records of any age unless they set ``retention.ms``.

    Parameters
    ----------
    directory
        Holds data, configuration and ``broker.log``; made if missing. A directory of an earlier broker
        is continued.
    jars_dir
        The broker's JARs, as `make jars` leaves them in ``build/broker-jars``.
    port
        Where clients connect; 0 picks a free one.
    extra_properties
        Entries for ``server.properties`` that override those of this class, for example
        ``{"transaction.max.timeout.ms": "3600000"}``.
    start_timeout_ms
        How long :meth:`start` waits for the first answer.
    features
        Levels of features that differ from the release's defaults, for the first start:
        ``{"transaction.version": 0}`` gives transactions as before Kafka 4.

    Attributes
    ----------
    log
        The file with the broker's output.
    is_paused
        True between :meth:`pause` and :meth:`resume`.

    Examples
    --------
    >>> from kafka import KafkaProducer
    >>> broker = LocalBroker("build/doc-broker", jars_dir="build/broker-jars")
    >>> with broker:  # doctest: +SKIP
    ...     broker.kill()
    ...     broker.start()
    ...     producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        jars_dir: str | Path,
        port: int = 0,
        extra_properties: Mapping[str, str] = MappingProxyType({}),
        start_timeout_ms: Duration = 60_000,
        features: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._directory = Path(directory).resolve()
        self.run_from(jars_dir)
        self._cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        self._features = dict(features)
        self._port = port or free_port()
        self._controller_port = free_port(self._port)
        self._ports = [self._port, self._controller_port]
        self._extra = dict(extra_properties)
        self._start_timeout_s = to_ms("start_timeout_ms", start_timeout_ms) / 1000
        self._process: subprocess.Popen[bytes] | None = None
        self.is_paused = False
        self._watcher: subprocess.Popen[bytes] | None = None
        self.log = self._directory / "broker.log"

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` for clients; the same after every restart."""
        return f"{_HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the running broker."""
        if self._process is None:
            raise ConfigError("The broker is not running", what_to_do="call start()")
        return self._process.pid

    def run_from(self, jars_dir: str | Path) -> None:
        """Set the JARs of the next start, for an upgrade to another release."""
        self._jars_dir = Path(jars_dir).resolve()
        if not any(self._jars_dir.glob("kafka_2.13-*.jar")):
            raise ConfigError(
                "There is no Kafka broker to start",
                why=f"{self._jars_dir} holds no kafka_2.13 JAR",
                what_to_do="run `make jars`, or give the directory that holds the broker's JARs",
            )

    @property
    def is_running(self) -> bool:
        """True while the broker's process lives and is not paused."""
        return self._process is not None and self._process.poll() is None and not self.is_paused

    def start(self) -> Self:
        """Start the broker and return once it answers; about 5 s, longer after a kill.

        Does nothing if the broker runs already.

        Raises
        ------
        EnvironmentFault
            If another process listens on the port, or the broker ended or did not answer; then the message
            has the end of its log.
        """
        if self._process is not None:
            return self
        for port in self._ports:
            if not _is_free(port):
                raise EnvironmentFault(
                    f"Port {port} of {_HOST} is taken",
                    why="another process listens there",
                    what_to_do="stop it, or give another port (0 picks a free one)",
                )
        self._write_properties()
        if not (self._data / "meta.properties").exists():
            self._format()
        self._process = self._java("kafka.Kafka", str(self._properties_file))
        self._watcher = watch(self._process.pid)
        try:
            self._await_answer(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, timeout_ms: Duration = 30_000) -> None:
        """Shut the broker down cleanly; kill it if that takes longer than `timeout_ms`."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)  # a paused broker does not receive SIGTERM
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(to_ms("timeout_ms", timeout_ms) / 1000)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        self._reap()

    def kill(self) -> None:
        """Kill the broker with SIGKILL; data that it acknowledged stays on disk."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._reap()

    def pause(self) -> None:
        """Freeze the broker (SIGSTOP): connections stay open; after this call it answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        # On a busy machine its threads continue for a moment, and may answer the next request.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        self.is_paused = True

    def resume(self) -> None:
        """Continue a frozen broker (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    @property
    def _properties_file(self) -> Path:
        return self._directory / "server.properties"

    # A broker that authenticates clients sets these four differently.
    def _security_properties(self) -> dict[str, str]:
        return {
            "listeners": f"PLAINTEXT://{_HOST}:{self._port},{self._controller}",
            "advertised.listeners": f"PLAINTEXT://{_HOST}:{self._port}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        }

    def _first_users(self) -> list[str]:
        return []

    def _jvm_options(self) -> list[str]:
        return []

    def _probe_arguments(self) -> dict[str, object]:
        return {"bootstrap_servers": self.bootstrap_servers}

    @property
    def _controller(self) -> str:
        return f"CONTROLLER://{_HOST}:{self._controller_port}"

    def _write_properties(self) -> None:
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{_HOST}:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self._data),
            # With one node every internal topic has one replica, and few partitions for a quick restart.
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # After a kill the controller refuses the new process until the session of the old one ends: 9 s
            # by default.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            # A misspelt topic must be an error, not a new topic.
            "auto.create.topics.enable": "false",
            # By default a record with a timestamp of last week is deleted within minutes.
            "log.retention.ms": "-1",
            # The default of 128 MB is a quarter of this broker's heap.
            "log.cleaner.dedupe.buffer.size": "16777216",
            **self._security_properties(),
            **self._extra,
        }
        self._data.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{name}={value}\n" for name, value in properties.items())
        # The file may contain passwords of the broker's users.
        self._properties_file.touch(mode=0o600)
        self._properties_file.write_text(text, encoding="utf-8")

    def _format(self) -> None:
        # --ignore-formatted completes an interrupted format. One id in 64 begins with a dash, so it must
        # follow an equals sign.
        given = f"--cluster-id={self._cluster_id}"
        arguments = ["format", "--ignore-formatted", given, "-c", str(self._properties_file)]
        levels = [f"--feature={name}={level}" for name, level in self._features.items()]
        process = self._java("kafka.tools.StorageTool", *arguments, *levels, *self._first_users())
        if process.wait() != 0:
            raise self._did_not_start("formatting its storage failed")

    def _java(self, main_class: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            _java_binary(),
            "-Xms128m",
            "-Xmx512m",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
            *self._jvm_options(),
            "-cp",
            str(self._jars_dir / "*"),
            main_class,
            *arguments,
        ]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                start_new_session=True,
            )

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._did_not_start(f"its process ended with status {process.returncode}")
            if self._answers():
                return
            time.sleep(_POLL_S)
        raise self._did_not_start(f"it did not answer within {self._start_timeout_s:g} s")

    def _answers(self) -> bool:
        # The socket is open well before the broker serves, so ask it; but only once it listens, since the
        # client logs an error for every refused connection.
        if _is_free(self._port):
            return False
        try:
            admin = KafkaAdminClient(**self._probe_arguments(), bootstrap_timeout_ms=2_000)
        except KafkaError:
            return False
        try:
            return bool(admin.describe_cluster()["brokers"])
        except KafkaError:
            return False
        finally:
            admin.close()

    def _did_not_start(self, why: str) -> EnvironmentFault:
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return EnvironmentFault(
            "The Kafka broker did not start",
            why=why,
            what_to_do=f"read {self.log}, which ends: {' / '.join(tail)}",
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
        self.is_paused = False
        if self._watcher is not None:
            self._watcher.communicate(b"over\n")
            self._watcher = None


def _java_binary() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if java is None:
        raise EnvironmentFault(
            "There is no Java to run a Kafka broker with",
            why=f"JAVA_HOME is {home}" if home else "java is not on the PATH",
            what_to_do="install a Java 17 runtime, or set JAVA_HOME to one",
        )
    return java


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def free_port(*given_away: int) -> int:
    """Return an unused port that the system does not give to clients."""
    candidates = random.SystemRandom().sample(_PORTS, 200)
    for port in candidates:
        if port not in given_away and _is_free(port):
            return port
    raise EnvironmentFault(
        f"No free port between {_PORTS.start} and {_PORTS.stop}",
        what_to_do="stop what occupies them, or give the broker a port",
    )
