"""Inputs of keyed operators, of the streams that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import Column, DataFrame

from flinkish_spark.bridge.plans import calls_python
from flinkish_spark.core.errors import GraphError
from flinkish_spark.planning.between import BranchRows, RecordStream, functions_between
from flinkish_spark.planning.declare import KeyPart, with_computed_keys
from flinkish_spark.planning.sent_columns import KeyedInput
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import KeyedEntry, KeyedNode
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins

PlannedStream = RecordStream | TaggedStream


def keyed_input(node: KeyedNode, at: int, stream: PlannedStream, reporters: Sequence[str]) -> KeyedInput:
    """Return the input of an operator's entry where one path leads into it, with nothing on it."""
    entry = node.entries[at]
    if isinstance(stream, RecordStream):
        frames = frames_of(stream, by_expression=has_expression(entry))
        first, keys = with_computed_keys(frames[0], entry.keys, node.uid, stream.origins)
        made = of_source(stream, (first, *frames[1:]), keys, reporters, stream.source)
    else:
        functions_between(node.uid, stream.transforms)
        for key in entry.keys:
            if isinstance(key, Column) and calls_python(stream.alone(), key):
                raise GraphError(
                    f"the key of operator '{node.uid}' is an expression that calls a function in Python",
                    why="behind an operator Spark would call it for barriers, which have no fields",
                    what_to_do="give key_by() the function itself, and key=; or compute a column in front",
                )
        frame, keys = with_computed_keys(stream.alone(), entry.keys, node.uid, Origins())
        made = KeyedInput((frame,), stream.schema, stream.channels, Origins(), keys)
    return replace(made, entry=at, distribution=entry.distribution)


def frames_of(stream: RecordStream, *, by_expression: bool) -> tuple[DataFrame, ...]:
    """Return records and barriers of a source, in one frame if they may be."""
    # An expression of the user's must not see rows without fields, and times alone are such.
    stream = stream.records_only() if by_expression else stream
    return (stream.frame,) if stream.is_marked else (stream.frame, stream.barriers)


def has_expression(entry: KeyedEntry) -> bool:
    return any(isinstance(key, Column) for key in entry.keys)


def of_source(
    stream: RecordStream,
    frames: tuple[DataFrame, ...],
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    """Return an input of an operator by its name in the chain, which may not be that of the scan."""
    is_timed = C.TIME in stream.frame.columns
    return KeyedInput(
        frames,
        stream.schema,
        stream.channels,
        stream.origins,
        keys,
        source=name,
        reports_as=reporters.index(name) if is_timed else None,
    )


def of_branch(
    stream: RecordStream,
    branch: BranchRows,
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    rows = branch.rows
    beside = [name for name in (C.CHANNEL, C.SEQUENCE, C.TIME) if name in rows.frame.columns]
    view = rows.frame.select(*beside, *rows.named)
    made = of_source(stream, (view, stream.barriers), keys, reporters, name)
    return replace(made, schema=branch.schema, shared=rows)
