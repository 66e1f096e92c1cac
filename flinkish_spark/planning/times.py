"""Event times, latency markers and chains in a plan: who reports about time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.suggestions import they_have
from flinkish_spark.planning.async_calls import shared_from, sharing
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Leg,
    SinkNode,
    StreamGraph,
    StreamNode,
    TimedNode,
    feeds,
    legs,
    operator_of,
    operator_scans,
    operators_upto,
)
from flinkish_spark.planning.transforms import has_frames_first
from flinkish_spark.protocol.event_time import AssignerRules, Untimed
from flinkish_spark.protocol.latency import SUBTASK_MASK, place_of
from flinkish_spark.protocol.plan_layout import Chain, input_names, source_of
from flinkish_spark.protocol.time_plan import Assigner, Reporter, TimePlan, assigner_uid, reporters_of
from flinkish_spark.transport import columns as C
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.worker.time import NULL_TIME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.planning.sink_rows import PlannedJob, TaggedStream


def chains_to(graph: StreamGraph, node: StreamNode) -> tuple[tuple[Chain, tuple[Leg, ...]], ...]:
    """Return the chains whose ends a stream is, each with the ways that are its end."""
    # All ways from sources to sinks without an operator on them are one chain. An operator's outputs are ends
    # of the operator's chain, whoever reads them: transforms behind it are no part of the plan. So it is with
    # the outputs of an async operator behind a source, if several sinks read them.
    ways = legs(node)
    plain = tuple(leg for leg in ways if isinstance(leg.base, SourceNode))
    found: list[tuple[Chain, tuple[Leg, ...]]] = []
    if plain:
        sources = [leg.base.uid for leg in plain if isinstance(leg.base, SourceNode)]
        is_shared = shared_from(graph, plain[0], len(ways)) is not None
        together = sharing(graph, plain[0]) if is_shared else ()
        readers = tuple(sink.uid for sink in graph.sinks if sink.parent is node or sink in together)
        found.append((Chain(input_names(sources), (), readers), plain))
    for leg in ways:
        operator = operator_of(leg.base)
        if operator is not None:
            found.append((chain_of(graph, operator), (leg,)))
    return tuple(found)


def chains_of_sink(graph: StreamGraph, sink: SinkNode) -> tuple[Chain, ...]:
    return tuple(chain for chain, _ in chains_to(graph, sink.parent))


def sharing_tasks(graph: StreamGraph) -> tuple[tuple[KeyedNode, ...], ...]:
    """Return the operators of a group that read sources and that only sinks read: they share tasks."""
    # One alone is left out, unless it reads a source several times, which is scanned once then.
    groups: dict[str, list[KeyedNode]] = {}
    ends = {chain: ways[0] for sink in graph.sinks for chain, ways in chains_to(graph, sink.parent)}
    for chain, leg in ends.items():
        node = operator_of(leg.base)
        if node is not None and len(chain.operators) == 1:
            groups.setdefault(graph.slot_sharing.get(node.uid, "default"), []).append(node)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1 or _scans_again(group[0]))


def _scans_again(operator: KeyedNode) -> bool:
    sources = [scan.source for scan in operator_scans(operator)]
    return any(sources.count(source) > 1 for source in sources)


def read_by(planned: PlannedJob) -> dict[Chain, tuple[str, ...]]:
    return {
        chain: tuple(sink.uid for sink in planned.sinks if stream in sink.streams)
        for stream, chain in enumerate(planned.chains)
    }


def inputs_of(graph: StreamGraph) -> tuple[str, ...]:
    """Return the names of all inputs of a job's chains, those of the same source one behind the other."""
    names = {name for sink in graph.sinks for chain in chains_of_sink(graph, sink) for name in chain.inputs}
    order = [source.uid for source in graph.sources]
    known = {uid: place for place, uid in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (known[source_of(name)], len(name), name)))


def chain_of(graph: StreamGraph, operator: KeyedNode) -> Chain:
    return _chain(ends_with(graph, operator))


def ends_with(graph: StreamGraph, operator: KeyedNode) -> tuple[KeyedNode, ...]:
    """Return the operators that sinks read in the chain of one of them, in the order of the sinks."""
    # What an operator makes for sinks and for others stands in one chain, so that it runs once. A job goes on
    # with the chains that it has begun with.
    together = next((ends for ends in _ends(tuple(graph.sinks)) if operator in ends), (operator,))
    if graph.begun_chains is None:
        return together
    begun = [end.uid for end in together if end.uid in graph.begun_chains]
    return together if begun == list(_chain(together).consumers) else (operator,)


def _chain(ends: tuple[KeyedNode, ...]) -> Chain:
    inputs = input_names([scan.source.uid for scan in operator_scans(*ends)])
    operators = tuple(node.uid for node in operators_upto(*ends))
    return Chain(inputs, operators, operators[-1:])


@lru_cache(maxsize=16)
def _ends(sinks: tuple[SinkNode, ...]) -> tuple[tuple[KeyedNode, ...], ...]:
    """Return the operators that sinks read, those together that read one operator, or each other."""
    read = dict.fromkeys(operator_of(leg.base) for sink in sinks for leg in legs(sink.parent))
    found: list[tuple[set[KeyedNode], list[KeyedNode]]] = []
    for end in read:
        if end is None:
            continue
        below, ends = set(operators_upto(end)), [end]
        for other in [one for one in found if not one[0].isdisjoint(below)]:
            if _go_in_line(below | other[0]):
                found.remove(other)
                below |= other[0]
                ends = [*other[1], *ends]
        found.append((below, ends))
    order = list(read)
    return tuple(tuple(sorted(ends, key=order.index)) for _, ends in found)


def _go_in_line(operators: Iterable[KeyedNode]) -> bool:
    """Whether operators can stand one behind the other, so that rows of one pass the next."""
    # A transform() between two of them that stands first on no way of its own would get the rows of all.
    inlets = (inlet for one in operators for feed in feeds(one) for inlet in feed.inlets)
    between = (inlet for inlet in inlets if operator_of(inlet.legs[0].base) is not None)
    return all(map(has_frames_first, between))


_UNTIMED = AssignerRules(Untimed())


def time_column(records: DataFrame, timestamps: Column) -> Column:
    kind = records.select(timestamps.alias("time")).schema["time"].dataType
    check_time_type(timestamps, kind)
    time = F.unix_millis(timestamps) if isinstance(kind, T.TimestampType) else timestamps
    return F.when(time.isNull(), F.raise_error(F.lit(NULL_TIME)).cast("long")).otherwise(time)


def named_time(records: DataFrame, name: str | None) -> str:
    """Return the column with the records' event times; None asks for that which the source gives them."""
    if name is None:
        return _own_time(records)
    if name not in records.columns:
        raise GraphError(
            f"the records have no column '{name}' with their event time",
            why=they_have(_fields(records), name),
            what_to_do="name one of them in with_timestamp_assigner(...)",
        )
    check_time_type(name, records.schema[name].dataType)
    return name


def check_time_type(timestamps: object, kind: T.DataType) -> None:
    if not isinstance(kind, T.TimestampType | T.LongType):
        raise GraphError(
            f"the event time {timestamps} is a {kind.simpleString()}",
            why="a time is a TIMESTAMP, or a LONG with milliseconds since 1970",
            what_to_do="convert it in a transform, or give a column expression that does",
        )


def _own_time(records: DataFrame) -> str:
    if C.TIME not in records.columns:
        raise GraphError(
            "the records have no time of their own",
            why="the source gives them none, or a transform in front chose its own columns",
            what_to_do='say where times are: WatermarkStrategy....with_timestamp_assigner("bought_at"); '
            "or call assign_timestamps_and_watermarks() right behind the source",
        )
    return C.TIME


def _fields(records: DataFrame) -> list[str]:
    return [name for name in records.columns if not name.startswith(PREFIX)]


def plan_times(graph: StreamGraph, planned: Callable[[Leg, Chain, str], Any]) -> TimePlan:
    """Return who in a program reports about time, and under which rules."""
    # A source whose records reach no keyed operator counts for the end of its input only, as does one without
    # a strategy: nobody there asks for a watermark.
    chains, operators, assigners = {}, {}, {}
    names = _Names()
    inputs: dict[str, set[str]] = {}
    in_front: dict[str, set[str]] = {}
    for sink in graph.sinks:
        ends = chains_to(graph, sink.parent)
        chains[sink.uid] = tuple(chain.name for chain, _ in ends)
        for chain, ways in ends:
            operators[chain.name] = chain.operators
            for leg, name, path in _entries(graph, ways, chain.inputs):
                uid = source = source_of(name)
                timed = next((step for step in reversed(leg.steps) if isinstance(step, TimedNode)), None)
                if timed is None or not chain.operators:
                    assigners[source] = Assigner(source, _UNTIMED)
                    names.give(source, source)
                else:
                    has_channels = planned(leg, chain, name).has_channels
                    uid = assigner_uid(name, chain.name)
                    assigners[uid] = Assigner(source, timed.strategy.rules, has_channels)
                    names.give(uid, name, chain.name)
                for at, operator in enumerate(path):
                    inputs.setdefault(operator, set()).add(uid)
                    in_front.setdefault(operator, set()).update(path[:at])
    # Also what others in front wait for in other chains: nobody is ahead of whom it reads.
    closed = {uid: own.union(*(inputs[other] for other in in_front[uid])) for uid, own in inputs.items()}
    plan = TimePlan(
        reporters(graph),
        chains,
        {name: uids for name, uids in operators.items() if uids},
        assigners,
        {uid: frozenset(own) for uid, own in closed.items()},
    )
    instances = _Names()
    for chain_name, uids in plan.operators.items():
        for uid in uids:
            name = plan.instance(uid, chain_name)
            instances.give(name, uid, *(() if name == uid else (chain_name,)))
    return plan


class _Names:
    def __init__(self) -> None:
        self._given: dict[str, tuple[str, ...]] = {}

    def give(self, name: str, *parts: str) -> None:
        """Give one a name, made of these uids; more than once to the same does nothing."""
        other = self._given.setdefault(name, parts)
        if other != parts:
            one, two = (" in front of ".join(f"'{uid}'" for uid in found) for found in (other, parts))
            raise GraphError(
                f"{one} and {two} cannot be told apart",
                why=f"their event times are kept by uids with a dot between them, so both are '{name}'",
                what_to_do="give one of these sources or operators another uid",
            )


def reporters(graph: StreamGraph) -> tuple[Reporter, ...]:
    return reporters_of([node.uid for node in graph.operators], inputs_of(graph))


def _entries(
    graph: StreamGraph, ways: Sequence[Leg], names: Sequence[str]
) -> Iterator[tuple[Leg, str, tuple[str, ...]]]:
    """Yield each path from a source to a sink or a first operator: it, its input, the operators behind it."""
    rest = list(names)
    for leg in ways:
        operator = operator_of(leg.base)
        if operator is None:
            yield leg, rest.pop(0), ()
        else:
            scans = operator_scans(*ends_with(graph, operator))
            named = {(id(one.operator), one.feed): name for one, name in zip(scans, names, strict=True)}
            yield from _paths(operator, named, (operator.uid,))


def _paths(
    node: KeyedNode, named: Mapping[tuple[int, int], str], behind: tuple[str, ...]
) -> Iterator[tuple[Leg, str, tuple[str, ...]]]:
    for number, feed in enumerate(feeds(node)):
        upstream = operator_of(feed.base)
        # Of several ways from one operator the first stands for all: they pass what it has read.
        if upstream is None:
            yield feed.inlets[0].legs[0], named[id(node), number], behind
        else:
            yield from _paths(upstream, named, (upstream.uid, *behind))


# Latency markers come from no streaming source: a row of `spark.range` in a streaming plan is there in each
# micro-batch, asks for none, and stands in no log. `current_timestamp` of such a plan is the time that Spark
# has logged for the micro-batch when it decided its offsets.
@dataclass(frozen=True)
class SourceMarkers:
    spark: SparkSession
    #: Their numbers among those who report to the driver; at least one.
    sources: tuple[int, ...]

    def routed(self, routes: Sequence[int]) -> DataFrame:
        subtask = F.col("id") % len(routes)
        route = F.get(_array(routes), subtask.cast("int"))
        no_block = F.lit("").cast("binary").alias(C.BLOCK)
        rows = self._rows(len(routes))
        return rows.select(route.alias(C.ROUTE), *self._control(len(routes), subtask), no_block)

    def alone(self) -> DataFrame:
        return self._rows(1).select(*self._control(1, F.lit(0)))

    def _rows(self, subtasks: int) -> DataFrame:
        return self.spark.range(0, len(self.sources) * subtasks, 1, 1)

    def _control(self, subtasks: int, subtask: Column) -> list[Column]:
        places = _array([place_of(source, 0) for source in self.sources])
        place = F.get(places, F.floor(F.col("id") / subtasks).cast("int")) + subtask
        return [
            F.lit(int(C.Kind.MARKER)).alias(C.KIND),
            F.unix_millis(F.current_timestamp()).alias(C.CHECKPOINT),
            place.cast("long").alias(C.CHANNEL),
            F.lit(0).cast("long").alias(C.SEQUENCE),
        ]


class LatencyMarking:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def of(self, graph: StreamGraph, inputs: Iterable[str]) -> SourceMarkers | None:
        numbers = [one.uid for one in reporters(graph)]
        found = tuple(numbers.index(name) for name in inputs)
        return SourceMarkers(self._spark, found) if found else None

    def beside(self, stream: TaggedStream, graph: StreamGraph, inputs: Iterable[str]) -> TaggedStream:
        # Behind: of the first partition of a DataFrame Spark writes a file even if it holds no record.
        markers = self.of(graph, inputs)
        if markers is None:
            return stream
        return replace(stream, frame=stream.frame.unionByName(markers.alone(), allowMissingColumns=True))


class NoMarking:
    def of(self, graph: StreamGraph, inputs: Iterable[str]) -> SourceMarkers | None:
        return None

    def beside(self, stream: TaggedStream, graph: StreamGraph, inputs: Iterable[str]) -> TaggedStream:
        return stream


NO_MARKING = NoMarking()


def subtask_in(place: Column) -> Column:
    return place.bitwiseAND(F.lit(SUBTASK_MASK)).cast("int")


def _array(values: Sequence[int]) -> Column:
    return F.array(*map(F.lit, values))
