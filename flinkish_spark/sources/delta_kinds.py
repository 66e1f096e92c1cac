"""What of a Delta table's changes a source reads."""

from __future__ import annotations

import enum


class DeltaChanges(enum.Enum):
    """What of a table's changes is read."""

    #: Rows that are added. A commit that updates or deletes rows fails the job.
    ROWS = "ROWS"
    #: The change feed (`delta.enableChangeDataFeed`): rows with ``_change_type``, ``_commit_version`` and
    #: ``_commit_timestamp``.
    FEED = "FEED"
