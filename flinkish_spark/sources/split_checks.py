"""Whether what a user's source says can be worked with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flinkish_spark.errors import ConfigError, InputLostError
from flinkish_spark.sources.split_positions import Offset, SplitPosition, is_number, refuse_no_json
from flinkish_spark.user_iterators import elements_of

if TYPE_CHECKING:
    from flinkish_spark.sources.splits import SplitSource


def check_travels(source: SplitSource, uid: str) -> None:
    """Raise ConfigError if the source cannot be sent to Spark's processes."""
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(source)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"the source '{uid}' cannot be sent to Spark's processes",
            why=str(error),
            what_to_do="keep settings in its attributes, and open connections and files in its methods",
        ) from error


def gone_through(found: Any) -> Any:
    """Return what a source gave as a tuple, if it is several things; a text is not meant as such.

    Going through it is work of the source, which may fail.
    """
    is_many = isinstance(found, Iterable) and not isinstance(found, str | bytes)
    return tuple(elements_of(found)) if is_many else found


def checked_splits(uid: str, found: Any, position: SplitPosition) -> Sequence[str]:
    """Return the names of splits that a source gave, behind :func:`gone_through`.

    Raises
    ------
    ConfigError
        They are no names, or not different from each other.
    InputLostError
        A split that the job has begun to read is not among them.
    """
    names = found if isinstance(found, tuple) else ()
    if not isinstance(found, tuple) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"splits() of source '{uid}' returned {found!r}", what_to_do='return a list of names: ["all"]'
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"splits() of source '{uid}' names a split twice: {sorted(names)}")
    gone = [name for name in position.offsets if name not in set(names)]
    if gone:
        until = position.offsets[gone[0]]
        raise InputLostError(
            f"the split '{gone[0]}' of source '{uid}' is gone: it was read up to {until!r}",
            why="the job cannot know that it has read all of it",
            what_to_do="let splits() name every split that it has ever named",
        )
    return names


def checked_end(uid: str, split: str, found: Any) -> Offset | None:
    """Return the end of a split that a source gave.

    Raises
    ------
    ConfigError
        It is no number that anything comes to.
    """
    if is_number(found) and not math.isfinite(found):
        raise ConfigError(
            f"end() of source '{uid}' returned {found!r} for the split '{split}'",
            why="no offset comes to it, so the job would never end",
            what_to_do="return an offset; or None while the end is not known",
        )
    return found


def checked_count(uid: str, split: str, found: Any) -> int | None:
    """Return a number of records that a source gave.

    Raises
    ------
    ConfigError
        It is none.
    """
    is_count = isinstance(found, numbers.Real) and not isinstance(found, bool)
    if found is None or (is_count and 0 <= found < math.inf):
        return None if found is None else int(found)
    raise ConfigError(
        f"records_between() of source '{uid}' returned {found!r} for the split '{split}'",
        what_to_do="return how many records lie between the offsets, or None if that is not known",
    )


def checked_offset(uid: str, split: str, start: Offset, found: Any, method: str) -> Offset:
    """Return an offset that a source gave.

    Raises
    ------
    ConfigError
        It is no JSON value.
    InputLostError
        It lies before `start`.
    """
    why = refuse_no_json(found)
    if why:
        raise ConfigError(
            f"{method}() of source '{uid}' returned {found!r} for the split '{split}'",
            why=why,
            what_to_do="return a number, a text, or a list or dict of such with texts as keys",
        )
    if is_number(found) and is_number(start) and found < start:
        raise InputLostError(
            f"the split '{split}' of source '{uid}' ends at {found}, and was read up to {start}",
            why="records that the job has read are gone, or the input is another one",
            what_to_do="restore the input, or start a new job with a new job_dir",
        )
    return found


def moved(offsets: Mapping[str, Offset], ends: Mapping[str, Offset]) -> list[str]:
    """Return the splits of which there is something to read between two positions."""
    return [name for name, end in ends.items() if offsets.get(name) != end]
