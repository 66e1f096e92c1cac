"""What lies between a keyed operator and a sink, done in one pass over records and control rows."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as T

from flinkish_spark.graph.declared import check_field_names
from flinkish_spark.graph.frame_transforms import Transform, transformed
from flinkish_spark.graph.in_workers import InWorkers, RecordFunction
from flinkish_spark.graph.partitioning import is_partitioning
from flinkish_spark.graph.row_by_row import RowByRow, named_field, read_functions
from flinkish_spark.runtime import columns as C

#: Of a sink's rows, as they come out of the union.
_CONTROL = T.StructType(
    [
        T.StructField(C.KIND, T.IntegerType()),
        *(T.StructField(name, T.LongType()) for name in (C.CHECKPOINT, C.CHANNEL, C.HASH)),
    ]
)


class _Kind(enum.Enum):
    """What a function takes."""

    OF_FRAMES = "OF_FRAMES"
    OF_RECORDS = "OF_RECORDS"
    MOVING = "MOVING"


@dataclass(frozen=True, eq=False)
class OnePass:
    """Functions in front of a sink, which control rows pass by.

    Parameters
    ----------
    steps
        At least one.

    Notes
    -----
    Belongs to one JVM, as :class:`~flinkish_spark.graph.row_by_row.RowByRow` does.
    """

    steps: tuple[RowByRow | InWorkers, ...]

    def over(self, frame: DataFrame) -> DataFrame:
        """Return the rows that are kept, control columns and :attr:`fields`."""
        for step in self.steps:
            frame = step.over(frame)
        return frame

    @property
    def fields(self) -> tuple[tuple[Column, T.StructField], ...]:
        """Column with each field that comes out, without its name, and that field."""
        return self.steps[-1].fields

    @property
    def named_fields(self) -> list[Column]:
        """The fields that come out under their names."""
        return [named_field(column, field) for column, field in self.fields]


def functions_before_sink(
    spark: SparkSession, functions: Sequence[Transform], schema: T.StructType, columns: Sequence[str]
) -> tuple[T.StructType, OnePass | None]:
    """Return the fields of records behind functions, and how these are done in one pass.

    Parameters
    ----------
    functions
        At least one.
    schema, columns
        Fields in front of them, and the column with each.

    Returns
    -------
    tuple
        None in place of the second where a function does more than look at single rows, or moves them:
        they are done to the records alone then, and control rows are read once more.

    Raises
    ------
    GraphError, UserFunctionError
        As of :func:`~flinkish_spark.graph.frame_transforms.transformed`.
    SchemaError
        Fields that come out of a function cannot be those of a stream, or of records in Python.
    """
    steps: list[RowByRow | InWorkers] = []
    made, runs = schema, [(kind, tuple(run)) for kind, run in itertools.groupby(functions, _kind_of)]
    for kind, given in runs:
        made, step = _step_of(spark, kind, given, made, columns)
        if step is None:
            # What one run comes to is known; functions are called no more than needed.
            return made if len(runs) == 1 else _schema_behind(spark, functions, schema), None
        columns = step.outputs
        steps.append(step)
    return made, OnePass(tuple(steps))


def _step_of(
    spark: SparkSession,
    kind: _Kind,
    functions: Sequence[Transform],
    schema: T.StructType,
    columns: Sequence[str],
) -> tuple[T.StructType, RowByRow | InWorkers | None]:
    if kind is _Kind.OF_RECORDS:
        own: Sequence[object] = functions
        found = InWorkers.of(
            [one for one in own if isinstance(one, RecordFunction)], schema, columns, _CONTROL
        )
        return found.schema, found
    if kind is _Kind.OF_FRAMES:
        made, read = read_functions(spark, functions, schema, columns)
        check_field_names(made, "the result of a transform")
        return made, read if isinstance(read, RowByRow) else None
    return _schema_behind(spark, functions, schema), None


def _schema_behind(spark: SparkSession, functions: Sequence[Transform], schema: T.StructType) -> T.StructType:
    frame = spark.createDataFrame([], schema)
    for function in functions:
        frame = transformed(frame, function)
    return frame.schema


def _kind_of(function: Transform) -> _Kind:
    given: object = function
    if isinstance(given, RecordFunction):
        # One with a number of tasks of its own moves records first, and control rows would have to stay.
        return _Kind.OF_RECORDS if given.settings.parallelism is None else _Kind.MOVING
    return _Kind.MOVING if is_partitioning(given) else _Kind.OF_FRAMES
