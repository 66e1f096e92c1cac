"""Parts that core uses by a protocol and never imports: each is loaded by its name when it is first needed.

`flinkish_spark/wings.py` registers them when the package is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LOADERS: dict[str, Callable[[], Any]] = {}


def register_part(name: str, load: Callable[[], Any]) -> None:
    _LOADERS[name] = load


def load_part(name: str) -> Any:
    return _LOADERS[name]()
