"""`make soak MINUTES=100 SEED=7`: python -m tests.crash.soak.

The last line on standard output is one JSON object. The exit status is 1 if the output is not exact, a
savepoint is wrong, the job failed, something grows, or half an hour was too short to tell; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from demo.rig import ROOT, UnusableDirectory
from tests.crash.class_path import variables
from tests.crash.soak.flatness import BOUND, Answer, Slope
from tests.crash.soak.schedule import draw
from tests.crash.soak.soak import RATE, Outcome, Soak

#: A run of so many minutes has values enough for every series.
LEAST_JUDGED = 30


def table_of(slopes: dict[str, Slope]) -> Grid:
    """Return the table for people, with what grows at its top."""
    grid = Grid(title=f"flat: not above {BOUND:.0%} an hour for certain")
    grid.add_column("what")
    for name in ("values", "median", "an hour", "at least", "is"):
        grid.add_column(name, justify="right")
    for name, one in sorted(slopes.items(), key=lambda item: item[1].answer is not Answer.GROWS):
        is_judged = one.answer is not Answer.TOO_SHORT
        rates = [f"{one.slope:+.0%}", f"{one.low:+.0%}"] if is_judged else ["", ""]
        grid.add_row(name, str(one.values), f"{one.median:,.1f}", *rates, one.answer.value)
    return grid


def report(console: Console, outcome: Outcome) -> None:
    """Print what people look at first."""
    console.print(table_of(outcome.slopes))
    for remark in (*outcome.verdict.remarks, *outcome.wrong, outcome.failure):
        console.print(f"  {remark}" if remark else "", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{'exact' if outcome.is_exact else 'NOT exact'}; grows: {outcome.growing or 'nothing'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of orders, kills, disturbances and moments")
    parser.add_argument("--rate", type=float, default=RATE, help="orders per second")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "soak")
    args = parser.parse_args(arguments)
    if args.minutes < 1 or args.rate <= 0:
        parser.error("--minutes must be 1 or more, --rate above 0")
    return args


def main() -> int:
    args = parse_args()
    # SIGTERM must run the same clean-up as Ctrl-C: the broker and the job are other processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.update(variables())
    console = Console()
    minutes = draw(args.minutes, args.seed)
    console.print(f"seed {args.seed}: {args.minutes} minutes, {args.rate:g} orders a second", highlight=False)
    try:
        outcome = Soak(args.directory, seed=args.seed, rate=args.rate).run(minutes)
    except UnusableDirectory as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is gone")
        return 130
    report(console, outcome)
    line = json.dumps({"minutes": args.minutes, "seed": args.seed, "rate": args.rate, **outcome.to_json()})
    (args.directory / "report.json").write_text(line + "\n", encoding="utf-8")
    print(line)
    is_judged = args.minutes < LEAST_JUDGED or not outcome.unjudged
    return 0 if outcome.is_exact and not outcome.growing and is_judged else 1


if __name__ == "__main__":
    sys.exit(main())
