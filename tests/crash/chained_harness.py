"""Two chained jobs in processes of their own; each is shot while the other goes on, or is shot too."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kafka import KafkaProducer

from demo.process import JobProcess, Victim
from demo.rig import ROOT, _environment
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.upstream_cut import UpstreamCut, upstream_cut
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.testing import LocalBroker
from tests.crash.app import FIND_DEAD_VARIABLE
from tests.crash.chained_app import MODE_VARIABLE, chain_in
from tests.support.chained_jobs import Checked, Topic, check_cuts, held_back
from tests.support.killing import KILL_AT_VARIABLE
from tests.support.open_transactions import still_open

APP = ROOT / "tests" / "crash" / "chained_app.py"
UPSTREAM, CHAINED = "upstream", "chained"
_PATIENCE_S = 600.0
_OVER = "over"
_NUMBERS_PER_CHECKPOINT = 80
_MODES = ("ALIGNED", "UNALIGNED", "ALIGNED_WITH_TIMEOUT")


@dataclass(frozen=True)
class At:
    """The job kills itself at a step, written as a kill point's text; maybe after a rewind."""

    point: str
    finds_dead: bool = False


@dataclass(frozen=True)
class Shot:
    """Some of the job is killed at a moment of chance."""

    victim: Victim


@dataclass(frozen=True)
class InFlight:
    """The chained job is killed behind a checkpoint that has channel state; a new process replays it."""

    victim: Victim


Crash = At | Shot | InFlight


class Numbers:
    """Feeds the source: orders that are numbered, most of them of one user.

    So many per checkpoint and not per second: on a slow machine the jobs do not fall behind.
    """

    def __init__(self, servers: str, topic: str, chance: random.Random) -> None:
        self._producer = KafkaProducer(bootstrap_servers=servers, linger_ms=20)
        self._topic, self._chance = topic, chance
        self.sent = 0

    def put(self, count: int) -> None:
        """Send some more, and return when the broker has them."""
        for _ in range(count):
            user = "most" if self._chance.random() < 0.7 else f"u{self._chance.randrange(20)}"
            value = json.dumps({"user": user, "amount": self.sent}).encode()
            self._producer.send(self._topic, key=user.encode(), value=value)
            self.sent += 1
        self._producer.flush(30)

    def close(self) -> None:
        self._producer.close(5)


@dataclass
class ChainOutcome:
    """What a run left."""

    sent: int
    lost: int
    doubled: int
    open_transactions: int
    checked: Checked
    crashes: int = 0
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether both topics hold every number once; the cuts are asserted on the way."""
        return not (self.lost or self.doubled or self.open_transactions)


class ChainRun:
    """Runs both jobs, each through crashes of its own, at the same time.

    Parameters
    ----------
    directory
        Emptied at the start, kept at the end: what went wrong is in the jobs' logs.
    broker
        May be others', too.
    seed
        Of the numbers and all moments.
    """

    def __init__(self, directory: Path, broker: LocalBroker, *, seed: int) -> None:
        self._directory, self._servers = directory, broker.bootstrap_servers
        self._chance = random.Random(seed)
        self._starts = 0
        self._began = time.monotonic()

    def run(self, crashes: Mapping[str, Sequence[Crash]]) -> ChainOutcome:
        """Crash, restart, crash, ...; at last stop both gracefully, and count."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        with ExitStack() as stack:
            servers = self._servers
            self._chain = chain_in(self._directory, servers)
            with KafkaAdmin(KafkaConnection(servers)) as admin:
                for topic in (self._chain.source, self._chain.middle, self._chain.out):
                    admin.create_topic(topic, 2)
            self._jobs = {role: self._job(role, servers) for role in (UPSTREAM, CHAINED)}
            for job in self._jobs.values():
                stack.callback(job.reap)
            numbers = Numbers(servers, self._chain.source, self._chance)
            stack.callback(numbers.close)
            lives = [self._life(role, crashes[role]) for role in self._jobs]
            fed = -1
            while lives:
                lives = [life for life in lives if next(life, _OVER) is not _OVER]
                if (checkpoints := self._receipts(UPSTREAM)) > fed:
                    numbers.put(_NUMBERS_PER_CHECKPOINT)
                    fed = checkpoints
                time.sleep(0.05)
            outcome = self._finish(servers, numbers.sent)
        outcome.crashes = sum(map(len, crashes.values()))
        outcome.seconds = round(time.monotonic() - self._began, 1)
        return outcome

    def _job(self, role: str, servers: str) -> JobProcess:
        command = [
            sys.executable, str(APP), "--role", role, "--directory", str(self._directory),
            "--bootstrap-servers", servers,
        ]  # fmt: skip
        return JobProcess(command, _environment(), self._directory / f"{role}.log", self._chance)

    # -- lives ----------------------------------------------------------------------------------
    def _life(self, role: str, crashes: Sequence[Crash]) -> Iterator[str]:
        """Take one job through its crashes; yields while it waits for something."""
        for crash in crashes:
            match crash:
                case At():
                    yield from self._let_it_kill_itself(role, crash)
                case Shot():
                    yield from self._shoot(role, crash)
                case InFlight():
                    yield from self._shoot_in_flight(role, crash)
            print(f"{time.monotonic() - self._began:6.1f} s  {role}: {crash}", flush=True)
        yield from self._next_checkpoint(role)

    def _let_it_kill_itself(self, role: str, crash: At) -> Iterator[str]:
        job = self._jobs[role]
        if job.is_alive:
            # Only a new process learns where to die: this follows a crash that the driver survived.
            job.kill(Victim.DRIVER)
        finds_dead = {FIND_DEAD_VARIABLE: "yes"} if crash.finds_dead else {}
        self._start(role, **{KILL_AT_VARIABLE: crash.point}, **finds_dead)
        yield from self._patiently(role, lambda: not job.is_alive, f"die at {crash.point}")
        if job.status != -signal.SIGKILL:
            raise job.failed(f"was to die at {crash}, but ended with status {job.status}")

    def _shoot(self, role: str, crash: Shot) -> Iterator[str]:
        yield from self._next_checkpoint(role)
        moment = time.monotonic() + self._chance.uniform(0, 2)
        yield from self._patiently(role, lambda: time.monotonic() > moment, "live for two seconds")
        self._jobs[role].kill(crash.victim)

    def _shoot_in_flight(self, role: str, crash: InFlight) -> Iterator[str]:
        if self._jobs[role].is_alive:
            self._jobs[role].kill(Victim.DRIVER)
        self._start(role, **{MODE_VARIABLE: "UNALIGNED"})
        yield from self._next_checkpoint(role)
        # Nothing can be ahead of the very first barrier: it is waited for in every mode.
        yield from self._patiently(role, lambda: self._newest_cut() is not None, "name a first cut")
        with held_back(self._chain, partition=1):
            before = max(_commits(self._chain.upstream_dir), default=0)
            is_drawn = partial(self._has_channel_state, before)
            yield from self._patiently(role, is_drawn, "draw a checkpoint ahead of a barrier")
            self._jobs[role].kill(crash.victim)

    def _has_channel_state(self, before: int) -> bool:
        later = [number for number in _commits(self._chain.upstream_dir) if number > before]
        if len(later) < 2:
            return False
        cut = self._newest_cut()
        # Of the first upstream checkpoint behind the hold a part may be visible, of the next one nothing is.
        return cut is not None and int(cut.checkpoint) >= later[1] and bool(cut.channel_state)

    def _newest_cut(self) -> UpstreamCut | None:
        newest = JobDir(LocalStore(self._chain.chained_dir)).newest_commit()
        return None if newest is None else upstream_cut(newest.offsets_text).get(self._chain.middle)

    def _next_checkpoint(self, role: str) -> Iterator[str]:
        if not self._jobs[role].is_alive:
            self._start(role)
        seen = self._receipts(role)
        yield from self._patiently(role, lambda: self._receipts(role) > seen, "complete a checkpoint")

    def _start(self, role: str, **extra: str) -> None:
        self._starts += 1
        mode = _MODES[self._starts % len(_MODES)]
        self._jobs[role].start({MODE_VARIABLE: mode, KILL_AT_VARIABLE: "", **extra})

    def _patiently(self, role: str, condition: Callable[[], bool], what: str) -> Iterator[str]:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            job = self._jobs[role]
            if not job.is_alive and not condition():
                raise job.failed(f"ended by itself with status {job.status}")
            if time.monotonic() > deadline:
                raise job.failed(f"did not {what} within {_PATIENCE_S:g} s")
            yield role

    def _receipts(self, role: str) -> int:
        return len(list((self._directory / role / "checkpoints").glob("*/receipt.json")))

    # -- counting -------------------------------------------------------------------------------
    def _stop(self, role: str) -> None:
        if self._jobs[role].terminate(_PATIENCE_S) != 0:
            raise self._jobs[role].failed("was stopped gracefully and ended otherwise")
        self._jobs[role].reap()

    def _finish(self, servers: str, sent: int) -> ChainOutcome:
        # The upstream job first: what it has read is in its last checkpoint, and no cut comes any more.
        received = self._patiently(
            UPSTREAM, lambda: len(Topic.read(servers, self._chain.middle).content) >= sent, "pass all on"
        )
        for _ in received:
            time.sleep(0.5)
        self._stop(UPSTREAM)
        done = self._patiently(
            CHAINED, lambda: len(Topic.read(servers, self._chain.out).content) >= sent, "read all"
        )
        for _ in done:
            time.sleep(0.5)
        self._stop(CHAINED)
        expected = Counter(range(sent))
        found = [Topic.read(servers, topic).content for topic in (self._chain.middle, self._chain.out)]
        chain = self._chain
        with TransactionClient(KafkaConnection(servers)) as client:
            left = [
                t
                for job_dir in (chain.upstream_dir, chain.chained_dir)
                for t in still_open(client, _uuid(job_dir))
            ]
        return ChainOutcome(
            sent=sent,
            lost=sum(sum((expected - content).values()) for content in found),
            doubled=sum(sum((content - expected).values()) for content in found),
            open_transactions=len(left),
            checked=check_cuts(chain),
        )


def _commits(job_dir: Path) -> list[int]:
    return sorted(int(decision.checkpoint) for decision in JobDir(LocalStore(job_dir)).live_commits())


def _uuid(job_dir: Path) -> JobUuid:
    job = JobDir(LocalStore(job_dir)).find_uuid()
    assert job is not None
    return job
