"""The sweep: every fault at every call of one checkpoint, for every sink.

First one process in which calls fail, lose their answers and are repeated, one after the other; then
lives that end with a kill. In each life every job goes to the next of its points and stands still
there; when all have come, the process is killed, and the next life begins with what that left.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from demo.process import JobFailed, JobProcess
from demo.rig import ROOT
from tests.crash.sweep.life import DiedEarly, Life, SweptBroker, job_process
from tests.crash.sweep.places import Fleet
from tests.crash.sweep.points import Call, Run, fault_runs, kill_runs, union
from tests.crash.sweep.results import Result, Results
from tests.crash.sweep.subject import Subject, Verdict

_T = TypeVar("_T")
_WARM_UP = 3
_UP_S = 180.0


@dataclass(frozen=True)
class Plan:
    """What to do.

    Parameters
    ----------
    choose
        Chooses among the runs of a sink; all of them, or a sample.
    deadline
        Monotonic time after which no run begins.
    """

    directory: Path
    results: Path
    revision: str
    sinks: tuple[str, ...]
    choose: Callable[[Sequence[Run]], list[Run]]
    deadline: float


@dataclass
class Lane:
    """One job and what is left to do with it."""

    subject: Subject
    results: Results
    faults: list[Run] = field(default_factory=list)
    kills: list[Run] = field(default_factory=list)
    #: The kill that the next life begins with.
    last: tuple[Run, float] | None = None
    is_broken: bool = False

    @property
    def sink(self) -> str:
        return self.subject.place.sink

    def plan(self, calls: list[Call], choose: Callable[[Sequence[Run]], list[Run]]) -> None:
        """Find out what is left to do."""
        self.faults = [run for run in choose(fault_runs(calls)) if not self.results.is_done(run)]
        self.kills = [run for run in choose(kill_runs(calls)) if not self.results.is_done(run)]

    def note(self, result: Result) -> None:
        self.results.add(result)
        # What comes later stands on it: nothing new would be learned.
        self.is_broken = self.is_broken or not result.verdict.is_exact


class Sweep:
    """Runs a plan; everything in its directory is made anew, results are appended to."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = time.monotonic()

    def run(self) -> None:
        """Do as much of the plan as there is time for."""
        plan = self._plan
        shutil.rmtree(plan.directory, ignore_errors=True)
        base = plan.directory / "jobs"
        base.mkdir(parents=True)
        with ExitStack() as stack:
            broker = stack.enter_context(SweptBroker(plan.directory / "broker", plan.sinks))
            places = tuple(broker.place(base, sink) for sink in plan.sinks)
            # A Unix socket's path is short, and directories of checkouts may be long.
            self._fleet = Fleet(
                base, plan.directory / "scratch", ROOT / "build" / "jars", plan.directory / "control", places
            )
            self._process: JobProcess = job_process(self._fleet, random.Random(1))
            stack.callback(self._process.reap)
            lanes = []
            for seed, place in enumerate(places):
                subject = Subject(place, seed)
                stack.callback(subject.close)
                lanes.append(Lane(subject, Results(plan.results / f"{place.sink}.jsonl", plan.revision)))
            self._in_process(lanes)
            self._kills(lanes)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._plan.deadline

    # -- one process ----------------------------------------------------------------------------
    def _in_process(self, lanes: list[Lane]) -> None:
        life = self._life(lanes)
        try:
            self._side_by_side(lanes, partial(self._prepare, life))
            self._say(f"{sum(len(lane.faults) for lane in lanes)} faults in one process")
            self._side_by_side(lanes, partial(self._faults, life))
            if not self._classes.exists():
                life.exit()
        finally:
            life.kill()

    def _prepare(self, life: Life, lane: Lane) -> None:
        subject = lane.subject
        subject.warm_up(life, _WARM_UP)
        calls = lane.results.trace
        if calls is None:
            calls = union(subject.trace(life), subject.trace(life))
            lane.results.add_trace(calls)
        lane.plan(calls, self._plan.choose)

    def _faults(self, life: Life, lane: Lane) -> None:
        while lane.faults and not self._is_over and not lane.is_broken:
            run = lane.faults.pop(0)
            began = time.monotonic()
            is_met, verdict = lane.subject.under_fault(life, run)
            notes = "; ".join(note for note in lane.subject.notes if note != "fired")
            lane.note(Result(run, is_met, verdict, time.monotonic() - began, notes))
            self._said(lane, run, is_met, verdict)

    # -- lives that end with a kill -------------------------------------------------------------
    def _kills(self, lanes: list[Lane]) -> None:
        while True:
            # One more life than kills: the last one shows what the last kill left.
            going = [lane for lane in lanes if self._goes_on(lane)]
            if not going:
                return
            life = self._life(going)
            try:
                self._side_by_side(going, partial(self._live_and_die, life))
            finally:
                life.kill()

    def _goes_on(self, lane: Lane) -> bool:
        return lane.last is not None or (bool(lane.kills) and not self._is_over and not lane.is_broken)

    def _live_and_die(self, life: Life, lane: Lane) -> None:
        subject = lane.subject
        verdict = subject.recover(life)
        if lane.last is not None:
            (run, began), lane.last = lane.last, None
            lane.note(Result(run, True, verdict, time.monotonic() - began))
            self._said(lane, run, True, verdict)
        if not lane.kills or self._is_over or lane.is_broken:
            return
        run, began = lane.kills.pop(0), time.monotonic()
        if not subject.until_reached(life, run):
            lane.note(Result(run, False, Verdict(), time.monotonic() - began))
            self._said(lane, run, False, Verdict())
            return
        lane.last = (run, began)
        early = subject.too_early()
        if not early.is_exact:
            lane.last = None
            lane.note(Result(run, True, early, time.monotonic() - began))
            self._said(lane, run, True, early)

    # -- parts ----------------------------------------------------------------------------------
    def _life(self, lanes: Sequence[Lane]) -> Life:
        fleet = self._fleet.only([lane.sink for lane in lanes])
        life = Life(fleet, self._process, self._classes)
        for lane in lanes:
            life.wait_for(lane.sink, "up", _UP_S)
        return life

    @property
    def _classes(self) -> Path:
        return self._plan.results / "classes.jsa"

    @staticmethod
    def _side_by_side(lanes: Sequence[Lane], body: Callable[[Lane], None]) -> None:
        failures: list[BaseException] = []

        def guarded(lane: Lane) -> None:
            try:
                body(lane)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(lane,), name=lane.sink) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _keep(self, lane: Lane) -> None:
        """Keep what a wrong result was found with; the next start makes everything else anew."""
        kept = self._plan.results / "wrong" / lane.sink
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(lane.subject.place.directory, kept, ignore_dangling_symlinks=True)
        shutil.copy(self._process.log, kept / "driver.log")
        self._say(f"{lane.sink:14} what it left is kept in {kept}")

    def _said(self, lane: Lane, run: Run, is_met: bool, verdict: Verdict) -> None:
        how = "exact" if verdict.is_exact else f"WRONG: {verdict}"
        left = len(lane.faults) + len(lane.kills)
        self._say(f"{lane.sink:14} {how if is_met else 'not met'}: {run}   ({left} left)")
        if not verdict.is_exact:
            self._keep(lane)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)


__all__ = ["DiedEarly", "JobFailed", "Plan", "Sweep"]
