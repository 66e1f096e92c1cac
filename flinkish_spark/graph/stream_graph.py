"""The stream graph: what the user wrote, as values. Checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flinkish_spark.errors import GraphError
from flinkish_spark.protocol.ids import checked_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql import types as T

    from flinkish_spark.functions import KeyedProcessFunction
    from flinkish_spark.sinks.base import Sink
    from flinkish_spark.sources.base import Source


@dataclass(frozen=True, eq=False)
class SourceNode:
    """Where records come in."""

    uid: str
    source: Source


@dataclass(frozen=True, eq=False)
class TransformNode:
    """A stateless DataFrame function over the records of `parent`."""

    parent: StreamNode
    function: Callable[[DataFrame], DataFrame]


@dataclass(frozen=True, eq=False)
class KeyedNode:
    """A keyed process function over `parent`."""

    uid: str
    parent: StreamNode
    keys: tuple[str | Column, ...]
    function: KeyedProcessFunction
    output: T.StructType
    max_parallelism: int


StreamNode = SourceNode | TransformNode | KeyedNode


@dataclass(frozen=True, eq=False)
class SinkNode:
    """Where records of `parent` go out."""

    uid: str
    parent: StreamNode
    sink: Sink


@dataclass
class StreamGraph:
    """All nodes of one job, in the order in which they were declared."""

    sources: list[SourceNode] = field(default_factory=list)
    operators: list[KeyedNode] = field(default_factory=list)
    sinks: list[SinkNode] = field(default_factory=list)

    def check_uid(self, uid: str) -> str:
        """Return `uid` if it is usable and new.

        Raises
        ------
        GraphError
            It is no name, or another node has it.
        """
        try:
            checked_name(uid, "uid")
        except ValueError as error:
            raise GraphError(str(error), uid=uid) from None
        if uid in self.uids():
            raise GraphError(
                f"the uid '{uid}' is used twice",
                why="state, transactions and table commits are found again by uid after a restart",
                what_to_do="give every source, operator and sink a uid of its own",
                uid=uid,
            )
        return uid

    def uids(self) -> tuple[str, ...]:
        """Return all uids in declaration order."""
        nodes: Sequence[SourceNode | KeyedNode | SinkNode] = [*self.sources, *self.operators, *self.sinks]
        return tuple(node.uid for node in nodes)

    def check_complete(self) -> None:
        """Raise GraphError unless something flows from a source to a sink."""
        if not self.sinks:
            raise GraphError(
                "the job has no sink", what_to_do="call sink_to(...) on a stream before execute()"
            )


def base_of(node: StreamNode) -> str:
    """Return the uid of the operator or source that a stream's plan begins with."""
    while isinstance(node, TransformNode):
        node = node.parent
    return node.uid
