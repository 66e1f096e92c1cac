"""Modes in which a sink writes a checkpoint to a table: append, upsert, overwrite partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.protocol.codec import LEFT_OUT, StoredObject, read


@dataclass(frozen=True, slots=True)
class Append(StoredObject):
    """Write mode: every record becomes a row."""

    TAG: ClassVar = ("kind", "APPEND")


@dataclass(frozen=True, slots=True)
class OverwritePartitions(StoredObject):
    """Write mode: the records of a checkpoint replace all rows of the partitions that they belong to.

    Other partitions stay. The table must be partitioned. A checkpoint replaces a partition by the records it
    has of it, so a partition should be written as a whole between two barriers.
    """

    TAG: ClassVar = ("kind", "OVERWRITE_PARTITIONS")


_GIVE_COLUMNS = 'give a tuple of columns: ("id",)'


@dataclass(frozen=True, slots=True)
class Upsert(StoredObject):
    """Write mode with one row per key: a record replaces the row with its key, or becomes a new one.

    If a checkpoint has several records of a key, the last one wins: the one with the greatest `sequence_by`
    if that is given, else the latest in the stream. The stream has an order only within a Spark partition, so
    key the stream by `keys`, or give `sequence_by`.

    Parameters
    ----------
    keys
        Columns that together name a row. A record with a null in one of them is refused.
    sequence_by
        Column whose greatest value is the newest; of records with equal values the latest in the stream wins.
        A record that is older than the row in the table changes nothing. Null is older than every value.
    delete_when
        SQL condition on a record; if it is true, the record deletes the row with its key. Deleted rows are
        not remembered, so an older record that comes in a later checkpoint brings the row back.
    not_stored
        Columns of the stream that the table does not get, such as an operation code. If `sequence_by` is
        among them, records are compared with each other and not with the table.
    row_kind
        For a changelog, in place of `delete_when`: the column with the kinds of its rows, ``"_row_kind"``,
        which the table does not get. -D and -U delete the row with their key, +I and +U replace it or insert
        one; a record with any other value is refused.

    Raises
    ------
    ConfigError
        No keys, or a column in two roles that exclude each other.

    Examples
    --------
    >>> Upsert(keys=("id",), sequence_by="at", delete_when="op = 'D'", not_stored=("op",)).keys
    ('id',)
    """

    TAG: ClassVar = ("kind", "UPSERT")

    keys: tuple[str, ...]
    sequence_by: str | None = None
    delete_when: str | None = None
    not_stored: tuple[str, ...] = ()
    row_kind: str | None = field(default=None, metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        check_fields(self, keys=_GIVE_COLUMNS, not_stored=_GIVE_COLUMNS)
        if not self.keys:
            what = "Upsert has no keys, which say the row that a record replaces"
            raise ConfigError(what, what_to_do='name them: Upsert(keys=("id",)), or use Append()')
        if both := sorted(set(self.keys) & set(self.not_stored)):
            what = f"the key '{both[0]}' of Upsert is among the columns that are not stored"
            raise ConfigError(what, what_to_do="take it out of not_stored")
        if self.row_kind is not None and (self.delete_when is not None or self.row_kind in self.keys):
            what = f"row_kind of Upsert is {self.row_kind!r}, which is a key, or delete_when is given as well"
            raise ConfigError(what, what_to_do="leave delete_when out, and name columns of the row as keys")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Columns of the stream that the table does not get."""
        return self.not_stored if self.row_kind is None else (*self.not_stored, self.row_kind)


WriteMode = Append | Upsert | OverwritePartitions


def list_stored_names(mode: WriteMode, names: Sequence[str]) -> tuple[str, ...]:
    left_out = mode.left_out if isinstance(mode, Upsert) else ()
    return tuple(name for name in names if name not in left_out)


def mode_from_json(stored: Any) -> WriteMode:
    mode: WriteMode = read(WriteMode, stored)
    return mode
