"""Functions of single records, done to those of a frame in Python workers; control rows pass them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import SchemaError
from flinkish_spark.graph.lookup_transforms import LookupTransform
from flinkish_spark.graph.python_transforms import RowTransform
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.branches import DealRows, DealtRows, InTurn
from flinkish_spark.runtime.kept_times import Worker
from flinkish_spark.runtime.usable_types import unfit_for_rows

RecordFunction = RowTransform | LookupTransform


@dataclass(frozen=True, eq=False)
class InWorkers:
    """What functions of single records do to a frame with records and control rows.

    Parameters
    ----------
    deal
        Runs them, in one worker per task.
    schema
        Fields that come out.
    columns
        With the fields that go in; one may stand for several.
    """

    deal: DealRows
    schema: T.StructType
    columns: tuple[str, ...]

    @classmethod
    def of(
        cls,
        functions: Sequence[RecordFunction],
        schema: T.StructType,
        columns: Sequence[str],
        control: T.StructType,
    ) -> InWorkers:
        """Return it for a frame of one output.

        Parameters
        ----------
        functions
            At least one.
        schema, columns
            Fields in front of them, and the column with each.
        control
            Columns of control rows; those of a record go on beside what is made of it.

        Raises
        ------
        SchemaError
            A field has a type that no record in Python has.
        """
        _check_types(functions[0].settings.name, schema)
        beside = [field for field in control if field.name not in (C.KIND, C.CHECKPOINT)]
        given = T.StructType([*beside, *schema])
        workers, made = in_turn(functions, given)
        fields = fields_of(made)
        names = tuple(f"{C.PREFIX}way_{at}" for at in range(len(fields)))
        into = tuple(f"{C.PREFIX}into_{at}" for at in range(len(schema)))
        dealt = DealtRows(0, into, given, InTurn(workers), fields, names)
        return cls(DealRows((dealt,), control), fields, tuple(columns))

    def over(self, frame: DataFrame) -> DataFrame:
        """Return control columns and, beside those of records, :attr:`fields` of what comes out."""
        (dealt,) = self.deal.inputs
        own = [F.col(C.quoted(c)).alias(name) for c, name in zip(self.columns, dealt.columns, strict=True)]
        given = frame.select(*self.deal.control.names, *own)
        return C.map_in_arrow(given, self.deal, self.deal.columns)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Column with each field that comes out."""
        return self.deal.inputs[0].names

    @property
    def fields(self) -> tuple[tuple[Column, T.StructField], ...]:
        """Column with each field that comes out, without its name, and that field."""
        return tuple((F.col(own), field) for own, field in zip(self.outputs, self.schema, strict=True))


def in_turn(
    functions: Sequence[RecordFunction], given: T.StructType
) -> tuple[tuple[Worker, ...], T.StructType]:
    """Return what makes records of those with the columns `given`, and the columns that come out."""
    workers: list[Worker] = []
    for function in functions:
        if isinstance(function, RowTransform):
            # It runs in the tasks of the operator in front.
            here = replace(function.settings, parallelism=None)
            worker, given = replace(function, settings=here).in_worker(given)
            workers.append(worker)
        else:
            lookup = function.in_worker(given)
            workers.append(lookup)
            given = lookup.columns
    return tuple(workers), given


def fields_of(columns: T.StructType) -> T.StructType:
    """Return the fields of records among columns."""
    return T.StructType([field for field in columns if not field.name.startswith(C.PREFIX)])


def _check_types(name: str, schema: T.StructType) -> None:
    """Refuse what a DataFrame function has made and no record in Python has, before the start."""
    for field in schema:
        if (why := unfit_for_rows(field.dataType)) is not None:
            raise SchemaError(
                f"'{name}' would be given the field '{field.name}', whose type no record in Python has",
                why=why,
                what_to_do="convert or drop it in front of the function",
            )
