"""Readings for `tests/crash/event_time_app.py`, what must come out of them, and what a run left."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kafka import KafkaProducer

from demo.topics import read_topic
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from tests.crash.event_time_app import ALARM_MS, GAP_MS, LAST, OUT_OF_ORDER_MS, PATTERN_MS, Topics
from tests.crash.event_time_updates import Reading, Update, expected_windows, last_firings

PARTITIONS = 3
_T0, _STEP_MS, _TICK_S = 1_700_000_000_000, 10, 0.05
_LAST_AT_MS = _T0 + 1_000_000_000


class Session(NamedTuple):
    """A window that fired, and the numbers in it."""

    user: str
    begin: int
    end: int
    numbers: tuple[int, ...]


def readings(seed: int) -> Iterator[Reading]:
    """Yield readings for ever, up to OUT_OF_ORDER_MS out of order, of users that come and go."""
    chance, n = random.Random(seed), 0
    while True:
        first = n // 400 * 4
        user = first + chance.randrange(4) if chance.random() < 0.97 else chance.randrange(24)
        at = _T0 + n * _STEP_MS + 2 * chance.randrange(OUT_OF_ORDER_MS // 2)
        yield Reading(f"u{user % 24}", n, at)
        n += 1


def last_readings() -> list[Reading]:
    """Return one for each partition."""
    return [Reading(LAST, 1_000_000_000 + number, _LAST_AT_MS) for number in range(PARTITIONS)]


def expected_sessions(given: Iterable[Reading]) -> Counter[Session]:
    """Recompute the sessions: an alarm per reading, and a pause of GAP_MS without one ends a session."""
    alarms: dict[str, list[tuple[int, int]]] = {}
    for user, n, at in given:
        if user != LAST:
            alarms.setdefault(user, []).append((at + ALARM_MS, n))
    found: Counter[Session] = Counter()
    for user, own in alarms.items():
        own.sort()
        begins = [0, *(i + 1 for i, (one, two) in enumerate(pairwise(own)) if two[0] - one[0] > GAP_MS)]
        for begin, end in pairwise([*begins, len(own)]):
            numbers = sorted(n for _, n in own[begin:end])
            found[Session(user, own[begin][0], own[end - 1][0] + GAP_MS, tuple(numbers))] += 1
    return found


def expected_calls(given: Iterable[Reading]) -> Counter[tuple[str, str, int]]:
    """Return what the timers of the wall clock must say: each number once."""
    return Counter(("call", user, n) for user, n, _ in given)


def expected_pairs(given: Iterable[Reading]) -> Counter[tuple[str, int, int | None]]:
    """Recompute what the pattern finds, without any matcher: of each first reading the second, or none."""
    by_user: dict[str, list[Reading]] = {}
    for reading in given:
        if reading.user != LAST:
            by_user.setdefault(reading.user, []).append(reading)
    found: Counter[tuple[str, int, int | None]] = Counter()
    for user, own in by_user.items():
        own.sort(key=lambda reading: (reading.at, reading.n))
        for place, first in enumerate(own):
            if first.n % 3:
                continue
            fits = (
                one.n
                for one in own[place + 1 :]
                if one.n % 3 == 1 and one.n > first.n and one.at - first.at < PATTERN_MS
            )
            found[user, first.n, next(fits, None)] += 1
    return found


class Feeder(threading.Thread):
    """Writes readings at a steady rate until `stop`, then the last ones."""

    def __init__(self, servers: str, topic: str, *, seed: int, rate: float) -> None:
        super().__init__(name="readings", daemon=True)
        self._topic, self._servers, self._readings, self._rate = topic, servers, readings(seed), rate
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        self.sent = 0

    def stop(self) -> None:
        """Write the last readings and end."""
        self._stopping.set()
        self.join(60)
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    def _run(self) -> None:
        producer = KafkaProducer(bootstrap_servers=self._servers, linger_ms=20)
        began = time.monotonic()
        sending = []
        while not self._stopping.wait(_TICK_S):
            while self.sent < (time.monotonic() - began) * self._rate:
                reading = next(self._readings)
                sending.append(self._send(producer, reading, reading.n % PARTITIONS))
                self.sent += 1
        for number, reading in enumerate(last_readings()):
            sending.append(self._send(producer, reading, number))
        for one in sending:
            one.get(30)
        producer.close()

    def _send(self, producer: KafkaProducer, reading: Reading, partition: int) -> Any:
        value = json.dumps(reading._asdict()).encode()
        return producer.send(self._topic, value=value, partition=partition)


@dataclass
class Found:
    """What is in the topics: input and all outputs, and calls by user in their order."""

    given: list[Reading]
    sessions: Counter[Session]
    calls: Counter[tuple[str, str, int]]
    clocks: Mapping[str, list[tuple[int, int, int]]]
    updates: list[Update]
    pairs: Counter[tuple[str, int, int | None]]

    @classmethod
    def read(cls, servers: str, topics: Topics) -> Found:
        """Read what is committed."""
        given = [Reading(**row) for row in _rows(servers, topics.readings)]
        sessions = Counter(
            Session(row["user"], row["begin_ms"], row["end_ms"], tuple(row["numbers"]))
            for row in _rows(servers, topics.sessions)
        )
        calls: Counter[tuple[str, str, int]] = Counter()
        clocks: dict[str, list[tuple[int, int, int]]] = {}
        for row in _rows(servers, topics.calls):
            calls[row["kind"], row["user"], row["n"]] += 1
            clocks.setdefault(row["user"], []).append((row["due"], row["now"], row["watermark"]))
        updates = [Update.of(row) for row in _rows(servers, topics.updates)]
        pairs = Counter((row["user"], row["first"], row["second"]) for row in _rows(servers, topics.patterns))
        return cls(given, sessions, calls, clocks, updates, pairs)

    @property
    def is_complete(self) -> bool:
        """Whether as much has come out as must."""
        sessions, calls = expected_sessions(self.given), expected_calls(self.given)
        are_there = self.sessions.total() >= sessions.total() and self.calls.total() >= calls.total()
        are_there = are_there and self.pairs.total() >= expected_pairs(self.given).total()
        return are_there and last_firings(self.updates) == expected_windows(self.given)

    def differences(self) -> list[str]:
        """Return what is missing and what should not be there; empty if all is right."""
        said: list[str] = []
        compared: tuple[tuple[str, Counter[Any], Counter[Any]], ...] = (
            ("sessions", expected_sessions(self.given), self.sessions),
            ("calls", expected_calls(self.given), self.calls),
            ("pairs", expected_pairs(self.given), self.pairs),
        )
        for name, wanted, found in compared:
            said += [f"{name}: missing {row} x{count}" for row, count in (wanted - found).items()]
            said += [f"{name}: surplus {row} x{count}" for row, count in (found - wanted).items()]
        return said

    def clocks_that_go_back(self) -> list[str]:
        """Return whose clocks went back, or who was called too early."""
        said = []
        for user, own in self.clocks.items():
            said += [f"{user}: called at {now}, due at {due}" for due, now, _ in own if now < due]
            for (_, now, watermark), (_, later, higher) in pairwise(own):
                if later < now or higher < watermark:
                    said.append(f"{user}: from {now}, {watermark} to {later}, {higher}")
        return said


def _rows(servers: str, topic: str) -> Iterator[dict[str, Any]]:
    for record in read_topic(servers, topic, PARTITIONS):
        yield json.loads(record.value)


class Watermarks:
    """Looks at where event time stands, again and again, in checkpoints and in Spark's log."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self.in_checkpoints: dict[int, int] = {}

    def look(self) -> None:
        """Note the checkpoints that are there; raise if event time went back between two, or in the log."""
        for decision in JobDir(LocalStore(self._job_dir)).live_commits():
            if decision.times is not None:
                known = self.in_checkpoints.setdefault(int(decision.checkpoint), decision.times.watermark_ms)
                assert known == decision.times.watermark_ms, decision.checkpoint
        stored = [watermark for _, watermark in sorted(self.in_checkpoints.items())]
        assert stored == sorted(stored), self.in_checkpoints
        for folder in (self._job_dir / "spark").glob("*/offsets"):
            entries = sorted((one for one in folder.iterdir() if one.name.isdecimal()), key=_number)
            texts = [text for one in entries if (text := _read(one))]
            carried = [LoggedOffsets.parse(text).control.time.watermark_ms for text in texts]
            assert carried == sorted(carried), f"{folder}: {carried}"


def _read(path: Path) -> str:
    """Return an entry's text; nothing of one that a kill has cut off, or that is deleted just now."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _number(path: Path) -> int:
    return int(path.name)
