"""Event times, latency markers and chains in a plan: who reports about time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.suggestions import describe_choices
from flinkish_spark.planning.logical_plan import End, LogicalPlan
from flinkish_spark.planning.rules.cut_chains import ends_with, inputs_of
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Path,
    StreamGraph,
    TimedNode,
    operator_of,
    operator_scans,
    upstreams,
)
from flinkish_spark.protocol.event_time import AssignerRules, Untimed
from flinkish_spark.protocol.latency import SUBTASK_MASK, place_of
from flinkish_spark.protocol.plan_layout import Chain, source_of
from flinkish_spark.protocol.time_plan import Assigner, Reporter, TimePlan, assigner_uid, reporters_of
from flinkish_spark.transport import columns as C
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.worker.time import NULL_TIME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_UNTIMED = AssignerRules(Untimed())


def time_column(records: DataFrame, timestamps: Column) -> Column:
    kind = records.select(timestamps.alias("time")).schema["time"].dataType
    check_time_type(timestamps, kind)
    time = F.unix_millis(timestamps) if isinstance(kind, T.TimestampType) else timestamps
    return F.when(time.isNull(), F.raise_error(F.lit(NULL_TIME)).cast("long")).otherwise(time)


def named_time(records: DataFrame, name: str | None) -> str:
    """Return the column with the records' event times; None asks for that which the source gives them."""
    if name is None:
        if C.TIME in records.columns:
            return C.TIME
        raise GraphError(
            "the records have no time of their own",
            why="the source gives them none, or a transform in front chose its own columns",
            what_to_do='say where times are: WatermarkStrategy....with_timestamp_assigner("bought_at"); '
            "or call assign_timestamps_and_watermarks() right behind the source",
        )
    if name not in records.columns:
        raise GraphError(
            f"the records have no column '{name}' with their event time",
            why=describe_choices([one for one in records.columns if not one.startswith(PREFIX)], name),
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


def plan_times(logical: LogicalPlan, planned: Callable[[Path, Chain, str], Any]) -> TimePlan:
    """Return who in a program reports about time, and under which rules."""
    # A source whose records reach no keyed operator counts for the end of its input only, as does one without
    # a strategy: nobody there asks for a watermark.
    chains, operators, assigners = {}, {}, {}
    names = _Names()
    inputs: dict[str, set[str]] = {}
    in_front: dict[str, set[str]] = {}
    for sink, ends in logical.ends.items():
        chains[sink] = tuple(end.chain.name for end in ends)
        for end in ends:
            chain = end.chain
            operators[chain.name] = chain.operators
            for path, name, behind in _entries(logical.graph, end):
                uid = source = source_of(name)
                timed = next((step for step in reversed(path.steps) if isinstance(step, TimedNode)), None)
                if timed is None or not chain.operators:
                    assigners[source] = Assigner(source, _UNTIMED)
                    names.give(source, source)
                else:
                    has_channels = planned(path, chain, name).has_channels
                    uid = assigner_uid(name, chain.name)
                    assigners[uid] = Assigner(source, timed.strategy.rules, has_channels)
                    names.give(uid, name, chain.name)
                for at, operator in enumerate(behind):
                    inputs.setdefault(operator, set()).add(uid)
                    in_front.setdefault(operator, set()).update(behind[:at])
    # Also what others in front wait for in other chains: nobody is ahead of whom it reads.
    closed = {uid: own.union(*(inputs[other] for other in in_front[uid])) for uid, own in inputs.items()}
    plan = TimePlan(
        reporters(logical.graph),
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


def _entries(graph: StreamGraph, end: End) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Yield each path from a source to a sink or a first operator: it, its input, the operators behind it."""
    names = end.chain.inputs
    rest = list(names)
    for path in end.paths:
        operator = operator_of(path.base)
        if operator is None:
            yield path, rest.pop(0), ()
        else:
            scans = operator_scans(*ends_with(graph, operator))
            named = {(id(one.operator), one.upstream): name for one, name in zip(scans, names, strict=True)}
            yield from _paths_of(operator, named, (operator.uid,))


def _paths_of(
    node: KeyedNode, named: Mapping[tuple[int, int], str], behind: tuple[str, ...]
) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    for number, upstream in enumerate(upstreams(node)):
        operator = operator_of(upstream.base)
        # Of several paths from one operator the first stands for all: they pass what it has read.
        if operator is None:
            yield upstream.inputs[0].paths[0], named[id(node), number], behind
        else:
            yield from _paths_of(operator, named, (operator.uid, *behind))


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


def subtask_in(place: Column) -> Column:
    return place.bitwiseAND(F.lit(SUBTASK_MASK)).cast("int")


def _array(values: Sequence[int]) -> Column:
    return F.array(*map(F.lit, values))
