"""Suggest the word that a misspelt one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'X'?" with the known word that is spelt most like `word`, or an empty text.

    It is a sentence of its own: give it as the `why` of an error, before `what_to_do`.

    Parameters
    ----------
    word
        What was given. Upper and lower case count as the same.
    known
        The words that would have been right.

    Examples
    --------
    >>> closest("KafkaSorce", ["KafkaSource", "FileSource"])
    "Did you mean 'KafkaSource'?"
    >>> closest("banana", ["KafkaSource", "FileSource"])
    ''
    """
    spelled = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), spelled, n=1)
    return f"Did you mean '{spelled[near[0]]}'?" if near else ""
