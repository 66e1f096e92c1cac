"""Whether the records of a key come in the order of the input: 16 bytes per key and source partition.

Pure: arrays in, numbers out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]


class KeyOrder:
    """The records of one output partition, in their order.

    Keys are told apart by 64-bit hashes: among a million of them two are mistaken for one with a
    probability of 3 in 100 million, and then order may be asked of records that have none.

    Examples
    --------
    >>> order = KeyOrder()
    >>> order.add(np.array([7, 8, 7], np.uint64), np.array([1, 5, 2]))
    0
    >>> order.add(np.array([8, 7], np.uint64), np.array([4, 3]))
    1
    """

    def __init__(self) -> None:
        self._keys = np.zeros(0, np.uint64)
        self._last = np.zeros(0, np.int64)

    def add(self, keys: UInt64s, offsets: Int64s) -> int:
        """Return how many of these records come behind one of their key with a higher offset.

        Parameters
        ----------
        keys
            A hash of key and source partition for each record.
        offsets
            In the source partition, 0 or more.
        """
        if not len(keys):
            return 0
        order = np.argsort(keys, kind="stable")
        keys, offsets = keys[order], offsets[order]
        begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        found = keys[begins]
        before = self._known(found)
        highest = _running_maximum(offsets, begins, before)
        behind = int((offsets < highest).sum())
        self._keep(found, np.maximum(before, np.maximum.reduceat(offsets, begins)))
        return behind

    def _known(self, keys: UInt64s) -> Int64s:
        """Return the highest offset of each key so far, -1 for a new one."""
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._last[at], -1)

    def _keep(self, keys: UInt64s, last: Int64s) -> None:
        at = np.searchsorted(self._keys, keys)
        inside = at < len(self._keys)
        is_known = np.zeros(len(keys), np.bool_)
        is_known[inside] = self._keys[at[inside]] == keys[inside]
        self._last[at[is_known]] = last[is_known]
        if not is_known.all():
            new = ~is_known
            self._keys = np.insert(self._keys, at[new], keys[new])
            self._last = np.insert(self._last, at[new], last[new])


def _running_maximum(offsets: Int64s, begins: npt.NDArray[np.intp], before: Int64s) -> Int64s:
    """Return for each record the highest offset in front of it, within its run.

    Parameters
    ----------
    begins
        Where each run begins.
    before
        The highest offset in front of each run.
    """
    runs = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(offsets))))
    # Ranks in place of offsets: a run's number in front of them does not overflow.
    values, ranks = np.unique(offsets, return_inverse=True)
    lifted = np.maximum.accumulate(runs * len(values) + ranks)
    highest = np.empty(len(offsets), np.int64)
    highest[1:] = values[(lifted[:-1] - runs[:-1] * len(values))]
    highest[begins] = -1
    return np.maximum(highest, before[runs])
