"""What a program does with single records between two operators, without Spark, batch by batch.

A frame here is what a DataFrame of records is in a job: control columns, then fields. A row whose sequence is
`BEHIND` or more came behind the watermark of its micro-batch.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.errors import ConfigError, GraphError, UserFunctionError
from flinkish_spark.graph.lookup_transforms import LookupTransform
from flinkish_spark.graph.partitioning import ByPartitioner, is_partitioning
from flinkish_spark.graph.python_transforms import ProcessTransform, RowTransform
from flinkish_spark.graph.stream_graph import Base, Leg, Step, TimedNode, TransformNode, operator_of
from flinkish_spark.graph.times import check_time_type
from flinkish_spark.operators.decoded_values import StateValueError
from flinkish_spark.operators.group_run import ElementFailed, TimerFailed
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import OutputError, RowReader, RowWriter
from flinkish_spark.runtime.arrow_values import ValueMismatch
from flinkish_spark.runtime.keyed_operator import USER_FUNCTION_MARKER, OperatorFailed, Origins
from flinkish_spark.runtime.row_blocks import arrow_schema, as_schema
from flinkish_spark.runtime.time_stage import TimeStage
from flinkish_spark.user_iterators import USER_ERRORS, NotAnEnd

#: As mapInArrow calls it.
Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
_CONTROL = [T.StructField(name, T.LongType()) for name in (C.CHANNEL, C.SEQUENCE, C.TIME)]
_NEEDS_SPARK = "give the harness a program that begins behind it, and test it with a Spark session"


def frame_type(fields: T.StructType) -> T.StructType:
    """Return the columns of a frame of records with these fields."""
    return T.StructType([*_CONTROL, *fields])


def fields_of(frame: T.StructType) -> T.StructType:
    """Return the fields of the records in a frame."""
    return T.StructType([field for field in frame if not field.name.startswith(C.PREFIX)])


def frame_of(
    values: Sequence[Any], times_ms: Sequence[int | None], fields: T.StructType, channel: int, first: int
) -> pa.RecordBatch:
    """Return records of a source as a frame.

    Parameters
    ----------
    values
        Each a tuple, named tuple, Row, dict or dataclass; of records with one field also its value.
    channel, first
        Where they come from, and the place of the first there.

    Raises
    ------
    ConfigError
        One is not of the declared type.
    """
    try:
        rows = [_row(value, len(fields)) for value in values]
        arrays = RowWriter(arrow_schema(fields)).write(rows)
    except OutputError as error:
        raise ConfigError(
            f"an element that was pushed is not ({', '.join(f.simpleString() for f in fields)})",
            why=str(error).replace("emitted", "it has", 1),
            what_to_do="push tuples, named tuples, Rows, dicts or dataclasses with the fields that the "
            "harness was given for this input",
        ) from None
    count = len(rows)
    control = [pa.array([channel] * count, pa.int64()), pa.array(range(first, first + count), pa.int64())]
    times = pa.array(times_ms, pa.int64())
    return pa.RecordBatch.from_arrays([*control, times, *arrays], schema=arrow_schema(frame_type(fields)))


def _row(value: Any, width: int) -> Any:
    if isinstance(value, tuple | list | dict) or hasattr(value, "__dataclass_fields__"):
        return value
    if width > 1:
        raise OutputError(f"it is {value!r}, which is no row")
    return (value,)


def records_in(frame: pa.RecordBatch) -> tuple[list[Any], list[int | None]]:
    """Return the records of a frame, as functions get them, and their times."""
    names = [name for name in frame.schema.names if not name.startswith(C.PREFIX)]
    return list(RowReader(names, names, ()).read(frame)[1]), frame.column(C.TIME).to_pylist()


@contextmanager
def blaming(uid: str | None = None) -> Iterator[None]:
    """Let what a function of the user's raised come out, with a note of the operator.

    Raises
    ------
    UserFunctionError
        What it emitted, or gave a state, is not of the declared type.
    """
    blamed: BaseException | None = None
    try:
        yield
    except (ElementFailed, TimerFailed) as failure:
        blamed = failure.error
    except OperatorFailed as failure:
        blamed = failure.__cause__
        uid = str(json.loads(str(failure).removeprefix(USER_FUNCTION_MARKER))["uid"])
    except USER_ERRORS as error:
        # Of a fold over columns, beside what was emitted: it has no single element that failed.
        if uid is None and not isinstance(error, OutputError | StateValueError):
            raise
        blamed = error
    if isinstance(blamed, OutputError | StateValueError | ValueMismatch):
        says = f"the function {blamed}" if isinstance(blamed, OutputError) else str(blamed)
        raise UserFunctionError(f"operator '{uid}': {says}", uid=uid)
    if isinstance(blamed, StopIteration):
        # As such it would end the `with` of whoever called.
        blamed = NotAnEnd(blamed, "the function")
    if blamed is not None:
        blamed.add_note(f"in the operator '{uid}'")
        raise blamed


@dataclass(frozen=True)
class Copied:
    """A stage of which each micro-batch has a copy of its own, as each task in a job has."""

    stage: Stage

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task."""
        return copy.deepcopy(self.stage)(batches)


@dataclass(frozen=True)
class Way:
    """From a source or an operator through steps.

    Parameters
    ----------
    stages
        What is done to frames.
    frame
        Columns that come out.
    """

    base: Base
    stages: tuple[Stage, ...]
    frame: T.StructType

    def rows(self, found: Mapping[int, pa.RecordBatch]) -> pa.RecordBatch:
        """Return what comes out in a micro-batch, given what each base has, by its identity."""
        schema = arrow_schema(self.frame)
        rows = found[id(self.base)]
        for stage in self.stages:
            if rows.num_rows:
                with blaming():
                    rows = pa.concat_batches(list(stage(iter([rows]))))
        if not rows.num_rows:
            return pa.RecordBatch.from_pylist([], schema=schema)
        return as_schema(rows.select(schema.names), schema)


def way_of(leg: Leg, frame: T.StructType) -> Way:
    """Return a way whose base has a frame's columns.

    Raises
    ------
    GraphError
        Something on it cannot be done without Spark.
    """
    stages: list[Stage] = []
    is_told_times = not any(isinstance(step.function, ProcessTransform) for step in _functions(leg))
    if operator_of(leg.base) is not None and not is_told_times:
        stages.append(_untimed)
    for step in leg.steps:
        stage, frame = _stage(step, frame)
        if stage is not None:
            stages.append(stage)
    return Way(leg.base, tuple(stages), frame)


def _functions(leg: Leg) -> Iterator[TransformNode]:
    return (step for step in leg.steps if isinstance(step, TransformNode))


def _untimed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take times away: behind an operator a process function is not told of any, as in a job."""
    for batch in batches:
        at = batch.schema.names.index(C.TIME)
        yield batch.set_column(at, batch.schema.field(at), pa.nulls(batch.num_rows, pa.int64()))


def _stage(step: Step, given: T.StructType) -> tuple[Stage | None, T.StructType]:
    if isinstance(step, TimedNode):
        return _timed(step, given), given
    function: Any = step.function
    if isinstance(function, RowTransform):
        worker, columns = function.in_worker(given)
        return Copied(worker), columns
    if isinstance(function, LookupTransform):
        lookup = function.in_worker(given)
        return Copied(lookup), lookup.columns
    if isinstance(function, ByPartitioner):
        function.check_key(fields_of(given).names)
    if is_partitioning(function):
        # It moves rows between tasks and changes nothing.
        return None, given
    raise no_frames()


def no_frames() -> GraphError:
    """Return the error for a function of a DataFrame."""
    return GraphError(
        "transform() cannot be run in a harness",
        why="it is a function of a DataFrame, which Spark evaluates in the JVM",
        what_to_do=_NEEDS_SPARK,
    )


def _timed(step: TimedNode, given: T.StructType) -> Stage | None:
    """Return what gives records their times; watermarks come from the test alone."""
    assigner: Any = step.strategy.timestamps
    if assigner is None:
        return None
    if isinstance(assigner, str):
        if assigner not in fields_of(given).names:
            raise GraphError(
                f"the records have no column '{assigner}' with their event time",
                why=f"they have {', '.join(fields_of(given).names)}",
                what_to_do="name one of them in with_timestamp_assigner(...)",
            )
        at = fields_of(given).names.index(assigner)
        check_time_type(assigner, fields_of(given)[at].dataType)
        return TimeStage(lambda record, _: _ms(record[at]), None, "harness", Origins())
    if isinstance(assigner, Column):
        raise GraphError(
            "a timestamp assigner that is a column expression cannot be run in a harness",
            why="Spark evaluates it in the JVM",
            what_to_do="name a column or give a function, or leave it out and push elements with their times",
        )
    return TimeStage(assigner, None, "harness", Origins())


def _ms(value: Any) -> Any:
    if not isinstance(value, datetime.datetime):
        return value
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (value - epoch) // datetime.timedelta(milliseconds=1)
