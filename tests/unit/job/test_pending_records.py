"""How many records wait in front of sources, out of what Spark reports of its query."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from flinkish_spark import Raw
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.job.inputs import pending_records as find_pending
from flinkish_spark.sources import KafkaSource

KAFKA = SourceNode("orders", KafkaSource("one:9092", ["orders"], value=Raw()).bind("orders"))
BOUNDED = SourceNode("users", CollectionSource([("ann",)], "user STRING").bind("users"))


def query(*offsets: tuple[str | None, str | None]) -> Any:
    """Return a query with so much read, and so much that was there, by source."""
    sources = [SimpleNamespace(endOffset=end, latestOffset=latest) for end, latest in offsets]
    return SimpleNamespace(lastProgress=SimpleNamespace(sources=sources))


def pending_records(sources: list[SourceNode], query: Any) -> Mapping[str, int]:
    return find_pending(sources, query).by_source


def worst_partition(sources: list[SourceNode], query: Any) -> int | None:
    return find_pending(sources, query).worst_partition


def test_what_waits_is_what_lies_behind_the_newest_micro_batch() -> None:
    ours = ('{"checkpoint": 3}', None)
    read = ('{"orders": {"0": 10, "1": 5}}', '{"orders": {"0": 12, "1": 9}}')
    assert pending_records([KAFKA, BOUNDED], query(ours, read)) == {"orders": 6}
    # Scanned twice: what one of both has not read waits.
    behind = ('{"orders": {"0": 8, "1": 5}}', '{"orders": {"0": 12, "1": 9}}')
    assert pending_records([KAFKA], query(read, behind)) == {"orders": 8}


def test_the_worst_partition_is_the_one_with_the_most_that_waits() -> None:
    read = ('{"orders": {"0": 10, "1": 5}}', '{"orders": {"0": 12, "1": 9, "2": 50}}')
    # Partition 2 is new: where its records begin nobody has asked.
    assert worst_partition([KAFKA, BOUNDED], query(('{"checkpoint": 3}', None), read)) == 4
    assert worst_partition([KAFKA], query(('{"orders": {"0": 9}}', '{"orders": {"0": 2}}'))) == 0
    assert worst_partition([KAFKA], query(('{"orders": {"0": 10}}', None))) is None
    assert worst_partition([BOUNDED], query(('{"0": 1}', '{"0": 2}'))) is None
    assert worst_partition([KAFKA], SimpleNamespace(lastProgress=None)) is None


def test_what_spark_does_not_know_is_left_out() -> None:
    assert pending_records([KAFKA], SimpleNamespace(lastProgress=None)) == {}
    assert pending_records([KAFKA], query(('{"orders": {"0": 10}}', None))) == {}
    assert pending_records([KAFKA], query(("no JSON", "none either"))) == {}
    # Topics that were made anew begin at 0 again.
    assert pending_records([KAFKA], query(('{"orders": {"0": 9}}', '{"orders": {"0": 2}}'))) == {"orders": 0}
