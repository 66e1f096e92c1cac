"""What a JDBC sink works with: its settings, checked and put together once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.errors import SchemaError
from flinkish_spark.sinks.jdbc.control import ControlTable
from flinkish_spark.sinks.jdbc.dialect import Dialect, Login, Session, Target, Ties, WriteMode
from flinkish_spark.sinks.jdbc.mysql import MySql
from flinkish_spark.sinks.jdbc.names import TableName
from flinkish_spark.sinks.jdbc.postgres import Postgres
from flinkish_spark.sinks.jdbc.refused import DeadLetterTable, RefusedPolicy
from flinkish_spark.sinks.jdbc.secrets import Secret, scrubbed
from flinkish_spark.sinks.jdbc.sqlite import Sqlite
from flinkish_spark.sinks.jdbc.url import JdbcUrl

DIALECTS: dict[str, Dialect] = {one.name: one for one in (Postgres(), Sqlite(), MySql())}


@dataclass(frozen=True, slots=True)
class JdbcSettings:
    """Settings of a :class:`~flinkish_spark.sinks.jdbc.sink.JdbcSink`, in types that cannot be wrong.

    Parameters
    ----------
    url, user, secret, timeout_ms
        How the database is reached, and how long a transaction may take.
    table_name, key, mode, delete_when, creates_table
        Where rows go and how.
    control_table, on_refused
        Further tables.
    """

    url: JdbcUrl
    user: str
    secret: Secret = field(repr=False)
    timeout_ms: int
    table_name: TableName
    key: tuple[str, ...]
    mode: WriteMode
    delete_when: str
    creates_table: bool
    control_table: TableName
    on_refused: RefusedPolicy

    @property
    def dialect(self) -> Dialect:
        """Of the database."""
        return DIALECTS[self.url.system]

    @property
    def tables(self) -> tuple[TableName, ...]:
        """Every table that is written."""
        letters = (self.on_refused.name,) if isinstance(self.on_refused, DeadLetterTable) else ()
        return (self.table_name, self.control_table, *letters)

    def connect(self) -> Any:
        """Return a new connection of the driver; the password is read now."""
        login = Login(self.url, self.user, self.secret.read(), self.timeout_ms)
        return self.dialect.connect(login)

    def scrubbed(self, text: str) -> str:
        """Return a text of the driver's without the password in it."""
        try:
            return scrubbed(text, self.secret.read())
        except Exception:
            return "its reason is not shown, since the password cannot be read to take it out"

    def target(self, schema: T.StructType) -> Target:
        """Return where rows of a schema go."""
        columns = tuple(name for name in schema.names if name != self.delete_when)
        return Target(self.table_name, columns, self.key, self.mode)

    def ties(self, session: Session, schema: T.StructType) -> Ties:
        """Return what ties rows of the table together, as it is now."""
        target = self.target(schema)
        texts = [name for name in target.key if isinstance(schema[name].dataType, T.StringType)]
        found = self.dialect.ties(session, target, texts, deletes=bool(self.delete_when))
        columns = {column.name for column in self.dialect.columns_of(session, self.table_name)}
        # A row that goes and comes again has lost what the sink does not write.
        return Ties.IN_PLACE if found is Ties.END_STATE and columns - set(target.columns) else found

    def require_upsert(self, session: Session, schema: T.StructType, uid: str) -> None:
        """Raise SchemaError if an upsert could replace another row than that with its key."""
        if self.mode is not WriteMode.UPSERT:
            return
        why = self.dialect.why_not_upserted(session, self.target(schema))
        if why:
            raise SchemaError(
                f"{self.table_name} of sink '{uid}' has more than one unique index",
                why=why,
                what_to_do="keep one unique index, the key's",
                uid=uid,
            )

    def create_tables(self, session: Session, schema: T.StructType) -> None:
        """Create what is missing and may be created; what is there stays as it is."""
        wanted: list[tuple[TableName, Callable[[], Any]]] = [
            (self.control_table, lambda: ControlTable.create(session, self.dialect, self.control_table))
        ]
        dead_letters = self.on_refused
        if isinstance(dead_letters, DeadLetterTable):
            wanted.append((dead_letters.name, lambda: dead_letters.create(session, self.dialect)))
        if self.creates_table:
            wanted.append((self.table_name, lambda: session.run(self._create_statement(schema))))
        for name, create in wanted:
            # Some databases ask for the right to create tables even if there is nothing to create.
            if not self.dialect.columns_of(session, name):
                create()

    def _create_statement(self, schema: T.StructType) -> str:
        columns = []
        for one in schema.fields:
            if one.name == self.delete_when:
                continue
            type_ = self.dialect.type_for(one.dataType, in_key=one.name in self.key)
            if type_ is None:
                raise SchemaError(
                    f"there is no column type in {self.dialect.name} for the field '{one.name}' of type "
                    f"{one.dataType.simpleString()}",
                    what_to_do="cast it to another type with transform(...)",
                )
            columns.append((one.name, type_ + (" NOT NULL" if one.name in self.key else "")))
        return self.dialect.create_table(self.table_name, columns, self.key)
