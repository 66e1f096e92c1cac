"""How a Delta sink changes its table: what a user chooses, and how a committable remembers it.

A committable carries the settings that it was staged under, so that whoever commits it needs nothing
else, and a sink whose settings were changed cannot reinterpret what is decided.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.codec import Stored, read


class SchemaEvolution(enum.Enum):
    """What the stream may have that the table does not have yet.

    Columns are only ever added and widened: no mode drops a column or changes its type otherwise.
    """

    #: Nothing: another schema is refused before the job starts.
    NONE = "NONE"
    #: New columns and new fields of structs; added by the commit of the checkpoint that brings them.
    ADD_COLUMNS = "ADD_COLUMNS"
    #: Also wider types, in tables with ``delta.enableTypeWidening``.
    WIDEN_TYPES = "WIDEN_TYPES"


class DeltaWriter(enum.Enum):
    """By which of Delta's doors a sink works. Either can finish what the other staged."""

    #: NATIVE where this Spark has Delta's classes, else PORTABLE.
    AUTO = "auto"
    #: Delta's own transactions: data files are staged in their final place, a commit only names them.
    NATIVE = "native"
    #: Public interfaces only: rows are staged as Parquet and written to the table by the commit.
    PORTABLE = "portable"

    @classmethod
    def of(cls, value: str | DeltaWriter) -> DeltaWriter:
        """Return the one that a user named; raise ConfigError if there is none."""
        try:
            return cls(value)
        except ValueError:
            raise ConfigError(
                f"writer is {value!r}", what_to_do='use "auto", "native" or "portable"'
            ) from None


@dataclass(frozen=True, slots=True)
class Append(Stored):
    """Every record becomes a row."""

    TAG: ClassVar = ("kind", "APPEND")


@dataclass(frozen=True, slots=True)
class OverwritePartitions(Stored):
    """The partitions that occur in a checkpoint's records are replaced by these records.

    Other partitions stay. The table must be partitioned. Which records share a checkpoint decides what
    is replaced, so a partition should be written as a whole between two barriers.
    """

    TAG: ClassVar = ("kind", "OVERWRITE_PARTITIONS")


@dataclass(frozen=True, slots=True)
class Upsert(Stored):
    """One row per key: a record replaces the row with its key, or becomes a new one.

    Of several records with one key in a checkpoint the last one wins: the one with the greatest
    `sequence_by` if that is given, else the one that is later in the stream. The stream has an order only
    within a Spark partition, so key the stream by `keys`, or give `sequence_by`.

    Parameters
    ----------
    keys
        Columns that together name a row. A record with a null in one of them is refused.
    sequence_by
        Column whose greatest value is the newest; of equal ones the later in the stream. A record that is
        older than the row in the table changes nothing. Null is older than everything.
    delete_when
        SQL condition on a record: it deletes the row with its key. Nothing remembers a deleted row, so
        an older record that comes in a later checkpoint brings it back.
    not_stored
        Columns of the stream that the table does not get, such as the one that says what a record does.
        If `sequence_by` is among them, records are compared with each other and not with the table.

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

    def __post_init__(self) -> None:
        for name in ("keys", "not_stored"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) for one in given):
                raise ConfigError(
                    f"{name} of Upsert is {given!r}", what_to_do='give a tuple of columns, such as ("id",)'
                )
            object.__setattr__(self, name, tuple(given))
        if not self.keys:
            raise ConfigError(
                "Upsert has no keys",
                why="nothing would say which row a record replaces",
                what_to_do='name them: Upsert(keys=("id",)), or use Append()',
            )
        both = sorted(set(self.keys) & set(self.not_stored))
        if both:
            raise ConfigError(
                f"the key '{both[0]}' of Upsert is among the columns that are not stored",
                why="the row could not be found again",
                what_to_do="take it out of not_stored",
            )


WriteMode = Append | Upsert | OverwritePartitions


def stored_fields(mode: WriteMode, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of a stream's fields that the table gets."""
    left_out = mode.not_stored if isinstance(mode, Upsert) else ()
    return tuple(name for name in names if name not in left_out)


def mode_from_json(stored: Any) -> WriteMode:
    """Read the stored form; committables from before there were modes have none and append.

    Examples
    --------
    >>> mode_from_json(Upsert(("id",)).to_json()) == Upsert(("id",))
    True
    """
    mode: WriteMode = Append() if stored is None else read(WriteMode, stored)
    return mode
