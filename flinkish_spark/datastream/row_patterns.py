"""The part that finds row patterns, as streams and queries use it; `match_queries.py` is that part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flinkish_spark.core.wings import load_part

if TYPE_CHECKING:
    from flinkish_spark.core.elements import OutputTag

#: A MATCH_RECOGNIZE in FROM, which only the part reads.
Clause = Any
#: A DataStream or a KeyedStream, whose modules import this one.
Stream = Any


class RowPatternPart(Protocol):
    def find_partition(self, text: str) -> tuple[str, ...]:
        """Return the columns that PARTITION BY names."""

    def find_row_patterns(
        self,
        stream: Stream,
        text: str,
        uid: str | None,
        late_output: OutputTag | None,
        max_parallelism: int | None,
    ) -> Stream:
        """Add the operator of :meth:`KeyedStream.match_recognize`."""

    def cut_matches(self, query: str) -> tuple[str, Mapping[str, Clause]]:
        """Return a query with a view's name for each clause, and the clauses by these names."""

    def check_match_query(self, clauses: Sequence[Clause], others: Sequence[str], output_mode: str) -> None:
        """Refuse a query that reads more than the matches of one clause."""

    def find_matches(self, stream: Stream, clause: Clause, uid: str) -> Stream:
        """Return the matches of a clause in the stream that it names."""


def load_row_patterns() -> RowPatternPart:
    part: RowPatternPart = load_part("row patterns")
    return part
