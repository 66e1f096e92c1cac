"""What a lineage begins with: nothing, or the state and the positions of a seed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.protocol.seeding import SeededChain
from flinkish_spark.savepoints.seed_source import load_seed
from flinkish_spark.sources.base import Source, SourceStart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.graph.stream_graph import SourceNode
    from flinkish_spark.protocol.scans import Chain
    from flinkish_spark.protocol.seeding import Seed


@dataclass(frozen=True)
class Beginning:
    """What the planner has to know of the seed of the live lineage.

    Spark logs offsets by the order of sources, so for the life of the lineage the plan has the same
    seeds in it, long after their state was read.

    Parameters
    ----------
    seed
        None for a lineage that began with nothing.
    folder
        Where the seed lies; means nothing without one.
    """

    seed: Seed | None = None
    folder: Path = Path()

    def label(self, chain: Chain) -> str:
        """Return what tells the beginning of a chain from others; empty where it begins with nothing."""
        begins = self._of(chain)
        return "" if begins is None else _digest([dict(begins.positions), dict(begins.states)])

    def positioned(self, node: SourceNode, chain: Chain, name: str) -> Source:
        """Return the node's source so that it begins where the seed says of that input of the chain."""
        begins = self._of(chain)
        if begins is None or name not in begins.positions:
            return node.source
        label = _digest(begins.positions[name])
        folder = self.folder / "begin" / f"{node.uid}-{label}"
        return node.source.starting_at(SourceStart(begins.positions[name], str(folder), label))

    def state_of(self, spark: SparkSession, operator: str, chain: Chain) -> DataFrame | None:
        """Return key groups and state of an operator in a chain; None if it begins with nothing."""
        begins = self._of(chain)
        if begins is None or operator not in begins.states:
            return None
        return load_seed(spark, self.folder, operator, chain.name)

    def _of(self, chain: Chain) -> SeededChain | None:
        return None if self.seed is None else self.seed.chain(chain.name)


def _digest(value: object) -> str:
    """Return a short name for a value, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
