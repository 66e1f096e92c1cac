"""PostgreSQL, through psycopg 3."""

from __future__ import annotations

import contextlib
import json
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
    WriteMode,
    import_driver,
    to_text,
)
from flinkish_spark.connectors.jdbc.names import TableName
from flinkish_spark.connectors.jdbc.types import TEXT_CAST, SqlType, make_blank_check

#: Fewer rows than this go as parameters of an INSERT; for more, COPY is faster.
_FEW_ROWS = 20
_STAGE = "flinkish_stage"
#: How long a stalled process may hold the control row, and how long others wait for it.
_IDLE_MS, _LOCK_WAIT_MS = 60_000, 20_000
_CONNECT_TIMEOUT_S = 10

_TYPES: dict[type[T.DataType], str] = {
    T.BooleanType: "boolean",
    T.ByteType: "smallint",
    T.ShortType: "smallint",
    T.IntegerType: "integer",
    T.LongType: "bigint",
    T.FloatType: "real",
    T.DoubleType: "double precision",
    T.StringType: "text",
    T.BinaryType: "bytea",
    T.DateType: "date",
    T.TimestampType: "timestamp with time zone",
    T.TimestampNTZType: "timestamp without time zone",
    T.ArrayType: "jsonb",
    T.MapType: "jsonb",
    T.StructType: "jsonb",
}
_ALSO: dict[type[T.DataType], frozenset[str]] = {
    T.FloatType: frozenset({"double precision"}),
    **dict.fromkeys((T.ArrayType, T.MapType, T.StructType), frozenset({"json", "text"})),
}
_BITS = {"smallint": 16, "integer": 32, "bigint": 64}
#: Types to which different texts are never equal, under a deterministic collation.
_TEXTS = frozenset({"text", "character varying"})
#: Types that store a text unchanged or refuse it; a VARCHAR cuts trailing blanks, see `check_of`.
_TEXT_TYPES = frozenset({"text", "character varying", "citext", "json"})
#: Types that store the value which a text denotes, or refuse it: '07' is the integer 7.
_NAMED_BY_TEXT = frozenset(
    {"boolean", "smallint", "integer", "bigint", "numeric"}
    | {"inet", "cidr", "macaddr", "macaddr8", "jsonb", "uuid"}
)
_MICROSECONDS = 6
#: SQLSTATEs, or their classes, of errors about values: data, constraints, views with a check, RAISE in a
#: trigger, values too long for an index. 21000 means that two keys of a statement are equal for the database
#: but not for Python; one by one they are accepted.
_REFUSED = ("22", "23", "44", "P0001", "54000", "21000")
#: Violations of a unique index, or of an exclusion constraint.
_TAKEN = ("23505", "23P01")
#: Errors that pass: connections, resources, conflicts, administration, a standby that is not yet the primary.
_PASSING = ("08", "53", "40", "57", "58", "55P03", "25006", "25P03", "25P04")

#: Kinds of relations with transactions: tables, partitioned tables, views, and their indexes.
_IN_TRANSACTIONS = frozenset("rpvSiI")


class Postgres(Dialect):
    """PostgreSQL 12 and later, and databases with its protocol, COPY and temporary tables."""

    name, marker = "postgresql", "%s"
    # If a constraint is checked at COMMIT, its error cannot be traced to a row.
    begin = ("BEGIN", "SET CONSTRAINTS ALL IMMEDIATE")
    _longest_identifier_bytes = 63
    types, also, bits, decimal = _TYPES, _ALSO, _BITS, "numeric"

    def connect(self, login: Login) -> Any:
        psycopg = import_driver("PostgreSQL", "psycopg", "postgresql")
        url = login.url
        settings: dict[str, Any] = {"connect_timeout": _CONNECT_TIMEOUT_S, "application_name": "flinkish"}
        settings |= url.options
        connection = psycopg.connect(
            host=url.host,
            port=url.port,
            dbname=url.database,
            user=login.user or None,
            password=login.password or None,
            autocommit=True,
            prepare_threshold=None,  # prepared statements would not survive a pooler in between
            **settings,
        )
        try:
            session = Session(connection)
            session.run("SELECT set_config('lock_timeout', %s, false)", (f"{_LOCK_WAIT_MS}ms",))
            session.run(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (f"{_IDLE_MS}ms",)
            )
            session.run("SET TIME ZONE 'UTC'")
            # Committed rows must survive a crash of the server.
            if session.rows("SELECT current_setting('synchronous_commit')") == [("off",)]:
                session.run("SET synchronous_commit = on")
        except BaseException:
            connection.close()
            raise
        return connection

    def interrupt(self, connection: Any) -> None:
        """Shut the socket down: the waiting thread sees a lost connection."""
        with contextlib.suppress(Exception), socket.socket(fileno=connection.fileno()) as shared:
            try:
                shared.shutdown(socket.SHUT_RDWR)
            finally:
                shared.detach()

    def is_at_work(self, connection: Any, other: Session) -> bool:
        return bool(
            other.rows(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state LIKE 'active%%' "
                "AND wait_event IS DISTINCT FROM 'ClientRead'",
                (connection.info.backend_pid,),
            )
        )

    def trouble(self, error: BaseException) -> Trouble:
        """Classify an error by its SQLSTATE; an error without one is psycopg's own."""
        import psycopg

        state = getattr(error, "sqlstate", None)
        if state is not None:
            if state.startswith(_REFUSED):
                return Trouble.REFUSED
            return Trouble.PASSING if state.startswith(_PASSING) else Trouble.LASTING
        if isinstance(error, psycopg.DataError):
            return Trouble.REFUSED
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return Trouble.PASSING
        return Trouble.LASTING

    def is_taken(self, error: BaseException) -> bool:
        return getattr(error, "sqlstate", None) in _TAKEN

    def reason(self, error: BaseException) -> str:
        diag = getattr(error, "diag", None)
        if diag is None or diag.message_primary is None:
            return super().reason(error)
        detail = f": {diag.message_detail}" if diag.message_detail else ""
        return " ".join(f"{diag.message_primary}{detail} ({diag.sqlstate})".split())

    def write(
        self, session: Session, target: Target, rows: Sequence[Params], *, in_order: bool = False
    ) -> None:
        """COPY rows into the table; for an upsert, into a temporary table first."""
        # A statement that upserts may have each key only once.
        if len(rows) < _FEW_ROWS or (in_order and target.mode is WriteMode.UPSERT):
            super().write(session, target, rows, in_order=in_order)
        elif target.mode is WriteMode.INSERT:
            import psycopg

            try:
                with session.savepoint():
                    self._copy(session, self.table(target.table), target.columns, rows)
            except psycopg.errors.FeatureNotSupported:
                # A table with row-level security, or a view with rules, accepts INSERT only.
                super().write(session, target, rows, in_order=in_order)
        else:
            names = self.list_of(target.columns)
            upsert = f"INSERT INTO {self.table(target.table)} ({names}) SELECT {names} FROM pg_temp.{_STAGE}"
            with self._stage(session, target, target.columns, rows):
                session.run(upsert + self.on_conflict(target))

    @contextlib.contextmanager
    def defer_constraints(self, session: Session) -> Iterator[None]:
        session.run("SET CONSTRAINTS ALL DEFERRED")
        yield
        session.run("SET CONSTRAINTS ALL IMMEDIATE")

    def delete(self, session: Session, target: Target, keys: Sequence[Params]) -> None:
        if len(keys) < _FEW_ROWS:
            super().delete(session, target, keys)
            return
        same = " AND ".join(f"t.{self.quote(c)} = s.{self.quote(c)}" for c in target.key)
        with self._stage(session, target, target.key, keys):
            session.run(f"DELETE FROM {self.table(target.table)} t USING pg_temp.{_STAGE} s WHERE {same}")

    @contextlib.contextmanager
    def _stage(
        self, session: Session, target: Target, columns: Sequence[str], rows: Sequence[Params]
    ) -> Iterator[None]:
        """Keep the rows in a temporary table during the block."""
        session.run(
            f"CREATE TEMPORARY TABLE {_STAGE} ON COMMIT DROP AS "
            f"SELECT {self.list_of(columns)} FROM {self.table(target.table)} WITH NO DATA"
        )
        self._copy(session, f"pg_temp.{_STAGE}", columns, rows)
        yield
        session.run(f"DROP TABLE pg_temp.{_STAGE}")

    def _copy(self, session: Session, table: str, columns: Sequence[str], rows: Sequence[Params]) -> None:
        statement = f"COPY {table} ({self.list_of(columns)}) FROM STDIN"
        with (
            session.cursor() as cursor,
            # A COPY has no parameters, so the driver does not undo the doubling of percent signs.
            cursor.copy(statement.replace("%%", "%")) as copy,
        ):
            for row in session.count_answers(rows):
                copy.write_row(row)

    def probe(self, session: Session, target: Target, *, deletes: bool) -> None:
        """Also check the right to create the temporary table of an upsert."""
        super().probe(session, target, deletes=deletes)
        if target.mode is WriteMode.UPSERT:
            with self._stage(session, target, target.columns, ()):
                pass

    def columns_of(self, session: Session, table: TableName) -> list[ColumnInfo]:
        found = session.rows(
            # For a domain, its base type; a trigger or a rule may replace a null.
            "SELECT a.attname, format_type(COALESCE(NULLIF(t.typbasetype, 0), t.oid), "
            "CASE WHEN t.typbasetype = 0 THEN a.atttypmod ELSE t.typtypmod END), "
            "a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', "
            "a.attnotnull AND c.relkind = 'r' AND NOT c.relhasrules AND NOT EXISTS ("
            "SELECT FROM pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal), "
            "COALESCE(b.typtype, t.typtype) = 'e', a.attgenerated <> '' FROM pg_attribute a "
            "JOIN pg_class c ON c.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid "
            "LEFT JOIN pg_type b ON b.oid = t.typbasetype "
            "WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped "
            "ORDER BY a.attnum",
            (self._plain(table),),
        )
        return [
            ColumnInfo(str(n), str(t).lower(), bool(must), bool(no), bool(enum), bool(made))
            for n, t, must, no, enum, made in found
        ]

    def unique_columns(self, session: Session, table: TableName) -> list[Params]:
        return session.rows(
            "SELECT i.indexrelid, a.attname FROM pg_index i JOIN pg_attribute a "
            "ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indimmediate AND i.indisvalid "
            "AND i.indpred IS NULL AND i.indexprs IS NULL",
            (self._plain(table),),
        )

    def why_keys_fold(self, session: Session, table: TableName, key: Sequence[T.StructField]) -> str:
        """Check the types of text columns, and look for non-deterministic collations."""
        texts = {field.name for field in key if isinstance(field.dataType, T.StringType)}
        for column in self.columns_of(session, table):
            if column.name in texts and (kind := SqlType.parse(column.type).name) not in _TEXTS:
                return f"different texts are one {kind} in its column {column.name}"
        inexact = session.rows(
            "SELECT a.attname, c.collname FROM pg_attribute a JOIN pg_collation c ON c.oid = a.attcollation "
            "WHERE a.attrelid = to_regclass(%s) AND NOT c.collisdeterministic "
            "UNION ALL SELECT a.attname, c.collname FROM pg_index i JOIN pg_attribute a "
            "ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::int2[]) "
            "JOIN pg_collation c ON c.oid = ANY (i.indcollation::oid[]) "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND NOT c.collisdeterministic",
            (self._plain(table), self._plain(table)),
        )
        wrong = [
            f"the collation {collation} of its column {name}" for name, collation in inexact if name in texts
        ]
        return f"{wrong[0]} takes different texts for equal" if wrong else ""

    def is_ordered(self, session: Session, table: TableName) -> bool:
        """Look for triggers (foreign keys are triggers, at both ends), rules, policies and partitions."""
        found = session.rows(
            "SELECT 1 FROM pg_class c WHERE c.oid = to_regclass(%s) "
            "AND (c.relkind <> 'r' OR c.relrowsecurity OR c.relhasrules OR EXISTS ("
            "SELECT FROM pg_trigger t LEFT JOIN pg_constraint k ON k.oid = t.tgconstraint "
            "WHERE t.tgrelid = c.oid AND (k.contype IS NULL OR k.contype NOT IN ('p', 'u', 'x'))))",
            (self._plain(table),),
        )
        return bool(found)

    def why_unsafe(self, session: Session, table: TableName) -> str:
        """Check the kind of the table, of its partitions, and of the tables behind a view."""
        found = session.rows(
            "WITH RECURSIVE r (oid) AS (SELECT to_regclass(%s)::oid "
            "UNION SELECT n.oid FROM r, LATERAL (SELECT i.inhrelid AS oid FROM pg_inherits i "
            "JOIN pg_class p ON p.oid = i.inhrelid AND p.relispartition "
            "WHERE i.inhparent = r.oid UNION ALL SELECT d.refobjid FROM pg_rewrite w JOIN pg_depend d "
            "ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid "
            "AND d.refclassid = 'pg_class'::regclass WHERE w.ev_class = r.oid) n) "
            "SELECT c.relname, c.relkind, c.relpersistence FROM r JOIN pg_class c ON c.oid = r.oid",
            (self._plain(table),),
        )
        for name, kind, persistence in ((str(n), to_text(k), to_text(p)) for n, k, p in found):
            if persistence != "p":
                which = {"u": "UNLOGGED", "t": "TEMPORARY"}.get(persistence, persistence)
                return f"the table {name} is {which}: it is empty when the server or the session has ended"
            if kind not in _IN_TRANSACTIONS:
                return f"{name} is no table of this database, and writes into it are not transactional"
        return ""

    def why_lost_without_power(self, session: Session) -> str:
        ((fsync,),) = session.rows("SELECT current_setting('fsync')")
        return "" if fsync == "on" else f"fsync is {fsync}"

    def hold(self, session: Session, table: TableName) -> None:
        # The same lock as an INSERT: a SELECT of no rows would let others change a type.
        session.run(f"LOCK TABLE {self.table(table)} IN ROW EXCLUSIVE MODE")

    def _plain(self, table: TableName) -> str:
        # For use as a value, in which the driver looks for no parameters.
        return self.table(table).replace("%%", "%")

    def why_special(self, data_type: T.DataType, column: ColumnInfo, found: SqlType) -> str | None:
        if isinstance(data_type, T.StringType):
            is_kept = column.is_enum or found.name in _TEXT_TYPES or column.type in _NAMED_BY_TEXT
            return "" if is_kept else TEXT_CAST
        is_time = isinstance(data_type, T.TimestampType | T.TimestampNTZType)
        if is_time and found.size not in (None, _MICROSECONDS):
            return f"it would be rounded to {found.size} digits of a second"
        return None

    def check_of(self, column: ColumnInfo) -> Callable[[str], str] | None:
        """Return a check for trailing blanks that a VARCHAR cuts, or for repeated names that JSONB drops."""
        found = SqlType.parse(column.type)
        if found.name == "character varying" and found.size is not None:
            return make_blank_check(found.size, column.type, len)
        return _why_not_jsonb if found.name == "jsonb" else None

    def has_zero_bytes(self, arrow_type: pa.DataType, column_type: str) -> bool:
        """Return true for JSON in json and text, where a zero byte is an escape; jsonb refuses it."""
        return bool(pa.types.is_nested(arrow_type)) and column_type in ("json", "text")


def _why_not_jsonb(text: str) -> str:
    """Return why JSONB would lose a part of a text; the database itself refuses text that is no JSON."""

    def members(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("two members have the same name")

    try:
        # Numbers are kept as text: Python refuses to parse thousands of digits.
        json.loads(text, object_pairs_hook=members, parse_float=str, parse_int=str)
    except json.JSONDecodeError:
        return ""
    except (ValueError, RecursionError) as error:
        return f"jsonb keeps less than the text: {error}"
    return ""
