"""One job for a long time: a kill each minute, disturbances between them, samples all along, one report."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.process import JobFailed, Victim
from demo.verify import Verdict
from tests.crash.app import FIND_DEAD_VARIABLE
from tests.crash.soak.flatness import LIKE_AGE_S, Answer, Slope, find_slopes
from tests.crash.soak.rig import APP, SoakRig
from tests.crash.soak.samples import Sampler, read_samples
from tests.crash.soak.schedule import Death, Disturbance, Minute, Shot

#: Orders per second: the job holds it, though it is down for a third of each minute.
RATE = 100.0
MINUTE_S = 60.0
_PATIENCE_S = 600.0
#: A point that every checkpoint passes is passed soon.
_DIES_S = 180.0
_POLL_S = 0.2


@dataclass
class Outcome:
    """A finished run."""

    verdict: Verdict
    slopes: dict[str, Slope]
    kills: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    rewinds: int = 0
    #: How often the driver gave up while the broker was away, and was started again.
    ends_by_itself: int = 0
    wrong: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.verdict.is_exact and not self.wrong and not self.failure

    @property
    def unjudged(self) -> list[str]:
        """Series of too few values: all of a short run's may be, none of a long one's."""
        return [name for name, slope in self.slopes.items() if slope.answer is Answer.TOO_SHORT]

    @property
    def growing(self) -> list[str]:
        return [name for name, slope in self.slopes.items() if slope.answer is Answer.GROWS]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.verdict.to_json(),
            "kills": dict(self.kills),
            "disturbances": dict(self.disturbances),
            "starts": self.starts,
            "rewinds": self.rewinds,
            "ends_by_itself": self.ends_by_itself,
            "wrong": self.wrong,
            "failure": self.failure,
            "exact": self.is_exact,
            "growing": self.growing,
            "slopes": {name: slope.to_json() for name, slope in self.slopes.items()},
            "seconds": self.seconds,
        }


class Soak:
    """Runs the minutes of a schedule on one job.

    A minute is a life of the job: from a start to the kill at its end, which comes a minute after the kill
    before, or when the job has been seen at like age, whichever is later. So a slow machine takes longer, and
    a worker's kill leaves the driver alive for the next minute.

    Parameters
    ----------
    directory
        Emptied at the start; has ``samples.jsonl`` and ``driver.log`` at the end.
    seed
        Of the orders and of all moments.
    """

    def __init__(self, directory: Path, *, seed: int, rate: float = RATE) -> None:
        self._directory, self._seed, self._rate = directory, seed, rate
        self._chance = random.Random(seed)
        self._began = time.monotonic()
        self._kills: Counter[str] = Counter()
        self._disturbances: Counter[str] = Counter()
        self._ends_by_itself = 0
        self._wrong: list[str] = []

    def run(self, minutes: list[Minute]) -> Outcome:
        failure = ""
        path = self._directory / "samples.jsonl"
        with SoakRig(self._directory, APP, self._chance, interval_ms=1_000) as rig:
            self._rig, self._sampler = rig, Sampler(rig, path)
            rig.produce(seed=self._seed, rate=self._rate)
            self._sampler.start()
            try:
                rig.start()
                for minute in minutes:
                    self._live(minute)
                self._end()
            except JobFailed as error:
                failure = str(error)
            finally:
                self._sampler.stop()
            verdict = rig.verify()
            if not failure:
                self._wrong += rig.find_wrong_savepoints()
            return Outcome(
                verdict,
                find_slopes(read_samples(path)),
                self._kills,
                self._disturbances,
                rig.job.starts,
                rig.count_rewinds(),
                self._ends_by_itself,
                self._wrong,
                failure,
                round(time.monotonic() - self._began, 1),
            )

    # -- a minute -------------------------------------------------------------------------------
    def _live(self, minute: Minute) -> None:
        began = time.monotonic()
        self._sampler.minute = minute.number
        self._await_checkpoint()
        for disturbance in minute.disturbances:
            self._let_pass(self._chance.uniform(0, 5))
            self._disturb(disturbance, minute)
        self._await_that(
            lambda: time.monotonic() >= began + MINUTE_S and (self._sampler.age_s or 0) >= LIKE_AGE_S[1],
            "come of age",
        )
        self._kill(minute)

    def _disturb(self, disturbance: Disturbance, minute: Minute) -> None:
        began = time.monotonic()
        match disturbance:
            case Disturbance.PARTITION:
                self._rig.add_partition()
            case Disturbance.BOUNCE:
                self._rig.bounce_broker()
                self._await_checkpoint(may_end=True)
            case Disturbance.SAVEPOINT:
                if why_none := self._rig.take_savepoint(f"{minute.number:03}"):
                    self._wrong.append(f"minute {minute.number}: no savepoint: {why_none}")
            case Disturbance.MAINTENANCE:
                self._rig.optimize_and_vacuum()
            case Disturbance.REWIND | Disturbance.MAINTENANCE_WHILE_DEAD:
                # Part of the kill, or after it.
                return
        self._note(disturbance, began)

    def _kill(self, minute: Minute) -> None:
        began, rig = time.monotonic(), self._rig
        match minute.kill:
            case Shot(victim):
                rig.job.kill(victim)
                self._kills[victim.value] += 1
            case Death(point):
                rig.load_trigger(point)
                if (status := rig.job.wait(_DIES_S)) != -signal.SIGKILL:
                    raise rig.job.failed(f"was to die at {point}, but ended with status {status}")
                self._kills["point"] += 1
        self._say(f"minute {minute.number}: {minute.kill}", began)
        if Disturbance.MAINTENANCE_WHILE_DEAD in minute.disturbances:
            began = time.monotonic()
            if rig.job.is_alive:
                rig.job.kill(Victim.DRIVER)
            rig.optimize_and_vacuum()
            self._note(Disturbance.MAINTENANCE_WHILE_DEAD, began)
        if minute.rewinds:
            self._note(Disturbance.REWIND, began)
        if not rig.job.is_alive:
            rig.start({FIND_DEAD_VARIABLE: "yes"} if minute.rewinds else None)

    # -- waiting --------------------------------------------------------------------------------
    def _await_checkpoint(self, *, may_end: bool = False) -> None:
        seen = self._rig.confirmed
        self._await_that(lambda: self._rig.confirmed > seen, "complete a checkpoint", may_end=may_end)
        self._sampler.note_first_checkpoint()

    def _let_pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._await_that(lambda: time.monotonic() >= until, "run on")

    def _await_that(self, condition: Callable[[], bool], what: str, *, may_end: bool = False) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if self._sampler.failure is not None:
                raise self._sampler.failure
            if may_end and not self._rig.job.is_alive:
                # Its restarts are used up: whoever operates it starts it again.
                self._ends_by_itself += 1
                self._say(f"the driver ended by itself with status {self._rig.job.status}")
                self._rig.start()
            self._rig.check()
            if time.monotonic() > deadline:
                raise self._rig.job.failed(f"did not {what} within {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)

    def _end(self) -> None:
        """Let the job finish the input and stop it gracefully."""
        self._await_checkpoint()
        producer = self._rig.producer
        assert producer is not None
        producer.stop()
        producer.join(60)
        self._rig.drain(_PATIENCE_S)
        status = self._rig.job.terminate(_PATIENCE_S)
        if status != 0:
            raise self._rig.job.failed(f"was stopped gracefully and ended with status {status}")
        self._say("stopped; comparing")

    # -- telling --------------------------------------------------------------------------------
    def _note(self, disturbance: Disturbance, began: float) -> None:
        self._disturbances[disturbance.value] += 1
        self._say(disturbance.value, began)

    def _say(self, text: str, began: float | None = None) -> None:
        now = time.monotonic()
        took = f" ({now - began:.1f} s)" if began is not None and now - began >= 0.1 else ""
        print(f"{now - self._began:7.1f} s  {text}{took}", flush=True)
