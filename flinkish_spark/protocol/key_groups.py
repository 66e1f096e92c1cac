"""Key groups, and the bundles of them that are worked on together.

State is saved, moved and rescaled by key group. While a job runs, a call costs more than a record: so key
groups of one partition are *bundled*, and Spark calls an operator once for each bundle that has records.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How many bundles a partition has in a log that begins now.
BUNDLES_PER_PARTITION = 4


@dataclass(frozen=True, slots=True)
class Bundling:
    """Which key groups of an operator are in one bundle, which is known by its lowest key group."""

    key_groups: int
    #: Tasks that its key groups are spread over.
    partitions: int
    #: Bundles of a partition.
    per_partition: int = BUNDLES_PER_PARTITION

    @property
    def bundles(self) -> int:
        return min(self.key_groups, self.partitions * self.per_partition)

    def bundle_of(self, group: int) -> int:
        return group % self.bundles

    def groups_of(self, bundle: int) -> range:
        return range(bundle, self.key_groups, self.bundles)
