"""MySQL and MariaDB, through PyMySQL."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.dialect import (
    ColumnInfo,
    Dialect,
    Login,
    Params,
    Session,
    Target,
    Trouble,
    UnfitValue,
    WriteMode,
    import_driver,
    to_text,
)
from flinkish_spark.connectors.jdbc.names import TableName
from flinkish_spark.connectors.jdbc.types import INTEGER_BITS, TEXT_CAST, SqlType, make_blank_check
from flinkish_spark.core.errors import ConfigError

_CONNECT_TIMEOUT_S, _IDLE_S, _LOCK_WAIT_S = 10, 60, 20
_ROWS_A_STATEMENT = 500
#: A letter may take four bytes, or be escaped; the factor leaves room for other values.
_LETTERS_PER_PACKET_BYTE = 8
_MICROSECONDS = 6
_LONGEST_NAME, _LAST_LETTER = 64, 0xFFFF
#: The information schema compares names without case, and so would find the columns of two tables.
_EXACTLY = "CAST(table_name AS CHAR CHARACTER SET utf8mb4) COLLATE utf8mb4_bin = %s"
_SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,NO_ZERO_DATE,NO_ZERO_IN_DATE"

_TYPES: dict[type[T.DataType], str] = {
    T.BooleanType: "tinyint(1)",
    T.ByteType: "tinyint",
    T.ShortType: "smallint",
    T.IntegerType: "int",
    T.LongType: "bigint",
    T.FloatType: "double",  # its FLOAT prints six digits
    T.DoubleType: "double",
    T.StringType: "longtext",
    T.BinaryType: "longblob",
    T.DateType: "date",
    T.TimestampType: "datetime(6)",
    T.TimestampNTZType: "datetime(6)",
    T.ArrayType: "json",
    T.MapType: "json",
    T.StructType: "json",
}
#: An index needs a length: 255 characters of four bytes are within the limit of all but the oldest row
#: formats.
_KEY_TYPES: dict[type[T.DataType], str] = {T.StringType: "varchar(255)", T.BinaryType: "varbinary(255)"}
_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
#: Longest texts in bytes; a VARCHAR has its length in its type.
_TEXT_BYTES = {"tinytext": 255, "text": 65_535, "mediumtext": 16_777_215, "longtext": 4_294_967_295}
#: Types that store a text unchanged or refuse it. CHAR drops trailing blanks; ENUM and SET convert texts.
_STRINGS = frozenset({"varchar", *_TEXT_BYTES})
#: Types that store bytes unchanged or refuse them. BINARY pads values with zero bytes.
_BINARIES = frozenset({"varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_ALSO: dict[type[T.DataType], frozenset[str]] = {
    T.BinaryType: _BINARIES,
    T.BooleanType: frozenset({*_BITS, *(f"{name} unsigned" for name in _BITS)}),
    **dict.fromkeys((T.ArrayType, T.MapType, T.StructType), _STRINGS),
}
#: Character sets that have every letter or refuse the missing ones; others store two letters as one.
_LETTERS = frozenset({"", "utf8mb4", "utf8mb3", "utf8", "utf16", "utf32", "ucs2", "latin1", "ascii"})
#: Errors about values: null, duplicate, out of range, truncated, wrong, too long, division, no default,
#: foreign keys, checks, SIGNAL in a trigger, JSON, too large rows, rows without a partition.
_REFUSED = frozenset(
    {1048, 1062, 1118, 1264, 1265, 1292, 1364, 1365, 1366, 1367, 1406, 1451, 1452, 1526, 1644, 1690, 3140}
    | {3819, 4025}
)
#: Errors that pass: connections, locks, deadlocks, shutdown, full disks, a replica that is not yet the
#: primary.
_PASSING = frozenset(
    {1021, 1037, 1040, 1041, 1053, 1152, 1158, 1159, 1160, 1161, 1203, 1205, 1213, 1290, 1317, 1836, 1927}
    | {2002, 2003, 2006, 2013, 2055, 4031}
)

#: A collation to which texts differ by case and trailing spaces: a version comment for each server.
_COLLATION = "/*!50799 COLLATE utf8mb4_0900_bin */ /*M!100202 COLLATE utf8mb4_nopad_bin */"

#: Suffixes of collations to which different texts are never equal, including trailing spaces.
_EXACT_COLLATIONS = ("_0900_bin", "_nopad_bin")
#: The engine with transactions; others have none, or keep their rows elsewhere.
_ENGINE = "InnoDB"


class StatementTooLong(Exception):
    """The server would close the connection without reading it."""


class MySql(Dialect):
    """MySQL 8.0.17 and MariaDB 10.5, tables of InnoDB."""

    name, marker = "mysql", "%s"
    begin = ("START TRANSACTION",)
    has_transactional_ddl = False
    text, name_text, number = "LONGTEXT", "VARCHAR(190)", "BIGINT"
    _quote = "`"
    _longest_identifier_bytes = 64 * 3
    types, also, bits, decimal = _TYPES, _ALSO, _BITS, "decimal"

    def connect(self, login: Login) -> Any:
        pymysql = import_driver("MySQL", "pymysql", "mysql")
        url, timeout_s = login.url, max(1, login.timeout_ms // 1000)
        connection = pymysql.connect(
            host=url.host,
            port=url.port,
            database=url.database,
            user=login.user or None,
            password=login.password,
            charset="utf8mb4",
            autocommit=True,
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=timeout_s,
            write_timeout=timeout_s,
            **dict(url.options),
        )
        try:
            session = Session(connection)
            # Without a strict mode MySQL silently cuts and rounds values that do not fit.
            session.run(f"SET SESSION sql_mode = '{_SQL_MODE}'")
            session.run("SET SESSION time_zone = '+00:00'")
            session.run(
                "SET SESSION wait_timeout = %s, innodb_lock_wait_timeout = %s, lock_wait_timeout = %s",
                (_IDLE_S, _LOCK_WAIT_S, _LOCK_WAIT_S),
            )
        except BaseException:
            connection.close()
            raise
        # The driver's timeout would end a statement that the server is executing; `_Patience` asks the server
        # first.
        connection._read_timeout = None
        return connection

    def interrupt(self, connection: Any) -> None:
        """Shut the socket down: the waiting thread sees a lost connection."""
        with contextlib.suppress(Exception):
            connection._sock.shutdown(socket.SHUT_RDWR)

    def is_at_work(self, connection: Any, other: Session) -> bool:
        return bool(
            other.rows(
                "SELECT 1 FROM information_schema.processlist WHERE id = %s AND command = 'Query'",
                (connection.thread_id(),),
            )
        )

    def trouble(self, error: BaseException) -> Trouble:
        import pymysql

        if not isinstance(error, pymysql.Error):
            # PyMySQL's error for values that it cannot write as literals, and ours.
            is_refused = isinstance(error, UnicodeEncodeError | StatementTooLong)
            return Trouble.REFUSED if is_refused else Trouble.LASTING
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        if code in _REFUSED:
            return Trouble.REFUSED
        is_cut_off = code == 0 and isinstance(error, pymysql.OperationalError | pymysql.InterfaceError)
        return Trouble.PASSING if code in _PASSING or is_cut_off else Trouble.LASTING

    def reason(self, error: BaseException) -> str:
        if len(error.args) == 2:
            return " ".join(f"{error.args[1]} ({error.args[0]})".split())
        return super().reason(error)

    def quote(self, identifier: str) -> str:
        is_beyond = any(ord(letter) > _LAST_LETTER for letter in identifier)
        if is_beyond or len(identifier) > _LONGEST_NAME or identifier != identifier.rstrip():
            raise ConfigError(
                f"{identifier!r} cannot be the name of a table or column in MySQL",
                why=f"names have up to {_LONGEST_NAME} characters of the basic plane and no space at the end",
                what_to_do="use another name",
            )
        return super().quote(identifier)

    def on_conflict(self, target: Target) -> str:
        """Return the ON DUPLICATE KEY UPDATE clause, which cannot name the key."""
        if target.mode is WriteMode.INSERT:
            return ""
        others = [c for c in target.columns if c not in target.key] or [target.key[0]]
        sets = ", ".join(f"{self.quote(c)} = VALUES({self.quote(c)})" for c in others)
        return f" ON DUPLICATE KEY UPDATE {sets}"

    def insert_if_absent(self, table: TableName, columns: Sequence[str], key: Sequence[str]) -> str:
        same = self.quote(key[0])
        return f"{self.insert(table, columns)} ON DUPLICATE KEY UPDATE {same} = {same}"

    def create_table(
        self, table: TableName, columns: Sequence[tuple[str, str]], key: Sequence[str] = ()
    ) -> str:
        return super().create_table(table, columns, key) + (
            f" ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 {_COLLATION}"
        )

    def write(
        self, session: Session, target: Target, rows: Sequence[Params], *, in_order: bool = False
    ) -> None:
        """Write many rows with one statement, which writes them one after the other."""
        one = f"({', '.join([self.marker] * len(target.columns))})"
        head = f"INSERT INTO {self.table(target.table)} ({self.list_of(target.columns)}) VALUES "
        ((most_bytes,),) = session.rows("SELECT @@max_allowed_packet")
        most_letters = int(most_bytes) // _LETTERS_PER_PACKET_BYTE
        for part in _parts(rows, most_letters):
            sql = head + ", ".join([one] * len(part)) + self.on_conflict(target)
            params = tuple(value for row in part for value in row)
            if len(part) == 1 and _letters(part[0]) > most_letters:
                with session.cursor() as cursor:
                    text = cursor.mogrify(sql, params)
                size = len(text.encode("utf-8", "surrogateescape")) + 1
                if size > int(most_bytes):
                    why = f"the record is {size} bytes of SQL, and max_allowed_packet is {most_bytes}"
                    raise StatementTooLong(why)
            session.run(sql, params)

    def columns_of(self, session: Session, table: TableName) -> list[ColumnInfo]:
        # A trigger, an AUTO_INCREMENT and, in old settings, a TIMESTAMP replace a null.
        select = (
            "column_name, column_type, is_nullable = 'NO' AND column_default IS NULL "
            "AND extra NOT LIKE %s AND extra NOT LIKE %s, is_nullable = 'NO' AND extra NOT LIKE %s "
            "AND data_type <> 'timestamp' AND NOT EXISTS (SELECT 1 FROM information_schema.triggers "
            "WHERE event_object_schema = table_schema AND event_object_table = table_name), "
            "extra LIKE %s AND extra NOT LIKE 'DEFAULT%%', COALESCE(character_set_name, '') "
            "FROM information_schema.columns"
        )
        patterns = ("%auto_increment%", "%generated%", "%auto_increment%", "%generated%")
        found = self._ask_about(session, table, select, patterns, more="ORDER BY ordinal_position")
        return [
            ColumnInfo(str(n), to_text(t).lower(), bool(must), bool(no), False, bool(made), str(letters))
            for n, t, must, no, made, letters in found
        ]

    def unique_columns(self, session: Session, table: TableName) -> list[Params]:
        select = "index_name, column_name, sub_part FROM information_schema.statistics"
        found = self._ask_about(session, table, select, more="AND non_unique = 0")
        return [(index, column if part is None else None) for index, column, part in found]

    def why_keys_fold(self, session: Session, table: TableName, key: Sequence[T.StructField]) -> str:
        """Check types and collations: most collations ignore case, accents and trailing spaces."""
        kinds = {field.name: field.dataType for field in key}
        select = "column_name, data_type, collation_name FROM information_schema.columns"
        found = self._ask_about(session, table, select)
        for name, column_type, collation in ((str(n), to_text(t).lower(), c) for n, t, c in found):
            is_text = isinstance(kinds.get(name), T.StringType)
            if isinstance(kinds.get(name), T.BinaryType) and column_type == "binary":
                return f"its column {name} of type binary fills values up with zero bytes"
            if is_text and column_type not in _STRINGS | _BINARIES:
                return f"different texts are one {column_type} in its column {name}"
            if is_text and collation is not None and not str(collation).endswith(_EXACT_COLLATIONS):
                return f"the collation {collation} of its column {name} takes different texts for equal"
        return ""

    def is_ordered(self, session: Session, table: TableName) -> bool:
        """Look for triggers and foreign keys, at both ends, that this user may see."""
        # There are no further unique keys: see why_not_upserted().
        found = session.rows(
            "SELECT 1 FROM information_schema.triggers "
            "WHERE event_object_schema = COALESCE(%s, DATABASE()) AND event_object_table = %s "
            "UNION ALL SELECT 1 FROM information_schema.key_column_usage "
            "WHERE table_schema = COALESCE(%s, DATABASE()) AND referenced_table_name IS NOT NULL "
            "AND %s IN (table_name, referenced_table_name) LIMIT 1",
            self._place(table) * 2,
        )
        return bool(found)

    def why_not_upserted(self, session: Session, target: Target) -> str:
        """Look for unique indexes besides the key's, including those over parts of columns or expressions."""
        for index, columns in sorted(self.unique_indexes(session, target.table).items()):
            if columns != set(target.key):
                return f"MySQL's upsert also replaces a row that is equal in its unique index {index}"
        return ""

    def why_unsafe(self, session: Session, table: TableName) -> str:
        select = "COALESCE(engine, table_type) FROM information_schema.tables"
        found = self._ask_about(session, table, select)
        others = [str(engine) for (engine,) in found if engine != _ENGINE]
        if others:
            return f"its engine {others[0]} has no transactions, or keeps its rows elsewhere: use {_ENGINE}"
        ((flush,),) = session.rows("SELECT @@innodb_flush_log_at_trx_commit")
        return "" if int(flush) else "innodb_flush_log_at_trx_commit is 0: a server that ends forgets commits"

    def why_lost_without_power(self, session: Session) -> str:
        ((flush,),) = session.rows("SELECT @@innodb_flush_log_at_trx_commit")
        return "" if int(flush) == 1 else f"innodb_flush_log_at_trx_commit is {flush}"

    def _ask_about(
        self, session: Session, table: TableName, select: str, params: Params = (), more: str = ""
    ) -> list[Params]:
        here = f"table_schema = COALESCE(%s, DATABASE()) AND {_EXACTLY}"
        return session.rows(f"SELECT {select} WHERE {here} {more}", (*params, *self._place(table)))

    def _place(self, table: TableName) -> tuple[str | None, str]:
        return table.parts[0] if len(table.parts) > 1 else None, table.parts[-1]

    def type_for(self, data_type: T.DataType, *, in_key: bool) -> str:
        own = _KEY_TYPES.get(type(data_type)) if in_key else None
        return own or super().type_for(data_type, in_key=in_key)

    def why_special(self, data_type: T.DataType, column: ColumnInfo, found: SqlType) -> str | None:
        if column.letters not in _LETTERS:
            return f"its character set {column.letters} lacks letters"
        if isinstance(data_type, T.StringType):
            return "" if found.name in _STRINGS | _BINARIES else TEXT_CAST
        if type(data_type) in INTEGER_BITS and column.type.endswith(" unsigned"):
            return "it has a sign"
        if found.name == "double" and found.size is not None:
            return f"it would be rounded to {found.scale} digits after the point"
        if isinstance(data_type, T.TimestampType | T.TimestampNTZType) and found.name == "datetime":
            is_exact = found.size == _MICROSECONDS
            return "" if is_exact else f"it would be rounded to {found.size or 0} digits of a second"
        return None

    def check_of(self, column: ColumnInfo) -> Callable[[str], str] | None:
        """Return a check for trailing blanks beyond the length: MySQL cuts them off in every mode."""
        found = SqlType.parse(column.type)
        if found.name == "varchar" and found.size is not None:
            return make_blank_check(found.size, column.type, len)
        if found.name in _TEXT_BYTES:
            return make_blank_check(_TEXT_BYTES[found.name], column.type, lambda text: len(text.encode()))
        return None

    def scalar_encoder(self, arrow_type: pa.DataType) -> Callable[[Any], Any] | None:
        if pa.types.is_floating(arrow_type):
            no_number = UnfitValue("MySQL has no NaN and no infinity")
            return lambda value: value if math.isfinite(value) else no_number
        if pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None:
            return lambda value: value.replace(tzinfo=None)
        return None


def _parts(rows: Sequence[Params], most_letters: int) -> Iterator[list[Params]]:
    """Yield groups of rows for one statement each; one row may exceed the limit."""
    part: list[Params] = []
    letters = 0
    for row in rows:
        more = _letters(row)
        if part and (len(part) == _ROWS_A_STATEMENT or letters + more > most_letters):
            yield part
            part, letters = [], 0
        part.append(row)
        letters += more
    if part:
        yield part


def _letters(row: Params) -> int:
    return sum(len(value) for value in row if isinstance(value, str | bytes))
