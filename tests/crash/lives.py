"""One job process through a list of crashes, for tests that have a rig of their own around it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.process import JobProcess, Victim
from flinkish_spark.testing.crash_points import KillPoint
from tests.crash.app import FIND_DEAD_VARIABLE
from tests.crash.harness import At, Shot
from tests.support.killing import KILL_AT_VARIABLE

#: How many kills of chance; without it a test has a short list of its own.
KILLS_VARIABLE, SEED_VARIABLE = "FLINKISH_KILLS", "FLINKISH_SEED"
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Rewinding:
    """A start that takes kept micro-batches for dead, and so rewinds; it is shot when it works again.

    The crash before has to leave some: committed by Spark, not decided.
    """

    victim: Victim

    def __str__(self) -> str:
        return f"{self.victim.value} behind a rewind"


Crash = At | Shot | Rewinding


def wanted_kills() -> int:
    """Return what FLINKISH_KILLS says; 0 for the short list."""
    return int(os.environ.get(KILLS_VARIABLE, "0"))


def chosen_crashes(short: Sequence[Crash], chance: random.Random) -> list[Crash]:
    """Return a test's short list, or as many crashes of chance as FLINKISH_KILLS says."""
    kills = wanted_kills()
    points = [crash for crash in short if isinstance(crash, At)]
    crashes: list[Crash] = [] if kills else list(short)
    while len(crashes) < kills:
        is_shot = chance.random() < 0.7 or not points
        crashes.append(Shot(chance.choice(list(Victim)), 6.0) if is_shot else chance.choice(points))
    return crashes


class Life:
    """Crash, restart, crash, ...

    Parameters
    ----------
    job
        Not started yet.
    job_dir
        Of the job; progress is a checkpoint with a receipt.
    chance
        For all moments.
    look
        Called after each crash, with the job dead or alive: raises if something is wrong already.
    """

    def __init__(
        self, job: JobProcess, job_dir: Path, chance: random.Random, look: Callable[[], None] = lambda: None
    ) -> None:
        self.job = job
        self._job_dir, self._chance, self._look = job_dir, chance, look
        self._began = time.monotonic()

    @property
    def confirmed(self) -> int:
        """The newest checkpoint with a receipt."""
        receipts = (self._job_dir / "checkpoints").glob("*/receipt.json")
        return max((int(path.parent.name) for path in receipts), default=0)

    def through(self, crashes: Sequence[Crash]) -> None:
        """Let all of them happen; at last the job works again."""
        for crash in crashes:
            match crash:
                case At():
                    self._let_it_kill_itself(crash)
                case Shot():
                    self._shoot(crash.victim, crash.within_s)
                case Rewinding():
                    self._end()
                    self.job.start({FIND_DEAD_VARIABLE: "yes"})
                    self._shoot(crash.victim)
            self.say(str(crash))
            self._look()
        self.await_checkpoint()

    def await_checkpoint(self) -> None:
        """Wait for one more checkpoint of the running job, which is started if it is not."""
        if not self.job.is_alive:
            self.job.start()
        seen = self.confirmed
        self.await_that(lambda: self.confirmed > seen, "complete a checkpoint")

    def await_that(self, condition: Callable[[], bool], what: str, pause_s: float = 0.05) -> None:
        """Wait, with the job running all the time."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if not self.job.is_alive:
                raise self.job.failed(f"ended by itself with status {self.job.status}")
            if time.monotonic() > deadline:
                raise self.job.failed(f"did not {what} within {PATIENCE_S:g} s")
            time.sleep(pause_s)

    def stop(self) -> None:
        """Stop the job with a last checkpoint."""
        if self.job.terminate(PATIENCE_S) != 0:
            raise self.job.failed("was stopped gracefully and ended otherwise")
        self.job.reap()
        self.say("stopped")

    def say(self, text: str) -> None:
        """Print what has happened, and when."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def _let_it_kill_itself(self, crash: At) -> None:
        KillPoint.parse(crash.point)
        self._end()
        self.job.start({KILL_AT_VARIABLE: crash.point})
        status = self.job.wait(PATIENCE_S)
        if status != -signal.SIGKILL:
            raise self.job.failed(f"was to die at {crash}, but ended with status {status}")

    def _end(self) -> None:
        """Only a new process learns what is to go wrong."""
        if self.job.is_alive:
            self.job.kill(Victim.DRIVER)

    def _shoot(self, victim: Victim, within_s: float = 3.0) -> None:
        self.await_checkpoint()
        time.sleep(self._chance.uniform(0, within_s))
        self.job.kill(victim)
