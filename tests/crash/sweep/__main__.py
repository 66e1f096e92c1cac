"""`make crash-sweep`: python -m tests.crash.sweep."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demo.rig import ROOT
from tests.crash.sweep.points import Fault, Run, fault_runs, kill_runs
from tests.crash.sweep.results import Results, revision
from tests.crash.sweep.rounds import Plan
from tests.crash.sweep.sinks import SWEPT
from tests.crash.sweep.sweep import Sweep


def chooser(sample: int, faults: Sequence[Fault], points: str) -> Callable[[Sequence[Run]], list[Run]]:
    """Return what chooses runs: by fault, by a part of the point's text, and maybe a sample of them."""

    def choose(runs: Sequence[Run]) -> list[Run]:
        wanted = [run for run in runs if run.fault in faults and points in str(run.point)]
        if not sample or len(wanted) <= sample:
            return wanted
        chosen = set(random.Random(sample).sample(range(len(wanted)), sample))
        return [run for number, run in enumerate(wanted) if number in chosen]

    return choose


def summary(
    sinks: Sequence[str], results: Path, code: str, choose: Callable[[Sequence[Run]], list[Run]]
) -> dict[str, Any]:
    """Return the JSON line."""
    line: dict[str, Any] = {"sinks": {}, "lost": 0, "duplicated": 0, "partial_checkpoints": 0}
    left = not_met = stuck = 0
    for sink in sinks:
        file = Results(results / f"{sink}.jsonl", code)
        calls, found = file.trace or [], file.all()
        planned = [*choose(fault_runs(calls)), *choose(kill_runs(calls))]
        line["sinks"][sink] = {
            "points": len({run.point for run in planned}),
            "runs": sum(result.is_met for result in found.values()),
        }
        left += sum(run not in found for run in planned) + (not calls)
        not_met += sum(not result.is_met for result in found.values())
        for result in found.values():
            stuck += result.verdict.stuck
            line["lost"] += result.verdict.lost
            line["duplicated"] += result.verdict.duplicated
            line["partial_checkpoints"] += result.verdict.partial
    return {**line, "stuck": stuck, "not_met": not_met, "left": left}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.sweep", description=__doc__)
    parser.add_argument("--sinks", default=",".join(SWEPT), help="names, with commas between them")
    parser.add_argument("--faults", default=",".join(fault.value for fault in Fault))
    parser.add_argument("--points", default="", help="only points with this in their name")
    parser.add_argument("--sample", type=int, default=0, help="so many runs of each kind; 0 is all")
    parser.add_argument("--minutes", type=float, default=45.0, help="begin no run after this time")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--store", choices=("disk", "s3", "hdfs"), default="disk")
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    directory = args.directory or ROOT / "build" / "crash-sweep" / args.store
    began = time.monotonic()
    sinks = tuple(args.sinks.split(","))
    if args.fresh:
        for sink in sinks:
            (directory / f"{sink}.jsonl").unlink(missing_ok=True)
    choose = chooser(args.sample, [Fault(name) for name in args.faults.split(",")], args.points)
    deadline = began + args.minutes * 60
    code = revision()
    Sweep(Plan(directory / "work", directory, code, sinks, choose, deadline, args.store)).run()
    line = summary(sinks, directory, code, choose)
    print(json.dumps({**line, "seconds": round(time.monotonic() - began)}))
    wrong = ("lost", "duplicated", "partial_checkpoints", "stuck", "left")
    return 1 if any(line[name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
