"""Whether a piece of ours has become slower since another revision, measured side by side.

    python -m bench.regressions                  beside the parent commit, or HEAD if files are changed
    python -m bench.regressions --base v0.3      beside another revision
    python -m bench.regressions --pieces coordinator "batch encode"

Both revisions run their own `bench.micro`, each in a process of its own, and take turns: a round here,
one there. What counts is the CPU time of a process and not the clock, and of each side's rounds the cheapest:
what else a machine does makes a round dearer, never cheaper. What looks more than 20 % dearer is measured
twice more, with new processes, and fails only if it does so each time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST, ROUNDS, TRIES = 1.2, 5, 3


@dataclass(frozen=True)
class Rounds:
    """What rounds of a piece have cost on each side, in CPU milliseconds."""

    here: Sequence[float]
    base: Sequence[float]

    @property
    def ratio(self) -> float:
        """What it costs here, in units of what it costs at the base.

        Examples
        --------
        >>> Rounds([14.0, 12.0, 30.0], [10.0, 10.5, 18.0]).ratio
        1.2
        """
        return min(self.here) / min(self.base)


class Side:
    """A revision's pieces, in a process of its own."""

    def __init__(self, tree: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.micro", "--serve"],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        #: What a round of each piece does, by its name.
        self.pieces: Mapping[str, str] = self._answer()

    def round(self, name: str) -> float:
        """Return what a round costs, in CPU milliseconds."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side has ended with {self._process.wait(60)}; its error stands above")
        return json.loads(line)


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Unpack what a revision has, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="base-", dir=ROOT / "build") as folder:
        packed = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def default_base() -> str:
    """Return the parent commit; HEAD where files are changed, since their parent is that."""
    is_changed = _git("status", "--porcelain", "--untracked-files=no")
    return "HEAD" if is_changed else "HEAD~1"


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def measured(here: Path, base: Path, names: Sequence[str], rounds: int) -> Iterator[tuple[str, Rounds]]:
    """Yield what each piece costs in two trees; new processes take turns, round by round."""
    ours, theirs = sides = Side(here), Side(base)
    try:
        for name in names:
            taken: dict[Side, list[float]] = {ours: [], theirs: []}
            for number in range(rounds):
                # Whoever begins is the other one each time: the first of a pair finds other caches.
                for side in sides if number % 2 else sides[::-1]:
                    taken[side].append(side.round(name))
            yield name, Rounds(taken[ours], taken[theirs])
    finally:
        for side in sides:
            side.close()


def comparable(here: Mapping[str, str], base: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of pieces that both sides have, and why others are not compared.

    Examples
    --------
    >>> comparable({"a": "5 rows", "b": "5 rows", "c": "9 rows"}, {"a": "5 rows", "c": "5 rows", "d": ""})
    (['a'], {'b': 'new', 'c': 'does another work now', 'd': 'gone'})
    """
    others = {name: "new" if name not in base else "does another work now" for name in here}
    same = [name for name, work in here.items() if base.get(name) == work]
    gone = {name: "gone" for name in base if name not in here}
    return same, {name: why for name, why in others.items() if name not in same} | gone


def slower(here: Path, base: Path, names: Sequence[str], rounds: int) -> list[str]:
    """Compare pieces, print how they do, and return the names of those that have become slower."""
    left = list(names)
    for attempt in range(TRIES):
        too_much = "SLOWER" if attempt == TRIES - 1 else "once more"
        before, left = left, []
        for name, found in measured(here, base, before, rounds):
            if found.ratio > MOST:
                left.append(name)
            print(
                f"{name:<20} {min(found.here):8.1f} ms here, {min(found.base):8.1f} ms at the base: "
                f"{found.ratio:5.2f} times  {too_much if found.ratio > MOST else 'ok'}",
                flush=True,
            )
        if not left:
            break
    return left


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="a revision; by default the parent commit")
    parser.add_argument("--here", type=Path, default=ROOT, help="another tree than this one")
    parser.add_argument("--pieces", nargs="*", help="by default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    revision = args.base or default_base()
    head, short = (_git("rev-parse", "--short", one) for one in ("HEAD", revision))
    print(f"{head}, with what is changed in its files, beside {short}", flush=True)
    with tree_of(revision) as base:
        if not (base / "bench/micro.py").exists():
            print("all pieces are new: the base has none")
            return 0
        here_has, base_has = (_pieces(tree) for tree in (args.here, base))
        names, others = comparable(here_has, base_has)
        for name, why in others.items():
            print(f"{name:<20} is not compared: {why}")
        wanted = names if args.pieces is None else [name for name in names if name in args.pieces]
        found = slower(args.here, base, wanted, args.rounds)
    if found:
        print(f"more than {MOST - 1:.0%} dearer than at {revision}: {', '.join(found)}", file=sys.stderr)
    return 1 if found else 0


def _pieces(tree: Path) -> Mapping[str, str]:
    side = Side(tree)
    side.close()
    return side.pieces


if __name__ == "__main__":
    raise SystemExit(main())
