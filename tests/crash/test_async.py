"""Kills of a job that asks a server which never gives the same answer twice: one answer for each question."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

from demo.delta_log import Table
from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from demo.topics import read_topic
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing import LocalBroker
from tests.crash.async_app import AGAIN, ANSWERS, CAPACITY, COUNTED, PAIRED, QUESTIONS
from tests.crash.harness import At, Shot
from tests.crash.lives import SEED_VARIABLE, Crash, Life, Rewinding, chosen_crashes, wanted_kills
from tests.support.answering_server import AnsweringServer, answering

APP = ROOT / "tests" / "crash" / "async_app.py"
PARTITIONS, RATE, LEAST = 3, 20.0, 800
#: Of the questions that the server refuses, whatever is tried.
REFUSED_ONE_IN = 50
FEW: tuple[Crash, ...] = (At("decision:before:2"), Rewinding(Victim.WORKER))
CRASHES: tuple[Crash, ...] = (
    At("staged-file:before:3"),
    At("decision:before:2"),
    Rewinding(Victim.WORKER),
    At("decision:after:2"),
    At("sink-commit:after:1:kafka"),
    Shot(Victim.JVM),
    Shot(Victim.GROUP),
)


@pytest.mark.timeout(900)
def test_a_kill_and_a_rewind_leave_one_answer_for_each_question(
    run_directory: Path, broker: LocalBroker
) -> None:
    survive(run_directory, broker.bootstrap_servers, FEW)


@pytest.mark.nightly
@pytest.mark.timeout(900 + 90 * wanted_kills())
@pytest.mark.parametrize("shape", [(), ("--together",)], ids=["apart", "together"])
def test_kills_leave_one_answer_for_each_question(
    run_directory: Path, broker: LocalBroker, shape: tuple[str, ...]
) -> None:
    survive(run_directory, broker.bootstrap_servers, CRASHES, shape)


class Feeder(threading.Thread):
    """Writes questions at a steady rate until `stop`."""

    def __init__(self, servers: str, topic: str) -> None:
        super().__init__(name="questions", daemon=True)
        self._servers, self._topic, self._stopping = servers, topic, threading.Event()
        self.sent = 0

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)

    def run(self) -> None:
        producer = KafkaProducer(bootstrap_servers=self._servers, linger_ms=20)
        while not self._stopping.wait(0.05):
            for _ in range(int(RATE * 0.05)):
                value = json.dumps({"n": self.sent}).encode()
                producer.send(self._topic, value=value, partition=self.sent % PARTITIONS)
                self.sent += 1
        producer.flush()
        producer.close()


class RefusingServer(AnsweringServer):
    """Refuses some questions, each time."""

    async def answered(self, key: str) -> Any:
        if int(key) % REFUSED_ONE_IN == 0:
            # One more for each call: several may be under way at once.
            self.failing[key] += 1
        return await super().answered(key)


def survive(run_directory: Path, servers: str, crashes: Sequence[Crash], shape: Sequence[str] = ()) -> None:
    """Let all of them happen to a job, and compare everything in the end."""
    chance = random.Random(int(os.environ.get(SEED_VARIABLE, "7")))
    shutil.rmtree(run_directory, ignore_errors=True)
    run_directory.mkdir(parents=True)
    prefix, table = run_directory.name, run_directory / "table"
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        for name in (QUESTIONS, ANSWERS, COUNTED, AGAIN, PAIRED):
            admin.create_topic(f"{prefix}.{name}", PARTITIONS)
    with answering(RefusingServer, latency_ms=10) as server, answering(latency_ms=5) as other:
        command = [
            sys.executable, str(APP), "--bootstrap-servers", servers, "--prefix", prefix,
            "--job-dir", str(run_directory / "job"), "--scratch", str(run_directory / "scratch"),
            "--table", str(table), "--url", server.url, "--url-again", other.url, *shape,
        ]  # fmt: skip
        job = JobProcess(command, _environment(), run_directory / "driver.log", chance)
        feeder = Feeder(servers, f"{prefix}.{QUESTIONS}")
        feeder.start()
        try:
            life = Life(job, run_directory / "job", chance)
            life.through(chosen_crashes(crashes, chance))
            life.await_that(lambda: feeder.sent > LEAST, "live until there are enough questions")
            feeder.stop()
            answered = feeder.sent - len(range(0, feeder.sent, REFUSED_ONE_IN))
            ends = (AGAIN, PAIRED)
            life.await_that(
                lambda: all(len(rows(servers, prefix, one)) >= answered for one in ends), "answer all", 1.0
            )
            life.stop()
        finally:
            job.reap()
    is_together = bool(shape)
    answers = rows(servers, prefix, ANSWERS)
    letters = {n: f"refused {n}" for n in range(0, feeder.sent, REFUSED_ONE_IN)}
    by_number = dict(answers)
    # Each question once, with one answer that the server has given for it.
    assert sorted(n for n, _ in answers) == [*range(feeder.sent)]
    assert {n: by_number[n] for n in letters} == letters
    good = {n: answer for n, answer in answers if n not in letters}
    assert all(answer.split()[0] == str(n) for n, answer in good.items())
    assert len(set(good.values())) == len(good)
    # Delta has the same one, and so has what a keyed operator made of it.
    frame = pq.read_table(list(Table.read(table).files), partitioning=None).to_pydict()
    in_table = dict(zip(frame["n"], frame["answer"], strict=True))
    assert in_table == (by_number if is_together else good) and len(frame["n"]) == len(in_table)
    counted = rows(servers, prefix, COUNTED)
    assert {n: text.rsplit(" of ")[0] for n, text in counted} == good and len(counted) == len(good)
    again = rows(servers, prefix, AGAIN)
    assert sorted(n for n, _ in again) == sorted(good) and len({text for _, text in again}) == len(good)
    # On both ways from one operator each comes once, and meets itself once.
    assert sorted(rows(servers, prefix, PAIRED)) == sorted((n, "1 1") for n in good)
    # A crash costs what was on its way, in each worker of both ways, and not more.
    extra = Counter({key: count - 1 for key, count in server.calls.items() if int(key) not in letters})
    lost = 2 * CAPACITY * 4 * (len(crashes) + wanted_kills())
    print(
        f"{feeder.sent} questions, {extra.total()} asked again; behind an operator "
        f"{other.calls.total() - len(good)} of {len(good)}"
    )
    assert extra.total() <= lost
    assert all(len(keys) == 1 for keys in server.keys.values())


def rows(servers: str, prefix: str, name: str) -> list[tuple[int, str]]:
    found = (json.loads(one.value) for one in read_topic(servers, f"{prefix}.{name}", PARTITIONS))
    return [(row["n"], row["answer"]) for row in found]
