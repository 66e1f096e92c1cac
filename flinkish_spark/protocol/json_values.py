"""Taking stored JSON apart: a value of the wrong shape raises ValueError and nothing else.

For what anybody may open with the command line. A checksum says that an object is as it was
written; these say that it is what the reader expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flinkish_spark.protocol.limits import checked_whole


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object, else raise ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {value!r}")
    return value


def list_of(value: Any, what: str) -> list[Any]:
    """Return `value` if it is a JSON list, else raise ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list, got {value!r}")
    return value


def text_of(value: Any, what: str) -> str:
    """Return `value` if it is a text, else raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, got {value!r}")
    return value


def measured(name: str, value: Any) -> int | None:
    """Return `value` if it is None or a whole number of at least 0, else raise ValueError."""
    return None if value is None else checked_whole(name, value, least=0)


def member(stored: Mapping[str, Any], name: str) -> Any:
    """Return a member of an object; raise ValueError if it is missing.

    Examples
    --------
    >>> member(object_of({"rows": 3}, "statistics"), "rows")
    3
    """
    if name not in stored:
        raise ValueError(f"{name!r} is missing")
    return stored[name]
