"""What of a Delta table's changes a source reads."""

from __future__ import annotations

import enum

from flinkish_spark.protocol.limits import checked_whole


class DeltaChanges(enum.Enum):
    """What of a table's changes is read."""

    #: Rows that are added. A commit that updates or deletes rows fails the job.
    ROWS = "ROWS"
    #: The change feed (`delta.enableChangeDataFeed`): rows with ``_change_type``, ``_commit_version`` and
    #: ``_commit_timestamp``.
    FEED = "FEED"


def check_versions(starting: int | None, ending: int | None) -> None:
    """Raise ValueError unless they are versions, and the last one is not before the first; None says none."""
    if starting is not None:
        checked_whole("starting_version", starting, least=0)
    if ending is not None:
        # One that ends before it begins would be read as an empty one.
        checked_whole("ending_version", ending, least=starting or 0)
