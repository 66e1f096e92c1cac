"""What lies between two keyed operators: functions of single records, on one way or several that meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import ConfigError, GraphError
from flinkish_spark.graph.declared import check_same_fields
from flinkish_spark.graph.in_workers import RecordFunction, fields_of, in_turn
from flinkish_spark.graph.key_selectors import Key, KeyFunction, key_worker
from flinkish_spark.graph.partitioning import ByPartitioner, Spread, is_partitioning
from flinkish_spark.graph.planned import TaggedStream
from flinkish_spark.graph.stream_graph import (
    Feed,
    Inlet,
    KeyedNode,
    Leg,
    StreamGraph,
    TransformNode,
    feeds,
    operator_of,
)
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.branches import INPUT, ORIGIN, DealRows, DealtRows, InTurn, SideBySide
from flinkish_spark.runtime.column_functions import AppendColumns
from flinkish_spark.runtime.kept_times import Worker
from flinkish_spark.runtime.keyed_operator import Origins

_ORIGIN = T.StructField(ORIGIN, T.LongType())


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The rows of one input among those of others, in a frame of all of them.

    Parameters
    ----------
    frame
        The same object for all of them. Its columns have names of ours.
    is_own
        Whether a row is for this input; a control row is for none.
    columns
        Each with the name by which expressions of the user's, and what travels, know it.
    """

    frame: DataFrame
    is_own: Column
    columns: tuple[tuple[str, str], ...]

    @property
    def named(self) -> list[Column]:
        """Its columns under these names."""
        return [F.col(own).alias(known) for own, known in self.columns]


def functions_between(uid: str, functions: Sequence[object]) -> tuple[RecordFunction, ...]:
    """Return what an operator's records go through behind another one.

    What only moves records is left out: the operator distributes them anew.

    Raises
    ------
    GraphError
        Something is a function of a DataFrame. Where there is one way only, it was done before
        (`graph/frames_between.py`).
    """
    found = [function for function in functions if not is_partitioning(function)]
    known = tuple(function for function in found if isinstance(function, RecordFunction))
    if len(known) < len(found):
        raise GraphError(
            f"operator '{uid}' follows a transform() behind another keyed operator",
            why="it reads that operator on several ways, and the rows of all ways are in one DataFrame",
            what_to_do="say it with functions of single records: map(), flat_map(), filter(), process(); or "
            "do it in the function of the operator before it",
            uid=uid,
        )
    return known


def check_said_between(graph: StreamGraph, tasks: int) -> None:
    """Refuse what is said of tasks between two keyed operators and cannot be kept.

    Functions run there in the tasks of the operator in front, and its records are not moved before the one
    behind distributes them.

    Parameters
    ----------
    tasks
        How many keyed operators have.

    Raises
    ------
    ConfigError
        A function is to have another number of tasks.
    GraphError
        A function follows `global_` or `partition_custom`, which say what it sees in one task.
    """
    for node in graph.operators:
        for feed in feeds(node):
            if operator_of(feed.base) is not None:
                for leg in (leg for inlet in feed.inlets for leg in inlet.legs):
                    steps = [one.function for one in leg.steps if isinstance(one, TransformNode)]
                    _check_said(node.uid, steps, tasks)


def _check_said(uid: str, steps: Sequence[object], tasks: int) -> None:
    moved = ""
    for step in steps:
        if isinstance(step, ByPartitioner):
            moved = "partition_custom()"
        elif is_partitioning(step):
            moved = "global_()" if step == Spread(1) else ""
        if not isinstance(step, RecordFunction):
            continue
        where = f"'{step.settings.name}' stands in front of the keyed operator '{uid}' and behind another one"
        why = "functions between keyed operators run in the tasks of the one in front, as its records come"
        if moved:
            raise GraphError(
                f"{where}, and {moved} says which records it sees in one task",
                why=why,
                what_to_do=f"leave {moved} out; or call key_by() with the key that belongs together, and "
                "give the function as a keyed one",
                uid=uid,
            )
        if step.settings.parallelism not in (None, tasks):
            raise ConfigError(
                f"{where}, and set_parallelism({step.settings.parallelism}) was called on it",
                why=f"{why}, and these are {tasks}",
                what_to_do=f"leave it out, or say {tasks}",
                setting="parallelism",
                value=step.settings.parallelism,
            )


def is_read_plainly(uid: str, feed: Feed) -> bool:
    """Whether an operator reads another one on one way, with nothing on it.

    Raises
    ------
    GraphError
        As of :func:`functions_between`.
    """
    found = [_functions(uid, leg) for inlet in feed.inlets for leg in inlet.legs]
    return len(found) == 1 and not found[0]


def worker_between(uid: str, inlet: Inlet, given: T.StructType) -> tuple[Worker | None, T.StructType]:
    """Return what makes an input's records of those of an operator in front, and the columns that come out.

    Parameters
    ----------
    given
        Control columns and fields that come in.

    Returns
    -------
    tuple
        A worker that makes one batch of each; None where records stay as they are.

    Raises
    ------
    GraphError, SchemaError
        As of :func:`functions_between`; or the ways bring different fields.
    """
    if len(inlet.legs) == 1:
        (leg,) = inlet.legs
        workers, made = in_turn(_functions(uid, leg), given)
        return (InTurn(workers), made) if workers else (None, made)
    numbered = T.StructType([*given, _ORIGIN])
    ways = [in_turn(_functions(uid, leg), numbered) for leg in inlet.legs]
    first = fields_of(ways[0][1])
    for _, made in ways[1:]:
        check_same_fields(first, fields_of(made), f"operator '{uid}'")
    control = [field for field in given if field.name.startswith(C.PREFIX)]
    columns = T.StructType([*control, *first])
    return SideBySide(tuple(InTurn(workers) for workers, _ in ways), columns), columns


def shared_inputs(
    node: KeyedNode, feed: Feed, streams: Sequence[TaggedStream]
) -> list[tuple[SharedRows, T.StructType, tuple[str | Column, ...]]]:
    """Return, for each input that an operator has of another one, its rows, its fields and its keys.

    Parameters
    ----------
    streams
        The output of the other operator that each input begins with.
    """
    control = T.StructType([f for f in streams[0].frame.schema if f.name in (*C.CONTROL, C.TIME)])
    beside = [field for field in control if field.name not in (C.KIND, C.CHECKPOINT)]
    dealt, keys = [], []
    for number, (inlet, stream) in enumerate(zip(feed.inlets, streams, strict=True)):
        given = T.StructType([*beside, *stream.schema])
        worker, made = worker_between(node.uid, inlet, given)
        own, key = _keys(node, inlet, made)
        workers = tuple(one for one in (worker, key) if one is not None)
        parts = [] if key is None else [field for field in key.columns if field.name in key.names]
        taken = T.StructType([*fields_of(made), *parts])
        names = tuple(f"{C.PREFIX}way{number}_{at}" for at in range(len(taken)))
        columns = stream.outputs[stream.side] if stream.outputs else tuple(stream.schema.names)
        dealt.append(DealtRows(stream.side, tuple(columns), given, InTurn(workers), taken, names))
        keys.append(own)
    frame, is_own = _dealt(streams[0], dealt, control)
    return [
        (
            SharedRows(frame, own, tuple(zip(one.names, one.made.names, strict=True))),
            fields_of(one.made),
            key,
        )
        for one, own, key in zip(dealt, is_own, keys, strict=True)
    ]


def _dealt(
    stream: TaggedStream, inputs: Sequence[DealtRows], control: T.StructType
) -> tuple[DataFrame, list[Column]]:
    """Return the rows of all inputs in one frame, and of each whether a row is its own."""
    if any(isinstance(one.worker, InTurn) and one.worker.workers for one in inputs):
        deal = DealRows(tuple(inputs), control)
        frame = C.map_in_arrow(stream.frame, deal, deal.columns)
        return frame, [F.col(INPUT) == number for number in range(len(inputs))]
    own = [
        F.col(C.quoted(column)).alias(name)
        for one in inputs
        for column, name in zip(one.columns, one.names, strict=True)
    ]
    sides = [C.SIDE] if stream.outputs else []
    frame = stream.frame.select(*control.names, *sides, *own)
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    return frame, [is_record & (F.col(C.SIDE) == one.side) if sides else is_record for one in inputs]


def _keys(
    node: KeyedNode, inlet: Inlet, made: T.StructType
) -> tuple[tuple[str | Column, ...], AppendColumns | None]:
    """Return what an input is keyed by, and what makes that of its records in Python."""
    keys: Sequence[Key] = node.entries[inlet.entry].keys
    functions = [key for key in keys if isinstance(key, KeyFunction)]
    if not functions:
        return tuple(key for key in keys if not isinstance(key, KeyFunction)), None
    worker = key_worker(functions[0], made, node.uid, Origins())
    return tuple(F.col(name) for name in worker.names), worker


def _functions(uid: str, leg: Leg) -> tuple[RecordFunction, ...]:
    return functions_between(uid, [one.function for one in leg.steps if isinstance(one, TransformNode)])
