"""Crash runs for as long as you like: `make chaos KILLS=200 SEED=7`.

Goes in rounds of up to twenty kills, each with a job of its own. A finished round is a line in
``rounds.jsonl``; called again with the same seed, what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from demo.rig import ROOT
from tests.crash.harness import CrashRun, random_crashes

KILLS_PER_ROUND = 20


def rounds_of(kills: int) -> list[int]:
    """Return how many kills each round has."""
    full, rest = divmod(kills, KILLS_PER_ROUND)
    return [KILLS_PER_ROUND] * full + ([rest] if rest else [])


def read_done(results: Path, seed: int) -> dict[int, dict[str, Any]]:
    """Return the finished rounds of this seed by number.

    A last line without its end was cut off by a kill of this program; its round is run again.
    """
    if not results.exists():
        return {}
    lines = results.read_text(encoding="utf-8").splitlines(keepends=True)
    rounds = [json.loads(line) for line in lines if line.endswith("\n")]
    return {one["round"]: one for one in rounds if one["seed"] == seed}


def run_round(directory: Path, seed: int, number: int, kills: int) -> dict[str, Any]:
    """Run one round; its crashes depend on seed and number only."""
    own_seed = seed * 1_000 + number
    crashes = random_crashes(kills, random.Random(own_seed))
    outcome = CrashRun(directory / f"round-{number}", seed=own_seed).run(crashes)
    return {
        "seed": seed,
        "round": number,
        "kills": len(outcome.crashes),
        **outcome.verdict.to_json(),
        "seconds": outcome.seconds,
        "exact": outcome.verdict.is_exact and not outcome.failure,
        "failure": outcome.failure,
        "remarks": list(outcome.verdict.remarks),
    }


def append(results: Path, line: dict[str, Any]) -> None:
    """Add a round; a cut-off last line of an earlier call is ended first."""
    results.parent.mkdir(parents=True, exist_ok=True)
    old = results.read_bytes() if results.exists() else b""
    whole = old[: old.rfind(b"\n") + 1]
    results.write_bytes(whole + json.dumps(line).encode() + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="the same seed goes on where it was")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "chaos")
    args = parser.parse_args()
    results = args.directory / "rounds.jsonl"
    done = read_done(results, args.seed)
    for number, kills in enumerate(rounds_of(args.kills), start=1):
        if done.get(number, {}).get("kills", 0) >= kills:
            print(f"round {number}: done before")
            continue
        print(f"round {number}: {kills} kills, seed {args.seed}")
        done[number] = run_round(args.directory, args.seed, number, kills)
        append(results, done[number])
        print(json.dumps(done[number]))
    bad = [number for number, one in sorted(done.items()) if not one["exact"]]
    total = sum(one["kills"] for one in done.values())
    print(json.dumps({"kills": total, "rounds": len(done), "bad_rounds": bad, "results": str(results)}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
