"""Broadcast streams as a user writes them: `orders.key_by("user").connect(rules.broadcast(RULES))`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flinkish_spark.arguments import refuse_async
from flinkish_spark.errors import GraphError
from flinkish_spark.functions import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.graph.broadcast_functions import BroadcastFunctions
from flinkish_spark.graph.declared import declare_operator
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.stream_graph import KeyedEntry
from flinkish_spark.runtime.group_runners import Distribution
from flinkish_spark.runtime.hinted_types import OutputType
from flinkish_spark.state import MapStateDescriptor

if TYPE_CHECKING:
    from flinkish_spark.datastream import DataStream
    from flinkish_spark.environment import StreamExecutionEnvironment
    from flinkish_spark.graph.stream_graph import StreamNode


class BroadcastStream:
    """A stream all of whose records go to every partition of the operator that reads it.

    Made by :meth:`DataStream.broadcast`; a keyed or plain stream is connected with it.
    """

    def __init__(
        self,
        environment: StreamExecutionEnvironment,
        node: StreamNode,
        descriptors: tuple[MapStateDescriptor, ...],
    ) -> None:
        self._environment, self._descriptors = environment, descriptors
        self._entry = KeyedEntry(node, (), Distribution.BROADCAST)


class BroadcastConnectedStream:
    """A stream and a broadcast one that one function reads."""

    def __init__(self, entry: KeyedEntry, other: BroadcastStream) -> None:
        self._entry, self._other = entry, other

    def process(
        self,
        function: KeyedBroadcastProcessFunction | BroadcastProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Process the elements of the stream, with the state that the broadcast elements fill.

        In a micro-batch the broadcast elements come first, in every partition. Each partition keeps a copy of
        the broadcast state, which goes through checkpoints, savepoints and rescaling.

        Parameters
        ----------
        function
            A KeyedBroadcastProcessFunction if the stream is keyed, else a BroadcastProcessFunction.
        output
            Fields of the emitted rows; by default what the hint of `process_element` says.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.

        Raises
        ------
        GraphError
            It is the other kind of function, or the uid cannot be used or is taken.
        UserFunctionError, SchemaError, ConfigError
            As of :meth:`KeyedStream.process`.
        """
        is_keyed = self._entry.distribution is Distribution.BY_KEY
        wanted: Any = KeyedBroadcastProcessFunction if is_keyed else BroadcastProcessFunction
        if not isinstance(function, wanted):
            raise GraphError(
                f"process() of '{uid}' got a {type(function).__name__}",
                why=f"the stream that is connected with a broadcast one is {'' if is_keyed else 'not '}keyed",
                what_to_do=f"give it an instance of a {wanted.__name__} subclass",
            )
        refuse_async(function, ("process_element", "process_broadcast_element", "on_timer"), f"'{uid}'")
        if output is None:
            timers = (function.on_timer,) if isinstance(function, KeyedBroadcastProcessFunction) else ()
            calls = (function.process_broadcast_element, *timers)
            output = inferred_output(function.process_element, f"'{uid}'", *calls, is_iterable=True)
        from flinkish_spark.datastream import DataStream  # the two make each other

        environment, entries = self._other._environment, (self._entry, self._other._entry)
        made = BroadcastFunctions(function, self._other._descriptors)
        return DataStream(
            environment, declare_operator(environment.graph, entries, made, output, uid, max_parallelism)
        )


def broadcast_states(descriptors: tuple[Any, ...]) -> tuple[MapStateDescriptor, ...]:
    """Return the descriptors of broadcast states.

    Raises
    ------
    GraphError
        There is none, or one is no MapStateDescriptor, has a time to live, or a name that is taken.
    """
    what_to_do = 'give a MapStateDescriptor: broadcast(MapStateDescriptor("rules", "STRING", "LONG"))'
    if not descriptors:
        raise GraphError(
            "broadcast() got no state",
            why="what every task gets is of use only where a function keeps it for the records of another "
            "stream; a function of this stream alone would emit everything once per task",
            what_to_do=f"{what_to_do}, and connect a stream with it",
        )
    for descriptor in descriptors:
        if not isinstance(descriptor, MapStateDescriptor):
            raise GraphError(f"broadcast() got a {type(descriptor).__name__}", what_to_do=what_to_do)
        if descriptor.ttl is not None:
            raise GraphError(
                f"the broadcast state '{descriptor.name}' has a time to live",
                why="its copies would not stay equal: partitions look at it at different times",
                what_to_do="leave the ttl out, and remove entries in process_broadcast_element()",
            )
    names = [descriptor.name for descriptor in descriptors]
    if len(set(names)) < len(names):
        raise GraphError(f"broadcast() got states of one name: {', '.join(names)}", what_to_do=what_to_do)
    return descriptors


def same_job(one: StreamExecutionEnvironment, other: BroadcastStream) -> BroadcastStream:
    """Return `other`; raise GraphError if it is of another job."""
    if other._environment is not one:
        raise GraphError(
            "connect() got a stream of another environment",
            what_to_do="make both streams with one environment",
        )
    return other
