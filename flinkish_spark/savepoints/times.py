"""Times of stored entries as readers and writers see them: timestamps, where milliseconds are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from flinkish_spark.operators.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.operators.table_codec import TOUCHED

Array = np.ndarray[Any, Any]

#: Readers' names of columns whose stored names are short; of times, which are stored in milliseconds.
TIMES = {"from": "window_start", "to": "window_end", TOUCHED: "touched_at"}
#: Readers' name of the times of a list's elements and a map's entries.
EACH_TOUCHED_AT = "each_touched_at"
#: What stands for the beginning and the end of time, such as those of the one global window: as far as
#: Python's datetime goes in every time zone.
FIRST_MICROS, LAST_MICROS = -62_135_510_400_000_000, 253_402_128_000_000_000
_MILLISECOND_MICROS = 1_000


def to_micros(ms: pa.Array) -> pa.Array:
    """Return times as Spark's timestamps; what is beyond them as :data:`FIRST_MICROS` or `LAST_MICROS`."""
    first, last = FIRST_MICROS // _MILLISECOND_MICROS, LAST_MICROS // _MILLISECOND_MICROS
    clipped = np.clip(ms.fill_null(0).to_numpy(), first, last) * _MILLISECOND_MICROS
    mask = ms.is_null().to_numpy(zero_copy_only=False)
    return pa.array(clipped, pa.int64(), mask=mask).cast(pa.timestamp("us", "UTC"))


def to_ms(timestamps: pa.Array) -> pa.Array:
    """Return timestamps as stored times; the inverse of :func:`to_micros`.

    Raises
    ------
    ValueError
        A time lies between two milliseconds.
    """
    micros = timestamps.cast(pa.timestamp("us", timestamps.type.tz)).cast(pa.int64())
    plain = micros.fill_null(0).to_numpy()
    if (plain % _MILLISECOND_MICROS).any():
        raise ValueError("times of states are whole milliseconds")
    ms = plain // _MILLISECOND_MICROS
    ms[plain <= FIRST_MICROS] = MIN_WATERMARK_MS
    ms[plain >= LAST_MICROS] = MAX_WATERMARK_MS
    return pa.array(ms, pa.int64(), mask=micros.is_null().to_numpy(zero_copy_only=False))


def times_of_elements(touched: pa.Array, touches: pa.Array, values: pa.Array) -> pa.Array:
    """Return the times of the elements of lists or maps as timestamps, also where all have the same.

    Parameters
    ----------
    touched, touches
        As stored.
    values
        The lists or maps.
    """
    offsets = _offsets(values)
    counts = np.diff(offsets)
    found = np.repeat(touched.to_numpy(), counts)
    found[np.repeat(touches.is_valid().to_numpy(zero_copy_only=False), counts)] = touches.flatten().to_numpy()
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), to_micros(pa.array(found)))


def stored_times_of_elements(touched: pa.Array, given: pa.Array, values: pa.Array) -> pa.Array:
    """Return times of elements as they are stored; the inverse of :func:`times_of_elements`.

    Raises
    ------
    ValueError
        They are not as many as there are elements, one is null, the latest is not `touched`, or one lies
        between two milliseconds.
    """
    offsets, counts = _offsets(given), np.diff(_offsets(values))
    known = given.is_valid().to_numpy(zero_copy_only=False)
    if (np.diff(offsets)[known] != counts[known]).any():
        raise ValueError("there are as many times as elements")
    flat = given.flatten()
    if flat.null_count:
        raise ValueError("one is null; every element has one")
    times_ms = to_ms(flat)
    latest = np.full(len(given), MIN_WATERMARK_MS)
    np.maximum.at(latest, np.repeat(np.arange(len(given))[known], counts[known]), times_ms.to_numpy())
    if (latest != touched.to_numpy())[known & (counts > 0)].any():
        raise ValueError(
            f"the latest of an entry is its {TIMES[TOUCHED]}; leave {EACH_TOUCHED_AT} out, or give null, "
            "where all elements are to have that"
        )
    lengths = np.append(0, np.cumsum(np.where(known, counts, 0)))
    return pa.ListArray.from_arrays(pa.array(lengths, pa.int32()), times_ms, mask=pa.array(~known))


def _offsets(lists: pa.Array) -> Array:
    """Return where each of some lists or maps begins and ends, counted from the first."""
    offsets: Array = lists.offsets.to_numpy()
    counted: Array = offsets - offsets[0]
    return counted
