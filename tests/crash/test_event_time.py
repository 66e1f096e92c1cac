"""Kills of a job with timers of both clocks and session windows over Kafka: no timer lost, none twice."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.testing import LocalBroker
from tests.crash.event_time_app import Topics
from tests.crash.event_time_rig import PARTITIONS, Feeder, Found, Watermarks
from tests.crash.event_time_updates import last_firings, updates_that_are_wrong
from tests.crash.harness import At, Shot
from tests.crash.lives import SEED_VARIABLE, Crash, Life, Rewinding, chosen_crashes, wanted_kills
from tests.support.open_transactions import still_open

APP = ROOT / "tests" / "crash" / "event_time_app.py"
RATE, LEAST = 100.0, 3_000
FEW: tuple[Crash, ...] = (At("decision:before:2"), Rewinding(Victim.WORKER))
CRASHES: tuple[Crash, ...] = (
    At("decision:before:3"),
    Rewinding(Victim.WORKER),
    Shot(Victim.JVM),
    Shot(Victim.GROUP),
)


def job_in(directory: Path, servers: str, chance: random.Random) -> JobProcess:
    command = [
        sys.executable, str(APP), "--bootstrap-servers", servers, "--prefix", directory.name,
        "--job-dir", str(directory / "job"), "--scratch", str(directory / "scratch"),
    ]  # fmt: skip
    return JobProcess(command, _environment(), directory / "driver.log", chance)


@pytest.mark.timeout(900)
def test_a_kill_and_a_rewind_lose_no_timer_and_fire_none_twice(
    run_directory: Path, broker: LocalBroker
) -> None:
    """Behaviours 124, 161: what comes out is what a recomputation says; the watermark never goes back.

    So it is with windows that fire again for late readings, and count windows over their firings; and with a
    pattern, whose matches and timed-out partial matches are those of a recomputation.
    """
    survive(run_directory, broker.bootstrap_servers, FEW)


@pytest.mark.nightly
@pytest.mark.timeout(900 + 90 * wanted_kills())
def test_kills_lose_no_timer_and_fire_none_twice(run_directory: Path, broker: LocalBroker) -> None:
    """Behaviours 124, 161 again, by more kills, or as many as are asked for."""
    survive(run_directory, broker.bootstrap_servers, CRASHES)


def survive(run_directory: Path, servers: str, crashes: Sequence[Crash]) -> None:
    """Let all of them happen to a job, and compare everything in the end."""
    seed = int(os.environ.get(SEED_VARIABLE, "7"))
    chance = random.Random(seed)
    shutil.rmtree(run_directory, ignore_errors=True)
    run_directory.mkdir(parents=True)
    watermarks = Watermarks(run_directory / "job")
    topics = Topics.of(run_directory.name)
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for topic in topics:
            admin.create_topic(topic, PARTITIONS)
    job = job_in(run_directory, servers, chance)
    feeder = Feeder(servers, topics.readings, seed=seed, rate=RATE)
    feeder.start()
    try:
        life = Life(job, run_directory / "job", chance, watermarks.look)
        life.through(chosen_crashes(crashes, chance))
        life.await_that(lambda: feeder.sent > LEAST, "live until there are enough readings")
        feeder.stop()
        # With no more input: the stream is woken for what is still due.
        life.await_that(lambda: Found.read(servers, topics).is_complete, "fire all timers and sessions", 1.0)
        life.stop()
    finally:
        job.reap()
    watermarks.look()
    found = Found.read(servers, topics)
    job_dir = JobDir(LocalStore(run_directory / "job"))
    with TransactionClient(KafkaConnection(servers)) as client:
        left_open = still_open(client, job_dir.find_uuid())
    assert found.differences()[:10] == []
    assert updates_that_are_wrong(found.given, found.updates)[:10] == []
    assert found.clocks_that_go_back()[:10] == []
    assert list(left_open) == []
    assert wanted_kills() or len(job_dir.history().rewinds) == 1
    assert len(found.updates) > len(last_firings(found.updates)) + 20
    assert len(found.given) > LEAST and len(watermarks.in_checkpoints) > 5
    assert found.pairs.total() > LEAST / 4 and any(second is None for _, _, second in found.pairs)
    print(
        f"{len(found.given)} readings, {found.sessions.total()} sessions, {len(found.updates)} updates, "
        f"{found.pairs.total()} pairs"
    )
