"""The floor plan in figures: files, core and wings, arrows between packages, circles, longest files.

    python -m tools.house             print the figures
    python -m tools.house --index     print the modules, floor by floor, as the page on architecture has them

Imports of type hints and those within functions count like all others.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median

import grimp

from tools.wings import CORE, FACADE, Wings

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flinkish_spark"
#: From the top floor to the ground; the contract of import-linter in setup.cfg says the same.
FLOORS = [
    line.strip().removeprefix(f"{PACKAGE}.").split(f" | {PACKAGE}.")
    for line in (ROOT / "setup.cfg")
    .read_text()
    .partition("\nlayers =\n")[2]
    .partition("\n\n")[0]
    .splitlines()
]


def files() -> dict[str, Path]:
    """Return the modules of the package and where each lies."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows() -> dict[str, frozenset[str]]:
    """Return what each module imports of the package."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=False, cache_dir=None)
    return {name: frozenset(graph.find_modules_directly_imported_by(name)) for name in graph.modules}


def package_of(module: str) -> str:
    """Return the folder below the root that a module is in, or the module itself."""
    return module.split(".")[1] if "." in module else module


def circles(edges: Mapping[str, frozenset[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components that have more than one member (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in order:
                yield from visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            at = stack.index(name)
            found = stack[at:]
            del stack[at:]
            if len(found) > 1:
                yield sorted(found)

    for name in sorted(edges):
        if name not in order:
            yield from visit(name)


def between_packages(edges: Mapping[str, frozenset[str]]) -> Counter[tuple[str, str]]:
    """Return how many arrows lead from one package to another."""
    pairs = ((package_of(one), package_of(other)) for one in edges for other in edges[one])
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def count_imports_of_wings(edges: Mapping[str, frozenset[str]], wings: Wings) -> Counter[str]:
    """Return how many arrows lead from core to each wing."""
    owners = (wings.find(other) for one in edges if wings.find(one) == CORE for other in edges[one])
    return Counter(owner for owner in owners if owner not in (CORE, FACADE))


def _sum_up(counts: Counter[str]) -> str:
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{counts.total()} ({parts})" if parts else "0"


def figures() -> str:
    """Return the figures as a table in Markdown."""
    paths, edges = files(), arrows()
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items()}
    importers = Counter(other for one in edges for other in edges[one])
    packages = between_packages(edges)
    folders: dict[str, frozenset[str]] = {
        one: frozenset(b for a, b in packages if a == one) for one in {a for a, _ in packages}
    }
    longest = sorted(lines, key=lambda name: -lines[name])[:5]
    in_circles = [[name.removeprefix(f"{PACKAGE}.") for name in one] for one in circles(edges)]
    wings = Wings.read()
    part_lines: Counter[str] = Counter()
    for name, count in lines.items():
        part_lines[wings.find(name)] += count
    to_wings = count_imports_of_wings(edges, wings)
    rows = [
        ("Python files", len(paths)),
        ("lines", sum(lines.values())),
        ("lines of core", part_lines[CORE]),
        ("lines of wings", ", ".join(f"{wing} {part_lines[wing]}" for wing in wings.modules)),
        ("imports from core to wings", _sum_up(to_wings)),
        (
            "median, mean, longest file (lines)",
            f"{median(lines.values()):.0f}, {mean(lines.values()):.0f}, {lines[longest[0]]}",
        ),
        ("arrows from file to file", sum(map(len, edges.values()))),
        ("of these between packages", sum(packages.values())),
        ("files that one file imports", sum(importers[name] == 1 for name in paths)),
        ("circles of packages", "; ".join(", ".join(one) for one in circles(folders)) or "none"),
        ("circles of files", "; ".join(map(", ".join, in_circles)) or "none"),
        (
            "longest files",
            ", ".join(f"{name.removeprefix(f'{PACKAGE}.')} ({lines[name]})" for name in longest),
        ),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def index() -> str:
    """Return all modules, floor by floor from the top, each with the first line of its docstring."""
    paths = files()
    found = []
    for floor in FLOORS:
        for package in floor:
            own = [name for name in paths if f"{name}.".startswith(f"{PACKAGE}.{package}.")]
            found += [f"**{package}**", "", "| module | what it is |", "|---|---|"]
            for name in own:
                text = ast.get_docstring(ast.parse(paths[name].read_text(encoding="utf-8"))) or ""
                if text:
                    found.append(f"| `{name.removeprefix(PACKAGE + '.')}` | {text.splitlines()[0]} |")
            found.append("")
    return "\n".join(found).rstrip()


if __name__ == "__main__":
    print(index() if "--index" in sys.argv[1:] else figures())
