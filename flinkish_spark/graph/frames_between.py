"""DataFrame functions on the way from one keyed operator to the next, where control rows pass them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import types as T

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.declared import check_field_names
from flinkish_spark.graph.frame_transforms import Transform, named
from flinkish_spark.graph.in_workers import InWorkers, RecordFunction
from flinkish_spark.graph.partitioning import is_partitioning
from flinkish_spark.graph.planned import TaggedStream
from flinkish_spark.graph.row_by_row import Spoiler, read_functions
from flinkish_spark.graph.stream_graph import Feed, Step, TransformNode
from flinkish_spark.runtime import columns as C


def behind_frames(uid: str, feed: Feed, stream: TaggedStream) -> tuple[TaggedStream, Feed]:
    """Return an operator's output behind the last DataFrame function on a way, and what of the way remains.

    Where another operator is read on several ways both stay what they are. Its rows are for several inputs
    then, and a filter on one way would drop those of another.

    Parameters
    ----------
    uid
        Of the operator that reads it.
    stream
        The output that the way begins with.

    Raises
    ------
    GraphError
        A function does more than look at single rows, or Spark refuses what it does.
    UserFunctionError
        A function raised.
    SchemaError
        Fields that come out cannot be those of a stream.
    """
    ways = [leg for inlet in feed.inlets for leg in inlet.legs]
    steps = ways[0].steps
    last = max((at for at, step in enumerate(steps) if frame_function(step) is not None), default=None)
    if len(ways) > 1 or last is None:
        return stream, feed
    (inlet,) = feed.inlets
    rest = replace(inlet, legs=(replace(ways[0], steps=steps[last + 1 :]),))
    return _through(uid, steps[: last + 1], stream), Feed((rest,))


def _through(uid: str, steps: Sequence[Step], stream: TaggedStream) -> TaggedStream:
    made = TaggedStream(stream.alone(), stream.schema, stream.channels)
    frames: list[Transform] = []
    records: list[RecordFunction] = []
    for step in steps:
        assert isinstance(step, TransformNode), "refused where it was declared"
        function = frame_function(step)
        if function is not None:
            made, records = _behind_workers(made, records), []
            frames.append(function)
        elif isinstance(step.function, RecordFunction):
            made, frames = _behind_functions(uid, made, frames), []
            records.append(step.function)
    return _behind_functions(uid, made, frames)


def frame_function(step: Step) -> Transform | None:
    """Return the function of a step if it is one of a DataFrame, and not of single records or a move."""
    if not isinstance(step, TransformNode):
        return None
    function: object = step.function
    return None if isinstance(function, RecordFunction) or is_partitioning(function) else step.function


def _behind_functions(uid: str, stream: TaggedStream, functions: Sequence[Transform]) -> TaggedStream:
    if not functions:
        return stream
    frame = stream.frame
    schema, found = read_functions(frame.sparkSession, functions, stream.schema, stream.schema.names)
    if isinstance(found, Spoiler):
        raise GraphError(
            f"operator '{uid}' follows a transform() behind another keyed operator, and "
            f"{named(found.function)} there does not look at each row by itself: it contains {found.what}",
            why="barriers travel between the records, and pass by only what selects, computes and filters",
            what_to_do="say it with select, withColumn, where and drop; with functions of single records: "
            "map(), flat_map(), filter(), process(); or do it in one of the two operators",
            uid=uid,
        )
    check_field_names(schema, "the result of a transform")
    control = [field.name for field in _control(stream)]
    return replace(stream, frame=found.over(frame).select(*control, *found.named_fields), schema=schema)


def _behind_workers(stream: TaggedStream, functions: Sequence[RecordFunction]) -> TaggedStream:
    if not functions:
        return stream
    control = _control(stream)
    found = InWorkers.of(functions, stream.schema, stream.schema.names, T.StructType(control))
    own = [column.alias(field.name) for column, field in found.fields]
    frame = found.over(stream.frame).select(*(field.name for field in control), *own)
    return replace(stream, frame=frame, schema=found.schema)


def _control(stream: TaggedStream) -> list[T.StructField]:
    return [field for field in stream.frame.schema if field.name in (*C.CONTROL, C.TIME)]
