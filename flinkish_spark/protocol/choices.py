"""Suggestions for misspelt words, and enums that make them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any


def closest(word: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'X'?" with the known word most similar to `word`, or an empty text."""
    # Imported here: every process imports this module, and few misspell a word.
    import difflib

    spelled = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), spelled, n=1)
    return f"Did you mean '{spelled[near[0]]}'?" if near else ""


class _Members(enum.EnumMeta):
    if TYPE_CHECKING:
        ...  # With `__getattr__`, type checkers would accept any name as a member.
    else:

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            members = cls.__members__
            near = closest(name, members)
            text = f"{cls.__name__} has no {name}. {near}".rstrip()
            # Without an object Python does not add a suggestion of its own.
            raise AttributeError(f"{text} To do: choose from {', '.join(members)}.", name=name, obj=None)


class Choice(enum.Enum, metaclass=_Members):
    """An enum that suggests the right name for a misspelt member."""
