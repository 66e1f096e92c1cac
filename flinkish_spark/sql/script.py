"""A script in Spark's SQL as a job: its tables become sources and sinks, its inserts queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from flinkish_spark import DataStream, StreamExecutionEnvironment
from flinkish_spark.bridge.sql_statements import (
    CreateTable,
    CreateView,
    InsertInto,
    find_relations,
    parse_script,
)
from flinkish_spark.core.errors import GraphError
from flinkish_spark.datastream.row_patterns import Clause, load_row_patterns
from flinkish_spark.planning.queries import MatchQuery, SqlQuery, check_view_name
from flinkish_spark.sql.tables import make_lookup_table, make_sink, make_source
from flinkish_spark.types.ddl import quote_name


def add_sql_script(env: StreamExecutionEnvironment, script: str) -> StreamExecutionEnvironment:
    """Add the statements of a script to an environment; the caller executes it.

    ``CREATE TABLE ... USING kafka | files | delta | jdbc OPTIONS (...)`` is a source where a query reads it,
    and a sink where an insert writes it. ``CREATE TEMPORARY VIEW`` names a query, ``INSERT INTO`` writes one.
    All inserts are one job, with one decision for all of its sinks.

    Parameters
    ----------
    script
        Statements with semicolons between them; see `docs/sql.md`.

    Raises
    ------
    GraphError
        Spark cannot parse a statement, a table cannot be a source or a sink, or nothing is inserted.
    """
    script, clauses = load_row_patterns().cut_matches(script)
    job = _Script(env, clauses)
    for statement in parse_script(env.spark, script):
        match statement:
            case CreateTable():
                job.add_name(statement.name)
                job.tables[statement.name.lower()] = statement
            case CreateView():
                job.add_name(statement.name)
                job.views[statement.name.lower()] = statement.query
            case InsertInto():
                job.inserts.setdefault(statement.table.lower(), []).append(statement)
    job.add_sinks()
    return env


@dataclass
class _Script:
    env: StreamExecutionEnvironment
    #: Each MATCH_RECOGNIZE, by the name that stands in its place.
    clauses: Mapping[str, Clause]
    tables: dict[str, CreateTable] = field(default_factory=dict)
    #: Queries by the name of their view, in order.
    views: dict[str, str] = field(default_factory=dict)
    #: By the table that they write.
    inserts: dict[str, list[InsertInto]] = field(default_factory=dict)
    #: The sources and matches that queries read, by table or clause.
    sources: dict[str, DataStream] = field(default_factory=dict)

    def add_name(self, name: str) -> None:
        check_view_name(self.env.spark, name, {**self.tables, **self.views})

    def add_sinks(self) -> None:
        if not self.inserts:
            raise GraphError(
                "the script inserts into no table", what_to_do="add INSERT INTO table SELECT ..."
            )
        for name, inserts in self.inserts.items():
            table = self._find_table(inserts[0])
            sink, mode = make_sink(table)
            first, *others = [
                self._add_query(insert, table, mode, f"{name}-query-{number}")
                for number, insert in enumerate(inserts, start=1)
            ]
            stream = first.union(*others) if others else first
            stream.sink_to(sink, uid=f"{name}-sink")

    def _find_table(self, insert: InsertInto) -> CreateTable:
        table = self.tables.get(insert.table.lower())
        if table is None:
            raise GraphError(
                f"the insert of line {insert.line} writes the table '{insert.table}', which there is not",
                why=f"the script creates {', '.join(self.tables) or 'none'}",
                what_to_do="create it before: CREATE TABLE ... USING ...",
            )
        return table

    def _add_query(self, insert: InsertInto, table: CreateTable, mode: str, uid: str) -> DataStream:
        query = self._read_query(insert.query)
        read, written = query.views, _InsertQuery(query, insert, table)
        if not read:
            raise GraphError(
                f"the insert of line {insert.line} reads no table of the script that is a stream",
                what_to_do="select from a table that CREATE TABLE has made, and that is none of jdbc",
            )
        clauses = [self.clauses[name] for name in read if name in self.clauses]
        if clauses:
            load_row_patterns().check_match_query(
                clauses, [name for name in read if name in self.tables], mode
            )
            return self._add_matches(read[0], clauses[0], uid).transform(MatchQuery(written, uid))
        streams = [self._add_source(name) for name in read]
        return self.env.from_query(written, *streams, output_mode=mode, uid=uid)

    def _read_query(self, text: str) -> SqlQuery:
        """Return a query over the tables and clauses that it reads, also through views."""
        names = set[str]()
        open_ = [text]
        while open_:
            found = find_relations(self.env.spark, open_.pop()) - names
            names |= found
            open_ += [self.views[name] for name in found if name in self.views]
        views = {name: text for name, text in self.views.items() if name in names}
        tables = {name: table for name, table in self.tables.items() if name in names}
        static = {name: make_lookup_table(one) for name, one in tables.items() if one.provider == "jdbc"}
        read = [name for name in (*tables, *self.clauses) if name in names and name not in static]
        return SqlQuery(text, tuple(read), views, static)

    def _add_source(self, name: str) -> DataStream:
        if name not in self.sources:
            self.sources[name] = self.env.from_source(make_source(self.tables[name]), uid=name)
        return self.sources[name]

    def _add_matches(self, name: str, clause: Clause, uid: str) -> DataStream:
        if name not in self.sources:
            searched = self._add_searched(clause, uid)
            self.sources[name] = load_row_patterns().find_matches(searched, clause, uid)
        return self.sources[name]

    def _add_searched(self, clause: Clause, uid: str) -> DataStream:
        """Return the stream of the table or view in which a clause looks for matches."""
        rows = self._read_query(f"SELECT * FROM {quote_name(clause.table)}")
        if not rows.views or any(name in self.clauses for name in rows.views):
            clause.place.refuse(
                f"'{clause.table}' is no table of the script that is a stream, and no view of such tables",
                "name one that the script creates",
            )
        streams = [self._add_source(name) for name in rows.views]
        if rows.views == (clause.table,):
            return streams[0]
        return self.env.from_query(rows, *streams, uid=f"{uid}-rows")


@dataclass(frozen=True)
class _InsertQuery:
    """The query of an insert, with the columns of its table: by position, as SQL writes them."""

    query: SqlQuery
    insert: InsertInto
    table: CreateTable

    def __call__(self, *frames: DataFrame) -> DataFrame:
        rows, columns = self.query(*frames), self.table.columns
        names = list(self.insert.columns) or columns.names or rows.columns
        self._check_names(names)
        if len(names) != len(rows.columns):
            raise GraphError(
                f"the insert of line {self.insert.line} selects {len(rows.columns)} columns for {len(names)}",
                why=f"they are {', '.join(rows.columns)}, for {', '.join(names)}",
                what_to_do="select as many columns as the table has, or name them: INSERT INTO table (a, b)",
            )
        named = rows.toDF(*names)
        # Spark casts as for any insert.
        return named.to(T.StructType(columns.fields)) if columns.fields else named

    def _check_names(self, names: Sequence[str]) -> None:
        """Refuse columns that the table has not, which Spark would leave out, or that come twice."""
        known = {name.lower() for name in self.table.columns.names or names}
        wrong = next((name for name in names if name.lower() not in known), None)
        if wrong is None and len({name.lower() for name in names}) == len(names):
            return
        raise GraphError(
            f"the insert of line {self.insert.line} writes {', '.join(names)}",
            why="a column comes twice" if wrong is None else f"'{self.table.name}' has no column '{wrong}'",
            what_to_do="name each column once, as the table does",
        )
