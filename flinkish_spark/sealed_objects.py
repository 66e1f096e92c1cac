"""Typed reads of sealed objects in a store: what is absent, what is damaged, what is too new.

Absent optional objects are None here, once, so that callers see "no receipt yet" instead of a
missing file; a corrupt object is always an error and never skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flinkish_spark.errors import CorruptObjectError, JobDirError
from flinkish_spark.protocol.envelope import FORMAT, NewerFormatError, unseal
from flinkish_spark.store import ObjectMissing, Store

T = TypeVar("T")


class SealedObjects:
    """Reads what `protocol.envelope.seal` wrote.

    Parameters
    ----------
    store
        Where the objects are.
    place
        What messages call it, such as ``"the job directory"``.
    """

    def __init__(self, store: Store, place: str) -> None:
        self._store, self._place = store, place

    def read(self, key: str, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """Return an object.

        Raises
        ------
        ObjectMissing
            There is none under that key.
        JobDirError
            A newer version of this package wrote it.
        CorruptObjectError
            It is torn, altered or of another kind, or `parse` refuses it.
        """
        data = self._store.read(key)
        try:
            return parse(unseal(kind, data))
        except NewerFormatError as error:
            raise JobDirError(
                f"{key} was {error}",
                why=f"this version of flinkish_spark writes format {FORMAT}",
                what_to_do="use the newer version of flinkish_spark that wrote it",
                key=key,
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CorruptObjectError(
                f"{key} in {self._place} cannot be trusted",
                why=str(error),
                what_to_do="restore the file from a backup; an older checkpoint is never used silently",
                key=key,
            ) from error

    def optional(self, key: str, kind: str, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Return an object, or None if there is none; raises as :meth:`read` otherwise."""
        try:
            return self.read(key, kind, parse)
        except ObjectMissing:
            return None

    def numbers(self, folder: str, ending: str = ".json") -> frozenset[int]:
        """Return the numbers after which the objects (or, without ending, folders) in `folder` are named.

        Only what is written as we write it: `007.json` would be looked for as `7.json`.
        """
        names = [key.rsplit("/", 1)[1] for key in self._store.list(folder)]
        stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
        return frozenset(int(stem) for stem in stems if stem.isdecimal() and str(int(stem)) == stem)
