"""Everything around the job: directory, broker, topics, producer, reader. Shared with the crash tests."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from demo.process import JobProcess
from demo.producer import OrderProducer
from demo.readers import SinkReader
from demo.verify import Checked, Verdict, group_lag, verify
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.testing.broker import LocalBroker
from tests.support.buckets import BucketServer

ROOT = Path(__file__).resolve().parents[1]
#: Of another version of Kafka, where `tools/matrix.py` says so.
BROKER_JARS = Path(os.environ.get("FLINKISH_BROKER_JARS", ROOT / "build" / "broker-jars"))
#: Hadoop's file system for S3, where the job directory is in a bucket.
S3A_JARS = ROOT / "build" / "s3a-jars"
PARTITIONS = 4
INPUT, OUTPUT, GROUP = "orders", "totals", "orders-app"
KAFKA_SINK, DELTA_SINK = "totals-kafka", "totals-delta"

#: Marks a directory as ours to empty.
_MARKER = ".flinkish-run"
_POLL_S = 0.1


class UnusableDirectory(Exception):
    """The directory holds somebody else's files."""


class TooSlow(Exception):
    """Something that had to happen did not happen in time."""


class Rig:
    """A fresh run in `directory`; use it as a context manager.

    Parameters
    ----------
    directory
        Emptied at the start.
    program
        Path of the app, which takes the arguments of `demo/app.py`.
    interval_ms
        Checkpoint interval of the job.
    is_bare
        Whether the job's session has no JAR but Delta's.
    broker
        One that runs, and is not this run's alone; None for one of its own in `directory`.
    buckets
        A server that runs, in a bucket of which the job directory is; None for one on the disk.
    prefix
        Begins the names of topics and group, so that others may be on the same broker. The program must
        know of it.
    """

    #: Uids of the job's sinks.
    kafka_sink, delta_sink = KAFKA_SINK, DELTA_SINK
    partitions = PARTITIONS
    broker_start_timeout_ms = 60_000

    def __init__(
        self,
        directory: Path,
        program: Path,
        chance: random.Random,
        *,
        interval_ms: int = 2_000,
        is_bare: bool = False,
        broker: LocalBroker | None = None,
        buckets: BucketServer | None = None,
        prefix: str = "",
    ) -> None:
        self.directory = directory.resolve()
        self._program, self._chance = program, chance
        self._interval_ms, self._is_bare = interval_ms, is_bare
        self._running_broker = broker
        #: Where the job directory is.
        self.place = StoreSpec(str(self.directory / "job")) if buckets is None else buckets.new_store()
        self.input, self.output, self.group = (f"{prefix}{name}" for name in (INPUT, OUTPUT, GROUP))
        self._stack = ExitStack()
        self.producer: OrderProducer | None = None

    def __enter__(self) -> Self:
        _empty(self.directory)
        with ExitStack() as stack:
            self.broker = self._running_broker or stack.enter_context(
                LocalBroker(
                    self.directory / "broker",
                    jars_dir=BROKER_JARS,
                    start_timeout_ms=self.broker_start_timeout_ms,
                )
            )
            self.servers = self.broker.bootstrap_servers
            with KafkaAdmin(KafkaConnection(self.servers)) as admin:
                for topic in (self.input, self.output):
                    admin.create_topic(topic, self.partitions)
            self.reader = self._start_reader()
            stack.callback(self._silence)
            self.job = JobProcess(
                self._command(), _environment(), self.directory / "driver.log", self._chance
            )
            stack.callback(self.job.reap)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- input ----------------------------------------------------------------------------------
    def produce(self, *, seed: int, rate: float, count: int | None = None) -> OrderProducer:
        """Begin to write orders; see OrderProducer."""
        self.producer = OrderProducer(self.servers, self.input, seed=seed, rate=rate, count=count)
        self.producer.start()
        return self.producer

    # -- progress -------------------------------------------------------------------------------
    @property
    def confirmed(self) -> int:
        """The newest checkpoint with a receipt, as far as the reader saw."""
        return self.reader.book.newest_confirmed

    @property
    def query_restarts(self) -> int:
        """How often a living driver started its query again, as it says in its log."""
        return self.job.log.read_text(encoding="utf-8", errors="replace").count("restarting in ")

    def check(self) -> None:
        """Raise if anything around the job, or the job itself, has failed."""
        for part in (self.reader, self.producer):
            if part is not None and part.failure is not None:
                raise part.failure
        if self.job.starts and not self.job.is_alive:
            raise self.job.failed(f"ended by itself with status {self.job.status}")

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait, with the job running all the time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise self.job.failed(f"ran, but {what} did not happen within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def drain(self, timeout_s: float) -> None:
        """Wait until the group has committed the end of the input; the producer has ended."""
        pause = 1.0
        deadline = time.monotonic() + timeout_s
        while group_lag(self._checked):
            self.check()
            if time.monotonic() > deadline:
                raise self.job.failed(f"ran, but had not read all input after {timeout_s:g} s")
            time.sleep(pause)

    def look(self) -> None:
        """Look at what only some rigs watch; the job has just been killed."""

    # -- the end --------------------------------------------------------------------------------
    def verify(self) -> Verdict:
        """Compare input and output; the job has ended."""
        self.job.reap()
        self.reader.finish()
        return verify(self._checked, self.reader)

    # -- parts ----------------------------------------------------------------------------------
    @property
    def _table(self) -> Path:
        return self.directory / "table"

    @property
    def _job_dir(self) -> Path:
        return self.directory / "job"

    @property
    def _checked(self) -> Checked:
        return Checked(self.servers, self.input, self.output, self.partitions, self.group, self._table)

    def _command(self) -> list[str]:
        arguments = {
            "--bootstrap-servers": self.servers,
            "--job-dir": self.place.url,
            "--store-options": json.dumps(dict(self.place.options)),
            "--table": self._table,
            "--interval-ms": self._interval_ms,
            "--jars": ROOT / "build" / "jars",
            **({"--more-jars": S3A_JARS} if self.place.url.startswith("s3:") else {}),
            "--scratch": self.directory / "scratch",
        }
        pairs = [str(word) for pair in arguments.items() for word in pair]
        return [sys.executable, str(self._program), *pairs, *(["--bare"] if self._is_bare else [])]

    def _start_reader(self) -> SinkReader:
        reader = SinkReader(
            self.servers,
            self.output,
            self.partitions,
            self._table,
            self.place,
            kafka_sink=self.kafka_sink,
            delta_sink=self.delta_sink,
        )
        reader.start()
        return reader

    def _silence(self) -> None:
        """End the threads before the broker goes; what they say about it is of no interest."""
        if self.producer is not None:
            self.producer.stop()
            self.producer.join(10)
        self.reader.stop()
        self.reader.join(10)


def _environment() -> Mapping[str, str]:
    # Another Spark in the caller's shell must not leak in; workers must be this interpreter.
    foreign = {"SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYTHONHOME"}
    # What tests have made of it begins with this checkout.
    path = os.environ.get("PYTHONPATH", "")
    own = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": path if path.split(os.pathsep)[0] == str(ROOT) else str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return {**{name: value for name, value in os.environ.items() if name not in foreign}, **own}


def _empty(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        if not (directory / _MARKER).exists():
            raise UnusableDirectory(
                f"{directory} is not empty and was not made by an earlier run; name another directory"
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MARKER).touch()
