"""A simulator: the product's own supervisor, coordinator and recovery under a seeded scheduler.

See `docs/simulation.md`. ``python -m flinkish_spark.testing.simulation --help`` runs it.
"""

from flinkish_spark.testing.simulation.runs import RunReport, simulate
from flinkish_spark.testing.simulation.surroundings import simulated_surroundings

__all__ = ["RunReport", "simulate", "simulated_surroundings"]
