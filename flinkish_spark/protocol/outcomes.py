"""What ending a committable can answer. One enum for commit and abort, one meaning each."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Outcome(enum.Enum):
    """Answer of a committer for one committable (DESIGN 9)."""

    #: The data became visible (or, for an abort, went away) through this call.
    COMMITTED = "COMMITTED"
    #: It already was as asked; a repeat, which changes nothing.
    ALREADY_COMMITTED = "ALREADY_COMMITTED"
    #: The system cannot tell or cannot do it now; ask again.
    RETRY = "RETRY"
    #: Proven: the staged data is gone and can never be committed.
    LOST = "LOST"
    #: A newer owner acted on it; this process must re-read the owner record and stop.
    FENCED = "FENCED"

    @property
    def is_done(self) -> bool:
        """Whether the committable needs no further call."""
        return self in (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED)


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """An outcome with its reason, for logs, receipts and error messages.

    `is_proven_aborted` goes with LOST only: the system's own log says that the data was rolled
    back. Without it the proof itself is gone (expired, deleted), so the data may have been
    visible once, and nobody may write it a second time.

    `facts` are JSON values about what was committed, such as the version of a table. They go into the
    receipt and the manifest; a repeated commit gives those that it can still find out.
    """

    outcome: Outcome
    detail: str = ""
    is_proven_aborted: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
