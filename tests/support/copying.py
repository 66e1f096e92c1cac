"""A topic that is copied by a job in a process of its own, watched by a reader, and what came of it."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError

from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing.broker_cluster import BrokerCluster
from tests.support.jobs import read_committed
from tests.support.services import BUILD

APP = ROOT / "tests" / "support" / "copier_app.py"
_OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
_COUNTER = itertools.count(1)


@dataclass
class Watch:
    """A read_committed reader that polls all the while; values by partition, in their order."""

    servers: str
    topic: str
    partitions: int
    seen: dict[int, list[int]] = field(default_factory=dict)
    failure: str = ""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True, name="watch")
        self._thread.start()

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    def end(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _poll(self) -> None:
        consumer = KafkaConsumer(
            bootstrap_servers=self.servers,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            request_timeout_ms=10_000,
        )
        consumer.assign([TopicPartition(self.topic, number) for number in range(self.partitions)])
        while not self._over.is_set():
            try:
                found = consumer.poll(timeout_ms=200)
            except (KafkaError, OSError) as passing:
                self.failure = f"{type(passing).__name__}: {passing}"
                time.sleep(0.2)
                continue
            for place, records in found.items():
                self.seen.setdefault(place.partition, []).extend(int(record.value) for record in records)
        consumer.close()


@dataclass(frozen=True)
class Copied:
    """What came of a copy, in records."""

    wanted: int
    lost: int
    duplicated: int
    foreign: int
    watched_lost: int
    watched_duplicated: int
    out_of_order: int
    group_offset: int
    left_open: int
    starts: int
    query_restarts: int

    @property
    def is_exact(self) -> bool:
        wrong = (self.lost, self.duplicated, self.foreign, self.watched_lost, self.watched_duplicated)
        return not any((*wrong, self.out_of_order, self.left_open)) and self.group_offset == self.wanted


class Copying:
    """One copy on a cluster that others may ruin meanwhile; a context manager.

    Parameters
    ----------
    ordered
        One partition each, so that the whole order counts.
    """

    def __init__(
        self, cluster: BrokerCluster, folder: Path, *, atomic: bool, ordered: bool, records: int
    ) -> None:
        self.cluster, self.records, self.ordered = cluster, records, ordered
        number = next(_COUNTER)
        self.source, self.target, self.group = (f"{name}-{number}" for name in ("source", "target", "copier"))
        self.inputs, self.outputs = (1, 1) if ordered else (2, 3)
        cluster.create_topic(self.source, self.inputs)
        cluster.create_topic(self.target, self.outputs)
        self._seed()
        options = {
            "servers": cluster.bootstrap_servers,
            "source": self.source,
            "target": self.target,
            "group": self.group,
            "job-dir": str(folder / "job"),
            "jars": str(BUILD / "jars"),
            "scratch": str(folder / "scratch"),
            # Of Kafka's test: so many to a transaction. With the pause the copy takes a minute.
            "records-per-batch": "750",
            "trigger-interval-ms": "900" if ordered else "300",
        }
        given = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [sys.executable, str(APP), *given, *(["--atomic"] if atomic else [])]
        self.job = JobProcess(command, _environment(), folder / "copier.log", random.Random(number))

    def __enter__(self) -> Self:
        self.watch = Watch(self.cluster.bootstrap_servers, self.target, self.outputs)
        self.job.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.job.reap()
        self.watch.end()

    def _seed(self) -> None:
        producer = KafkaProducer(bootstrap_servers=self.cluster.bootstrap_servers, acks="all", linger_ms=20)
        sent = [
            producer.send(self.source, b"%d" % number, partition=number % self.inputs)
            for number in range(self.records)
        ]
        for one in sent:
            one.get(timeout=60)
        producer.close()

    def await_copied(self, records: int, within_s: float = 120) -> None:
        """Wait until the reader has seen so many; the job must live."""
        deadline = time.monotonic() + within_s
        while self.watch.count < records:
            if not self.job.is_alive:
                raise self.job.failed(f"ended by itself with status {self.job.status}")
            if time.monotonic() > deadline:
                said = (
                    f"copied {self.watch.count} of {records} records in {within_s:g} s ({self.watch.failure})"
                )
                raise self.job.failed(said)
            time.sleep(0.1)

    def bounce(self, *, clean: bool) -> None:
        """End the copier, in order or by a kill of all its processes, and start it again."""
        if clean:
            status = self.job.terminate(120)
            if status != 0:
                raise self.job.failed(f"was stopped and ended with status {status}")
        else:
            self.job.kill(Victim.GROUP)
        self.job.start()

    def finish(self) -> Copied:
        """Wait for the last record, stop the job in order, and compare."""
        self.await_copied(self.records, 240)
        if (status := self.job.terminate(120)) != 0:
            raise self.job.failed(f"was stopped and ended with status {status}")
        # What comes too often would come now.
        time.sleep(2)
        self.watch.end()
        servers, wanted = self.cluster.bootstrap_servers, set(range(self.records))
        values = [int(record.value) for record in read_committed(servers, self.target)]
        watched = [value for seen in self.watch.seen.values() for value in seen]
        with KafkaAdmin(KafkaConnection(servers)) as admin:
            offsets = admin.committed_offsets(self.group)
        log = self.job.log.read_text(encoding="utf-8", errors="replace")
        in_order = not self.ordered or (values == sorted(values) and watched == sorted(watched))
        return Copied(
            wanted=self.records,
            lost=len(wanted - set(values)),
            duplicated=len(values) - len(set(values)),
            foreign=len(set(values) - wanted),
            watched_lost=len(wanted - set(watched)),
            watched_duplicated=len(watched) - len(set(watched)),
            out_of_order=0 if in_order else 1,
            group_offset=sum(offsets.values()),
            left_open=self._left_open(),
            starts=self.job.starts,
            query_restarts=log.count("restarting in "),
        )

    def _left_open(self) -> int:
        wire = KafkaWire(KafkaConnection(self.cluster.bootstrap_servers))
        try:
            deadline = time.monotonic() + 20
            while (found := len(wire.list_transactions(_OPEN))) and time.monotonic() < deadline:
                time.sleep(0.2)
            return found
        finally:
            wire.close()
