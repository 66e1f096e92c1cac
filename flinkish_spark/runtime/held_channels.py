"""How sources hear that some of their channels are ahead of the others: a file beside the control file.

The time keeper replaces it behind each micro-batch, before Spark asks for the next one; the sources
read it each time they are asked, in Python processes of Spark's. It is not durable: it is made anew from
the stored state at each start of the query, and where it is not there, nobody is held back.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from flinkish_spark.protocol.watermark_alignment import (
    NONE_HELD,
    HeldChannels,
    HeldSources,
    held_from_json,
    held_to_json,
)


def held_path(control_path: Path) -> Path:
    """Return where the sources of the start with this control file look.

    Examples
    --------
    >>> held_path(Path("control/3-1.json")).name
    '3-1.held'
    """
    return control_path.with_suffix(".held")


def write_held(control_path: Path, held: HeldSources) -> None:
    """Replace what the sources read; called by the time keeper when it changes."""
    path = held_path(control_path)
    if not held:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".held-tmp")
    temporary.write_text(json.dumps(held_to_json(held)), encoding="utf-8")
    os.replace(temporary, path)


def read_held(control_path: str, source: str) -> HeldChannels:
    """Return what of a source brings no records in the next micro-batch.

    Parameters
    ----------
    control_path
        Of the start of the query that the source belongs to; empty outside of a job.
    source
        Its uid.

    Raises
    ------
    ValueError
        The file is not one of ours.
    """
    if not control_path:
        return NONE_HELD
    try:
        text = held_path(Path(control_path)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return NONE_HELD
    return held_from_json(json.loads(text)).get(source, NONE_HELD)
