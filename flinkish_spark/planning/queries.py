"""Queries of Spark's over streams of a job: their inputs, their checks, and their texts in SQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark.bridge.plans import (
    APPEND,
    UPDATE,
    add_row_kind,
    find_scanned,
    name_scan,
    native_parts,
    why_not_streamed,
)
from flinkish_spark.core.errors import GraphError
from flinkish_spark.planning.between import RecordStream, try_functions
from flinkish_spark.planning.stream_graph import QueryNode
from flinkish_spark.protocol.plan_layout import ScanRole
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import check_field_names

#: Held while views of a job are in the session.
_VIEWS = threading.RLock()


def select_fields(stream: RecordStream) -> DataFrame:
    """Return the records of a source as a query sees them, without columns of ours."""
    fields = [F.col(quote_name(name)) for name in stream.schema.names]
    return name_scan(stream.keep_records().frame.select(*fields), ScanRole.RECORDS, stream.source)


def run_query(node: QueryNode, frames: Sequence[DataFrame]) -> DataFrame:
    """Return the rows of a query; refuse one that Spark cannot stream, or that reads other streams."""
    # Spark's check refuses the places of records, which the query does not see.
    others = [try_functions(frame.sparkSession, frame.schema, []) for frame in frames]
    why = why_not_streamed(tried := _call(node, others), native_parts(tried), node.output_mode)
    if why:
        raise GraphError(
            f"Spark cannot run the query '{node.uid}' as a streaming query",
            why=why,
            what_to_do="change it as for writeStream; an aggregate without a watermark needs "
            f"output_mode='{UPDATE}'",
        )
    made = _call(node, frames)
    _check_scans(node, frames, made)
    check_field_names(made.schema, f"the query '{node.uid}'")
    return add_row_kind(made, node.output_mode)


def _call(node: QueryNode | MatchQuery, frames: Sequence[DataFrame]) -> DataFrame:
    try:
        made: object = node.function(*frames)
    except AnalysisException as error:
        # The lines after the first show the whole plan.
        raise GraphError(
            f"Spark refuses the query '{node.uid}'",
            why=str(error).partition("\n")[0],
            what_to_do="correct it",
        ) from error
    if not isinstance(made, DataFrame):
        raise GraphError(
            f"the query '{node.uid}' returned a {type(made).__name__}",
            what_to_do="return the DataFrame that it makes of its streams",
        )
    return made


def _check_scans(node: QueryNode, frames: Sequence[DataFrame], made: DataFrame) -> None:
    """Refuse a query that does not read each of its streams once, and nothing else that is a stream."""
    given = [name for frame in frames for name in find_scanned(frame)]
    read = find_scanned(made)
    unread = next((name for name in given if name not in read), None)
    twice = next((name for name in given if read.count(name) > 1), None)
    if "" in read:
        what, why = "reads a stream of its own", "nobody has checked whether that stream can be replayed"
        what_to_do = "add it with from_dataframe(), and give it to the query as one of its streams"
    elif unread is not None:
        what, why = f"does not read the stream '{unread}'", "its records would wait for ever"
        what_to_do = "leave the stream out"
    elif twice is not None:
        what, why = f"reads the stream '{twice}' twice", "each scan of a source has a position of its own"
        what_to_do = "give the query the stream a second time, in SQL under a second view name"
    else:
        return
    raise GraphError(f"the query '{node.uid}' {what}", why=why, what_to_do=what_to_do)


@dataclass(frozen=True)
class SqlQuery:
    """The function of a query in SQL: each stream is a temporary view while Spark analyses the text."""

    text: str
    #: Names of the views, in the order of the streams.
    views: tuple[str, ...]
    #: Further views by name, each a query that may read the views before it.
    queries: Mapping[str, str] = field(default_factory=dict)
    #: Tables that are no streams, by name.
    tables: Mapping[str, Callable[[SparkSession], DataFrame]] = field(default_factory=dict)

    def __call__(self, *frames: DataFrame) -> DataFrame:
        spark = frames[0].sparkSession
        # Jobs of one session may have views of one name.
        with _VIEWS, ExitStack() as made:

            def add(name: str, frame: DataFrame) -> None:
                _refuse_known(spark, name)
                frame.createTempView(quote_name(name))
                made.callback(spark.catalog.dropTempView, name)

            for name, frame in zip(self.views, frames, strict=True):
                add(name, frame)
            for name, load in self.tables.items():
                add(name, load(spark))
            for name, query in self.queries.items():
                add(name, spark.sql(query))
            return spark.sql(self.text)


@dataclass
class MatchQuery:
    """A query over matches: rows of an operator, which Spark sees one micro-batch at a time."""

    function: Callable[[DataFrame], DataFrame]
    uid: str
    _is_checked: bool = False

    def __call__(self, matches: DataFrame) -> DataFrame:
        if not self._is_checked:
            tried = _call(self, [try_functions(matches.sparkSession, matches.schema, [])])
            parts = native_parts(tried)
            why = why_not_streamed(tried, parts, APPEND)
            if parts.states or why:
                raise GraphError(
                    f"the query '{self.uid}' does more than look at single matches",
                    why=f"it contains {parts.states[0]}" if parts.states else why,
                    what_to_do="select, filter, or join with tables that are no streams; write the matches "
                    "to a table, and let another job read it",
                )
            self._is_checked = True
        return _call(self, [matches])


def check_view_name(spark: SparkSession, name: str, views: Mapping[str, object]) -> None:
    """Refuse the name of a view that is no identifier, or that the session or the job has given away."""
    if not isinstance(name, str) or not name.isidentifier():
        raise GraphError(
            f"create_temporary_view() got the name {name!r}",
            what_to_do='give it a name of letters, digits and "_", such as "orders"',
        )
    if name.lower() in views:
        raise _name_taken(name)
    with _VIEWS:
        _refuse_known(spark, name)


def _refuse_known(spark: SparkSession, name: str) -> None:
    if spark.catalog.tableExists(name):
        raise _name_taken(name)


def _name_taken(name: str) -> GraphError:
    return GraphError(f"there is a view or table '{name}' already", what_to_do="give the stream another name")
