"""Many seeds over all processors, and the one line that says what came of them."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.simulation.faults import FaultKind
from tests.simulation.runs import RunReport, simulate
from tests.simulation.surroundings import simulated_surroundings

#: Garbage is collected after so many seeds; each leaves rings of objects behind.
_SEEDS_PER_COLLECTION = 16
_CHUNK = 25


@dataclass
class Summary:
    """What became of many seeds."""

    seeds: int = 0
    steps: list[int] = field(default_factory=list)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    broken: list[RunReport] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, report: RunReport) -> None:
        """Count one seed."""
        self.seeds += 1
        self.steps.append(report.steps)
        self.faults += report.faults
        if report.broken is not None:
            self.broken.append(report)

    def line(self) -> str:
        """Return the JSON line."""
        return json.dumps(
            {
                "seeds": self.seeds,
                "steps_median": int(statistics.median(self.steps)) if self.steps else 0,
                "faults": {kind.value: self.faults[kind] for kind in FaultKind},
                "violations": len(self.broken),
                "seconds": round(self.seconds, 1),
            }
        )


def simulate_many(
    seeds: Sequence[int],
    *,
    processes: int | None = None,
    variant: Callable[[], AbstractContextManager[None]] | None = None,
    stop_at_first: bool = False,
) -> Summary:
    """Run seeds, in as many processes as there are processors.

    Parameters
    ----------
    variant
        Breaks the product on purpose, inside each process.
    stop_at_first
        Return once an invariant was broken.
    """
    summary, began = Summary(), time.perf_counter()
    count = processes or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    # Whoever waits for the first one does not want the others of its chunk.
    size = 1 if stop_at_first else _CHUNK
    chunks = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    with context.Pool(count, initializer=_initialise, initargs=(variant,)) as pool:
        for reports in pool.imap(_run_chunk, chunks):
            for report in reports:
                summary.add(report)
            if stop_at_first and summary.broken:
                pool.terminate()
                break
    summary.seconds = time.perf_counter() - began
    return summary


_surroundings: list[AbstractContextManager[None]] = []


def _initialise(variant: Callable[[], AbstractContextManager[None]] | None) -> None:
    gc.disable()
    gc.freeze()
    _surroundings[:] = [simulated_surroundings(), *([variant()] if variant else [])]
    for one in _surroundings:
        one.__enter__()


def _run_chunk(seeds: Sequence[int]) -> list[RunReport]:
    return list(_run(seeds))


def _run(seeds: Sequence[int]) -> Iterator[RunReport]:
    for number, seed in enumerate(seeds):
        yield simulate(seed)
        if number % _SEEDS_PER_COLLECTION == 0:
            gc.collect()
