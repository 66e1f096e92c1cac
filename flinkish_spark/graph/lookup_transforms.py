"""Lookup joins as DataFrame functions: records in, records with the rows of a table outside out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql import types as T

from flinkish_spark.arguments import refuse_async
from flinkish_spark.errors import GraphError, SchemaError
from flinkish_spark.graph.declared import check_can_be_sent, output_schema
from flinkish_spark.graph.join_factories import joined_fields
from flinkish_spark.graph.located import LocatedTransform
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.partitioning import Spread
from flinkish_spark.graph.python_transforms import TransformSettings
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.runtime.columns import PREFIX, map_in_arrow
from flinkish_spark.runtime.ddl import ddl_of, parse_ddl
from flinkish_spark.runtime.hinted_types import OutputType
from flinkish_spark.runtime.kept_times import KeepsTimes
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.lookup_rows import LookupRows
from flinkish_spark.state.handed_out import as_fields

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class LookupTransform(LocatedTransform):
    """A DataFrame function that asks a table in Python workers.

    Parameters
    ----------
    join
        What the program says; the type of the records is known when a frame comes.
    output
        Fields of what its function makes; None for those of both sides.
    settings
        Shared with all that is made of this.
    side
        Name of the side output that is read; None for the main output.
    wraps
        As of :class:`~flinkish_spark.graph.python_transforms.RowTransform`.
    kept_as
        By what name workers keep answers; those of side outputs are the same.
    """

    join: LookupJoin
    output: T.StructType | None
    settings: TransformSettings
    origins: Origins
    wraps: type[KeepsTimes] | None = None
    side: str | None = None
    kept_as: str = field(default_factory=lambda: uuid4().hex)

    def located(self, origins: Origins) -> LookupTransform:
        """Return the same for records of which it is known where they come from."""
        return replace(self, origins=origins)

    def keeping_times(self) -> LookupTransform:
        """Return the same for records whose times are reported behind it."""
        return replace(self, wraps=KeepsTimes)

    def of_side(self, name: str, output: T.StructType) -> LookupTransform:
        """Return the same join, for a side output of its function.

        Raises
        ------
        GraphError
            It has no function.
        """
        if self.join.function is None:
            raise GraphError(
                f"'{self.settings.name}' has no side output '{name}'",
                why="only a function emits to one, and this join puts the fields of both sides together",
                what_to_do="give it a function=, which calls ctx.output(tag, row)",
            )
        return replace(self, side=name, output=output)

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Return the transformed frame; called by the planner, or once per micro-batch."""
        tasks = self.settings.parallelism
        spread = frame if tasks is None else Spread(tasks)(frame)
        worker = self.in_worker(frame.schema)
        if self.wraps is None:
            return map_in_arrow(spread, worker, worker.columns)
        wrapped = self.wraps(worker, worker.columns)
        return map_in_arrow(spread, wrapped, wrapped.columns)

    def in_worker(self, given: T.StructType) -> LookupRows:
        """Return what runs in the workers for rows with these columns."""
        own = T.StructType([field for field in given if not field.name.startswith(PREFIX)])
        carried = tuple(field for field in given if field.name.startswith(PREFIX))
        output = joined_fields(own, _fields(self.join.right_type)) if self.output is None else self.output
        join, name = replace(self.join, left_type=ddl_of(own)), self.settings.name
        return LookupRows(join, name, output, carried, self.origins, self.side, kept_as=self.kept_as)


def lookup_rows(join: LookupJoin, output: OutputType | None, name: str) -> LookupTransform:
    """Return the transform of a lookup join.

    Raises
    ------
    ConfigError
        The table or the function is async.
    SchemaError
        The output is not known, or there is one without a function.
    UserFunctionError
        The table or a function cannot be sent to the workers.
    """
    if join.function is None and output is not None:
        raise SchemaError(
            f"'{name}' has an output and no function",
            why="without a function the fields of the record and of the row come out",
            what_to_do="leave the output out, or give a function that makes it",
        )
    refuse_async(join.table, ("lookup",), f"'{name}'")
    refuse_async(join.function, ("process_element",), f"'{name}'")
    if join.function is not None and output is None:
        output = inferred_output(join.function.process_element, f"'{name}'", is_iterable=True)
    # Its rows are put behind the fields of records, so a STRUCT says what its fields say.
    join = replace(join, right_type=as_fields(join.right_type))
    check_can_be_sent(join, "of", name)
    fields = None if output is None else output_schema(output, name)
    return LookupTransform(join, fields, TransformSettings(name), Origins())


def _fields(ddl: str) -> T.StructType:
    kind = parse_ddl(ddl)
    return kind if isinstance(kind, T.StructType) else T.StructType([T.StructField("value", kind)])
