"""Random kills of the sinks under test: `make chaos SINK=all KILLS=100`.

All jobs share one process, so a kill hits every sink, wherever it is just then. Each is audited when it
has recovered. Kills are counted per sink in ``<sink>.jsonl``; called again, the count goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from demo.process import JobFailed, Victim
from demo.rig import ROOT
from tests.crash.sweep.life import DiedEarly, Life
from tests.crash.sweep.points import Fault, Point, Run
from tests.crash.sweep.results import Result, Results, revision
from tests.crash.sweep.rounds import Lane, Plan, Rounds
from tests.crash.sweep.sinks import SWEPT
from tests.crash.sweep.subject import Verdict

#: A driver may die up to so long after all jobs have recovered: two or three checkpoints.
_WITHIN_S = 6.0
_ASKS_EVERY_S, _LOOKS = 0.4, 4


class Chaos(Rounds):
    """Kills something of the process at random, until every sink has met enough kills.

    Parameters
    ----------
    kills
        Per sink, those of earlier calls included.
    """

    def __init__(self, plan: Plan, kills: int, chance: random.Random) -> None:
        super().__init__(plan)
        self._kills, self._chance = kills, chance

    def _go(self, lanes: list[Lane]) -> None:
        counts = {lane.sink: len(lane.results.all()) for lane in lanes}
        life = self._life(lanes)
        try:
            self._side_by_side(lanes, lambda lane: lane.subject.warm_up(life, 2))
            while min(counts.values()) < self._kills and not self._is_over:
                victim = self._chance.choice(list(Victim))
                number = max(counts.values()) + 1
                self._kill(life, lanes, victim)
                if not self._process.is_alive:
                    life.kill()
                    life = self._life(lanes)
                run = Run(Point(f"random {victim.value}", number), Fault.KILL)
                self._side_by_side(lanes, partial(self._audit, life, run, time.monotonic()))
                counts = {sink: count + 1 for sink, count in counts.items()}
                if any(lane.is_broken for lane in lanes):
                    return
        finally:
            life.kill()

    def _kill(self, life: Life, lanes: list[Lane], victim: Victim) -> None:
        """Keep all jobs busy, and kill in the middle of it."""
        is_over = threading.Event()
        threads = [threading.Thread(target=_keep_busy, args=(life, lane, is_over)) for lane in lanes]
        for thread in threads:
            thread.start()
        time.sleep(self._chance.uniform(0, _WITHIN_S))
        self._process.kill(victim)
        is_over.set()
        for thread in threads:
            thread.join()

    def _audit(self, life: Life, run: Run, began: float, lane: Lane) -> None:
        early = lane.subject.too_early()
        verdict = early if not early.is_exact else lane.subject.recover(life)
        lane.note(Result(run, True, verdict, time.monotonic() - began))
        self._said(lane, run, True, verdict)


def _keep_busy(life: Life, lane: Lane, is_over: threading.Event) -> None:
    """Feed a job and ask it for checkpoints all the time."""
    with contextlib.suppress(DiedEarly, JobFailed):
        while not is_over.is_set():
            lane.subject.feed(4)
            life.say(lane.sink, "trigger")
            for _ in range(_LOOKS):
                lane.subject.follow()
                lane.subject.watch()
                is_over.wait(_ASKS_EVERY_S / _LOOKS)


def summary(results: Path, sinks: tuple[str, ...], code: str) -> dict[str, Any]:
    """Return the JSON line."""
    kills, verdicts = {}, list[Verdict]()
    for sink in sinks:
        found = Results(results / f"{sink}.jsonl", code).all()
        kills[sink] = len(found)
        verdicts += [result.verdict for result in found.values()]
    return {
        "kills": kills,
        "lost": sum(one.lost for one in verdicts),
        "duplicated": sum(one.duplicated for one in verdicts),
        "partial_checkpoints": sum(one.partial for one in verdicts),
        "stuck": sum(one.stuck for one in verdicts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.sweep.chaos", description=__doc__)
    parser.add_argument("--sinks", default="all", help="names, with commas between them")
    parser.add_argument("--kills", type=int, default=100, help="per sink")
    parser.add_argument("--seed", type=int, default=None, help="of victims and moments")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "chaos-sinks")
    args = parser.parse_args()
    sinks = SWEPT if args.sinks == "all" else tuple(args.sinks.split(","))
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")
    code, deadline = revision(), time.monotonic() + args.minutes * 60
    plan = Plan(args.directory / "work", args.directory, code, sinks, list, deadline)
    Chaos(plan, args.kills, random.Random(seed)).run()
    line = summary(args.directory, sinks, code)
    print(json.dumps(line))
    wrong = any(line[name] for name in ("lost", "duplicated", "partial_checkpoints", "stuck"))
    return 1 if wrong or min(line["kills"].values()) < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
