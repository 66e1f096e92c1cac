"""Key groups, and the integers that route them evenly over Spark's shuffle partitions.

A key group is ``pmod(xxhash64(key), max_parallelism)``, see `transport/key_hash.py`. Spark places a grouping
integer on partition ``pmod(murmur3(integer, 42), partitions)``, which spreads 128 groups over 2 partitions as
74 and 54. So each bundle of key groups gets a *route*: the next integer that Spark hashes to the bundle's
partition. Routes ascend within a partition, and the last route of each partition is its barrier's: Spark
passes groups to Python in ascending order, so a barrier comes after all records of its partition. Broadcast
elements, which every partition gets, have a negative route and come before the records. Each of the operators
that share tasks has routes of its own.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.transport.channels import TOPIC_SHIFT, number_of_topic

_MASK = 0xFFFFFFFF
#: Bits of a route below its operator's number among those that share tasks; more than any operator needs.
PLACE_BITS = 20


def _rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def spark_hash_int(value: int, seed: int = 42) -> int:
    """Return Spark's `hash()` of an INT: Murmur3 x86 32-bit of its four bytes, signed."""
    mixed = _rotate_left((value & _MASK) * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    h = (_rotate_left(seed ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    h ^= 4
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    h ^= h >> 16
    signed: int = struct.unpack("<i", struct.pack("<I", h))[0]
    return signed


@dataclass(frozen=True)
class Routing:
    """Routes of all bundles of an operator's key groups, and of its barriers."""

    #: Bundles of its key groups; partitions are Spark's shuffle partitions, the operator's parallelism.
    bundling: Bundling
    #: The operator's number among those that share its tasks.
    place: int = 0

    @property
    def partitions(self) -> int:
        return self.bundling.partitions

    @cached_property
    def _tables(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        bundles = self.bundling.bundles
        wanted = [0] * self.partitions
        for bundle in range(bundles):
            wanted[bundle % self.partitions] += 1
        found: list[list[int]] = [[] for _ in range(self.partitions)]
        route = self.place << PLACE_BITS
        while any(len(found[p]) <= wanted[p] for p in range(self.partitions)):
            partition = spark_hash_int(route) % self.partitions
            if len(found[partition]) <= wanted[partition]:
                found[partition].append(route)
            route += 1
        routes = tuple(
            found[bundle % self.partitions][bundle // self.partitions] for bundle in range(bundles)
        )
        return routes, tuple(own[-1] for own in found)

    @cached_property
    def of_broadcast(self) -> tuple[int, ...]:
        """Return the routes of broadcast elements, by partition; each is below all other routes there."""
        found: dict[int, int] = {}
        route = ~(self.place << PLACE_BITS)
        while len(found) < self.partitions:
            found.setdefault(spark_hash_int(route) % self.partitions, route)
            route -= 1
        return tuple(found[partition] for partition in range(self.partitions))

    @property
    def of_bundle(self) -> tuple[int, ...]:
        return self._tables[0]

    @cached_property
    def of_group(self) -> tuple[int, ...]:
        return tuple(
            self.of_bundle[self.bundling.bundle_of(group)] for group in range(self.bundling.key_groups)
        )

    @property
    def of_barrier(self) -> tuple[int, ...]:
        """Return the routes of barriers, by partition; each is above all bundles' routes there."""
        return self._tables[1]


def place_of(route: int) -> int:
    return (route if route >= 0 else ~route) >> PLACE_BITS


class Distribution(enum.Enum):
    """How the rows of an input are distributed over the partitions."""

    #: By key group.
    BY_KEY = "BY_KEY"
    #: Every partition gets all of them.
    BROADCAST = "BROADCAST"
    #: By channel, for an unkeyed stream.
    BY_CHANNEL = "BY_CHANNEL"
    #: By channel, passing through the operator to a downstream one.
    PASSING = "PASSING"


def find_topic(topics: Sequence[str], channel: int) -> str:
    number = channel >> TOPIC_SHIFT
    return (
        topics[0] if len(topics) == 1 else next(topic for topic in topics if number_of_topic(topic) == number)
    )
