"""Runs `tests/crash/families_app.py` through crashes, on servers that others use, too."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from demo.rig import ROOT, Rig
from demo.topics import read_topic
from demo.verify import Verdict
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing import LocalBroker
from tests.crash.families import FAMILIES, Onlooker, Whereabouts
from tests.crash.harness import CrashRun
from tests.crash.sweep.places import PARTITIONS, Database, Place
from tests.crash.sweep.sinks import SINKS
from tests.support.postgres import LocalPostgres

APP = ROOT / "tests" / "crash" / "families_app.py"
#: Enough for every micro-batch to have rows for every sink.
_RATE = 40.0


@dataclass(frozen=True)
class Servers:
    """What a run finds running."""

    broker: LocalBroker
    postgres: LocalPostgres

    @property
    def port(self) -> int:
        return int(self.broker.bootstrap_servers.rpartition(":")[2])

    def database(self, name: str) -> Database:
        """Make a database that is a run's alone."""
        with self.postgres.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        url = self.postgres.url.replace(f"/{self.postgres.database}", f"/{name}")
        return Database(url, self.postgres.user, self.postgres.password)


@dataclass(frozen=True)
class FamiliesVerdict(Verdict):
    """What was found, in the sinks that the demo does not have, too.

    `undecided` was visible after a crash and covered by no decision; `wrong` is what differs at the end.
    """

    undecided: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return super().is_exact and not self.undecided and not self.wrong


class FamiliesRig(Rig):
    """The demo's rig around a job with a sink of every family.

    Parameters
    ----------
    directory
        Its name begins those of topics and database.
    families
        Which; the first two are those that the demo has, and are watched all the time.
    """

    kafka_sink, delta_sink = FAMILIES[:2]
    partitions = PARTITIONS

    def __init__(
        self,
        directory: Path,
        chance: random.Random,
        servers: Servers,
        families: Sequence[str] = FAMILIES,
    ) -> None:
        prefix = f"{directory.name}."
        super().__init__(directory, APP, chance, broker=servers.broker, prefix=prefix)
        self._shared, self._prefix, self._families = servers, prefix, families
        self.output = self._place(self.kafka_sink).output_topic
        self._told = self.directory / "whereabouts.json"
        self.undecided: list[str] = []

    def _place(self, sink: str) -> Place:
        folder, port = self.directory / "sinks" / sink, self._shared.port
        return Place(sink, folder, port, port, f"127.0.0.1:{port}", prefix=self._prefix)

    def __enter__(self) -> Self:
        super().__enter__()
        (self.directory / "failures").mkdir()
        places = []
        for place in map(self._place, self._families):
            place.directory.mkdir(parents=True)
            if SINKS[place.sink].needs_postgres:
                name = re.sub(r"\W", "_", self._prefix)[-60:]
                place = replace(place, database=self._shared.database(name))
            places.append(place)
        if "kafka-second" in self._families:
            with KafkaAdmin(KafkaConnection(self.servers)) as admin:
                admin.create_topic(self._place("kafka-second").output_topic, PARTITIONS)
        scratch = self.directory / "scratch"
        where = Whereabouts(self._job_dir, scratch, self.servers, self.input, self.group, tuple(places))
        self._told.write_text(where.to_json(), encoding="utf-8")
        self._onlooker = Onlooker(where)
        self._stack.callback(self._onlooker.close)
        return self

    def look(self) -> None:
        self.undecided += self._onlooker.undecided()

    def verify(self) -> FamiliesVerdict:
        verdict = super().verify()
        self.look()
        values = [record.value for record in read_topic(self.servers, self.input, self.partitions)]
        wrong = self._onlooker.differences(values)
        remarks = (*verdict.remarks, *self.undecided[:6], *wrong[:12])
        found: dict[str, Any] = {**vars(verdict), "remarks": remarks}
        return FamiliesVerdict(**found, undecided=tuple(self.undecided), wrong=tuple(wrong))

    @property
    def _table(self) -> Path:
        return self._place(self.delta_sink).output

    def _command(self) -> list[str]:
        return [sys.executable, str(self._program), str(self._told)]


class FamiliesRun(CrashRun):
    """Runs the job with a sink of every family through a list of crashes.

    Parameters
    ----------
    failures
        How many tasks are to fail at their first attempt.
    """

    def __init__(
        self,
        directory: Path,
        servers: Servers,
        *,
        seed: int,
        families: Sequence[str] = FAMILIES,
        failures: int = 0,
        broken: str = "",
    ) -> None:
        super().__init__(directory, seed=seed, rate=_RATE, broken=broken)
        self._servers, self._families = servers, families
        self.failures = directory / "failures"
        self._variables["FLINKISH_FAILURES"] = str(self.failures)
        self._variables["FLINKISH_FAILURE_COUNT"] = str(failures)

    def _rig(self) -> Rig:
        return FamiliesRig(self._directory, self._chance, self._servers, self._families)
