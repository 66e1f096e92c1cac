"""Stores outside of this host: their requests are counted, and no fork uses them.

A fork does not copy the threads of their clients: a process that was forked off one which has used a store
would wait for ever, also with a store of its own.
"""

from __future__ import annotations

import os
import threading
from collections import Counter

from flinkish_spark.core.errors import StoreError

#: The process whose threads the clients use; 0 before their first request.
_USED_BY = [0]

#: Of all stores of this process.
_ASKED: Counter[str] = Counter()
_COUNTING = threading.Lock()

KINDS = ("read", "put", "create", "list", "delete", "copy")


def requests_of_this_process() -> dict[str, int]:
    with _COUNTING:
        return {kind: _ASKED[kind] for kind in KINDS}


class CountedStore:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests by kind; a client's own repetitions count once."""
        with _COUNTING:
            return {kind: self._counts[kind] for kind in KINDS}

    def _count(self, kind: str) -> None:
        _USED_BY[0] = _USED_BY[0] or os.getpid()
        if _USED_BY[0] != os.getpid():
            raise StoreError(
                "this process cannot use a store in a bucket",
                why=f"it was forked off process {_USED_BY[0]}, which used one, and would wait for ever",
                what_to_do='start this process without a fork: multiprocessing.get_context("spawn")',
            )
        with _COUNTING:
            self._counts[kind] += 1
            _ASKED[kind] += 1
