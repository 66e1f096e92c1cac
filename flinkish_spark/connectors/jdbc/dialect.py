"""Dialects: the differences between databases, their drivers, and conversion of values to parameters.

SQL consists of text of this package and of identifiers quoted by :meth:`Dialect.quote`; values are always
passed as parameters. Drivers are extras, imported on first use.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import enum
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.names import JdbcUrl, TableName
from flinkish_spark.connectors.jdbc.types import INTEGER_BITS, SqlType, why_decimal_unfit, why_integer_unfit
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.types.arrow_columns import find_beyond_years, leaves

Params = tuple[Any, ...]


class Trouble(enum.Enum):
    """Kinds of database errors during the commit of a decided checkpoint."""

    #: The error may go away: connection lost, locked, restarting, full.
    PASSING = "PASSING"
    #: The error is about values: a constraint, a length, a cast. Other rows may be accepted.
    REFUSED = "REFUSED"
    #: The user must act: no such table, no right, a bug.
    LASTING = "LASTING"


class WriteMode(enum.Enum):
    #: Each record is inserted as a new row.
    INSERT = "insert"
    #: A record replaces the row with its key.
    UPSERT = "upsert"


@dataclass(frozen=True, slots=True)
class Target:
    table: TableName
    #: The columns that are written, in the order of parameters.
    columns: tuple[str, ...]
    key: tuple[str, ...]
    mode: WriteMode


@dataclass(frozen=True, slots=True)
class Login:
    """Settings of a connection; contains the password, so it must not be kept."""

    url: JdbcUrl
    user: str
    password: str
    timeout_ms: int

    def __repr__(self) -> str:
        return f"Login({self.url})"


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    name: str
    #: The type as the database writes it, in lower case.
    type: str
    #: If a row without this column is refused: NOT NULL without a default.
    must_be_given: bool
    #: If a null is always refused: no trigger or rule could replace it.
    refuses_null: bool = False
    is_enum: bool = False
    #: If the database computes its values.
    is_generated: bool = False
    #: The character set of a text column, in MySQL.
    letters: str = ""


class LostTransaction(Exception):
    """After an error the rollback to a savepoint failed: the transaction or the connection is lost."""

    def __init__(self, first: Exception, second: Exception) -> None:
        super().__init__(str(first))
        self.first, self.second = first, second


class Session:
    """A connection of a dialect; executes every statement of the sink."""

    def __init__(self, connection: Any) -> None:
        # In autocommit: statements begin and end transactions.
        self.connection, self._depth = connection, 0
        #: If a statement is running; the number of answers so far, where each row sent to the server counts,
        #: too.
        self.is_asking, self.answers = False, 0

    @contextlib.contextmanager
    def cursor(self) -> Iterator[Any]:
        cursor = self.connection.cursor()
        self.is_asking = True
        try:
            yield cursor
        finally:
            self.is_asking = False
            self.answers += 1
            with contextlib.suppress(Exception):  # the block's own error counts
                cursor.close()

    def run(self, sql: str, params: Params = ()) -> int:
        with self.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def rows(self, sql: str, params: Params = ()) -> list[tuple[Any, ...]]:
        with self.cursor() as cursor:
            cursor.execute(sql, params)
            return [tuple(row) for row in cursor.fetchall()]

    def run_many(self, sql: str, params: Sequence[Params]) -> None:
        with self.cursor() as cursor:
            cursor.executemany(sql, self.count_answers(params))

    def count_answers(self, rows: Iterable[Params]) -> Iterator[Params]:
        # Each row that the driver takes counts as an answer.
        for row in rows:
            yield row
            self.answers += 1

    @contextlib.contextmanager
    def transaction(self, begin: Sequence[str]) -> Iterator[None]:
        """Commit what the block does, or nothing of it."""
        try:
            for statement in begin:
                self.run(statement)
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.run("ROLLBACK")
            raise
        # If COMMIT itself fails, the transaction may have been committed or not.
        self.run("COMMIT")

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Keep what the block does within the transaction, or nothing of it."""
        self._depth += 1
        name = f"flinkish_{self._depth}"
        self.run(f"SAVEPOINT {name}")
        try:
            yield
        except Exception as error:
            try:
                self.run(f"ROLLBACK TO SAVEPOINT {name}")
            except Exception as second:
                raise LostTransaction(error, second) from None
            raise
        else:
            self.run(f"RELEASE SAVEPOINT {name}")
        finally:
            self._depth -= 1

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.connection.close()


class Dialect(ABC):
    """One kind of database. Stateless; its statements are for :class:`Session`."""

    name: str
    #: The marker of a parameter in SQL.
    marker: str
    #: Statements that begin a transaction in which rows are written.
    begin: tuple[str, ...] = ("BEGIN",)
    #: If a ROLLBACK undoes a CREATE TABLE.
    has_transactional_ddl = True
    #: Column types of the control and dead-letter tables: for texts, names and numbers.
    text, name_text, number = "TEXT", "TEXT", "BIGINT"
    #: Column types by Spark type: the one for new tables, and others that store all values unchanged.
    types: Mapping[type[T.DataType], str] = MappingProxyType({})
    also: Mapping[type[T.DataType], frozenset[str]] = MappingProxyType({})
    #: Bits of integer types, by name; the name of the decimal type.
    bits: Mapping[str, int] = MappingProxyType({})
    decimal = ""
    _quote = '"'
    _longest_identifier_bytes = 1 << 16

    @abstractmethod
    def connect(self, login: Login) -> Any:
        """Return a connection of the driver, in autocommit."""

    @abstractmethod
    def interrupt(self, connection: Any) -> None:
        """Make a statement that another thread executes fail soon. Never raises."""

    def is_at_work(self, connection: Any, other: Session) -> bool:
        return True

    @abstractmethod
    def trouble(self, error: BaseException) -> Trouble:
        """Classify an error."""

    def is_taken(self, error: BaseException) -> bool:
        """Return if another row violates a unique constraint, and may be deleted or changed."""
        return False

    def reason(self, error: BaseException) -> str:
        return " ".join(str(error).split()) or type(error).__name__

    def quote(self, identifier: str) -> str:
        size = len(identifier.encode())
        if not identifier or "\0" in identifier or size > self._longest_identifier_bytes:
            raise ConfigError(
                f"{identifier!r} cannot be the name of a table or column in {self.name}",
                why=f"names have 1 to {self._longest_identifier_bytes} bytes and no zero byte",
                what_to_do="use another name",
            )
        quote = self._quote
        # The driver must see no parameter in it.
        text = identifier.replace("%", "%%") if self.marker == "%s" else identifier
        return quote + text.replace(quote, quote * 2) + quote

    def table(self, name: TableName) -> str:
        return ".".join(self.quote(part) for part in name.parts)

    def list_of(self, columns: Sequence[str]) -> str:
        return ", ".join(self.quote(column) for column in columns)

    def insert(self, table: TableName, columns: Sequence[str]) -> str:
        markers = ", ".join([self.marker] * len(columns))
        return f"INSERT INTO {self.table(table)} ({self.list_of(columns)}) VALUES ({markers})"

    def on_conflict(self, target: Target) -> str:
        """Return the conflict clause of an INSERT; empty for a plain insert."""
        if target.mode is WriteMode.INSERT:
            return ""
        others = [c for c in target.columns if c not in target.key]
        sets = ", ".join(f"{self.quote(c)} = EXCLUDED.{self.quote(c)}" for c in others)
        action = f"UPDATE SET {sets}" if sets else "NOTHING"
        return f" ON CONFLICT ({self.list_of(target.key)}) DO {action}"

    def insert_if_absent(self, table: TableName, columns: Sequence[str], key: Sequence[str]) -> str:
        return f"{self.insert(table, columns)} ON CONFLICT ({self.list_of(key)}) DO NOTHING"

    def delete_by_key(self, target: Target) -> str:
        where = " AND ".join(f"{self.quote(c)} = {self.marker}" for c in target.key)
        return f"DELETE FROM {self.table(target.table)} WHERE {where}"

    def create_table(
        self, table: TableName, columns: Sequence[tuple[str, str]], key: Sequence[str] = ()
    ) -> str:
        parts = [f"{self.quote(name)} {type_}" for name, type_ in columns]
        parts += [f"PRIMARY KEY ({self.list_of(key)})"] if key else []
        return f"CREATE TABLE IF NOT EXISTS {self.table(table)} ({', '.join(parts)})"

    def write(
        self, session: Session, target: Target, rows: Sequence[Params], *, in_order: bool = False
    ) -> None:
        """Insert or upsert rows; in order, one after the other, if keys may repeat."""
        session.run_many(self.insert(target.table, target.columns) + self.on_conflict(target), rows)

    @contextlib.contextmanager
    def defer_constraints(self, session: Session) -> Iterator[None]:
        """Defer constraints to the end of the block; the block's end raises violations."""
        yield

    def delete(self, session: Session, target: Target, keys: Sequence[Params]) -> None:
        session.run_many(self.delete_by_key(target), keys)

    def probe(self, session: Session, target: Target, *, deletes: bool) -> None:
        """Have the database check columns, key and rights by writing no rows; within a transaction."""
        names, table = self.list_of(target.columns), self.table(target.table)
        nothing = f"INSERT INTO {table} ({names}) SELECT {names} FROM {table} WHERE 1 = 0"
        session.run(nothing + self.on_conflict(target))
        if deletes:
            session.run(f"DELETE FROM {table} WHERE 1 = 0")

    @abstractmethod
    def columns_of(self, session: Session, table: TableName) -> list[ColumnInfo]:
        """Return a table's columns; empty if there is no such table."""

    def unique_indexes(self, session: Session, table: TableName) -> dict[str, set[str | None]]:
        """Return the columns of each unique index that is checked at all times."""
        # None stands for a part of a column, or an expression.
        indexes: dict[str, set[str | None]] = {}
        for index, column in self.unique_columns(session, table):
            indexes.setdefault(index, set()).add(column)
        return indexes

    @abstractmethod
    def unique_columns(self, session: Session, table: TableName) -> list[Params]:
        """Return pairs of an index and one of its columns, for :meth:`unique_indexes`."""

    @abstractmethod
    def why_keys_fold(self, session: Session, table: TableName, key: Sequence[T.StructField]) -> str:
        """Return why the table takes two different keys for equal; empty if it does not."""

    @abstractmethod
    def is_ordered(self, session: Session, table: TableName) -> bool:
        """Return if each change of a row has effects: by a trigger, a rule, or a foreign key."""

    def why_not_upserted(self, session: Session, target: Target) -> str:
        """Return why an upsert could replace a row with another key; empty if it cannot."""
        return ""

    @abstractmethod
    def why_unsafe(self, session: Session, table: TableName) -> str:
        """Return why writes into a table are not transactional or not durable; empty if they are."""

    def why_lost_without_power(self, session: Session) -> str:
        return ""

    def hold(self, session: Session, table: TableName) -> None:
        """Keep the table from being altered until the transaction ends."""
        session.run(f"SELECT 1 FROM {self.table(table)} WHERE 1 = 0")

    def type_for(self, data_type: T.DataType, *, in_key: bool) -> str:
        if isinstance(data_type, T.DecimalType):
            return f"{self.decimal}({data_type.precision}, {data_type.scale})"
        return self.types[type(data_type)]

    def why_unfit(self, data_type: T.DataType, column: ColumnInfo) -> str:
        """Return why a column cannot store every value of a Spark type unchanged; empty if it can."""
        # Only pairs of types that are known to be exact are accepted.
        found, kind = SqlType.parse(column.type), type(data_type)
        if column.is_generated:
            return "the database computes its values"
        if (why := self.why_special(data_type, column, found)) is not None:
            return why
        if kind in INTEGER_BITS and (found.name in self.bits or found.name == self.decimal):
            return why_integer_unfit(data_type, found, self.bits.get(found.name))
        if isinstance(data_type, T.DecimalType) and found.name == self.decimal:
            return why_decimal_unfit(data_type, found)
        expected = SqlType.parse(self.types.get(kind, "")).name
        is_known = found.name == expected or found.name in self.also.get(kind, ())
        return "" if is_known else "values would be converted"

    def why_special(self, data_type: T.DataType, column: ColumnInfo, found: SqlType) -> str | None:
        """Return the same by a database's own rules; None if it has no rule for this column."""
        return None

    def check_of(self, column: ColumnInfo) -> Callable[[str], str] | None:
        """Return a function that says why the column would silently change a text; None if it never does."""
        return None

    def checks(self, columns: Iterable[ColumnInfo]) -> dict[str, Callable[[str], str]]:
        found = {column.name: self.check_of(column) for column in columns}
        return {name: check for name, check in found.items() if check is not None}

    def has_zero_bytes(self, arrow_type: pa.DataType, column_type: str) -> bool:
        return True

    def encoder(self, arrow_type: pa.DataType) -> Callable[[Any], Any] | None:
        """Return a function from a Python value to a parameter or UnfitValue; None if none is needed."""
        if pa.types.is_nested(arrow_type):
            return lambda value: json.dumps(json_value(value, arrow_type), ensure_ascii=False)
        return self.scalar_encoder(arrow_type)

    def scalar_encoder(self, arrow_type: pa.DataType) -> Callable[[Any], Any] | None:
        return None


def import_driver(system: str, module: str, extra: str) -> Any:
    try:
        return __import__(module)
    except ImportError as error:
        raise EnvironmentFault(
            f"there is no Python driver for {system}",
            why=f"the module {module} cannot be imported",
            what_to_do=how_to_install(extra),
        ) from error


class UnfitValue(str):
    """Replaces a value that cannot be sent to the database; the text is the reason."""

    __slots__ = ()


def python_values(column: pa.Array) -> list[Any]:
    """Return a column's values; an UnfitValue for a value that Python cannot hold, like the year 10000."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        # UTC keeps the instant, and is unambiguous when clocks are set back.
        column = column.cast(pa.timestamp("us", tz="UTC"))
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError) as error:
        if pa.types.is_timestamp(scalar.type):
            return UnfitValue(f"the value {scalar.cast('int64').as_py()} is out of range: {error}")
        return UnfitValue(f"the value cannot be read: {error}")


def has_zero_byte(column: pa.Array) -> bool:
    """Return if a text in a column has a zero byte, at any depth."""
    texts = (leaf for leaf in leaves(column) if is_text(leaf.type))
    return any(pc.any(pc.match_substring(text, "\0")).as_py() for text in texts)


def may_be_unfit(column: pa.Array) -> bool:
    """Return if a column may have a value that cannot be sent to a database; fast, without Python values."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # bytes that are no text
        return True
    return any(_is_suspect(leaf, is_in_json=leaf is not column) for leaf in leaves(column))


def _is_suspect(leaf: pa.Array, *, is_in_json: bool) -> bool:
    if pa.types.is_floating(leaf.type):
        return not is_in_json and pc.all(pc.is_finite(leaf)).as_py() is False
    if pa.types.is_date32(leaf.type) or (pa.types.is_timestamp(leaf.type) and leaf.type.unit == "us"):
        return bool(find_beyond_years(leaf).any())
    return bool(pa.types.is_temporal(leaf.type))


def is_text(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def parameters(
    batch: pa.RecordBatch,
    columns: Sequence[str],
    dialect: Dialect,
    checks: Mapping[str, Callable[[str], str]],
) -> list[tuple[Any, ...]]:
    if not columns:
        return [()] * batch.num_rows
    encoded = []
    for name in columns:
        column = batch.column(batch.schema.get_field_index(name))
        values, encode = python_values(column), dialect.encoder(column.type)
        if encode is not None:
            values = [v if v is None or isinstance(v, UnfitValue) else encode(v) for v in values]
        if (check := checks.get(name)) is not None and is_text(column.type):
            values = [UnfitValue(why) if type(v) is str and (why := check(v)) else v for v in values]
        encoded.append(values)
    return list(zip(*encoded, strict=True))


def to_text(value: Any) -> str:
    """Return a catalog's text, which some servers return as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def record_json(batch: pa.RecordBatch, row: int, columns: Sequence[str] | None = None) -> str:
    record = {}
    for name in batch.schema.names if columns is None else columns:
        column = batch.column(batch.schema.get_field_index(name))
        (value,) = python_values(column.slice(row, 1))
        record[name] = str(value) if isinstance(value, UnfitValue) else json_value(value, column.type)
    return json.dumps(record, ensure_ascii=False)


def json_value(value: Any, arrow_type: pa.DataType) -> Any:
    """Return a value in JSON types; a string if JSON has no exact form for it."""
    # A map whose keys are no strings becomes an array of pairs.
    if value is None:
        return None
    if pa.types.is_map(arrow_type):
        pairs = [[json_value(k, arrow_type.key_type), json_value(v, arrow_type.item_type)] for k, v in value]
        return dict(pairs) if is_text(arrow_type.key_type) else pairs
    if pa.types.is_struct(arrow_type):
        return {field.name: json_value(value[field.name], field.type) for field in arrow_type}
    if pa.types.is_nested(arrow_type):
        return [json_value(item, arrow_type.value_type) for item in value]
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case Decimal():
            return format(value, "f")
        case bytes():
            return base64.b64encode(value).decode()
        case dt.datetime() | dt.date():
            return value.isoformat()
        case dt.timedelta():
            return str(value)
    return value
