"""Checks of a stream and its table before the start; those of the table are repeated in each commit."""

from __future__ import annotations

import contextlib
import logging

from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.database import Database
from flinkish_spark.connectors.jdbc.dialect import ColumnInfo, Session, WriteMode
from flinkish_spark.connectors.jdbc.settings import JdbcSettings
from flinkish_spark.connectors.jdbc.types import is_supported
from flinkish_spark.connectors.plain_formats import find_field
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.errors import SchemaError

LOG = logging.getLogger(__name__)

_EXACT_KEYS = (
    "give the key columns a type and a collation that compare texts letter by letter: TEXT in PostgreSQL and "
    "SQLite, VARCHAR or TEXT with COLLATE utf8mb4_0900_bin in MySQL and utf8mb4_nopad_bin in MariaDB; "
    "or use a key of numbers"
)
_NO_CONVERSION = (
    "change the column, or cast the field to the column's type before the sink, as with transform(...); "
    "a DECIMAL, DATE or TIMESTAMP may also be declared where the field is read"
)


class _RollbackChecks(Exception):
    """Raised to roll back the transaction of the checks."""


class Checks:
    def __init__(self, settings: JdbcSettings, context: SinkContext) -> None:
        self._settings, self._context = settings, context
        self._where = f"sink '{context.uid}'"

    def run(self) -> tuple[ColumnInfo, ...]:
        """Make all checks; tables created for them are rolled back if the database can do that."""
        self._check_stream()
        settings, schema = self._settings, self._context.schema
        dialect, database = settings.dialect, Database(settings, self._context.uid)
        with contextlib.closing(database), database.use() as session:
            if why := dialect.why_lost_without_power(session):
                lost = "%s: a power cut at %s can take what is reported as committed, since %s"
                LOG.warning(lost, self._where, settings.url, why)
            if not dialect.has_transactional_ddl:
                settings.create_tables(session, schema)
            with contextlib.suppress(_RollbackChecks), session.transaction(dialect.begin):
                settings.create_tables(session, schema)
                columns = self.check_table(session)
                # Execute a checkpoint's statements without rows: the database checks the rights.
                dialect.probe(session, settings.target(schema), deletes=bool(settings.deletes_by))
                settings.control(self._context).try_out(session)
                raise _RollbackChecks
        return columns

    def _check_stream(self) -> None:
        settings, schema = self._settings, self._context.schema
        for name in settings.key:
            find_field(schema, name, f"key of {self._where}")
        for declared in schema.fields:
            if not is_supported(declared.dataType):
                raise SchemaError(
                    f"{self._where} cannot write the field '{declared.name}' of type "
                    f"{declared.dataType.simpleString()}",
                    what_to_do="cast it to another type with transform(...)",
                )
            if declared.name in settings.key and isinstance(
                declared.dataType, T.ArrayType | T.MapType | T.StructType
            ):
                raise SchemaError(
                    f"the key of {self._where} has the column '{declared.name}' of type "
                    f"{declared.dataType.simpleString()}",
                    why="it is stored as JSON, which databases do not compare as a key",
                    what_to_do="choose columns of scalar types",
                )
        if settings.delete_when:
            find_field(schema, settings.delete_when, f"delete_when of {self._where}", ("boolean",))
        if settings.row_kind:
            find_field(schema, settings.row_kind, f"row_kind of {self._where}", ("string",))
        if not settings.target(schema).columns:
            raise SchemaError(f"{self._where} has no column to write", what_to_do="add fields to its stream")

    def check_table(self, session: Session) -> tuple[ColumnInfo, ...]:
        """Check the table and return its columns; :meth:`.Dialect.hold` keeps them from changing."""
        settings, dialect = self._settings, self._settings.dialect
        columns = {c.name: c for c in dialect.columns_of(session, settings.table_name)}
        if not columns:
            raise SchemaError(
                f"{self._where} writes into the table {settings.table_name}, which is not in {settings.url}",
                what_to_do="create it, or set create_table=True",
            )
        for declared in self._context.schema.fields:
            if declared.name != settings.deletes_by:
                self._check_column(declared, columns)
        for table in settings.tables:
            why = dialect.why_unsafe(session, table)
            if why:
                raise SchemaError(
                    f"the table {table} of {self._where} cannot be written exactly once",
                    why=why,
                    what_to_do="use an ordinary table of this database, in MySQL one of InnoDB",
                )
        written = settings.target(self._context.schema).columns
        for column in columns.values():
            if column.must_be_given and column.name not in written:
                raise SchemaError(
                    f"the column '{column.name}' of {settings.table_name} must have a value, and "
                    f"{self._where} has none for it",
                    what_to_do="give the column a default, or the stream the field",
                )
        if settings.mode is WriteMode.UPSERT:
            self._check_key(session)
        return tuple(columns.values())

    def _check_column(self, field: T.StructField, columns: dict[str, ColumnInfo]) -> None:
        table = self._settings.table_name
        column = columns.get(field.name)
        if column is None:
            raise SchemaError(
                f"{self._where} writes the field '{field.name}', for which {table} has no column",
                why="names are compared letter by letter, case included",
                what_to_do=f"rename it to one of {', '.join(columns)}, leave it out, or add the column",
            )
        why = self._settings.dialect.why_unfit(field.dataType, column)
        if why:
            raise SchemaError(
                f"the field '{field.name}' of type {field.dataType.simpleString()} does not fit the column "
                f"of type {column.type} in {table}, {self._where}",
                why=why,
                what_to_do=_NO_CONVERSION,
            )

    def _check_key(self, session: Session) -> None:
        settings = self._settings
        indexes = settings.dialect.unique_indexes(session, settings.table_name)
        if set(settings.key) not in indexes.values():
            raise SchemaError(
                f"{self._where} upserts by {', '.join(settings.key)}, and {settings.table_name} has no "
                "unique constraint on exactly these columns",
                why="without it a row could not replace the one with its key",
                what_to_do="add a primary key or a unique constraint (not deferrable), or name its columns",
            )
        if why := settings.dialect.why_not_upserted(session, settings.target(self._context.schema)):
            raise SchemaError(
                f"{settings.table_name} of {self._where} has more than one unique index",
                why=why,
                what_to_do="keep one unique index, the key's",
            )
        # A table to which two different keys are equal would replace another key's row.
        key = [self._context.schema[name] for name in settings.key]
        texts = [(one.name, one.dataType) for one in key if isinstance(one.dataType, T.StringType)]
        folding = (
            f"the collation {kind.collation} of the field '{name}'"
            for name, kind in texts
            if not kind.isUTF8BinaryCollation()
        )
        why = next(folding, "") or settings.dialect.why_keys_fold(session, settings.table_name, key)
        if why:
            raise SchemaError(
                f"{self._where} upserts by {', '.join(settings.key)}, and {settings.table_name} takes some "
                "different keys for equal",
                why=why,
                what_to_do=_EXACT_KEYS,
            )
