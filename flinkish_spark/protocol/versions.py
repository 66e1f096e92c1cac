"""Versions of Spark: which one may continue a checkpoint that another one wrote.

Rules of this file:

- Only major and minor count. A patch release keeps the form of Spark's checkpoints.
- A later minor version reads the checkpoints of an earlier one. An earlier version need not read those of a
  later one, so there is no way back once the later version has run.
- Nothing is known about another major version.
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
    #: The same minor version.
    NONE = "NONE"
    #: To a later minor version. Allowed and recorded.
    FORWARD = "FORWARD"
    #: To an earlier minor version. Refused.
    BACK = "BACK"
    #: To another major version. Refused.
    ANOTHER_MAJOR = "ANOTHER_MAJOR"


def find_version_step(running: SparkMinor, before: Iterable[SparkMinor]) -> VersionStep:
    """Return the version step of a start with `running`, after starts with the versions `before`."""
    newest = max(before, default=running)
    if newest.major != running.major:
        return VersionStep.ANOTHER_MAJOR
    if newest == running:
        return VersionStep.NONE
    return VersionStep.FORWARD if newest < running else VersionStep.BACK
