"""Changelogs: streams whose records say what happens to a row of a table."""

from __future__ import annotations

import enum

#: The column of a stream with the kind of each row.
ROW_KIND = "_row_kind"


class RowKind(enum.Enum):
    """What a row of a changelog says: Flink's kinds, under the short names that Flink prints.

    An update may come as two rows, that which was and that which is; both are of one record of the log, and
    follow each other.

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
        """Whether the row is taken back, and not added."""
        return self in (RowKind.UPDATE_BEFORE, RowKind.DELETE)


#: The kinds that take a row back.
RETRACTIONS = tuple(kind.value for kind in RowKind if kind.is_retraction)
