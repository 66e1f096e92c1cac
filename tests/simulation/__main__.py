"""The command line: ``python -m tests.simulation``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from tests.simulation.many import Summary, simulate_many
from tests.simulation.patching import Variant
from tests.simulation.runs import simulate
from tests.simulation.surroundings import simulated_surroundings
from tests.simulation.variants import VARIANTS

_COMMAND = "python -m tests.simulation"
#: Failing seeds that are shown with their traces; the others are only named.
_MOST_SHOWN = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return the exit code: 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (default 200)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default 1)")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--trace", action="store_true", help="print the events of that seed")
    parser.add_argument("--variant", help="break the product on purpose; a name from --variants")
    parser.add_argument("--variants", action="store_true", help="show which seed catches each variant")
    chosen = parser.parse_args(arguments)
    variant = None if chosen.variant is None else _variant(chosen.variant)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    if chosen.variants:
        return _show_variants(seeds)
    if chosen.seed is not None:
        return _show_seed(chosen.seed, variant, is_traced=chosen.trace)
    summary = simulate_many(seeds, variant=variant)
    _show_broken(summary, variant)
    print(summary.line())
    return 1 if summary.broken else 0


def _variant(name: str) -> Variant:
    found = [one for one in VARIANTS if one.name == name]
    if not found:
        raise SystemExit(f"there is no variant {name!r}; choose from {[one.name for one in VARIANTS]}")
    return found[0]


def _show_seed(seed: int, variant: Variant | None, *, is_traced: bool) -> int:
    lines: list[str] = []
    with simulated_surroundings(), variant() if variant else contextlib.nullcontext():
        report = simulate(seed, trace=lines)
    if is_traced:
        print("\n".join(lines))
    faults = ", ".join(f"{count} {kind.value}" for kind, count in sorted(report.faults.items(), key=str))
    print(f"seed {seed}: {report.steps} steps; {faults}")
    print(f"BROKEN {report.broken}" if report.broken else "every invariant holds")
    return 1 if report.broken else 0


def _show_broken(summary: Summary, variant: Variant | None) -> None:
    extra = f" --variant '{variant.name}'" if variant else ""
    for report in summary.broken[:_MOST_SHOWN]:
        print(f"---- seed {report.seed}")
        _show_seed(report.seed, variant, is_traced=True)
    for report in summary.broken:
        print(f"seed {report.seed}: {report.broken}")
        print(f"    replay: {_COMMAND} --seed {report.seed} --trace{extra}")


def _show_variants(seeds: Sequence[int]) -> int:
    missed = 0
    print("| variant | first seed | invariant |\n|---|---|---|")
    for variant in VARIANTS:
        caught = simulate_many(seeds, variant=variant, stop_at_first=True).broken
        missed += not caught
        broken = caught[0].broken if caught else None
        print(f"| {variant.name} | {caught[0].seed if caught else '-'} | {broken.rule if broken else '-'} |")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
