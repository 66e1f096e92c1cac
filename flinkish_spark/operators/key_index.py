"""Which rows of a batch belong to which key, as numbers: what vectorised functions group by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Array = np.ndarray[Any, Any]

#: One of so many keys is looked at to tell how often keys repeat; fewer rows of such keys tell nothing.
_SAMPLED_KEYS = 64
_LEAST_SAMPLED_ROWS = 256
#: Upper bits: by the lower ones rows are dealt out to key groups.
_SAMPLED_BY = 40


@dataclass(frozen=True)
class KeyIndex:
    """The distinct keys of a batch.

    Parameters
    ----------
    of_row
        Number of each row's key; shape (rows,).
    hashes
        Hash of each key, ascending; equal for two keys only where their hashes collide. Shape (keys,).
    keys
        Columns of the distinct keys, by number.
    first
        The first row of each key; shape (keys,).
    """

    of_row: Array
    hashes: Array
    keys: tuple[pa.Array, ...]
    first: Array

    def __len__(self) -> int:
        return len(self.hashes)

    def chosen(self, where: Array | None) -> Array:
        """Return the numbers of the keys where an array says so, all for None.

        Raises
        ------
        ValueError
            It is not one true or false per key: one per row, or numbers of keys, would choose others.
        """
        if where is None:
            return np.arange(len(self))
        given = np.asarray(where)
        is_true_or_false = given.dtype == bool or all(isinstance(one, bool | np.bool_) for one in given.flat)
        if given.shape != (len(self),) or not is_true_or_false:
            raise ValueError(
                f"which keys are meant is said by {given.dtype} of shape {given.shape}; say it by one "
                f"true or false for each of the {len(self)} keys"
            )
        found: Array = np.flatnonzero(given)
        return found

    @classmethod
    def of(cls, hashes: Array, keys: Sequence[pa.Array]) -> KeyIndex:
        """Give the keys of rows numbers.

        Parameters
        ----------
        hashes
            64-bit hash of each row's key; equal keys have equal hashes.
        keys
            Key columns, as long as the hashes.
        """
        distinct, first, of_row = np.unique(hashes, return_index=True, return_inverse=True)
        taken = tuple(column.take(pa.array(first)) for column in keys)
        index = cls(of_row, distinct, taken, first)
        again = [column.take(pa.array(of_row)) for column in taken]
        if all(_same(column, repeated) for column, repeated in zip(keys, again, strict=True)):
            return index
        return cls._with_collisions(hashes, keys)

    @classmethod
    def _with_collisions(cls, hashes: Array, keys: Sequence[pa.Array]) -> KeyIndex:
        """Give keys numbers by their values; two keys have one hash, which happens once in many years."""
        rows = list(zip(hashes.tolist(), *(column.to_pylist() for column in keys), strict=True))
        first_of: dict[tuple[Any, ...], int] = {}
        for place, row in enumerate(rows):
            first_of.setdefault(row, place)
        ordered = sorted(first_of, key=lambda row: (row[0], first_of[row]))
        number = {row: at for at, row in enumerate(ordered)}
        first = np.array([first_of[row] for row in ordered], dtype=np.int64)
        of_row = np.array([number[row] for row in rows], dtype=np.int64)
        return cls(of_row, hashes[first], tuple(column.take(pa.array(first)) for column in keys), first)


def group_numbers(keys: Sequence[pa.Array]) -> tuple[Array, Array]:
    """Return a number per row, by its key, in the order of first appearance; and each key's first row.

    Parameters
    ----------
    keys
        Key columns, of equal length; at least one. Null is the same as null.
    """
    numbers: Array | None = None
    for key in keys:
        encoded = key.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if numbers is None:
            numbers = codes
        else:
            both = pa.array(numbers * len(encoded.dictionary) + codes).dictionary_encode()
            numbers = both.indices.to_numpy().astype(np.int64)
    if numbers is None:
        raise ValueError("rows cannot be told apart without a key column")
    count = int(numbers.max()) + 1 if len(numbers) else 0
    first = np.empty(count, dtype=np.int64)
    # Of several rows of a key the one that is written last stays: the first.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return numbers, first


def keys_rarely_repeat(hashes: Array) -> bool:
    """Return whether fewer than a quarter of rows have the key of an earlier one, as far as a sample tells.

    The sample are all rows of some keys, so it does not matter in which order keys come. The answer depends
    on the rows alone: a micro-batch that is run again is treated alike.

    Parameters
    ----------
    hashes
        64-bit hash of each row's key.

    Examples
    --------
    >>> hashes = np.random.default_rng(1).integers(0, 1 << 62, 100_000)
    >>> keys_rarely_repeat(hashes), keys_rarely_repeat(np.tile(hashes[:50_000], 2))
    (True, False)
    """
    sampled = hashes[(hashes >> _SAMPLED_BY) % _SAMPLED_KEYS == 0]
    # A key that many rows have is seldom in the sample; then that has too few rows, or it has too many.
    is_even = 0.5 <= len(sampled) * _SAMPLED_KEYS / max(len(hashes), 1) <= 2
    if len(sampled) < _LEAST_SAMPLED_ROWS or not is_even:
        return False
    return len(np.unique(sampled)) > 0.75 * len(sampled)


def _same(left: pa.Array, right: pa.Array) -> bool:
    if left.null_count or right.null_count:
        if not left.is_null().equals(right.is_null()):
            return False
        left, right = left.drop_null(), right.drop_null()
    return bool(pc.all(pc.equal(left, right), min_count=0).as_py())
