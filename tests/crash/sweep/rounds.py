"""What all long runs share: a broker, one job per sink, and lives of the process that all of them are in."""

from __future__ import annotations

import random
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from demo.process import JobProcess
from demo.rig import ROOT
from tests.crash.sweep.files import database_of
from tests.crash.sweep.life import Life, SweptBroker, job_process
from tests.crash.sweep.places import Database, Fleet, Place
from tests.crash.sweep.points import Call, Run, fault_runs, kill_runs
from tests.crash.sweep.results import Result, Results
from tests.crash.sweep.sinks import SINKS
from tests.crash.sweep.subject import Subject, Verdict
from tests.support.buckets import LocalS3
from tests.support.hdfs import LocalHdfs
from tests.support.postgres import LocalPostgres, unpack_postgres
from tests.support.services import BUILD

_UP_S = 300.0


@dataclass(frozen=True)
class Plan:
    """What to do.

    Parameters
    ----------
    choose
        Chooses among the runs of a sink; all of them, or a sample.
    deadline
        Monotonic time after which no run begins.
    store
        What job directories and Delta tables lie on: "disk" or "s3"; or "hdfs", for the tables alone.
    """

    directory: Path
    results: Path
    revision: str
    sinks: tuple[str, ...]
    choose: Callable[[Sequence[Run]], list[Run]]
    deadline: float
    store: str = "disk"


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


class Rounds(ABC):
    """Makes broker, jobs and lanes, and the lives that a plan needs.

    Everything in the plan's directory is made anew, results are appended to.
    """

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
            if any(SINKS[sink].needs_postgres for sink in plan.sinks):
                server = stack.enter_context(LocalPostgres(unpack_postgres(ROOT / "build" / "postgres")))
                places = tuple(_with_database(place, server) for place in places)
            if plan.store == "s3":
                s3 = stack.enter_context(LocalS3())
                places = tuple(replace(place, bucket=s3.new_store().to_text()) for place in places)
            if plan.store != "disk":
                stores = s3 if plan.store == "s3" else stack.enter_context(LocalHdfs(BUILD / "hdfs-jars"))
                places = tuple(replace(place, store=stores.new_store().to_text()) for place in places)
            # A Unix socket's path is short, and directories of checkouts may be long.
            self._fleet = Fleet(base, plan.directory / "scratch", plan.directory / "control", places)
            self._process: JobProcess = job_process(self._fleet, random.Random(1))
            stack.callback(self._process.reap)
            lanes = []
            for seed, place in enumerate(places):
                subject = Subject(place, seed)
                stack.callback(subject.close)
                lanes.append(Lane(subject, Results(plan.results / f"{place.sink}.jsonl", plan.revision)))
            self._go(lanes)

    @abstractmethod
    def _go(self, lanes: list[Lane]) -> None:
        """Do as much of the plan as there is time for."""

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._plan.deadline

    # -- parts ----------------------------------------------------------------------------------
    def _life(self, lanes: Sequence[Lane]) -> Life:
        fleet = self._fleet.only([lane.sink for lane in lanes])
        life = Life(fleet, self._process)
        for lane in lanes:
            life.wait_for(lane.sink, "up", _UP_S)
        return life

    @staticmethod
    def _side_by_side(lanes: Sequence[Lane], body: Callable[[Lane], None]) -> None:
        failures: list[Exception] = []

        def guarded(lane: Lane) -> None:
            try:
                body(lane)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(lane,), name=lane.sink) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise ExceptionGroup("some jobs could not go on", failures)

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


def _with_database(place: Place, server: LocalPostgres) -> Place:
    """Make a database for a job that needs one."""
    if not SINKS[place.sink].needs_postgres:
        return place
    name = database_of(place.sink)
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = server.url.replace(f"/{server.database}", f"/{name}")
    return replace(place, database=Database(url, server.user, server.password))
