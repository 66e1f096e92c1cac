"""The demo: a job is killed again and again, and nothing is lost and nothing comes twice.

Run it with `make demo`. The last line on standard output is one JSON object; the exit status is 1
if one of the five numbers that must be 0 is not, or if the job failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from demo.display import Display
from demo.process import JobFailed, Victim
from demo.rig import ROOT, Rig, UnusableDirectory
from demo.verify import Verdict
from flinkish_spark.core.errors import FlinkishError
from tests.support.buckets import BucketServer, LocalS3
from tests.support.hdfs import LocalHdfs

#: What a kill costs here: restart, recovery, first checkpoint. Only to spread the kills over the input.
_SECONDS_PER_KILL = 34
_MOST_RATE = 3_000
_LONGEST_WAIT_S = 300.0


@dataclass
class Story:
    """What happened to the job in one run."""

    victims: list[Victim] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)
    #: Kills while input still arrived; fewer than all means that the machine was slow or the rate high.
    hits_with_input: int = 0


def choose_victims(kills: int, chance: random.Random) -> list[Victim]:
    """Return whom to kill: every kind equally often, in an order of chance."""
    victims: list[Victim] = []
    while len(victims) < kills:
        kinds = list(Victim)
        chance.shuffle(kinds)
        victims += kinds
    return victims[:kills]


def default_rate(orders: int, kills: int) -> float:
    """Return a rate at which input still arrives when the last kill comes."""
    return min(_MOST_RATE, orders / (30 + kills * _SECONDS_PER_KILL))


def run(rig: Rig, display: Display, args: argparse.Namespace, chance: random.Random, story: Story) -> Verdict:
    """Produce, kill, wait for the end of the input, stop, verify."""
    producer = rig.produce(seed=args.seed, rate=args.rate, count=args.orders)
    rig.job.start()
    for victim in choose_victims(args.kills, chance):
        seen = rig.confirmed
        rig.wait_for(lambda: rig.confirmed > seen, "the next checkpoint", _LONGEST_WAIT_S)  # noqa: B023
        _let_pass(rig, chance.uniform(0, 5))
        display.killed(victim)
        story.victims.append(victim)
        story.moments_s.append(round(display.seconds, 2))
        rig.job.kill(victim)
        story.hits_with_input += producer.is_alive()
        if not rig.job.is_alive:
            rig.job.start()
    # Without input left the job would look finished although it lies dead from the last kill.
    recovered_from = rig.confirmed
    rig.wait_for(lambda: rig.confirmed > recovered_from, "the recovery from the last kill", _LONGEST_WAIT_S)
    display.say("no more kills; waiting for the end of the input")
    rig.wait_for(lambda: not producer.is_alive(), "the end of the input", 60 + args.orders / args.rate)
    rig.check()
    rig.drain(_LONGEST_WAIT_S)
    display.say("all input is done; SIGTERM: a last checkpoint, then the end")
    status = rig.job.terminate(_LONGEST_WAIT_S)
    if status != 0:
        raise rig.job.failed(f"was stopped gracefully and ended with status {status}")
    display.say("comparing both sinks with a recomputation from the input")
    return rig.verify()


def _let_pass(rig: Rig, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rig.check()
        time.sleep(0.02)


def report(console: Console, verdict: Verdict, line: dict[str, object]) -> None:
    """Print the table for people and the line for programs."""
    zeros = verdict.zeros
    grid = Grid(title="exactly once" if verdict.is_exact else "NOT exactly once", min_width=60)
    grid.add_column("what")
    grid.add_column("found", justify="right")
    grid.add_column("must be", justify="right")
    for name, value in line.items():
        if isinstance(value, int | float | str):
            grid.add_row(name, f"{value:,}" if isinstance(value, int) else str(value), "0" * (name in zeros))
    for sink, one in verdict.differences.items():
        grid.add_row(f"{sink}: lost / twice", f"{one.lost} / {one.duplicated}", "0 / 0")
    console.print(grid)
    for remark in verdict.remarks:
        console.print(f"  {remark}", markup=False, highlight=False)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, help="orders, victims and moments (default: drawn and printed)")
    parser.add_argument("--orders", type=int, default=300_000)
    parser.add_argument("--rate", type=float, help="orders per second (default: so that all kills hit)")
    parser.add_argument("--shim", action="store_true", help="with the JAR of our JVM side (make shim)")
    parser.add_argument(
        "--store", choices=("disk", "s3", "hdfs"), default="disk", help="what the job directory lies on"
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "demo")
    args = parser.parse_args(arguments)
    if args.kills < 0 or args.orders < 1 or (args.rate is not None and args.rate <= 0):
        parser.error("--kills must be 0 or more, --orders and --rate above 0")
    args.seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    args.rate = args.rate or default_rate(args.orders, args.kills)
    # Spark's own checkpoint files in a bucket and on HDFS are the JVM side's.
    args.is_bare = not args.shim and args.store == "disk"
    return args


def server_of(store: str) -> contextlib.AbstractContextManager[BucketServer | None]:
    """Return the server on which the job directory is to lie; for a disk none."""
    if store == "hdfs":
        return LocalHdfs(ROOT / "build" / "hdfs-jars")
    return LocalS3() if store == "s3" else contextlib.nullcontext()


def main() -> int:
    args = parse_args()
    # SIGTERM must run the same clean-up as Ctrl-C: the broker and the job are other processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    console.print(
        f"seed {args.seed}: {args.orders:,} orders at {args.rate:,.0f} a second, {args.kills} kills; "
        f"again with make demo KILLS={args.kills} SEED={args.seed} {'' if args.is_bare else 'SHIM=1 '}"
        f"STORE={args.store}",
        highlight=False,
        soft_wrap=True,
    )
    chance, story = random.Random(args.seed), Story()
    started = time.monotonic()
    try:
        with (
            server_of(args.store) as buckets,
            Rig(
                args.directory, ROOT / "demo" / "app.py", chance, is_bare=args.is_bare, buckets=buckets
            ) as rig,
            Display(console, rig, args.orders) as display,
        ):
            verdict = run(rig, display, args, chance, story)
            restarts, query_restarts = rig.job.starts - 1, rig.query_restarts
    except (JobFailed, FlinkishError, UnusableDirectory) as failure:
        console.print(f"FAILED (seed {args.seed}): {failure}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is gone")
        return 130
    line: dict[str, object] = {
        "orders": verdict.orders,
        "kills": len(story.victims),
        **verdict.to_json(),
        "restarts": restarts,
        "query_restarts": query_restarts,
        "kills_while_input_arrived": story.hits_with_input,
        "bare": args.is_bare,
        "store": args.store,
        "seed": args.seed,
        "rate": round(args.rate),
        "seconds": round(time.monotonic() - started, 1),
    }
    report(console, verdict, line)
    print(json.dumps({**line, "killed": [v.value for v in story.victims], "killed_at_s": story.moments_s}))
    all_produced = verdict.orders == args.orders
    return 0 if verdict.is_exact and all_produced else 1


if __name__ == "__main__":
    sys.exit(main())
