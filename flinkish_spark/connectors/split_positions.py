"""Positions of a source of splits: offsets as they are logged, and how they are compared."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.codec import Form, Presence, StoredObject, read, store_as
from flinkish_spark.protocol.plan_layout import OWN_KEYS, SPLITS, Position, lowest

_UID, _ENDED, _DONE = f"{OWN_KEYS}source", f"{OWN_KEYS}ended", f"{OWN_KEYS}done"

#: A JSON value that only the source interprets; in most sources a rising number.
Offset = Any
_PAIRS = Form(
    lambda offsets: [list(pair) for pair in offsets.items()],
    lambda pairs: dict(read(tuple[tuple[str, Offset], ...], pairs)),
)


@dataclass(frozen=True)
class SplitPosition(StoredObject):
    uid: str = field(metadata=store_as(_UID))
    #: By split, in the order in which splits were found. The index of a split is its number and channel:
    #: new splits are appended, and none is removed.
    offsets: Annotated[Mapping[str, Offset], _PAIRS] = field(metadata=store_as(SPLITS))
    #: If the source is bounded and was read to its end.
    is_ended: bool = field(default=False, metadata=store_as(_ENDED, Presence.LEFT_OUT))
    #: Splits that were read to their end.
    done: frozenset[str] = field(default=frozenset(), metadata=store_as(_DONE, Presence.LEFT_OUT, at=2))

    @classmethod
    def from_json(cls, value: Position) -> Self:
        try:
            found: Self = read(cls, value)
        except ValueError as error:
            raise CorruptObjectError(
                f"{json.dumps(value)[:200]} is no position of a source of splits",
                why=f"it was logged by another kind of source, or is damaged ({error})",
                what_to_do="give the source a uid of its own; or restore the file from a backup",
            ) from error
        return found

    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.offsets)}

    def open_numbers(self) -> frozenset[int]:
        return frozenset(number for name, number in self.numbers().items() if name not in self.done)

    def move_to(self, offsets: Mapping[str, Offset]) -> SplitPosition:
        return replace(self, offsets={**self.offsets, **offsets})


def find_scan_positions(position: LoggedOffsets, uid: str) -> list[SplitPosition]:
    """Return the logged positions of a source: one per scan, since a plan may read a source several times."""
    return [
        SplitPosition.from_json(source)
        for source in position.sources
        if isinstance(source, dict) and source.get(_UID) == uid
    ]


def lowest_offsets(positions: Collection[SplitPosition]) -> dict[str, Offset]:
    # A split is left out if scans differ and its offsets are not numbers.
    if not positions:
        return {}
    found = lowest([one.to_json() for one in positions])
    return dict(SplitPosition.from_json(found).offsets)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def why_not_json(value: Offset) -> str:
    try:
        again = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        return f"it is no JSON value: {error}"
    return "" if again == value and value is not None else "it does not come back from JSON as it was"


def reaches(offset: Offset, end: Offset | None) -> bool:
    if is_number(offset) and is_number(end):
        return bool(offset >= end)
    return end is not None and bool(offset == end)
