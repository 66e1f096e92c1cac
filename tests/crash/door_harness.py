"""Runs the drop-in query through crashes and counts what readers see."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deltalake import DeltaTable

from demo.process import JobProcess, Victim
from demo.producer import OrderProducer
from demo.rig import _environment
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.steps import Step
from flinkish_spark.testing import LocalBroker
from tests.crash.door_app import TRIPWIRE
from tests.support.connect_server import ConnectServer
from tests.support.door_files import confirmed, sink_uuid
from tests.support.jobs import read_committed
from tests.support.open_transactions import still_open
from tests.support.postgres import LocalPostgres
from tests.support.services import scratch

APP = Path(__file__).with_name("door_app.py")
_PARTITIONS = 3
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class At:
    """Kill `victim` at a step; the process that takes it lives on as a zombie unless it is hit."""

    step: Step
    moment: str
    victim: Victim
    occurrence: int = 1

    def __str__(self) -> str:
        return f"{self.victim.value} at {self.step.value}:{self.moment}:{self.occurrence}"


@dataclass(frozen=True)
class Shot:
    """Kill `victim` at a moment of chance."""

    victim: Victim

    def __str__(self) -> str:
        return f"{self.victim.value} at random"


Crash = At | Shot

_V = Victim
#: Every step on both sides, every kind of victim, and moments of chance. `trigger:before` comes right
#: behind Spark's commits/N, `receipt:after` right before it.
EVERY_POINT: tuple[Crash, ...] = (
    At(Step.TRIGGER, "before", _V.GROUP, 2),
    At(Step.TRIGGER, "after", _V.DRIVER, 2),
    Shot(_V.WORKER),
    At(Step.DECISION, "before", _V.JVM, 2),
    At(Step.DECISION, "after", _V.GROUP, 2),
    Shot(_V.DRIVER),
    At(Step.SINK_COMMIT, "before", _V.DRIVER, 2),
    At(Step.SINK_COMMIT, "after", _V.GROUP, 1),
    Shot(_V.JVM),
    At(Step.SINK_COMMIT, "before", _V.WORKER, 3),
    At(Step.SINK_COMMIT, "after", _V.JVM, 2),
    Shot(_V.GROUP),
    At(Step.RECEIPT, "before", _V.GROUP, 2),
    At(Step.RECEIPT, "after", _V.DRIVER, 1),
    Shot(_V.WORKER),
    At(Step.DECISION, "before", _V.WORKER, 1),
    At(Step.DECISION, "after", _V.DRIVER, 1),
    At(Step.TRIGGER, "before", _V.JVM, 2),
    At(Step.RECEIPT, "after", _V.WORKER, 2),
    Shot(_V.GROUP),
)


@dataclass(frozen=True)
class DoorOutcome:
    """What a run left."""

    sent: int
    lost: int
    doubled: int
    open_transactions: int
    group_lag: int
    batches: int
    seconds: float

    @property
    def is_exact(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.doubled or self.open_transactions or self.group_lag)


class DoorRun:
    """Runs one query through a list of crashes.

    Parameters
    ----------
    directory
        Emptied at the start, kept at the end: what went wrong is in ``driver.log``. Its name begins those of
        the topics.
    broker
        May be others', too.
    seed
        Of the records and all moments.
    """

    def __init__(self, directory: Path, broker: LocalBroker, *, seed: int, rate: float = 200.0) -> None:
        self._directory, self._seed, self._rate = directory, seed, rate
        self._servers = broker.bootstrap_servers
        self._input, self._output, self._group = (
            f"{re.sub(r'[^A-Za-z0-9_-]', '-', directory.name)}.{one}" for one in ("in", "out", "group")
        )
        self._chance = random.Random(seed)
        self._checkpoint, self._wire = directory / "checkpoint", directory / "tripwire"

    def run(self, crashes: Sequence[Crash], *, least: int) -> DoorOutcome:
        """Crash, restart, crash, ...; with so many records sent let the query finish, stop it, count."""
        began = time.monotonic()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._wire.mkdir(parents=True)
        with ExitStack() as stack:
            with KafkaAdmin(KafkaConnection(self._servers)) as admin:
                admin.create_topic(self._input, _PARTITIONS)
                admin.create_topic(self._output, _PARTITIONS)
            producer = OrderProducer(self._servers, self._input, seed=self._seed, rate=self._rate)
            producer.start()
            job = JobProcess(
                self._command(),
                {**_environment(), TRIPWIRE: str(self._wire)},
                self._directory / "driver.log",
                self._chance,
            )
            stack.callback(job.reap)
            for number, crash in enumerate(crashes, 1):
                self._crash(job, crash)
                print(f"{time.monotonic() - began:6.1f} s  {number:3}  {crash}", flush=True)
            self._await_batches(job, 2)
            self._wait(job, lambda: producer.sent > least, "live until there are enough records")
            producer.stop()
            producer.join(30)
            return self._finish(job, began)

    def _command(self) -> list[str]:
        return [
            sys.executable, str(APP), "--bootstrap-servers", self._servers,
            "--input", self._input, "--output", self._output, "--group", self._group,
            "--checkpoint", str(self._checkpoint), "--scratch", str(self._directory / "scratch"),
        ]  # fmt: skip

    # -- crashing -------------------------------------------------------------------------------
    def _crash(self, job: JobProcess, crash: Crash) -> None:
        if isinstance(crash, Shot):
            self._start(job)
            self._await_batches(job, 1)
            time.sleep(self._chance.uniform(0, 2.5))
            self._kill(job, crash.victim)
            return
        (self._wire / "count").unlink(missing_ok=True)
        (self._wire / "armed").write_text(f"{crash.step.value}:{crash.moment}:{crash.occurrence}")
        self._start(job)
        reached = self._wire / "reached"
        self._wait(job, reached.exists, f"reach {crash}")
        # A zombie of the start before may have reached it while this start has no JVM yet.
        self._wait(job, lambda: self._has_engine(job), "start its JVM")
        if crash.victim is Victim.WORKER:
            os.kill(int((self._wire / "pid").read_text()), signal.SIGKILL)
        else:
            self._kill(job, crash.victim)
        # Whoever waits there and was not hit goes on now, as a zombie of the one that was.
        with contextlib.suppress(FileNotFoundError):
            reached.unlink()

    def _kill(self, job: JobProcess, victim: Victim) -> None:
        job.kill(victim)

    def _has_engine(self, job: JobProcess) -> bool:
        return job.has_jvm

    @staticmethod
    def _start(job: JobProcess) -> None:
        if not job.is_alive:
            job.start()

    def _batches(self) -> int:
        found = confirmed(self._checkpoint) if self._checkpoint.exists() else ()
        return max((batch.value for batch in found), default=-1)

    def _await_batches(self, job: JobProcess, count: int) -> None:
        self._start(job)
        seen = self._batches()
        self._wait(job, lambda: self._batches() >= seen + count, "commit micro-batches")

    @staticmethod
    def _wait(job: JobProcess, condition, what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if not job.is_alive:
                raise job.failed(f"ended by itself with status {job.status}")
            if time.monotonic() > deadline:
                raise job.failed(f"did not {what} within {_PATIENCE_S:g} s")
            time.sleep(0.02)

    # -- counting -------------------------------------------------------------------------------
    def _finish(self, job: JobProcess, began: float) -> DoorOutcome:
        servers = self._servers
        sent = _content(servers, self._input)
        self._wait(job, lambda: self._lag() == 0, "finish the input")
        if job.terminate(_PATIENCE_S) != 0:
            raise job.failed("was stopped gracefully and ended otherwise")
        job.reap()
        found = _content(servers, self._output)
        with TransactionClient(KafkaConnection(servers)) as client:
            left = still_open(client, sink_uuid(self._checkpoint))
        return DoorOutcome(
            sent=sum(sent.values()),
            lost=sum((sent - found).values()),
            doubled=sum((found - sent).values()),
            open_transactions=len(left),
            group_lag=self._lag(),
            batches=self._batches() + 1,
            seconds=round(time.monotonic() - began, 1),
        )

    def _lag(self) -> int:
        with KafkaAdmin(KafkaConnection(self._servers)) as admin:
            ends = admin.end_offsets([(self._input, p) for p in range(_PARTITIONS)])
            done = admin.committed_offsets(self._group)
        return sum(end - done.get(place, 0) for place, end in ends.items())


class SinkGroupRun(DoorRun):
    """The same with a group of sinks behind the query: a topic, a Delta table, files, and a database."""

    def __init__(self, directory: Path, broker: LocalBroker, database: LocalPostgres, *, seed: int) -> None:
        super().__init__(directory, broker, seed=seed, rate=40)
        self._postgres, self._name = database, f"group_{uuid.uuid4().hex[:8]}"
        with database.connect() as open_:
            open_.execute(f"CREATE DATABASE {self._name}")
        with database.connect(dbname=self._name) as open_:
            open_.execute("CREATE TABLE copies (key TEXT, value TEXT)")

    def _command(self) -> list[str]:
        url = self._postgres.url.replace(f"/{self._postgres.database}", f"/{self._name}")
        login = f"{url} {self._postgres.user} {self._postgres.password}"
        return [*super()._command(), "--sinks", str(self._directory / "sinks"), "--database", login]

    def count_in_topic(self) -> Counter[tuple[bytes | None, bytes | None]]:
        return _content(self._servers, self._output)

    def count_elsewhere(self) -> dict[str, Counter[tuple[bytes | None, bytes | None]]]:
        """Return how often each record is in the systems besides the topic."""
        table = DeltaTable(self._directory / "sinks" / "table").to_pyarrow_table().to_pylist()
        shown = (self._directory / "sinks" / "files").glob("part-*")
        files = [json.loads(line) for one in shown for line in one.read_text().splitlines()]
        with self._postgres.connect(dbname=self._name) as open_:
            rows = [
                {"key": k, "value": v} for k, v in open_.execute("SELECT key, value FROM copies").fetchall()
            ]
        found = {"table": table, "files": files, "rows": rows}
        return {
            uid: Counter((_encode(row.get("key")), _encode(row.get("value"))) for row in some)
            for uid, some in found.items()
        }


def _encode(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


class ConnectDoorRun(DoorRun):
    """The same with the query in a server of Spark Connect, to which the driver is a client."""

    def run(self, crashes: Sequence[Crash], *, least: int) -> DoorOutcome:
        with scratch("test-connect-") as folder:
            environment = {**_environment(), TRIPWIRE: str(self._wire)}
            with ConnectServer(folder, environment) as self._server:
                return super().run(crashes, least=least)

    def _command(self) -> list[str]:
        return [*super()._command(), "--connect", self._server.url]

    def _kill(self, job: JobProcess, victim: Victim) -> None:
        """Kill; a client's death leaves the query running, until the next client starts it again."""
        match victim:
            case Victim.DRIVER:
                job.kill(victim)
            case Victim.WORKER:
                self._server.kill_worker()
            case Victim.JVM:
                self._server.kill()
                seen = self._batches()
                self._server.start()
                # Another server does not know its session. A client that had none yet, where what was left of
                # the one before it came to the step, goes on with that server.
                while job.is_alive and self._batches() == seen:
                    time.sleep(0.05)
                assert job.is_alive or job.status != 0
            case Victim.GROUP:
                self._server.kill()
                job.kill(Victim.DRIVER)
                self._server.start()

    def _has_engine(self, job: JobProcess) -> bool:
        return True


class ConnectSinkGroupRun(ConnectDoorRun, SinkGroupRun):
    """A group of sinks in a server of Spark Connect."""


class FormatRun(SinkGroupRun):
    """The same sinks behind `format("flinkish")`."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--by-format"]


class ConnectFormatRun(ConnectDoorRun, FormatRun):
    """The same in a server of Spark Connect."""


def _content(servers: str, topic: str) -> Counter[tuple[bytes | None, bytes | None]]:
    return Counter((record.key, record.value) for record in read_committed(servers, topic))
