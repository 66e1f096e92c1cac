"""Kills of a job whose patterns come and go: what is told equals a recomputation, and nothing comes twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from kafka import KafkaProducer

from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from demo.topics import read_topic
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing import LocalBroker
from tests.crash.event_time_app import LAST
from tests.crash.event_time_rig import PARTITIONS, Feeder
from tests.crash.harness import At, Shot
from tests.crash.lives import SEED_VARIABLE, Crash, Life, Rewinding, chosen_crashes, wanted_kills
from tests.crash.rules_app import Topics, goes_on, rule_of

APP = ROOT / "tests" / "crash" / "rules_app.py"
RATE, LEAST, RULE_EVERY_S = 200.0, 3_000, 1.7
CRASHES: tuple[Crash, ...] = (
    At("decision:before:3"),
    Rewinding(Victim.WORKER),
    Shot(Victim.JVM),
    Shot(Victim.GROUP),
)
#: User, version, first reading and second; null where the reading is told of alone.
Told = tuple[str, int, int, int | None]


class Rules(threading.Thread):
    """Sends one version of the rule after the other, each twice, until `stop`."""

    def __init__(self, servers: str, topic: str) -> None:
        super().__init__(name="rules", daemon=True)
        self._producer, self._topic = KafkaProducer(bootstrap_servers=servers), topic
        self._stopping = threading.Event()
        self.version = 0

    def run(self) -> None:
        while not self._stopping.wait(RULE_EVERY_S):
            for _ in range(2):
                value = json.dumps(rule_of(self.version)).encode()
                self._producer.send(self._topic, value=value, partition=0).get(30)
            self.version += 1

    def stop(self) -> None:
        """Send no more."""
        self._stopping.set()
        self.join(60)


def differences(given: Iterable[tuple[str, int, int]], told: Sequence[Told]) -> list[str]:
    """Return what is not as it follows from the readings and from what is told of each alone."""
    said = [f"told twice: {one}" for one, count in Counter(told).items() if count > 1]
    version_of = {first: version for _, version, first, second in told if second is None}
    pairs = {one for one in told if one[3] is not None}
    by_user: dict[str, list[tuple[int, int]]] = {}
    for user, n, at in given:
        if user != LAST:
            by_user.setdefault(user, []).append((at * 1000 + n % 1000, n))
    wanted = set()
    for user, own in by_user.items():
        own.sort()
        numbers = [n for _, n in own]
        versions = [version_of[n] for n in numbers if n in version_of]
        if versions != sorted(versions):
            said.append(f"{user}: versions go back: {versions}")
        for one, two in pairwise(numbers):
            if one in version_of and two in version_of and goes_on(version_of[one], version_of[two]):
                wanted.add((user, version_of[two], one, two))
        # Nothing is told of readings in a time in which the rule was gone, or before the first: of no others.
        known = [-1, *(version_of.get(n) for n in numbers), None]
        for at, version in enumerate(known[1:-1], 1):
            if version is None:
                before = next(one for one in reversed(known[:at]) if one is not None)
                behind = next((one for one in known[at:] if one is not None), None)
                if behind is not None and not any(
                    one == -1 or one % 4 == 3 for one in range(before, behind + 1)
                ):
                    said.append(f"{user}: nothing of {numbers[at - 1]}, between {before} and {behind}")
    said += [f"missing {one}" for one in sorted(wanted - pairs)]
    return said + [f"surplus {one}" for one in sorted(pairs - wanted)]


def test_differences_are_seen() -> None:
    given = [("u", n, n) for n in range(6)]
    told: list[Told] = [
        ("u", 0, 0, None), ("u", 0, 1, None), ("u", 0, 0, 1), ("u", 1, 2, None), ("u", 1, 1, 2),
        ("u", 2, 3, None), ("u", 4, 5, None),
    ]  # fmt: skip
    assert differences(given, told) == []
    assert differences(given, [*told, told[2]]) == ["told twice: ('u', 0, 0, 1)"]
    assert differences(given, told[:4] + told[5:]) == ["missing ('u', 1, 1, 2)"]
    assert differences(given, [*told, ("u", 2, 2, 3)]) == ["surplus ('u', 2, 2, 3)"]
    assert differences(given, told[:1] + told[3:4] + told[5:])[0] == "u: nothing of 1, between 0 and 1"


@pytest.mark.nightly
@pytest.mark.timeout(900 + 90 * wanted_kills())
def test_kills_tell_nothing_of_changing_rules_twice_and_leave_nothing_out(
    run_directory: Path, broker: LocalBroker
) -> None:
    """Behaviours 124, 161 for patterns from a stream: of each reading by which version, of each pair once."""
    seed = int(os.environ.get(SEED_VARIABLE, "7"))
    chance, servers = random.Random(seed), broker.bootstrap_servers
    shutil.rmtree(run_directory, ignore_errors=True)
    run_directory.mkdir(parents=True)
    topics = Topics.of(run_directory.name)
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for topic in topics:
            admin.create_topic(topic, PARTITIONS)
    command = [
        sys.executable, str(APP), "--bootstrap-servers", servers, "--prefix", run_directory.name,
        "--job-dir", str(run_directory / "job"), "--scratch", str(run_directory / "scratch"),
    ]  # fmt: skip
    job = JobProcess(command, _environment(), run_directory / "driver.log", chance)
    feeder, rules = Feeder(servers, topics.readings, seed=seed, rate=RATE), Rules(servers, topics.rules)
    feeder.start()
    rules.start()

    def rows(topic: str) -> list[dict[str, object]]:
        return [json.loads(record.value) for record in read_topic(servers, topic, PARTITIONS)]

    try:
        life = Life(job, run_directory / "job", chance)
        life.through(chosen_crashes(CRASHES, chance))
        life.await_that(lambda: feeder.sent > LEAST, "live until there are enough readings")
        feeder.stop()
        rules.stop()
        # One more that is there to stay, and a reading by which one sees that all before are through.
        life.await_checkpoint()
        life.await_checkpoint()
        life.await_checkpoint()
        life.stop()
    finally:
        job.reap()
    given = [(str(row["user"]), int(str(row["n"])), int(str(row["at"]))) for row in rows(topics.readings)]
    told: list[Told] = [
        tuple(row[name] for name in ("user", "version", "first", "second"))  # type: ignore[misc]
        for row in rows(topics.found)
    ]
    assert differences(given, told)[:10] == []
    versions = {version for _, version, _, _ in told}
    assert len(given) > LEAST and len(told) > LEAST / 2 and len(versions) > 5
    print(f"{len(given)} readings, {len(told)} rows, by {len(versions)} of {rules.version} versions")
