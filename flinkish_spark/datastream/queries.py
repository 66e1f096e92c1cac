"""Queries of Spark's over streams of an environment: DataFrame functions, and SQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from flinkish_spark.bridge.plans import APPEND, check_output_mode
from flinkish_spark.bridge.sql_statements import find_relations
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.validation import check_function, instance_of
from flinkish_spark.datastream.connected_streams import check_same_job
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.datastream.row_patterns import Clause, load_row_patterns
from flinkish_spark.planning.declare import resolve_uid
from flinkish_spark.planning.queries import MatchQuery, SqlQuery, check_view_name
from flinkish_spark.planning.recorded_functions import find_recorded_functions
from flinkish_spark.planning.stream_graph import QueryNode, StreamGraph, TimedNode, find_paths

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Queries:
    """The part of an environment that adds queries of Spark's."""

    spark: SparkSession
    graph: StreamGraph
    #: By name, in lower case.
    _views: dict[str, DataStream]

    def from_query(
        self,
        function: Callable[..., DataFrame],
        *streams: DataStream,
        output_mode: str = APPEND,
        uid: str | None = None,
    ) -> DataStream:
        """Add a query of Spark's over streams of sources, with whatever Spark keeps state for.

        Its state and watermark are part of the job's checkpoints, as those of :meth:`from_dataframe`. Event
        time is Spark's: call ``withWatermark`` in the function.

        Parameters
        ----------
        function
            Gets a DataFrame of the records of each stream, in order, and returns one. Called at each start.
        streams
            Streams of sources, with or without functions of single records; each is read once.
        output_mode
            ``"append"`` or ``"update"``, as of :meth:`from_dataframe`.

        Raises
        ------
        GraphError
            A stream cannot be read by a query. At the start: Spark cannot run the query, or it reads other
            streams, or one of these not at all or twice.
        """
        check_function(function, "the function of from_query()", len(streams))
        check_output_mode(output_mode)
        for stream in streams:
            self._check_stream(stream, "a stream of from_query()")
        if not streams:
            raise GraphError(
                "from_query() got no stream",
                what_to_do="give it the streams that the function takes",
            )
        parents = tuple(stream._node for stream in streams)
        known = self.graph.check_uid(resolve_uid(self.graph, uid, "query", *parents))
        node = QueryNode(known, parents, function, output_mode)
        self.graph.queries.append(node)
        return DataStream(self, node)  # type: ignore[arg-type]  # this is a part of the environment

    def create_temporary_view(self, name: str, stream: DataStream) -> Self:
        """Give a stream of sources the name by which :meth:`sql` reads it.

        Raises
        ------
        GraphError
            The name is taken, or a query cannot read the stream.
        """
        check_view_name(self.spark, name, self._views)
        self._check_stream(stream, "the stream of create_temporary_view()")
        self._views[name.lower()] = stream
        return self

    @check_arguments(query="give it a SELECT")
    def sql(self, query: str, *, output_mode: str = APPEND, uid: str | None = None) -> DataStream:
        """Add a query in Spark's SQL over views of streams, and over tables of the session.

        Parameters
        ----------
        query
            A ``SELECT`` that reads at least one view of :meth:`create_temporary_view`. It may have a
            MATCH_RECOGNIZE in FROM; see docs/sql.md.
        output_mode
            As of :meth:`from_query`.

        Raises
        ------
        GraphError
            Spark cannot parse the query, or it reads no view of this environment.
        PatternError
            A clause of MATCH_RECOGNIZE is wrong.

        Examples
        --------
        ::

            env.create_temporary_view("orders", orders)
            totals = env.sql(
                "SELECT window.start, sum(amount) AS total FROM orders "
                "WATERMARK ts DELAY OF INTERVAL 10 SECONDS GROUP BY window(ts, '1 minute')",
                uid="totals",
            )
        """
        patterns = load_row_patterns()
        query, clauses = patterns.cut_matches(query)
        names = find_relations(self.spark, query)
        read = {name: stream for name, stream in self._views.items() if name in names}
        if clauses:
            patterns.check_match_query([*clauses.values()], [*read], output_mode)
            ((name, clause),) = clauses.items()
            return self._query_matches(SqlQuery(query, (name,)), clause, uid)
        if not read:
            raise GraphError(
                "the query of sql() reads no stream of this environment",
                why=f"its views are {', '.join(self._views) or 'none'}; the query reads {', '.join(names)}",
                what_to_do="give a stream a name with create_temporary_view(), and read it",
            )
        function = SqlQuery(query, tuple(read))
        return self.from_query(function, *read.values(), output_mode=output_mode, uid=uid)

    def _query_matches(self, query: SqlQuery, clause: Clause, uid: str | None) -> DataStream:
        if clause.table not in self._views:
            clause.place.refuse(
                f"there is no view '{clause.table}'",
                "give a stream that name with create_temporary_view()",
            )
        stream = self._views[clause.table]
        known = resolve_uid(self.graph, uid, "query", stream._node)
        matches: DataStream = load_row_patterns().find_matches(stream, clause, known)
        return matches.transform(MatchQuery(query, known))

    def _check_stream(self, stream: DataStream, what: str) -> None:
        instance_of(what, stream, DataStream, what_to_do="give it the stream of a source")
        check_same_job(self, stream._environment, "from_query")  # type: ignore[arg-type]
        for path in find_paths(stream._node):
            if not isinstance(path.base, SourceNode):
                what, why = "reads an operator or another query", "Spark would have to run both as one query"
                what_to_do = "read its sources, or write both as one query"
            elif any(isinstance(step, TimedNode) for step in path.steps):
                what, why = "has event times", "the time of a query is Spark's"
                what_to_do = (
                    "leave assign_timestamps_and_watermarks() out, and declare a watermark in the query"
                )
            elif next(find_recorded_functions(path), None) is not None:
                what, why = (
                    "has an async function",
                    "its answers are kept by the records' place in the source",
                )
                what_to_do = "call the async function after the query"
            else:
                continue
            raise GraphError(f"a query cannot read a stream that {what}", why=why, what_to_do=what_to_do)
