"""Where a source of splits stands, as it travels in Spark's offset log and in savepoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from flinkish_spark.errors import CorruptObjectError
from flinkish_spark.protocol.codec import Form, Presence, Stored, read, stored
from flinkish_spark.protocol.scans import OWN_KEYS, SPLITS, Position, lowest

if TYPE_CHECKING:
    from flinkish_spark.runtime.spark_log import LoggedOffsets

_UID, _ENDED, _DONE = f"{OWN_KEYS}source", f"{OWN_KEYS}ended", f"{OWN_KEYS}done"

#: A JSON value that the source alone understands; of most a number that rises.
Offset = Any
_PAIRS = Form(
    lambda offsets: [list(pair) for pair in offsets.items()],
    lambda pairs: dict(read(tuple[tuple[str, Offset], ...], pairs)),
)


@dataclass(frozen=True)
class SplitPosition(Stored):
    """How far each split was read.

    Parameters
    ----------
    uid
        Of the source.
    offsets
        By split, in the order in which the splits were found. The place in it is the split's number
        and its channel: splits are added behind, and never removed.
    is_ended
        Whether there will never be more: the source is bounded and was read to its end.
    done
        Splits that have come to their end: they bring nothing any more.

    Examples
    --------
    >>> SplitPosition("orders", {"a": 3}).to_json()
    {'flinkish:source': 'orders', 'flinkish:splits': [['a', 3]]}
    """

    uid: str = field(metadata=stored(_UID))
    offsets: Annotated[Mapping[str, Offset], _PAIRS] = field(metadata=stored(SPLITS))
    is_ended: bool = field(default=False, metadata=stored(_ENDED, Presence.LEFT_OUT))
    done: frozenset[str] = field(default=frozenset(), metadata=stored(_DONE, Presence.LEFT_OUT, at=2))

    @classmethod
    def from_json(cls, value: Position) -> Self:
        """Read what was logged.

        Raises
        ------
        CorruptObjectError
            It is no position of a source of splits.
        """
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
        """Return the number of each split."""
        return {name: number for number, name in enumerate(self.offsets)}

    def open_numbers(self) -> frozenset[int]:
        """Return the numbers of the splits that may bring more."""
        return frozenset(number for name, number in self.numbers().items() if name not in self.done)

    def moved_to(self, offsets: Mapping[str, Offset]) -> SplitPosition:
        """Return this position with other offsets; new splits come behind the known ones."""
        return replace(self, offsets={**self.offsets, **offsets})


def logged_positions(position: LoggedOffsets, uid: str) -> list[SplitPosition]:
    """Return where the scans of a source stood, one for each time that the plan reads it."""
    return [
        SplitPosition.from_json(source)
        for source in position.sources
        if isinstance(source, dict) and source.get(_UID) == uid
    ]


def lowest_offsets(positions: Collection[SplitPosition]) -> dict[str, Offset]:
    """Return up to where every scan has read, by split, as far as that can be told.

    Where scans differ and offsets are no numbers, a split is left out.
    """
    if not positions:
        return {}
    found = lowest([one.to_json() for one in positions])
    return dict(SplitPosition.from_json(found).offsets)


def is_number(value: object) -> bool:
    """Return whether a value is a number, so that offsets like it have an order.

    Examples
    --------
    >>> is_number(2), is_number(2.5), is_number(True), is_number("2")
    (True, True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def refuse_no_json(value: Offset) -> str:
    """Return why a value cannot be an offset; empty if it can."""
    try:
        again = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        return f"it is no JSON value: {error}"
    return "" if again == value and value is not None else "it does not come back from JSON as it was"
