"""SQLite, through the standard library."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.dialect import ColumnInfo, Dialect, Login, Session, Trouble, UnfitValue
from flinkish_spark.connectors.jdbc.names import TableName

_LOCK_WAIT_S = 20
_REFUSED = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH})
#: Another row has the value of a unique index.
_TAKEN = frozenset(
    {sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_ROWID}
)
_PASSING = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT}
    | {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL}
)
#: An extended code has the primary one in its lowest byte.
_PRIMARY = 0xFF
_INTEGERS = (T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_REALS = (T.FloatType, T.DoubleType)
_NUMERIC_AFFINITY = ("INTEGER", "REAL", "NUMERIC")


class Sqlite(Dialect):
    """SQLite 3.24 and later. Decimals, dates, times and JSON are stored as TEXT."""

    name, marker = "sqlite", "?"
    # Takes the write lock at the start: taking it later in a transaction can fail.
    begin = ("BEGIN IMMEDIATE",)

    def connect(self, login: Login) -> Any:
        """Open the file; create it if it is missing, but not its folder."""
        connection = sqlite3.connect(
            login.url.database, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        # Committed rows must survive a power cut, whatever the library's default is.
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def interrupt(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            connection.interrupt()

    def trouble(self, error: BaseException) -> Trouble:
        """Classify an error by SQLite's code; without a code, Python's module could not bind a value."""
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None:
            if code & _PRIMARY in _REFUSED:
                return Trouble.REFUSED
            return Trouble.PASSING if code & _PRIMARY in _PASSING else Trouble.LASTING
        if isinstance(error, OverflowError | sqlite3.DataError | UnicodeEncodeError):
            return Trouble.REFUSED
        return Trouble.PASSING if isinstance(error, sqlite3.OperationalError) else Trouble.LASTING

    def is_taken(self, error: BaseException) -> bool:
        return getattr(error, "sqlite_errorcode", None) in _TAKEN

    def columns_of(self, session: Session, table: TableName) -> list[ColumnInfo]:
        name, schema = place = self._place(table)
        found = session.rows(
            'SELECT name, type, "notnull", dflt_value, pk FROM pragma_table_info(?, ?)', place
        )
        # ON CONFLICT and triggers may replace a null; an INTEGER PRIMARY KEY gets a number.
        may_take_nulls = found and session.rows(
            f"SELECT 1 FROM {self.quote(schema)}.sqlite_master WHERE tbl_name = ? COLLATE NOCASE "
            "AND (type = 'trigger' OR sql LIKE '%on conflict%')",
            (name,),
        )
        return [
            ColumnInfo(
                str(n),
                str(t).lower(),
                bool(not_null) and default is None,
                bool(not_null) and not may_take_nulls and not (pk and str(t).lower() == "integer"),
            )
            for n, t, not_null, default, pk in found
        ]

    def unique_columns(self, session: Session, table: TableName) -> list[tuple[Any, ...]]:
        # An INTEGER PRIMARY KEY has no index.
        name, schema = self._place(table)
        return session.rows(
            "SELECT '', name FROM pragma_table_info(?, ?) WHERE pk > 0 "
            "UNION ALL SELECT i.name, c.name FROM pragma_index_list(?, ?) i "
            'JOIN pragma_index_info(i.name, ?) c WHERE i."unique" AND NOT i.partial',
            (name, schema, name, schema, schema),
        )

    def why_keys_fold(self, session: Session, table: TableName, key: Sequence[T.StructField]) -> str:
        """Check the collations of unique indexes, which include that of the key's columns."""
        (name, schema), names = self._place(table), {field.name for field in key}
        found = session.rows(
            "SELECT c.name, c.coll FROM pragma_index_list(?, ?) i "
            'JOIN pragma_index_xinfo(i.name, ?) c WHERE i."unique" AND c.key',
            (name, schema, schema),
        )
        for column, collation in found:
            if column in names and str(collation).upper() != "BINARY":
                return f"the collation {collation} of its column {column} takes different texts for equal"
        return ""

    def is_ordered(self, session: Session, table: TableName) -> bool:
        """Look for triggers, and if the connection enforces foreign keys."""
        name, schema = self._place(table)
        sql = f"SELECT 1 FROM {self.quote(schema)}.sqlite_master WHERE type = 'trigger' "
        triggers = session.rows(sql + "AND tbl_name = ? COLLATE NOCASE", (name,))
        return bool(triggers) or session.rows("PRAGMA foreign_keys") == [(1,)]

    def why_unsafe(self, session: Session, table: TableName) -> str:
        is_temporary = self._place(table)[1].lower() == "temp"
        return "it is temporary: it is gone with its connection" if is_temporary else ""

    def _place(self, table: TableName) -> tuple[str, str]:
        return table.parts[-1], table.parts[0] if len(table.parts) > 1 else "main"

    def type_for(self, data_type: T.DataType, *, in_key: bool) -> str:
        if isinstance(data_type, _INTEGERS):
            return "INTEGER"
        if isinstance(data_type, _REALS):
            return "REAL"
        return "BLOB" if isinstance(data_type, T.BinaryType) else "TEXT"

    def why_unfit(self, data_type: T.DataType, column: ColumnInfo) -> str:
        """Check the column's affinity, which may convert text that looks like a number."""
        affinity = _affinity(column.type)
        if affinity == "BLOB" or isinstance(data_type, T.BinaryType):
            return ""
        if isinstance(data_type, _INTEGERS):
            return "" if affinity in ("INTEGER", "NUMERIC") else f"{affinity} affinity converts integers"
        if isinstance(data_type, _REALS):
            return "" if affinity == "REAL" else f"{affinity} affinity converts floating-point numbers"
        if isinstance(data_type, T.DateType | T.TimestampType | T.TimestampNTZType):
            return ""  # no affinity takes them for numbers
        if affinity in _NUMERIC_AFFINITY:
            return f"{affinity} affinity converts text that looks like a number"
        return ""

    def scalar_encoder(self, arrow_type: pa.DataType) -> Callable[[Any], Any] | None:
        if pa.types.is_floating(arrow_type):
            no_number = UnfitValue("SQLite would store NaN as NULL")
            return lambda value: no_number if math.isnan(value) else value
        if pa.types.is_decimal(arrow_type):
            return lambda value: format(value, "f")
        if pa.types.is_timestamp(arrow_type):
            # Sorts as text: always with microseconds, and in UTC if it is an instant.
            return lambda value: value.isoformat(sep=" ", timespec="microseconds")
        return dt.date.isoformat if pa.types.is_date(arrow_type) else None


def _affinity(declared: str) -> str:
    """Return the affinity of a declared type, by SQLite's own five rules."""
    for affinity, parts in (
        ("INTEGER", ("int",)),
        ("TEXT", ("char", "clob", "text")),
        ("BLOB", ("blob",)),
        ("REAL", ("real", "floa", "doub")),
    ):
        if any(part in declared for part in parts):
            return affinity
    # ANY stores all values unchanged only in a STRICT table.
    return "NUMERIC" if declared else "BLOB"
