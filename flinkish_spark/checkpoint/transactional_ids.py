"""The pool of numbers for transactional ids."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterable


class BlockPool:
    """Leases the smallest free numbers, so that brokers see few transactional ids.

    A block is leased per (sink, micro-batch) and returned only after the receipt: until then its transaction
    may be committed again, and a second transaction under the same id would be committed instead.
    Blocks of failed attempts are never returned: their task attempts may still be running. Block 0 is not
    used, so that probes never meet a real transaction.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._numbers = itertools.count(1)
        self._leased: set[int] = set()

    def lease(self) -> int:
        with self._lock:
            block = heapq.heappop(self._free) if self._free else next(self._numbers)
            self._leased.add(block)
            return block

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks to the pool after their receipt; those of an earlier owner are ignored."""
        with self._lock:
            for block in blocks:
                if block in self._leased:
                    self._leased.remove(block)
                    heapq.heappush(self._free, block)

    def forget(self) -> None:
        """Never lease the leased blocks again; called at a restart of the query."""
        with self._lock:
            self._leased.clear()

    @property
    def leased(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._leased)
