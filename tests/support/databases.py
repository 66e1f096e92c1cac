"""What tests of the JDBC sink share: databases, rows in a buffer without Spark, connections that break."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pymysql
from pyspark.sql import types as T

from flinkish_spark.connectors.buffer import BufferFileWriter, BufferName
from flinkish_spark.connectors.jdbc.committer import JdbcCommitter
from flinkish_spark.connectors.jdbc.dialect import Dialect, Session
from flinkish_spark.connectors.jdbc.names import TableName
from flinkish_spark.connectors.jdbc.sink import JdbcSink
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import Committable
from flinkish_spark.types.arrow_types import arrow_schema
from tests.support.sinks import sink_context_of

JOB = JobUuid("d" * 32)
PAIRS = T.StructType([T.StructField("k", T.LongType()), T.StructField("v", T.StringType())])
Rows = Sequence[tuple[Any, ...]]


class TestDatabase:
    """A database of a test, seen from outside the sink."""

    __test__ = False

    def __init__(self, url: str, user: str = "", password: str = "") -> None:
        self.url, self.user, self.password = url, user, password
        self._session: Session | None = None

    def sink(self, table: str = "t", **settings: Any) -> JdbcSink:
        return JdbcSink(self.url, table, **{"user": self.user, "password": self.password, **settings})

    @property
    def dialect(self) -> Dialect:
        return self.sink().settings.dialect

    @property
    def session(self) -> Session:
        """A connection of the test's own."""
        if self._session is None:
            self._session = Session(self.sink().settings.connect())
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.session.run(statement)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return self.session.rows(sql)

    def table(self, name: str = "t", order: str = "1, 2") -> list[tuple[Any, ...]]:
        found = TableName.parse(name)
        return self.query(f"SELECT * FROM {self.dialect.table(found)} ORDER BY {order}")

    def newest(self) -> list[tuple[Any, ...]]:
        return self.query("SELECT sink_uid, checkpoint_id, owner_epoch FROM flinkish_checkpoints")


def context_of(folder: Path, schema: T.StructType = PAIRS, epoch: int = 1, uid: str = "out") -> SinkContext:
    return sink_context_of(JOB, OwnerEpoch(epoch), uid, schema, CheckpointConfig(), folder)


def staged(
    folder: Path, rows: Rows, schema: T.StructType = PAIRS, batch: int = 0, task: int = 0
) -> Committable:
    """A committable of rows that a task has buffered."""
    arrow = arrow_schema(schema)
    columns = [
        pa.array(column, type_) for column, type_ in zip(zip(*rows, strict=True), arrow.types, strict=True)
    ]
    writer = BufferFileWriter(StoreSpec(str(folder)), BufferName.new(OwnerEpoch(1), batch + 1, task, 0))
    writer.write(pa.record_batch(columns, schema=arrow))
    return Committable("out", {**writer.finish(), "lineage": 0, "batch": batch, "task": task})


def committer_of(sink: JdbcSink, context: SinkContext, connect: Any = None) -> JdbcCommitter:
    return JdbcCommitter(sink.settings, context, connect)


def commit(sink: JdbcSink, context: SinkContext, number: int, *committables: Committable) -> Any:
    """Commit with a committer of its own; return the answer that stands for all."""
    committer = committer_of(sink, context)
    try:
        return committer.commit(CheckpointId(number), committables)[0]
    finally:
        committer.close()


class Breaking:
    """A connection that is lost before one of its statements, or behind the COMMIT.

    Behind any other statement is, for the server, before the next one.

    Parameters
    ----------
    connection
        Of a driver.
    at
        Which moment, from 1.
    """

    def __init__(self, connection: Any, at: int) -> None:
        self.connection, self.at, self.moments = connection, at, 0

    @property
    def has_broken(self) -> bool:
        return self.moments >= self.at

    def moment(self) -> None:
        self.moments += 1
        # SQLite's file stays locked as long as statements are open: there, close() does it in their stead.
        if self.moments == self.at and not isinstance(self.connection, sqlite3.Connection):
            self.connection.close()
        if self.has_broken:
            if isinstance(self.connection, sqlite3.Connection):
                raise sqlite3.OperationalError("connection lost")
            if isinstance(self.connection, pymysql.Connection):
                raise pymysql.OperationalError(2013, "connection lost")
            raise psycopg.OperationalError("connection lost")

    def cursor(self) -> Any:
        return _BreakingCursor(self)

    def close(self) -> None:
        self.connection.close()


class _BreakingCursor:
    def __init__(self, owner: Breaking) -> None:
        self._owner = owner
        if owner.has_broken:
            owner.moment()
        self._cursor = owner.connection.cursor()

    def execute(self, *arguments: Any) -> None:
        self._owner.moment()
        self._cursor.execute(*arguments)
        if arguments[0] == "COMMIT":
            self._owner.moment()

    def executemany(self, *arguments: Any) -> None:
        self._owner.moment()
        self._cursor.executemany(*arguments)

    @contextlib.contextmanager
    def copy(self, *arguments: Any) -> Iterator[Any]:
        self._owner.moment()
        with self._cursor.copy(*arguments) as copy:
            yield copy
            self._owner.moment()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
