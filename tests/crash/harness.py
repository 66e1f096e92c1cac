"""A restart loop as data: a list of crashes, one job with both sinks, one verdict at the end."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from demo.process import JobFailed, Victim
from demo.rig import ROOT, Rig
from demo.verify import Verdict
from flinkish_spark.testing.crash_points import KillPoint
from tests.crash.app import BROKEN_VARIABLE, FIND_DEAD_VARIABLE
from tests.support.buckets import BucketServer
from tests.support.killing import KILL_AT_VARIABLE

APP = ROOT / "tests" / "crash" / "app.py"
#: Slow enough that the job, which is down most of the time, does not fall behind.
RATE = 100.0
_PROGRESS_S = 600.0


@dataclass(frozen=True, slots=True)
class At:
    """The process kills itself at a :class:`KillPoint`, written as its text.

    Parameters
    ----------
    finds_dead
        Whether this start takes kept micro-batches for dead, and rewinds. The crash before has to
        leave some: committed by Spark, not decided.
    """

    point: str
    finds_dead: bool = False

    def __str__(self) -> str:
        return f"{self.point} after a rewind" if self.finds_dead else self.point


@dataclass(frozen=True, slots=True)
class Shot:
    """Something of the job is killed from outside, up to `within_s` after a checkpoint."""

    victim: Victim
    within_s: float = 3.0

    def __str__(self) -> str:
        return f"{self.victim.value} at a random moment"


Crash = At | Shot

#: Right before and after every step. A rewind needs a kept micro-batch, so each is led up to by a
#: crash between commits/N and the decision. Where a decided checkpoint is left behind, the first
#: occurrence of a step is the recovery's and the second the coordinator's: there are some of both.
EVERY_POINT: tuple[Crash, ...] = (
    At("staged-file:before:1"),
    At("staged-file:after:1"),
    Shot(Victim.WORKER),
    At("spark-commit:before:1"),
    At("spark-commit:after:1"),
    At("rewind-delete:before:1", finds_dead=True),
    Shot(Victim.JVM),
    At("decision:before:1"),
    At("rewind-delete:after:1", finds_dead=True),
    At("decision:after:1"),
    At("sink-commit:before:2:totals-kafka"),
    At("sink-commit:after:1:totals-kafka"),
    Shot(Victim.GROUP),
    At("sink-commit:before:1:totals-delta"),
    At("sink-commit:after:2:totals-delta"),
    At("sink-complete:before:1"),
    At("sink-complete:after:2"),
    At("group-offsets:before:1"),
    At("group-offsets:after:2"),
    Shot(Victim.DRIVER),
    At("receipt:before:1"),
    At("receipt:after:2"),
)


def random_crashes(count: int, chance: random.Random) -> list[Crash]:
    """Return crashes of all kinds: half of them shots, half at a point of chance."""
    points = [crash for crash in EVERY_POINT if isinstance(crash, At) and not crash.finds_dead]
    crashes: list[Crash] = []
    while len(crashes) < count:
        left = count - len(crashes)
        if chance.random() < 0.5:
            crashes.append(Shot(chance.choice(list(Victim)), within_s=6.0))
        elif left >= 2 and chance.random() < 0.2:
            moment = chance.choice(("before", "after"))
            crashes += [At("decision:before:1"), At(f"rewind-delete:{moment}:1", finds_dead=True)]
        else:
            crashes.append(At(_other_occurrence(chance.choice(points).point, chance)))
    return crashes


def _other_occurrence(point: str, chance: random.Random) -> str:
    return str(replace(KillPoint.parse(point), occurrence=chance.randint(1, 3)))


@dataclass
class Outcome:
    """A finished run.

    `failure` is the reason why the job would not go on; the verdict then is about what it left.
    """

    verdict: Verdict
    crashes: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [str(self.verdict.to_json()), *self.verdict.remarks, self.failure]
        return "\n".join(line for line in lines if line)


class CrashRun:
    """Runs one job through a list of crashes.

    Parameters
    ----------
    directory
        Emptied at the start, kept at the end: what went wrong is in ``driver.log``.
    seed
        Of the orders and of all moments.
    broken
        Name of a mistake in `tests/crash/app.py`; empty for the product as it is.
    buckets
        A server that runs, in a bucket of which the job directory is; None for one on the disk.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        rate: float = RATE,
        broken: str = "",
        buckets: BucketServer | None = None,
    ) -> None:
        self._directory, self._seed, self._rate, self._buckets = directory, seed, rate, buckets
        self._variables = {BROKEN_VARIABLE: broken}
        self._chance = random.Random(seed)

    def run(self, crashes: Sequence[Crash], *, ends_well: bool = True) -> Outcome:
        """Crash, restart, crash, ...; at last stop gracefully, unless a crash is the end; verify."""
        began = time.monotonic()
        done: list[str] = []
        failure = ""
        with self._rig() as rig:
            rig.produce(seed=self._seed, rate=self._rate)
            try:
                for crash in crashes:
                    self._crash(rig, crash)
                    rig.look()
                    done.append(str(crash))
                    _say(f"{time.monotonic() - began:6.1f} s  {len(done):3}  {crash}")
                if ends_well:
                    self._end(rig)
            except JobFailed as error:
                failure = str(error)
            verdict = rig.verify()
        return Outcome(verdict, done, failure, round(time.monotonic() - began, 1))

    def _rig(self) -> Rig:
        return Rig(self._directory, APP, self._chance, interval_ms=1_000, buckets=self._buckets)

    def _crash(self, rig: Rig, crash: Crash) -> None:
        match crash:
            case At():
                self._let_it_kill_itself(rig, crash)
            case Shot():
                self._ensure_running(rig)
                self._await_progress(rig)
                time.sleep(self._chance.uniform(0, crash.within_s))
                rig.job.kill(crash.victim)
                if rig.job.is_alive:
                    # The driver survived: see it recover by itself before the next crash.
                    self._await_progress(rig)

    def _let_it_kill_itself(self, rig: Rig, crash: At) -> None:
        KillPoint.parse(crash.point)
        if rig.job.is_alive:
            # Only a new process learns where to die: this crash follows one that the driver survived.
            rig.job.kill(Victim.DRIVER)
        variables = {**self._variables, KILL_AT_VARIABLE: crash.point}
        variables[FIND_DEAD_VARIABLE] = "yes" if crash.finds_dead else ""
        rig.job.start(variables)
        status = rig.job.wait(_PROGRESS_S)
        if status != -signal.SIGKILL:
            raise rig.job.failed(f"was to die at {crash}, but ended with status {status}")

    def _ensure_running(self, rig: Rig) -> None:
        if not rig.job.is_alive:
            rig.job.start(self._variables)

    def _await_progress(self, rig: Rig) -> None:
        seen = rig.confirmed
        rig.wait_for(lambda: rig.confirmed > seen, "the next checkpoint", _PROGRESS_S)

    def _end(self, rig: Rig) -> None:
        """Let the job finish the input and stop it gracefully."""
        self._ensure_running(rig)
        # It must be seen to work again after the last crash, with input still coming.
        self._await_progress(rig)
        assert rig.producer is not None
        rig.producer.stop()
        rig.producer.join(30)
        rig.drain(_PROGRESS_S)
        status = rig.job.terminate(_PROGRESS_S)
        if status != 0:
            raise rig.job.failed(f"was stopped gracefully and ended with status {status}")


def _say(text: str) -> None:
    print(text, flush=True)
