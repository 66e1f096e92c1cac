"""A way to break the product, for as long as a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Variant:
    """One way to be wrong.

    Parameters
    ----------
    name
        As the command line knows it.
    patches
        Make the patches; entered together.
    """

    name: str
    patches: Callable[[], Sequence[Patch]]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Break the product while the context is open."""
        with ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield
