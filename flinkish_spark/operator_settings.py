"""What may be said of an operator behind the call that made it: name, uid, parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.declared import check_max_parallelism
from flinkish_spark.graph.lookup_transforms import LookupTransform
from flinkish_spark.graph.partitioning import (
    check_is_shuffle_partitions,
    checked_parallelism,
    is_partitioning,
    shuffle_partitions,
)
from flinkish_spark.graph.python_transforms import RowTransform, TransformSettings, connected_ways
from flinkish_spark.graph.stream_graph import (
    KeyedNode,
    SideNode,
    SourceNode,
    StreamNode,
    TimedNode,
    TransformNode,
    UnionNode,
)
from flinkish_spark.protocol.ids import checked_name

if TYPE_CHECKING:
    from flinkish_spark.environment import StreamExecutionEnvironment


class OperatorSettings:
    """The part of a `DataStream` that is about the operator that made it.

    Each method changes that operator, as in Flink, and returns the stream.
    """

    _environment: StreamExecutionEnvironment
    _node: StreamNode

    def name(self, name: str) -> Self:
        """Say what errors call the function that made the stream.

        A keyed operator has its uid beside it, by which its state is found; what its functions see as
        `get_task_name` is the name. Of a source a name is a note for who reads the program.

        Raises
        ------
        GraphError
            It is no name, or nothing that has one made the stream: a union, a transform.
        """
        if not isinstance(name, str) or not name:
            raise GraphError(
                f"name() got {name!r} ({type(name).__name__})", what_to_do='give it a text: name("parse")'
            )
        settings = self._settings()
        if settings is not None:
            settings.name = name
        elif isinstance(self._node, KeyedNode | SourceNode):
            self._environment.graph.names[self._node.uid] = name
        else:
            raise GraphError(
                f"name({name!r}) was called on {self._what()}",
                why="a source has a name, and what map(), flat_map(), filter() or process() made, or an "
                "operator on a keyed stream",
                what_to_do="call it right behind one of these, or leave it out",
            )
        return self

    def uid(self, uid: str) -> Self:
        """Say the uid of an operator again; of a function without state, what errors call it.

        Where a uid is needed, the call that makes the operator takes it. This is for programs that come from
        Flink: what it says must be what that call said.

        Raises
        ------
        GraphError
            It is no uid, or another one than the operator has.
        """
        try:
            checked_name(uid, "uid")
        except ValueError as error:
            raise GraphError(str(error), uid=uid) from None
        settings = self._settings()
        if settings is not None:
            settings.name = uid
        elif not isinstance(self._node, KeyedNode | SourceNode) or self._node.uid != uid:
            raise GraphError(
                f"uid({uid!r}) was called on {self._what()}",
                why="the call that makes a source or a keyed operator takes its uid: state is found by it",
                what_to_do=f'say it there: process(..., uid="{uid}")',
                uid=uid,
            )
        return self

    def set_parallelism(self, parallelism: int) -> Self:
        """Say in how many tasks a function of `map`, `flat_map`, `filter` or `process` without a key runs.

        Its records go through a shuffle in front of it, as by `rebalance`; what follows runs in its tasks,
        too. Keyed operators have as many tasks as Spark has shuffle partitions; another number is refused.
        So it is, when the job starts, of a function between two of them: it runs in the tasks of the first.

        Parameters
        ----------
        parallelism
            Number of tasks.

        Raises
        ------
        ConfigError
            It is no number of tasks, or not the one that keyed operators have.
        GraphError
            The stream comes from something else.
        """
        asked = checked_parallelism("set_parallelism", parallelism)
        settings = self._settings()
        if isinstance(self._node, KeyedNode):
            check_is_shuffle_partitions(asked, shuffle_partitions(self._environment.spark), self._what())
        elif settings is not None:
            settings.parallelism = asked
        else:
            raise GraphError(
                f"set_parallelism({asked}) was called on {self._what()}",
                why="it has no number of tasks of its own; a source has as many as its system has partitions",
                what_to_do=f"call rebalance({asked}) behind it, or set_parallelism({asked}) right behind the "
                "map(), flat_map(), filter() or process() that it is for",
            )
        return self

    def set_max_parallelism(self, max_parallelism: int) -> Self:
        """Say the number of key groups of a keyed operator again.

        The call that makes the operator takes it. What this says must be what that call said, or what the
        environment says where that call said nothing.

        Raises
        ------
        ConfigError
            It is no number of key groups.
        GraphError
            It is another one than the operator has, or the stream comes from no keyed operator.
        """
        check_max_parallelism(max_parallelism)
        if not isinstance(self._node, KeyedNode):
            raise GraphError(
                f"set_max_parallelism({max_parallelism}) was called on {self._what()}",
                why="only keyed operators have key groups",
                what_to_do="leave it out",
            )
        if self._node.max_parallelism != max_parallelism:
            raise GraphError(
                f"{self._what()} has {self._node.max_parallelism} key groups, not {max_parallelism}",
                why="the call that makes an operator takes their number, for the life of its state",
                what_to_do=f"say it there: process(..., max_parallelism={max_parallelism})",
                uid=self._node.uid,
            )
        return self

    def _settings(self) -> TransformSettings | None:
        """Return those of the function that made the stream; None if none did."""
        node = next(iter(connected_ways(self._node)), self._node)
        if isinstance(node, TransformNode) and isinstance(node.function, RowTransform | LookupTransform):
            return node.function.settings
        return None

    def _what(self) -> str:
        node, settings = self._node, self._settings()
        if settings is not None:
            return f"the function '{settings.name}', which has no key"
        match node:
            case KeyedNode():
                return f"the keyed operator '{node.uid}'"
            case SourceNode():
                return f"the source '{node.uid}'"
            case SideNode():
                return f"a side output of the keyed operator '{node.parent.uid}'"
            case UnionNode():
                return "a stream that is a union"
            case TimedNode():
                return "a stream that assign_timestamps_and_watermarks() made"
            case TransformNode() if is_partitioning(node.function):
                return "a stream whose records were only moved (rebalance() and the like)"
        return "a stream that transform() made"
