"""Running seeds: one, and many over all processors."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.cluster import Cluster
from tests.simulation.faults import FaultKind
from tests.simulation.final_check import check_end
from tests.simulation.invariants import Invariants
from tests.simulation.rules import Rule
from tests.simulation.scenario import draw_scenario
from tests.simulation.scheduler import Process
from tests.simulation.worker_pool import WorkerPool
from tests.simulation.world import InvariantBroken, World

POOL = WorkerPool()


@dataclass(frozen=True)
class RunReport:
    """What became of one seed.

    Parameters
    ----------
    steps
        Events outside the product: store operations, sink calls, Spark's steps.
    faults
        How often each kind struck.
    broken
        The invariant that did not hold, with what was seen; None if all did.
    trace
        Every event as a line, if it was asked for.
    """

    seed: int
    steps: int
    faults: Counter[FaultKind]
    broken: InvariantBroken | None
    trace: list[str] = field(default_factory=list)


class _LogLines(logging.Handler):
    """Puts what the product logs into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"log {record.levelname.lower()}", record.getMessage())


def simulate(seed: int, *, trace: list[str] | None = None) -> RunReport:
    """Run one seed; call it inside :func:`simulated_surroundings`.

    Parameters
    ----------
    trace
        A list to fill with the events; tracing changes nothing but the time it takes.

    Examples
    --------
    >>> from tests.simulation import simulate, simulated_surroundings
    >>> with simulated_surroundings():
    ...     report = simulate(1)
    >>> report.broken is None
    True
    """
    world = World(draw_scenario(seed), POOL, trace)
    handler = None if trace is None else _LogLines(world)
    logger = logging.getLogger("flinkish_spark")
    if handler is not None:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        invariants = Invariants(world)
        cluster = Cluster(world, invariants)
        cluster.start()
        world.scheduler.spawn(Process("people"), "people", cluster.people)
        world.scheduler.run()
    finally:
        if handler is not None:
            logger.removeHandler(handler)
    failure = world.scheduler.failure
    if failure is None:
        failure = check_end(world, invariants)
    if failure is not None and not isinstance(failure, InvariantBroken):
        failure = InvariantBroken(
            Rule.NO_SURPRISE.name, f"a thread ended: {type(failure).__name__}: {failure}"
        )
    return RunReport(seed, world.steps, world.faults.counts, failure, trace or [])
