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
    """Which key groups of an operator are in one bundle.

    A bundle is known by its lowest key group. Where there are at least as many bundles as key groups, each is
    its own bundle.

    Parameters
    ----------
    key_groups
        The operator's max parallelism.
    partitions
        Tasks that its key groups are spread over.
    per_partition
        Bundles of a partition; None in a log that began when there were none.

    Examples
    --------
    >>> bundling = Bundling(key_groups=10, partitions=2, per_partition=2)
    >>> bundling.bundles, [bundling.bundle_of(group) for group in range(10)]
    (4, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
    >>> bundling.groups_of(1)
    range(1, 10, 4)
    """

    key_groups: int
    partitions: int
    per_partition: int | None = BUNDLES_PER_PARTITION

    @property
    def bundles(self) -> int:
        """How many bundles there are."""
        if self.per_partition is None:
            return self.key_groups
        return min(self.key_groups, self.partitions * self.per_partition)

    def bundle_of(self, group: int) -> int:
        """Return the bundle of a key group; it is in the same partition as its key groups."""
        return group % self.bundles

    def groups_of(self, bundle: int) -> range:
        """Return the key groups of a bundle."""
        return range(bundle, self.key_groups, self.bundles)
