"""Bases of big key groups in a bucket: which of them the state may name, and which it never will again.

A base is a file with what a key group held at some micro-batch; the state's value names it. On a disk each
checkpoint has links to all of them. In a bucket checkpoints have names: a task says which bases it has
written, the staged micro-batch keeps that, and a decision has those that count.

Pure: no store, no clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from flinkish_spark.protocol.codec import Check
from flinkish_spark.protocol.ids import BatchId, checked_name

#: Their folder. On a disk it is below Spark's state, whose own folders are numbers and which takes no notice
#: of others: ``bases/<operator>/<key group>-<micro-batch>-<random>``. In a bucket it is beside Spark's
#: checkpoint, which each owner begins anew: ``bases/<operator>/<chain>/<key group>-<micro-batch>-<random>``.
BASES = "bases"
BASE_NAME = re.compile(r"\d{1,9}-\d{1,18}-[0-9a-f]{16}")


def checked_base(value: str) -> str:
    parts = value.split("/") if isinstance(value, str) else []
    if len(parts) != 3 or not BASE_NAME.fullmatch(parts[2]):
        raise ValueError(f"{value!r:.200} is not the name of a base")
    for part in parts[:2]:
        checked_name(part, what="folder of a base")
    return value


Base = Annotated[str, Check(checked_base)]


def bases_behind(before: Iterable[str], written: Collection[str]) -> tuple[str, ...]:
    """Return the bases that count behind a micro-batch.

    A key group has one. Where a task ran twice and both wrote one, both count until the key group has its
    next: which of the two the state names is known to Spark alone.
    """
    anew = {_owner(name) for name in written}
    return tuple(sorted({*written, *(name for name in before if _owner(name) not in anew)}))


@dataclass(frozen=True)
class CountingBases:
    """The bases that count at a checkpoint."""

    batch: BatchId
    names: Collection[str]

    @cached_property
    def _latest(self) -> Mapping[tuple[str, str], int]:
        latest: dict[tuple[str, str], int] = {}
        for name in self.names:
            latest[_owner(name)] = max(_batch(name), latest.get(_owner(name), 0))
        return latest

    def keeps(self, name: str) -> bool:
        """Return whether the state may name it: its key group has no base of a later micro-batch here."""
        if name in self.names:
            return True
        return _batch(name) <= self.batch.value and self._latest.get(_owner(name), -1) <= _batch(name)


def superseded(
    found: Iterable[str], newest: CountingBases, checkpoints: Collection[CountingBases]
) -> frozenset[str]:
    """Return the bases that no state names, nor ever will."""
    # Each checkpoint that might need one has a later one of the same key group: a task's word that was lost,
    # or has not arrived yet, then costs a file and no state.
    old = (name for name in found if _batch(name) <= newest.batch.value)
    return frozenset(name for name in old if not any(one.keeps(name) for one in (newest, *checkpoints)))


def _owner(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    return folder, file.partition("-")[0]


def _batch(name: str) -> int:
    return int(name.rpartition("/")[2].split("-")[1])
