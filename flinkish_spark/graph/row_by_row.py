"""DataFrame functions that look at each row by itself, done to the records among other rows.

Behind a keyed operator records and control rows are in one frame, and a function of the user's must see
records only. Taking them apart reads the operator twice. Where all that a function does are projections and
filters, they are done to the whole frame in such a way that control rows pass by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.row_plans import Computing, Keeping, NotRowByRow, RowPlan, row_plan
from flinkish_spark.bridge.selection import Selection
from flinkish_spark.graph.frame_transforms import Transform, transformed
from flinkish_spark.runtime import columns as C

#: Of columns that functions compute, as long as their fields have no names.
_MADE = f"{C.PREFIX}made_"


@dataclass(frozen=True)
class Spoiler:
    """The first of several functions that does more than look at single rows, and what that is."""

    function: Transform
    what: str


@dataclass(frozen=True, eq=False)
class RowByRow:
    """What functions do to each record.

    Parameters
    ----------
    plan
        Over the columns of a frame with records and control rows.
    schema
        Fields that come out.

    Notes
    -----
    Belongs to one JVM. Users' expressions stand in a CASE that control rows do not enter: these have no
    fields, on which an expression may raise an error.
    """

    plan: RowPlan
    schema: T.StructType

    def over(self, frame: DataFrame) -> DataFrame:
        """Return the rows of `frame` that are kept, with more columns: those of :attr:`fields`."""
        for step in self._steps:
            frame = step.of(frame) if isinstance(step, Selection) else frame.where(step)
        return frame

    def of_records(self, records: DataFrame) -> DataFrame:
        """Return what comes out where all rows are records: their control columns and fields."""
        control = [name for name in records.columns if name.startswith(C.PREFIX)]
        for step in self.plan.steps:
            if isinstance(step, Keeping):
                records = records.where(step.condition)
            else:
                records = records.withColumns({one.name: one.value for one in step.columns})
        return records.select(*control, *self.named_fields)

    def keeping_times(self, records: DataFrame) -> DataFrame:
        """Return the same with the times of records that are dropped, and of those that were dropped before.

        Such a row has no place and no fields, as what a Python function leaves of a record; see
        `runtime/kept_times.py`.
        """
        control = [name for name in records.columns if name.startswith(C.PREFIX)]
        has_place = F.col(C.SEQUENCE).isNotNull()
        for step in self.plan.steps:
            if isinstance(step, Keeping):
                kept = F.when(has_place, F.when(step.condition, F.col(C.SEQUENCE)))
                records = records.withColumn(C.SEQUENCE, kept)
            else:
                made = {one.name: F.when(has_place, one.value) for one in step.columns}
                records = records.withColumns(made)
        own = [named_field(F.when(has_place, column), field) for column, field in self.fields]
        return records.select(*control, *own)

    @property
    def drops(self) -> bool:
        """Whether there are records of which nothing comes out."""
        return any(isinstance(step, Keeping) for step in self.plan.steps)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Column with each field that comes out."""
        return self.plan.outputs

    @cached_property
    def fields(self) -> tuple[tuple[Column, T.StructField], ...]:
        """Column with each field that comes out, without its name, and that field."""
        return tuple(
            (F.col(C.quoted(own)), field) for own, field in zip(self.outputs, self.schema, strict=True)
        )

    @cached_property
    def named_fields(self) -> list[Column]:
        """The fields that come out under their names."""
        return [named_field(column, field) for column, field in self.fields]

    @cached_property
    def _steps(self) -> list[Selection | Column]:
        return [_passing(step) for step in self.plan.steps]


def read_functions(
    spark: SparkSession, functions: Sequence[Transform], schema: T.StructType, names: Sequence[str]
) -> tuple[T.StructType, RowByRow | Spoiler]:
    """Return the fields of records behind functions, and what these do to each.

    Parameters
    ----------
    functions
        At least one.
    schema
        Fields in front of them.
    names
        Column with each of these in the frame that they are for.

    Raises
    ------
    GraphError, UserFunctionError
        As of :func:`~flinkish_spark.graph.frame_transforms.transformed`.
    """
    return read_functions_over(spark.createDataFrame([], schema), functions, names)


def read_functions_over(
    given: DataFrame, functions: Sequence[Transform], names: Sequence[str]
) -> tuple[T.StructType, RowByRow | Spoiler]:
    """Return the same for functions that are called with a given DataFrame."""
    made = [given]
    for function in functions:
        made.append(transformed(made[-1], function))
    found, fields = row_plan(given, made[-1], tuple(names), _MADE), made[-1].schema
    if isinstance(found, RowPlan):
        return fields, RowByRow(found, fields)
    for function, behind in zip(functions, made[1:], strict=True):
        upto = row_plan(given, behind, tuple(names), _MADE)
        if isinstance(upto, NotRowByRow):
            return fields, Spoiler(function, upto.what)
    raise AssertionError("what one function spoils is spoiled behind all of them")


def _passing(step: Computing | Keeping) -> Selection | Column:
    """Return a step as control rows pass it."""
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    if isinstance(step, Keeping):
        return F.when(is_record, step.condition).otherwise(F.lit(True))
    return Selection([F.col("*"), *(F.when(is_record, one.value).alias(one.name) for one in step.columns)])


def named_field(column: Column, field: T.StructField) -> Column:
    """Return a column under a field's name."""
    # What a field is told with, such as a comment, would be lost behind CASE.
    return column.alias(field.name, metadata=field.metadata) if field.metadata else column.alias(field.name)
