"""Entries of states as rows of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

from flinkish_spark.state.tables import Touch


class Row(NamedTuple):
    """One entry: where it is, its value, and when it was touched; `alive` is false for a removed one.

    `touches` are those of its elements, None where they are the same.
    """

    slot: Any
    value: Any
    hash: int
    touched_ms: int = 0
    alive: bool = True
    touches: list[int] | None = None


#: Makes a row of its fields: what `Row(...)` does, of a tuple, without a call of Python for each.
to_row = cast(Callable[[tuple[Any, ...]], Row], partial(tuple.__new__, Row))


def rows_by_slot(
    slots: Sequence[Any],
    values: Iterable[Any],
    hashes: Iterable[int],
    touches: Iterable[Touch] | None = None,
) -> dict[Any, Row]:
    """Return rows of entries that are there.

    Parameters
    ----------
    slots, values, hashes
        One of each per entry.
    touches
        Of each entry; None where entries do not expire.
    """
    given = repeat((0, None)) if touches is None else touches
    rows = (
        (slot, value, hashed, touched_ms, True, each)
        for slot, value, hashed, (touched_ms, each) in zip(slots, values, hashes, given, strict=False)
    )
    return dict(zip(slots, map(to_row, rows), strict=True))
