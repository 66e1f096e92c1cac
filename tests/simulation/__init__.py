"""A simulator: the product's own supervisor, coordinator and recovery under a seeded scheduler.

See `docs/simulation.md`. ``python -m tests.simulation --help`` runs it.
"""

from tests.simulation.runs import RunReport, simulate
from tests.simulation.surroundings import simulated_surroundings

__all__ = ["RunReport", "simulate", "simulated_surroundings"]
