"""Refuses topics that a job reads twice, or reads and writes, and sources whose facts would share a name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import TYPE_CHECKING

from flinkish_spark.errors import GraphError
from flinkish_spark.kafka.positions import TopicPattern

if TYPE_CHECKING:
    from flinkish_spark.graph.planned import PlannedJob
    from flinkish_spark.graph.stream_graph import SourceNode, StreamGraph


def check_source_names(sources: Sequence[SourceNode]) -> None:
    """Raise GraphError where facts about two inputs would be kept under one name, for one only."""
    seen: dict[str, SourceNode] = {}
    for node in sources:
        for uid in node.source.known_as(node.uid):
            for name in (f"source-{uid}", *(f"topic-{uid}-{topic}" for topic in node.source.topics)):
                other = seen.setdefault(name, node)
                if other is not node:
                    raise GraphError(
                        f"the sources '{other.uid}' and '{node.uid}' cannot be told apart",
                        why=f"the job would keep facts about the input of both under the name '{name}'",
                        what_to_do="give one of them another uid",
                        uid=node.uid,
                    )


def check_loops(graph: StreamGraph, planned: PlannedJob) -> None:
    """Raise GraphError for such a topic, or such patterns; dead letters count as written."""
    for first, second in permutations(graph.sources, 2):
        _check_topics(first, second)
    for first, second in combinations((node for node in graph.sources if node.source.topic_pattern), 2):
        _check_patterns(first, second)
    for sink in planned.sinks:
        both = sorted({topic for topic in sink.sink.topics for node in graph.sources if _reads(node, topic)})
        if both:
            raise GraphError(
                f"the topic '{both[0]}' is read and written by the same job",
                why="the job would feed itself for ever",
                what_to_do=f"let '{sink.uid}' write another topic",
                topic=both[0],
            )


def _reads(node: SourceNode, topic: str) -> bool:
    source = node.source
    return topic in source.topics or (
        bool(source.topic_pattern) and topic in TopicPattern(source.topic_pattern)
    )


def _check_topics(first: SourceNode, second: SourceNode) -> None:
    for topic in second.source.topics:
        if first.uid != second.uid and _reads(first, topic):
            raise GraphError(
                f"the sources '{first.uid}' and '{second.uid}' read the same topic '{topic}'",
                why="their offsets could not be told apart in Spark's log",
                what_to_do="read it once and use the stream twice",
                topic=topic,
            )


def _check_patterns(first: SourceNode, second: SourceNode) -> None:
    ours, theirs = first.source.topic_pattern, second.source.topic_pattern
    if first.uid != second.uid and TopicPattern(ours).may_match_what(TopicPattern(theirs)):
        raise GraphError(
            f"the patterns of the sources '{first.uid}' and '{second.uid}' may match the same topic",
            why=f"{ours!r} and {theirs!r} do not begin with different letters, and the offsets of a topic "
            "that both read could not be told apart in Spark's log",
            what_to_do="read the topics of both with one source, whose metadata tells them apart; or with "
            "KafkaRecordsSource, which logs its offsets under its uid",
            patterns=(ours, theirs),
        )
