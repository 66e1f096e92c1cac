"""Versions of Spark: which one may go on with what another has left.

Rules of this file:

- What counts is major and minor. A patch release keeps the form of Spark's checkpoints.
- A later minor version reads what an earlier one wrote. Whatever it writes itself an earlier one need not
  read, so nobody goes back, as soon as the later one has run once.
- Of another major version nothing is known.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?!\d).*", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class SparkMinor:
    major: int
    minor: int

    @classmethod
    def of(cls, version: str) -> Self:
        found = _VERSION.fullmatch(version)
        if found is None:
            raise ValueError(f"{version!r} is no version of Spark: it does not begin with two numbers")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class VersionStep(enum.Enum):
    """From what has run on a job directory to what is about to."""

    #: The same minor version.
    NONE = "NONE"
    #: To a later minor version. It may, and is recorded.
    FORWARD = "FORWARD"
    #: To an earlier minor version. Refused.
    BACK = "BACK"
    #: To another major version. Refused.
    ANOTHER_MAJOR = "ANOTHER_MAJOR"


def step_to(running: SparkMinor, before: Iterable[SparkMinor]) -> VersionStep:
    """Return what a start with `running` is, behind those that have run `before`."""
    newest = max(before, default=running)
    if newest.major != running.major:
        return VersionStep.ANOTHER_MAJOR
    if newest == running:
        return VersionStep.NONE
    return VersionStep.FORWARD if newest < running else VersionStep.BACK
