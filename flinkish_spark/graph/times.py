"""Event times in a plan: the column that they come from, and who reports about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.chains import chains_to, inputs_of
from flinkish_spark.graph.stream_graph import Leg, StreamGraph, TimedNode, feeds, operator_of, scans_of
from flinkish_spark.protocol.scans import source_of
from flinkish_spark.protocol.time_facts import AssignerRules, Untimed
from flinkish_spark.protocol.time_plan import Assigner, Reporter, TimePlan, assigner_uid, reporters_of
from flinkish_spark.runtime import columns as C
from flinkish_spark.sources.json_records import BAD_RECORD_MARKER

if TYPE_CHECKING:
    from flinkish_spark.protocol.scans import Chain

_NULL_TIME = f"{BAD_RECORD_MARKER} its event time is null"
_UNTIMED = AssignerRules(Untimed())


def time_column(records: DataFrame, timestamps: Any) -> Column:
    """Return the event time of each record, in milliseconds; a null one fails the job.

    Parameters
    ----------
    timestamps
        The name of a column, a column, or None for the time that the source gave.

    Raises
    ------
    GraphError
        There is no such column, or it holds no times.
    """
    if timestamps is None:
        return _checked(_own_time(records))
    column = F.col(C.quoted(timestamps)) if isinstance(timestamps, str) else timestamps
    if isinstance(timestamps, str) and timestamps not in records.columns:
        raise GraphError(
            f"the records have no column '{timestamps}' with their event time",
            why=f"they have {', '.join(_fields(records))}",
            what_to_do="name one of them in with_timestamp_assigner(...)",
        )
    kind = records.select(column.alias("time")).schema["time"].dataType
    check_time_type(timestamps, kind)
    return _checked(F.unix_millis(column) if isinstance(kind, T.TimestampType) else column)


def check_time_type(timestamps: object, kind: T.DataType) -> None:
    """Raise GraphError if a column of that type holds no event times."""
    if not isinstance(kind, T.TimestampType | T.LongType):
        raise GraphError(
            f"the event time {timestamps} is a {kind.simpleString()}",
            why="a time is a TIMESTAMP, or a LONG with milliseconds since 1970",
            what_to_do="convert it in a transform, or give a column expression that does",
        )


def _own_time(records: DataFrame) -> Column:
    if C.TIME not in records.columns:
        raise GraphError(
            "the records have no time of their own",
            why="the source gives them none, or a transform in front chose its own columns",
            what_to_do='say where times are: WatermarkStrategy....with_timestamp_assigner("bought_at"); '
            "or call assign_timestamps_and_watermarks() right behind the source",
        )
    return F.col(C.TIME)


def _fields(records: DataFrame) -> list[str]:
    return [name for name in records.columns if not name.startswith(C.PREFIX)]


def _checked(time: Column) -> Column:
    return F.when(time.isNull(), F.raise_error(F.lit(_NULL_TIME)).cast("long")).otherwise(time)


# -- who reports ---------------------------------------------------------------------------------------


def plan_times(graph: StreamGraph, planned: Callable[[Leg, Chain, str], Any]) -> TimePlan:
    """Return who in a program reports about time, and under which rules.

    A source without a strategy counts for the end of its input only, and so does one whose records reach no
    keyed operator on their way to a sink: nobody there asks for a watermark.

    Parameters
    ----------
    planned
        Returns the plan of a way from a source, in a chain, as the input of that name.

    Raises
    ------
    GraphError
        Uids are such that two inputs, or two operators, would be known by one name.
    """
    chains, operators, assigners = {}, {}, {}
    names = _Names()
    inputs: dict[str, set[str]] = {}
    in_front: dict[str, set[str]] = {}
    for sink in graph.sinks:
        ends = chains_to(graph, sink.parent)
        chains[sink.uid] = tuple(chain.name for chain, _ in ends)
        for chain, ways in ends:
            operators[chain.name] = chain.operators
            for leg, name, path in _entries(ways, chain.inputs):
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
    """By which names inputs or operators are known, each of which may stand for one only."""

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
    """Return the reporters of a program, by number."""
    return reporters_of([node.uid for node in graph.operators], inputs_of(graph))


def _entries(
    ways: Sequence[Leg], names: Sequence[str], behind: tuple[str, ...] = ()
) -> Iterator[tuple[Leg, str, tuple[str, ...]]]:
    """Yield the ways from sources that a stream has, to the sinks or to their first operators.

    With the name of the input, and the uids of the operators that it passes, in order; `behind` are those
    that follow.
    """
    rest = list(names)
    for leg in ways:
        own = [rest.pop(0) for _ in scans_of(leg.base)]
        operator = operator_of(leg.base)
        if operator is None:
            yield leg, own[0], behind
        else:
            # Of several ways from one operator the first stands for all: they pass what it has read.
            upstream = [feed.inlets[0].legs[0] for feed in feeds(operator)]
            yield from _entries(upstream, own, (operator.uid, *behind))
