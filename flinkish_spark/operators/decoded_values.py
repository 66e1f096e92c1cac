"""Values of states as they are declared, made of what is stored, which a class of the user's may refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class StateValueError(ValueError):
    """A state has a value that does not fit the declared type."""


def decoded(
    state: str,
    decode: Callable[[Any], Any],
    values: Sequence[Any],
    keys: Sequence[Any],
    living: Sequence[Any],
) -> list[Any]:
    """Return values as they are declared, None for entries that are not there.

    Raises
    ------
    StateValueError
        The declared class takes one of them not; names state and key.
    """
    try:
        return [
            decode(one) if one is not None and is_there else None
            for one, is_there in zip(values, living, strict=True)
        ]
    except Exception:
        for one, key, is_there in zip(values, keys, living, strict=True):
            try:
                _ = decode(one) if one is not None and is_there else None
            except Exception as error:
                raise StateValueError(
                    f"state {state!r}: what is stored of key {key!r:.200} cannot be made the declared class: "
                    f"{type(error).__name__}: {error}"
                ) from error
        raise
