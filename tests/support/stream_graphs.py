"""Small stream graphs, written by their nodes: a graph's sinks, by the streams that they read, make it."""

from __future__ import annotations

from typing import Any

from pyspark.sql import types as T

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.elements import OutputTag
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.planning.stream_graph import (
    KeyedEntry,
    KeyedNode,
    SideNode,
    SinkNode,
    StreamGraph,
    StreamNode,
    TimedNode,
    TransformNode,
    collect_operators,
    find_operator,
    find_paths,
    find_sources,
    find_upstreams,
)
from flinkish_spark.planning.transforms import make_filter
from flinkish_spark.sources import CollectionSource

#: Stands for functions and sinks that nobody calls.
NOTHING: Any = None


def source(uid: str) -> SourceNode:
    return SourceNode(uid, CollectionSource([("ann", 1)], "user STRING, amount LONG"))


def keyed(uid: str, *parents: StreamNode) -> KeyedNode:
    entries = tuple(KeyedEntry(parent, ("user",)) for parent in parents)
    return KeyedNode(uid, entries, NOTHING, T.StructType([]), 4)


def side(operator: KeyedNode) -> SideNode:
    return SideNode(operator, OutputTag("late", "user STRING"), T.StructType([]))


def transform(parent: StreamNode) -> TransformNode:
    """A DataFrame function."""
    return TransformNode(parent, lambda frame: frame)


def record_function(parent: StreamNode, name: str = "large") -> TransformNode:
    return TransformNode(parent, make_filter(bool, name))


def timed(parent: StreamNode) -> TimedNode:
    return TimedNode(parent, WatermarkStrategy.for_monotonous_timestamps())


def graph(*ends: StreamNode, sources: tuple[SourceNode, ...] = ()) -> StreamGraph:
    """One sink for each end, called `out-0` and so on; sources in the order in which sinks come by them."""
    paths = [path for end in ends for path in find_paths(end)]
    last = [operator for path in paths if (operator := find_operator(path.base)) is not None]
    made = StreamGraph(operators=collect_operators(*last))
    paths += [path for one in made.operators for upstream in find_upstreams(one) for path in upstream.paths]
    made.sides += dict.fromkeys(path.base for path in paths if isinstance(path.base, SideNode))
    made.sources += dict.fromkeys([*sources, *(source for end in ends for source in find_sources(end))])
    made.sinks += [SinkNode(f"out-{number}", end, NOTHING) for number, end in enumerate(ends)]
    return made
