"""Bases of big key groups in a bucket: which of them the state may name, and which it never will again.

A base is a file with the content of a key group at some micro-batch; the state's value names the file. On a
disk each checkpoint links all of its bases. In a bucket a checkpoint has their names: a task reports the
bases that it has written, the staged micro-batch keeps these names, and a decision lists the live bases.

Pure: no store, no clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from flinkish_spark.protocol.codec import Check
from flinkish_spark.protocol.ids import BatchId, check_name

#: Folder of the bases. On a disk it is below Spark's state, which ignores folders that are not numbers:
#: ``bases/<operator>/<key group>-<micro-batch>-<random>``. In a bucket it is beside Spark's checkpoint, which
#: each owner creates anew: ``bases/<operator>/<chain>/<key group>-<micro-batch>-<random>``.
BASES = "bases"
BASE_NAME = re.compile(r"\d{1,9}-\d{1,18}-[0-9a-f]{16}")


def check_base_name(value: str) -> str:
    parts = value.split("/") if isinstance(value, str) else []
    if len(parts) != 3 or not BASE_NAME.fullmatch(parts[2]):
        raise ValueError(f"{value!r:.200} is not the name of a base")
    for part in parts[:2]:
        check_name(part, what="folder of a base")
    return value


Base = Annotated[str, Check(check_base_name)]


def merge_bases(before: Iterable[str], written: Collection[str]) -> tuple[str, ...]:
    """Return the live bases after a micro-batch that wrote some.

    A key group has one. If two attempts of a task each wrote one, both stay live until the key group writes
    its next: only Spark knows which of the two the state names.
    """
    anew = {_parse_owner(name) for name in written}
    return tuple(sorted({*written, *(name for name in before if _parse_owner(name) not in anew)}))


@dataclass(frozen=True)
class LiveBases:
    """The bases that the state of a checkpoint may name."""

    batch: BatchId
    names: Collection[str]

    @cached_property
    def _latest(self) -> Mapping[tuple[str, str], int]:
        latest: dict[tuple[str, str], int] = {}
        for name in self.names:
            latest[_parse_owner(name)] = max(_parse_batch(name), latest.get(_parse_owner(name), 0))
        return latest

    def keeps(self, name: str) -> bool:
        """Return whether the state may name a base: its key group has no later one at this checkpoint."""
        if name in self.names:
            return True
        return _parse_batch(name) <= self.batch.value and self._latest.get(
            _parse_owner(name), -1
        ) <= _parse_batch(name)


def find_superseded(
    found: Iterable[str], newest: LiveBases, checkpoints: Collection[LiveBases]
) -> frozenset[str]:
    """Return the bases that no state names, nor ever will."""
    # A base is superseded only if every checkpoint has a later one of its key group. So a task's report that
    # was lost, or is late, costs disk space and no state.
    old = (name for name in found if _parse_batch(name) <= newest.batch.value)
    return frozenset(name for name in old if not any(one.keeps(name) for one in (newest, *checkpoints)))


def _parse_owner(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    return folder, file.partition("-")[0]


def _parse_batch(name: str) -> int:
    return int(name.rpartition("/")[2].split("-")[1])
