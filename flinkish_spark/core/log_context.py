"""Facts about the current thread's work, for log records: job, lineage, checkpoint, micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

_NOTHING: Mapping[str, str | int] = MappingProxyType({})
_FACTS: ContextVar[Mapping[str, str | int]] = ContextVar("_FACTS", default=_NOTHING)


@contextmanager
def add_log_facts(**facts: str | int) -> Iterator[None]:
    token = _FACTS.set({**_FACTS.get(), **facts})
    try:
        yield
    finally:
        _FACTS.reset(token)


def log_facts() -> Mapping[str, str | int]:
    return _FACTS.get()
