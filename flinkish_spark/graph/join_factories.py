"""Joins as operator factories: the fields of their inputs are known when a job is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql import types as T

from flinkish_spark.errors import InternalError
from flinkish_spark.graph.declared import check_field_names
from flinkish_spark.joins.interval import IntervalJoin
from flinkish_spark.joins.temporal import TemporalJoin
from flinkish_spark.joins.window import WindowCoGroup, WindowJoin
from flinkish_spark.operators.elements import OutputTag, TimeDomain
from flinkish_spark.operators.interval_join import IntervalJoinOperator
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.temporal_join import TemporalJoinOperator
from flinkish_spark.operators.window_join import WindowCoGroupOperator
from flinkish_spark.runtime.ddl import ddl_of

KeyedJoin = IntervalJoin | WindowJoin | WindowCoGroup | TemporalJoin
#: Stands for the type of an input until it is known.
UNKNOWN_TYPE = "unknown STRING"
#: Before the name of a right field that a left one has too.
_RIGHT = "right_"


@dataclass(frozen=True)
class Joining:
    """A join of two keyed streams; an :class:`~flinkish_spark.graph.operator_factories.OperatorFactory`.

    Parameters
    ----------
    join
        What the program says, with :data:`UNKNOWN_TYPE` for the types of the inputs.
    """

    join: KeyedJoin

    @property
    def needs_event_time(self) -> bool:
        """Whether the join goes by event time: all do but those in windows of another clock."""
        if isinstance(self.join, WindowJoin | WindowCoGroup):
            return self.join.windows.assigner.clock is TimeDomain.EVENT_TIME
        return True

    def create(self, *schemas: T.StructType) -> KeyedStreamOperator:
        """Return the operator."""
        left, right = map(ddl_of, schemas)
        join = replace(self.join, left_type=left, right_type=right)
        if isinstance(join, IntervalJoin):
            return IntervalJoinOperator(join)
        if isinstance(join, TemporalJoin):
            return TemporalJoinOperator(join)
        return WindowCoGroupOperator(join)

    def late_outputs(self, *schemas: T.StructType) -> list[tuple[OutputTag, T.StructType]]:
        """Return by which tags late elements of both sides go out, and their fields."""
        join = self.join
        tags = (join.late_output,) if isinstance(join, TemporalJoin) else (join.left_late, join.right_late)
        return [(tag, schema) for tag, schema in zip(tags, schemas, strict=False) if tag is not None]

    def output(self, *schemas: T.StructType) -> T.StructType:
        """Return the fields of a join without a function: the left ones, then the right ones.

        A right field whose name is taken gets another one, ``right_<name>``.
        """
        if isinstance(self.join, WindowCoGroup) or self.join.function is not None:
            raise InternalError("the output of a join with a function is declared with it")
        return joined_fields(*schemas)


def joined_fields(left: T.StructType, right: T.StructType) -> T.StructType:
    """Return the fields of both sides; all may be null, as those of a missing side are.

    Raises
    ------
    SchemaError
        A name is there twice even so.
    """
    taken = {name.lower() for name in left.names}
    fields = [T.StructField(field.name, field.dataType) for field in left]
    for field in right:
        name = f"{_RIGHT}{field.name}" if field.name.lower() in taken else field.name
        fields.append(T.StructField(name, field.dataType))
    check_field_names(T.StructType(fields), "the result of a join")
    return T.StructType(fields)
