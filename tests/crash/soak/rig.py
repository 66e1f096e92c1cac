"""The demo's rig, with what else may happen around its job in a soak."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from deltalake import DeltaTable
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient

from demo.orders import Order
from demo.producer import OrderProducer
from demo.rig import Rig, _environment
from demo.topics import count_partitions, read_topic
from flinkish_spark.testing.crash_points import KillPoint
from tests.crash.soak import savepoints
from tests.crash.soak.app import TRIGGER_VARIABLE

APP = Path(__file__).with_name("app.py")
#: A broker of users that is upgraded is away for longer, but a minute is short.
_BROKER_AWAY_S = 3.0


class Homes:
    """Gives each user one partition for good, as running totals need; partitions added later have users of
    their own.

    Parameters
    ----------
    first
        How many partitions there are at the start.
    """

    USERS_OF_A_LATER_ONE = 20

    def __init__(self, first: int) -> None:
        self._first = first

    def place(self, order: Order, number: int, partitions: int) -> tuple[Order, int]:
        """Return the order with its partition: an equal share for each of those that there are now."""
        partition = number % partitions
        if partition < self._first:
            return order, crc32(order.key) % self._first
        user = f"late-{partition}-{number // partitions % self.USERS_OF_A_LATER_ONE:02}"
        return replace(order, user=user), partition


class SoakProducer(OrderProducer):
    """Also writes to partitions that are added while it runs."""

    def __init__(self, servers: str, topic: str, homes: Homes, **settings: Any) -> None:
        super().__init__(servers, topic, **settings)
        self._homes = homes

    def _settings(self) -> dict[str, Any]:
        # Partitions are found soon, and a broker that is away for long loses no order.
        return {**super()._settings(), "metadata_max_age_ms": 5_000, "delivery_timeout_ms": 600_000}

    def _send(self, producer: KafkaProducer, order: Order) -> Any:
        known = len(producer.partitions_for(self._topic))
        order, partition = self._homes.place(order, self.sent, known)
        return producer.send(self._topic, key=order.key, value=order.value, partition=partition)


class SoakRig(Rig):
    """Each disturbance is a method; the job runs or lies dead meanwhile."""

    #: It starts beside a job at work, and a run of hours is not to end of a slow start.
    broker_start_timeout_ms = 300_000

    @property
    def _trigger(self) -> Path:
        return self.directory / "trigger"

    @property
    def savepoints(self) -> Path:
        return self.directory / "savepoints"

    def produce(self, *, seed: int, rate: float, count: int | None = None) -> OrderProducer:
        homes = Homes(self.partitions)
        self.producer = SoakProducer(self.servers, self.input, homes, seed=seed, rate=rate, count=count)
        self.producer.start()
        return self.producer

    def start(self, extra: Mapping[str, str] | None = None) -> None:
        """Start the job, which comes to no kill point until it is told of one."""
        self._trigger.unlink(missing_ok=True)
        self.job.start({TRIGGER_VARIABLE: str(self._trigger), **(extra or {})})

    def load_trigger(self, point: KillPoint) -> None:
        """Let the driver die the next time that it comes to the point."""
        unready = self._trigger.with_suffix(".part")
        unready.write_text(str(point), encoding="utf-8")
        unready.rename(self._trigger)

    def add_partition(self) -> None:
        with KafkaAdminClient(bootstrap_servers=self.servers) as admin:
            admin.create_partitions({self.input: count_partitions(self.servers, self.input) + 1})

    def bounce_broker(self) -> None:
        self.broker.stop()
        time.sleep(_BROKER_AWAY_S)
        self.broker.start()

    def optimize_and_vacuum(self) -> None:
        """Compact the table, and delete at once what that has replaced.

        The job's staged files are in no version of the table, and the light kind of VACUUM does not see them.
        """
        table = DeltaTable(str(self._table))
        table.optimize.compact()
        table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    def take_savepoint(self, name: str) -> str:
        """Return why there is none, or an empty text."""
        self.savepoints.mkdir(exist_ok=True)
        return savepoints.take(self._job_dir, self.savepoints / name, _environment())

    def find_wrong_savepoints(self) -> list[str]:
        """Compare all of them with the input."""
        inputs = count_partitions(self.servers, self.input)
        records = read_topic(self.servers, self.input, inputs)
        return savepoints.find_wrong(self.savepoints, records, self.input, _environment())

    def count_rewinds(self) -> int:
        """Return how often decided micro-batches began a new lineage."""
        lineages = {batch.partition("/")[0] for batch in self.reader.book.of_batch}
        return max(0, len(lineages) - 1)
