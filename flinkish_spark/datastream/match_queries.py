"""Row patterns of streams and of queries in SQL: the operators that find their matches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flinkish_spark.bridge.plans import APPEND
from flinkish_spark.cep.factories import RowPatterns
from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.matches_in_sql import MatchClause, cut_matches
from flinkish_spark.core.errors import GraphError
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.planning.declare import resolve_uid

if TYPE_CHECKING:
    from flinkish_spark.core.elements import OutputTag
    from flinkish_spark.datastream.keyed_stream import KeyedStream

__all__ = ["check_match_query", "cut_matches", "find_matches", "find_partition", "find_row_patterns"]


def find_partition(text: str) -> tuple[str, ...]:
    return match_recognize(text).partition


def find_row_patterns(
    stream: KeyedStream,
    text: str,
    uid: str | None,
    late_output: OutputTag | None,
    max_parallelism: int | None,
) -> DataStream:
    uid = resolve_uid(stream._environment.graph, uid, "match_recognize", stream._entry)
    said = match_recognize(text)
    keys = tuple(key for key in stream._entry.keys if isinstance(key, str))
    if said.partition and [one.lower() for one in said.partition] != [one.lower() for one in keys]:
        raise GraphError(
            f"the row pattern of '{uid}' is partitioned by {', '.join(said.partition)}",
            why=f"the stream is keyed by {', '.join(keys) or 'expressions'}",
            what_to_do="leave PARTITION BY out, or let key_by() name the same columns",
        )
    return stream._add_operator(RowPatterns(said, keys, late_output), None, uid, max_parallelism)


def check_match_query(clauses: Sequence[MatchClause], others: Sequence[str], output_mode: str) -> None:
    """Refuse a query that reads more than the matches of one clause, and tables that are no streams."""
    clause, *more = clauses
    if more:
        more[0].place.refuse(
            "its query has another one",
            "write a query for each: several inserts into one table, or union() of the streams of sql()",
        )
    if others:
        clause.place.refuse(
            f"its query also reads the stream '{others[0]}', and Spark sees matches by micro-batches",
            "write the matches to a table, and join in another job",
        )
    if output_mode != APPEND:
        clause.place.refuse("matches do not change", f"leave the output mode '{output_mode}' out")


def find_matches(stream: DataStream, clause: MatchClause, uid: str) -> DataStream:
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(clause.delay_ms)
    timed = stream.assign_timestamps_and_watermarks(strategy.with_timestamp_assigner(clause.time_field))
    keys = clause.said.partition
    keyed = timed.key_by(*keys) if keys else timed.key_by(lambda record: 0, key="INT")
    return keyed._add_operator(RowPatterns(clause.said, keys, None, clause.place), None, uid, None)
