"""What the thread at hand works for, so that a log can say it: job, lineage, checkpoint, micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

_NOTHING: Mapping[str, str | int] = MappingProxyType({})
_FACTS: ContextVar[Mapping[str, str | int]] = ContextVar("_FACTS", default=_NOTHING)


@contextmanager
def logged_as(**facts: str | int) -> Iterator[None]:
    """Let what is logged within be about these facts, beside those that hold already."""
    token = _FACTS.set({**_FACTS.get(), **facts})
    try:
        yield
    finally:
        _FACTS.reset(token)


def log_facts() -> Mapping[str, str | int]:
    return _FACTS.get()
