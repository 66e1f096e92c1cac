"""What a chained source waits for, told to its job through a file.

The planner of a source runs in a Python process of Spark's, the coordinator in the user's. The file
lies beside the control file and is replaced whenever something changes. It is not durable: what
counts is in Spark's offset log. Standard library only: the control source imports it, too.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AlignmentStatus:
    """Where a chained source stands.

    Parameters
    ----------
    wants_checkpoint
        Whether it can go on only with a checkpoint of this job, or could draw one now.
    text
        What it waits for; for the reason of a checkpoint that expires, and for people.
    cut
        The upstream checkpoint at which it wants one; None where it wants none.
    drawn
        This job's newest checkpoint whose barrier it has put into a micro-batch; 0 before the first.
    """

    wants_checkpoint: bool
    text: str
    cut: int | None = None
    drawn: int = 0


def status_path(control_path: str) -> Path:
    """Return where the source with this control file writes its status."""
    return Path(control_path).with_suffix(".alignment")


def write_status(control_path: str, status: AlignmentStatus) -> None:
    """Replace the status; called by the planner when it changes."""
    path = status_path(control_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".alignment-tmp")
    temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
    os.replace(temporary, path)


def read_status(control_path: str) -> AlignmentStatus | None:
    """Return the status; None if the job has no chained source, or it was not planned yet.

    Called by the coordinator: on every tick, to ask for a checkpoint that the source waits for, and
    for the reason of a checkpoint that expires.
    """
    try:
        value = json.loads(status_path(control_path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return AlignmentStatus(**value)
