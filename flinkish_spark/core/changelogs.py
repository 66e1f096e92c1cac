"""Changelogs: streams of changes to the rows of a table."""

from __future__ import annotations

from flinkish_spark.protocol.choices import Choice

#: The column of a stream with the kind of each row.
ROW_KIND = "_row_kind"


class RowKind(Choice):
    """The kind of change that a row of a changelog stands for; Flink's kinds and short names.

    An update may come as two rows, the old one and the new one; both are of one record of the log, and follow
    each other.

    Examples
    --------
    >>> RowKind("-U"), RowKind.UPDATE_BEFORE.is_retraction
    (<RowKind.UPDATE_BEFORE: '-U'>, True)
    """

    INSERT = "+I"
    UPDATE_BEFORE = "-U"
    UPDATE_AFTER = "+U"
    DELETE = "-D"

    @property
    def is_retraction(self) -> bool:
        """True if the row retracts an earlier one."""
        return self in (RowKind.UPDATE_BEFORE, RowKind.DELETE)


#: The kinds that retract a row.
RETRACTIONS = tuple(kind.value for kind in RowKind if kind.is_retraction)


class ChangelogMode(Choice):
    """Which rows a source emits for an update; Flink's word."""

    #: The old row, -U, and the new row, +U: an aggregate needs both, to retract the old one.
    ALL = "all"
    #: The new row, +U, alone: enough for a sink that keeps one row per key.
    UPSERT = "upsert"
