"""Records of job directories as jobs of the simulator store them, each kind in every shape that it took.

They stand beside what one real job has left: rewinds, orders, requests from outside, replays and seeds, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.simulation.memory_store import MemoryStore
from tests.simulation.runs import simulate
from tests.simulation.surroundings import simulated_surroundings

SEEDS = range(1, 251)
_MOST_PER_KIND = 25


def kind_of(text: str) -> str | None:
    """Return the kind of a sealed object; None for anything else."""
    return json.loads(text.split("\n")[0])["kind"] if text.startswith('{"kind"') else None


def kept() -> dict[str, list[str]]:
    """Return sealed objects by kind, none of them of a shape that an earlier one has."""
    found: dict[str, dict[frozenset[str], str]] = {}
    put = MemoryStore.put

    def noting(self: MemoryStore, key: str, data: bytes) -> None:
        put(self, key, data)
        try:
            text = data.decode()
            kind = kind_of(text)
        except ValueError:
            return  # torn on purpose, or none of ours
        if kind is not None and text.count("\n") == 2:
            shapes = found.setdefault(kind, {})
            if len(shapes) < _MOST_PER_KIND:
                shapes.setdefault(frozenset(_shape(json.loads(text.split("\n")[1]))), text)

    MemoryStore.put = noting  # type: ignore[method-assign]
    try:
        with simulated_surroundings():
            for seed in SEEDS:
                assert simulate(seed).broken is None
    finally:
        MemoryStore.put = put  # type: ignore[method-assign]
    return {kind: list(shapes.values()) for kind, shapes in sorted(found.items())}


def _shape(value: Any, at: str = "") -> Iterator[str]:
    """Yield ways to values with their types; names that are numbers count as one."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _shape(one, f"{at}.{'0' if name.isdecimal() else name}")
    elif isinstance(value, list):
        for one in value:
            yield from _shape(one, f"{at}[]")
    yield f"{at}:{type(value).__name__}"
