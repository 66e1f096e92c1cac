"""The start of a lineage: positions of its sources, and states of its operators."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.contracts.source import Source, SourceNode, SourceStart
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.planning.seed_source import load_seed
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.savepoints import SeededChain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.protocol.savepoints import Seed

_NOWHERE = StoreSpec("/")


@dataclass(frozen=True)
class Beginning:
    # Spark logs offsets by the order of sources, so the plan keeps the seed's sources long after their state
    # was read.

    #: None for a lineage that began without state.
    seed: Seed | None = None
    #: The folder of the seed, if there is one.
    folder: StoreSpec = _NOWHERE

    def label(self, chain: Chain) -> str:
        begins = self._find_chain(chain)
        return "" if begins is None else _digest([dict(begins.positions), dict(begins.states)])

    def find_input_label(self, chain: Chain, name: str) -> str:
        begins = self._find_chain(chain)
        return "" if begins is None or name not in begins.positions else _digest(begins.positions[name])

    def position_source(self, node: SourceNode, chain: Chain, name: str) -> Source:
        begins = self._find_chain(chain)
        if begins is None or name not in begins.positions:
            return node.source
        label = _digest(begins.positions[name])
        folder = self.folder.to_child(f"begin/{node.uid}-{label}").to_text()
        return node.source.starting_at(SourceStart(begins.positions[name], folder, label))

    def state_of(self, spark: SparkSession, operator: str, chain: Chain) -> DataFrame | None:
        begins = self._find_chain(chain)
        if begins is None or operator not in begins.states:
            return None
        return load_seed(spark, self.folder, operator, chain.name)

    def _find_chain(self, chain: Chain) -> SeededChain | None:
        return None if self.seed is None else self.seed.chain(chain.name)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


#: The start of a lineage without a seed.
NOTHING = Beginning()
