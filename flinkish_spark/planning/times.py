"""Event times and latency markers in a plan, and the reporters about time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.suggestions import describe_choices
from flinkish_spark.planning.logical_plan import ChainEnd, LogicalPlan
from flinkish_spark.planning.rules.cut_chains import find_chain_operators, find_inputs
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Path,
    StreamGraph,
    TimedNode,
    deal_names,
    find_operator,
    find_operator_scans,
    find_upstreams,
)
from flinkish_spark.protocol.event_time import AssignerRules, NoWatermarkStrategy
from flinkish_spark.protocol.latency import SUBTASK_MASK, place_of
from flinkish_spark.protocol.plan_layout import Chain, source_of
from flinkish_spark.protocol.time_plan import Assigner, Reporter, TimePlan, assigner_uid, make_reporters
from flinkish_spark.transport import columns as C
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.worker.time import NULL_TIME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_UNTIMED = AssignerRules(NoWatermarkStrategy())


def make_time_column(records: DataFrame, timestamps: Column) -> Column:
    kind = records.select(timestamps.alias("time")).schema["time"].dataType
    check_time_type(timestamps, kind)
    time = F.unix_millis(timestamps) if isinstance(kind, T.TimestampType) else timestamps
    return F.when(time.isNull(), F.raise_error(F.lit(NULL_TIME)).cast("long")).otherwise(time)


def find_time_column(records: DataFrame, name: str | None) -> str:
    """Return the column with the records' event times; `name` None means the source's own times."""
    if name is None:
        if C.TIME in records.columns:
            return C.TIME
        raise GraphError(
            "the records have no time of their own",
            why="the source gives them none, or an earlier transform selected its own columns",
            what_to_do='name the column: WatermarkStrategy....with_timestamp_assigner("bought_at"); '
            "or call assign_timestamps_and_watermarks() right after the source",
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


def plan_times(logical: LogicalPlan, planned: Callable[[Path, Chain, tuple[str, ...]], Any]) -> TimePlan:
    """Return the reporters about time in a program, and their rules."""
    # A source without a keyed operator, or without a watermark strategy, reports only the end of its input:
    # nothing there needs a watermark.
    chains, operators, assigners = {}, {}, dict[str, Assigner]()
    names = _Names()
    inputs: dict[str, set[str]] = {}
    in_front: dict[str, set[str]] = {}
    for sink, ends in logical.ends.items():
        chains[sink] = tuple(end.chain.name for end in ends)
        for end in ends:
            chain = end.chain
            operators[chain.name] = chain.operators
            for path, own, behind in _find_entries(logical.graph, end):
                name, *others = own
                # Spark's watermark is that of all streams of a query; rows behind it count as the first's.
                for other in map(source_of, others):
                    assigners.setdefault(other, Assigner(other, _UNTIMED))
                    names.give(other, other)
                uid = source = source_of(name)
                timed = next((step for step in reversed(path.steps) if isinstance(step, TimedNode)), None)
                if timed is None or not chain.operators:
                    assigners[source] = Assigner(source, _UNTIMED)
                    names.give(source, source)
                else:
                    has_channels = planned(path, chain, own).has_channels
                    uid = assigner_uid(name, chain.name)
                    assigners[uid] = Assigner(source, timed.strategy.rules, has_channels)
                    names.give(uid, name, chain.name)
                for at, operator in enumerate(behind):
                    inputs.setdefault(operator, set()).add(uid)
                    in_front.setdefault(operator, set()).update(behind[:at])
    # Also the inputs of earlier operators in other chains: no operator is ahead of one that it reads.
    closed = {uid: own.union(*(inputs[other] for other in in_front[uid])) for uid, own in inputs.items()}
    plan = TimePlan(
        find_reporters(logical.graph),
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
        """Register a name made of these uids; refuse it if other uids have the same name."""
        other = self._given.setdefault(name, parts)
        if other != parts:
            one, two = (" before ".join(f"'{uid}'" for uid in found) for found in (other, parts))
            raise GraphError(
                f"{one} and {two} cannot be told apart",
                why=f"event times are stored under both uids joined by a dot, which is '{name}' for both",
                what_to_do="give one of these sources or operators another uid",
            )


def find_reporters(graph: StreamGraph) -> tuple[Reporter, ...]:
    return make_reporters([node.uid for node in graph.operators], find_inputs(graph))


#: A path from a source or query, the names of its inputs, and all later operators.
_Entry = tuple[Path, tuple[str, ...], tuple[str, ...]]


def _find_entries(graph: StreamGraph, end: ChainEnd) -> Iterator[_Entry]:
    """Yield each path from a source or query to its first operator or sink."""
    names = end.chain.inputs
    for path, own in deal_names(end.paths, names):
        operator = find_operator(path.base)
        if operator is None:
            yield path, own, ()
        else:
            scans = find_operator_scans(*find_chain_operators(graph, operator))
            named: dict[tuple[int, int], tuple[str, ...]] = {}
            for one, name in zip(scans, names, strict=True):
                place = id(one.operator), one.upstream
                named[place] = (*named.get(place, ()), name)
            yield from _find_source_paths(operator, named, (operator.uid,))


def _find_source_paths(
    node: KeyedNode, named: Mapping[tuple[int, int], tuple[str, ...]], behind: tuple[str, ...]
) -> Iterator[_Entry]:
    for number, upstream in enumerate(find_upstreams(node)):
        operator = find_operator(upstream.base)
        # All paths from an operator read the same sources, so the first path is enough.
        if operator is None:
            yield upstream.inputs[0].paths[0], named[id(node), number], behind
        else:
            yield from _find_source_paths(operator, named, (operator.uid, *behind))


# Latency markers come from no streaming source: a row of `spark.range` in a streaming plan is in each
# micro-batch, triggers none, and is in no log. `current_timestamp` is then the time that Spark logged for
# the micro-batch when it decided its offsets.
@dataclass(frozen=True)
class SourceMarkers:
    spark: SparkSession
    #: Their numbers as reporters to the driver; at least one.
    sources: tuple[int, ...]

    def route(self, routes: Sequence[int]) -> DataFrame:
        subtask = F.col("id") % len(routes)
        route = F.get(_make_array(routes), subtask.cast("int"))
        no_block = F.lit("").cast("binary").alias(C.BLOCK)
        rows = self._make_marker_rows(len(routes))
        return rows.select(route.alias(C.ROUTE), *self._make_control_columns(len(routes), subtask), no_block)

    def make_rows(self) -> DataFrame:
        return self._make_marker_rows(1).select(*self._make_control_columns(1, F.lit(0)))

    def _make_marker_rows(self, subtasks: int) -> DataFrame:
        return self.spark.range(0, len(self.sources) * subtasks, 1, 1)

    def _make_control_columns(self, subtasks: int, subtask: Column) -> list[Column]:
        places = _make_array([place_of(source, 0) for source in self.sources])
        place = F.get(places, F.floor(F.col("id") / subtasks).cast("int")) + subtask
        return [
            F.lit(int(C.Kind.MARKER)).alias(C.KIND),
            F.unix_millis(F.current_timestamp()).alias(C.CHECKPOINT),
            place.cast("long").alias(C.CHANNEL),
            F.lit(0).cast("long").alias(C.SEQUENCE),
        ]


def find_subtask(place: Column) -> Column:
    return place.bitwiseAND(F.lit(SUBTASK_MASK)).cast("int")


def _make_array(values: Sequence[int]) -> Column:
    return F.array(*map(F.lit, values))
