"""The servers that tests share: one of each for a whole run, however many processes run the tests.

The process that began the run owns them. It starts a server when a test first asks for it, so a run of a few
files starts only what these need, and ends all with the run, also when that is interrupted; if it is killed,
each server's watcher ends it. Processes of pytest-xdist ask by a socket and get the server as it looks from
outside: where it is and how to log in, nothing to start or stop it with.

Whoever kills, pauses or configures a server takes one of its own.
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flinkish_spark.testing.broker import LocalBroker
from tests.support.buckets import LocalAzure, LocalS3
from tests.support.hdfs import LocalHdfs
from tests.support.mariadb import LocalMariaDb, unpack_mariadb
from tests.support.postgres import LocalPostgres, unpack_postgres
from tests.support.registry import LocalRegistry

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
#: Those of the broker that tests run against; `tools/matrix.py` names those of another version.
BROKER_JARS = Path(os.environ.get("FLINKISH_BROKER_JARS", BUILD / "broker-jars"))

#: Where the servers of a run answer, and the word that opens the door.
Address = tuple[str, bytes]


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A folder below build/ that goes with the block."""
    BUILD.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=BUILD))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _broker() -> Iterator[LocalBroker]:
    with scratch("test-broker-") as folder, LocalBroker(folder, jars_dir=BROKER_JARS) as running:
        yield running


STARTS: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = MappingProxyType(
    {
        "broker": _broker,
        "postgres": lambda: LocalPostgres(unpack_postgres(BUILD / "postgres")),
        "mariadb": lambda: LocalMariaDb(unpack_mariadb(BUILD / "mariadb")),
        "s3": LocalS3,
        "azure": lambda: LocalAzure(BUILD / "azurite"),
        "hdfs": lambda: LocalHdfs(BUILD / "hdfs-jars"),
        "registry": lambda: LocalRegistry(BUILD / "registry"),
    }
)


class Services:
    """Starts each server once, when it is first asked for; `close` it."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._locks = {name: threading.Lock() for name in STARTS}
        self._stack = contextlib.ExitStack()
        self._address: Address | None = None

    def get(self, name: str) -> Any:
        """Return a server as it looks from outside, started by now."""
        with self._locks[name]:
            if name not in self._found:
                server = self._stack.enter_context(STARTS[name]())
                self._found[name] = _from_outside(server)
        return self._found[name]

    @property
    def address(self) -> Address:
        """Where other processes ask; opened with the first call."""
        if self._address is None:
            key = secrets.token_bytes(16)
            listener = self._stack.enter_context(Listener(family="AF_UNIX", authkey=key))
            threading.Thread(target=self._answer, args=(listener,), daemon=True, name="services").start()
            self._address = str(listener.address), key
        return self._address

    def _answer(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return  # closed: the run is over
            # The first start of a server takes seconds, in which another one may be asked for.
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                connection.send((self.get(connection.recv()), ""))
            except Exception as error:
                connection.send((None, f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """End what was started."""
        self._stack.close()


def ask(address: Address, name: str) -> Any:
    """Return a server of the run, from a process that only runs tests of it."""
    path, key = address
    with Client(path, authkey=key) as connection:
        connection.send(name)
        server, error = connection.recv()
    if error:
        raise RuntimeError(f"the run's {name} did not start: {error}")
    return server


def end_with_the_run() -> None:
    """Let this process end with the one that began the run, if that is killed; otherwise a test goes on."""
    owner = os.getppid()

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with the run").start()


def _from_outside(server: Any) -> Any:
    """Return a server without the processes that only its owner has."""
    seen = copy.copy(server)
    seen._process = seen._watcher = None
    return seen


def topics_of(broker: LocalBroker) -> Callable[..., str]:
    """Return what makes a topic and returns its name: ``topic(partitions=3)``."""
    from kafka.admin import KafkaAdminClient

    def create(partitions: int = 1, configs: Mapping[str, str] = MappingProxyType({})) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        options = {"num_partitions": partitions, "replication_factor": 1, "configs": dict(configs)}
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
        try:
            admin.create_topics({name: options}, wait_for_metadata=True)
        finally:
            admin.close()
        return name

    return create
