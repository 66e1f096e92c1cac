"""Key groups and their bundles.

State is saved, moved and rescaled by key group. While a job runs, a call costs more than a record. So key
groups of one partition are *bundled*, and Spark calls an operator once for each bundle that has records.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Number of bundles of a partition in a new log.
BUNDLES_PER_PARTITION = 4


@dataclass(frozen=True, slots=True)
class Bundling:
    """Assignment of an operator's key groups to bundles; a bundle's id is its lowest key group."""

    key_groups: int
    #: Number of tasks that share the key groups.
    partitions: int
    #: Number of bundles of a partition.
    per_partition: int = BUNDLES_PER_PARTITION

    @property
    def bundles(self) -> int:
        return min(self.key_groups, self.partitions * self.per_partition)

    def bundle_of(self, group: int) -> int:
        return group % self.bundles

    def groups_of(self, bundle: int) -> range:
        return range(bundle, self.key_groups, self.bundles)
