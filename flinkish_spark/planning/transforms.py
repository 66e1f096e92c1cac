"""Functions of single records as DataFrame functions: map, flat_map, filter, process, lookup joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self
from uuid import uuid4

from pyspark.errors import AnalysisException
from pyspark.resource import ResourceProfile
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import NotRowByRow, RowFilter, RowPlan, Selection, row_plan
from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.errors import FlinkishError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.core.foreign_errors import said
from flinkish_spark.core.validation import check_methods
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.functions.stream import CoProcessFunction, ProcessFunction
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.planning.declare import (
    RecordCall,
    check_can_be_sent,
    connected_calls,
    inferred_output,
    record_call,
)
from flinkish_spark.planning.factories import joined_fields
from flinkish_spark.planning.partitioning import Spread, is_partitioning
from flinkish_spark.planning.stream_graph import Input, Step, StreamNode, TransformNode, UnionNode
from flinkish_spark.state.tables import as_fields
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import DealRows, DealtRows
from flinkish_spark.transport.columns import InTurn, Origins, Worker, map_in_arrow
from flinkish_spark.transport.select import SelectColumns
from flinkish_spark.types.ddl import ddl_of, parse_ddl, quoted
from flinkish_spark.types.expressions import Expression
from flinkish_spark.types.hints import unfit_for_rows
from flinkish_spark.types.schemas import PREFIX, nullable, output_schema
from flinkish_spark.worker.functions import ExpandRows, FilterRows, LookupRows, One, ProcessRows, RowFunction
from flinkish_spark.worker.time import KeepsTimes


@dataclass
class TransformSettings:
    """What a user says of a function behind the call that made it; up to the start of the job."""

    name: str
    #: In how many tasks it runs; None for those in which its records are.
    parallelism: int | None = None
    #: Of its tasks, which nothing else shares; None for those of all others.
    resources: ResourceProfile | None = None
    #: Its id in the job graph, by which a failure finds its vertex; empty before it is planned.
    operator: str = ""


@dataclass
class ConnectedSettings(TransformSettings):
    """Those of a function with two inputs, which both its transforms have."""


class RecordFunction:
    """A function of single records, as a DataFrame function."""

    #: Shared with all that is made of this.
    settings: TransformSettings
    #: What is put around the worker: with a :class:`~flinkish_spark.worker.time.KeepsTimes` the times
    #: of records that the function drops go on.
    wraps: type[KeepsTimes] | None

    def keeping_times(self) -> Self:
        changed: Any = self
        made: Self = replace(changed, wraps=KeepsTimes)
        return made

    def __call__(self, frame: DataFrame) -> DataFrame:
        tasks = self.settings.parallelism
        spread = frame if tasks is None else Spread(tasks)(frame)
        return map_in_arrow(spread, *self.worker_of(frame.schema), self.settings.resources)

    def worker_of(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        """Return what makes records of those with the columns `given`, and the columns that come out."""
        worker, columns = self.in_worker(given)
        if self.wraps is None:
            return worker, columns
        wrapped = self.wraps(worker, columns)
        return wrapped, wrapped.columns

    def in_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        """As :meth:`worker_of`, without what is put around the worker."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowTransform(RecordFunction):
    function: RowFunction
    #: Fields of the result; None where they stay as they are.
    output: T.StructType | None
    settings: TransformSettings
    wraps: type[KeepsTimes] | None = None

    def located(self, origins: Origins) -> RowTransform:
        return replace(self, function=replace(self.function, origins=origins))

    def in_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        settings = self.settings
        function = replace(
            self.function,
            name=settings.name,
            parallelism=settings.parallelism,
            operator=settings.operator,
        )
        return self._worker(function, given)

    def _worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        if self.output is None:
            return FilterRows(function), given
        expand = ExpandRows(function, self.output, carried(given))
        return expand, expand.columns


@dataclass(frozen=True)
class ProcessTransform(RowTransform):
    #: Name of the side output; None for the main output.
    side: str | None = None

    def of_side(self, name: str, output: T.StructType) -> ProcessTransform:
        return replace(self, side=name, output=output)

    def _worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        assert self.output is not None
        rows = ProcessRows(function, self.output, carried(given), self.side)
        return rows, rows.columns


def carried(given: T.StructType) -> tuple[T.StructField, ...]:
    return tuple(field for field in given if field.name.startswith(PREFIX))


def map_rows(function: Any, output: OutputType | None, name: str | None) -> RowTransform:
    made, name = record_call(function, "map"), name or _name_of(function, "map")
    fields = emitted_fields(output, made.call, name, is_iterable=False)
    return _of_call("map", made, fields, TransformSettings(name))


def flat_map_rows(function: Any, output: OutputType | None, name: str | None) -> RowTransform:
    made, name = record_call(function, "flat_map"), name or _name_of(function, "flat_map")
    fields = emitted_fields(output, made.call, name, is_iterable=True)
    return _of_call("flat_map", made, fields, TransformSettings(name))


def filter_rows(function: Any, name: str | None) -> RowTransform:
    made, name = record_call(function, "filter"), name or _name_of(function, "filter")
    return _of_call("filter", made, None, TransformSettings(name))


def connected_rows(
    method: str, first: Any, second: Any, output: OutputType | None, name: str | None
) -> tuple[RowTransform, RowTransform]:
    calls = connected_calls(first, second, method)
    names = dict.fromkeys(_name_of(one, method) for one in (first, second) if one is not None)
    name = name or ", ".join(names)
    settings, many = ConnectedSettings(name), method == "flat_map"
    left, right = (
        _of_call(method, one, emitted_fields(output, one.call, name, other.call, is_iterable=many), settings)
        for one, other in (calls, calls[::-1])
    )
    return left, right


def process_rows(function: Any, output: OutputType | None, name: str | None) -> ProcessTransform:
    if not isinstance(function, ProcessFunction):
        raise GraphError(
            f"process() got a {type(function).__name__}",
            why="a stream without a key takes a function without state",
            what_to_do="give it an instance of a ProcessFunction of flinkish_spark.functions.stream; for "
            "state call key_by(...) first and give a KeyedProcessFunction, or call process_with_state()",
        )
    call = function.process_element
    check_methods(function, ProcessFunction, f"the {type(function).__name__} of process()")
    name = name or _name_of(function, "process")
    fields = emitted_fields(output, call, name, is_iterable=True)
    return ProcessTransform(_row_function(name, call, function), fields, TransformSettings(name))


def co_process_rows(
    function: Any, output: OutputType | None, name: str | None
) -> tuple[ProcessTransform, ProcessTransform]:
    if not isinstance(function, CoProcessFunction):
        raise GraphError(
            f"process() got a {type(function).__name__}",
            why="two streams without keys are connected, and what reads them has no state",
            what_to_do="give it an instance of a CoProcessFunction of flinkish_spark.functions.stream; for "
            "state call connect(...).key_by(...) and give a KeyedCoProcessFunction, or connect with a "
            "broadcast stream",
        )
    check_methods(function, CoProcessFunction, f"the {type(function).__name__} of process()")
    name = name or _name_of(function, "process")
    fields = emitted_fields(output, function.process_element1, name, is_iterable=True)
    settings = ConnectedSettings(name)
    first, second = (
        ProcessTransform(_row_function(name, call, function), fields, settings)
        for call in (function.process_element1, function.process_element2)
    )
    return first, second


def connected_ways(node: StreamNode) -> tuple[TransformNode, ...]:
    """Return the two ways on which a function with two inputs makes a stream; none if none did."""
    parents = node.parents if isinstance(node, UnionNode) else ()
    ways = [one for one in parents if isinstance(one, TransformNode)]
    made = [one.function.settings for one in ways if isinstance(one.function, RowTransform)]
    is_one = len(made) == len(parents) == 2 and made[0] is made[1]
    return tuple(ways) if is_one and isinstance(made[0], ConnectedSettings) else ()


def _of_call(
    method: str, made: RecordCall, fields: T.StructType | None, settings: TransformSettings
) -> RowTransform:
    call = One(made.call) if method == "map" else made.call
    return RowTransform(_row_function(settings.name, call, made.rich), fields, settings)


def _row_function(name: str, call: Callable[..., Any], rich: RichFunction | None) -> RowFunction:
    function = RowFunction(name, call, rich)
    check_can_be_sent(function, "of", name)
    return function


def emitted_fields(
    output: OutputType | None,
    call: Callable[..., Any],
    name: str,
    *others: Callable[..., Any],
    is_iterable: bool,
) -> T.StructType:
    if output is None:
        return inferred_output(call, f"'{name}'", *others, is_iterable=is_iterable)
    return output_schema(output, name)


def _name_of(function: Any, method: str) -> str:
    named = getattr(function, "__name__", type(function).__name__)
    return method if named == "<lambda>" else f"{method} {named}"


@dataclass(frozen=True)
class LookupTransform(RecordFunction):
    #: What the program says; the type of the records is known when a frame comes.
    join: LookupJoin
    #: Fields of what its function makes; None for those of both sides.
    output: T.StructType | None
    settings: TransformSettings
    origins: Origins
    wraps: type[KeepsTimes] | None = None
    #: Name of the side output that is read; None for the main output.
    side: str | None = None
    #: By what name workers keep answers; those of side outputs are the same.
    kept_as: str = field(default_factory=lambda: uuid4().hex)
    counts_as: str = ""

    def located(self, origins: Origins) -> LookupTransform:
        return replace(self, origins=origins)

    def of_side(self, name: str, output: T.StructType) -> LookupTransform:
        if self.join.function is None:
            raise GraphError(
                f"'{self.settings.name}' has no side output '{name}'",
                why="only a function emits to one, and this join puts the fields of both sides together",
                what_to_do="give it a function=, which calls ctx.output(tag, row)",
            )
        return replace(self, side=name, output=output)

    def in_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        own = T.StructType([field for field in given if not field.name.startswith(PREFIX)])
        output, settings = self.output, self.settings
        if output is None:
            kind = parse_ddl(self.join.right_type)
            right = kind if isinstance(kind, T.StructType) else T.StructType([T.StructField("value", kind)])
            output = joined_fields(own, right)
        join = replace(self.join, left_type=ddl_of(own))
        function = RowFunction(
            settings.name,
            join.key_of,
            origins=self.origins,
            counts_as=self.counts_as,
            operator=settings.operator,
        )
        rows = LookupRows(function, output, carried(given), join, self.side, kept_as=self.kept_as)
        return rows, rows.columns


def lookup_rows(join: LookupJoin, output: OutputType | None, name: str) -> LookupTransform:
    if join.function is None and output is not None:
        raise SchemaError(
            f"'{name}' has an output and no function",
            why="without a function the fields of the record and of the row come out",
            what_to_do="leave the output out, or give a function that makes it",
        )
    if join.function is not None and output is None:
        output = inferred_output(join.function.process_element, f"'{name}'", is_iterable=True)
    # Its rows are put behind the fields of records, so a STRUCT says what its fields say.
    join = replace(join, right_type=as_fields(join.right_type))
    check_can_be_sent(join, "of", name)
    fields = None if output is None else output_schema(output, name)
    return LookupTransform(join, fields, TransformSettings(name), Origins())


#: A stateless function from records to records.
Transform = Callable[[DataFrame], DataFrame]


def transformed(records: DataFrame, function: Transform) -> DataFrame:
    try:
        found = function(records)
    except FlinkishError:
        raise
    except AnalysisException as error:
        raise GraphError(
            f"Spark refuses what {named(function)} of transform() does",
            why=str(error).partition("\n")[0],
            what_to_do=f"correct it; the records have {', '.join(_own(records))}",
        ) from error
    except Exception as error:
        raise UserFunctionError(
            f"{named(function)} of transform() failed: {said(error)}",
            what_to_do="it gets the records' DataFrame, and returns another; correct it",
        ) from error
    if not isinstance(found, DataFrame):
        raise GraphError(
            f"{named(function)} of transform() returned a {type(found).__name__}",
            what_to_do="return a DataFrame",
        )
    return found


def named(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"'{name}'"


def _own(records: DataFrame) -> list[str]:
    return [name for name in records.columns if not name.startswith(PREFIX)]


# Behind a keyed operator records and control rows are in one frame, and a function of the user's must see
# records only. Taking them apart reads the operator twice. Where all that a function does are projections
# and filters, they are done to the whole frame in such a way that control rows pass by.

#: Of columns that functions compute, as long as their fields have no names.
_MADE = f"{PREFIX}made_"


@dataclass(frozen=True)
class Spoiler:
    """The first of several functions that does more than look at single rows, and what that is."""

    function: Transform
    what: str


class ReadRows:
    """Columns that functions make of each row by itself, in a frame in which control rows stay."""

    schema: T.StructType

    @property
    def outputs(self) -> tuple[str, ...]:
        """The column with each field that comes out."""
        raise NotImplementedError

    def over(self, frame: DataFrame) -> DataFrame:
        """Return a frame with control rows, in which these columns are, too."""
        raise NotImplementedError

    @cached_property
    def fields(self) -> tuple[tuple[Column, T.StructField], ...]:
        """Column with each field that comes out, without its name, and that field."""
        return tuple(
            (F.col(quoted(own)), field) for own, field in zip(self.outputs, self.schema, strict=True)
        )

    @cached_property
    def named_fields(self) -> list[Column]:
        return [named_field(column, field) for column, field in self.fields]


@dataclass(frozen=True, eq=False)
class RowByRow(ReadRows):
    #: Over the columns of a frame with records and control rows.
    plan: RowPlan
    schema: T.StructType

    def over(self, frame: DataFrame) -> DataFrame:
        for step in self._steps:
            frame = step.of(frame) if isinstance(step, Selection) else frame.where(step)
        return frame

    def in_arrow(self, frame: DataFrame, *, keeps_times: bool) -> DataFrame | None:
        """Return what comes out of a source's records in the pass that reads them; None where it cannot."""
        steps: list[Mapping[str, Expression] | Expression] = []
        for step in self.plan.steps:
            if isinstance(step, RowFilter):
                made: Any = step.in_arrow
            else:
                found = {one.name: one.in_arrow for one in step.columns}
                made = None if None in found.values() else found
            if made is None:
                return None
            steps.append(made)
        control = [one for one in frame.schema if one.name.startswith(PREFIX)]
        fields = self.schema
        if keeps_times or C.KIND in frame.columns:
            control, fields = list(nullable(control)), nullable(fields)
        columns = T.StructType([*control, *fields])
        select = SelectColumns(tuple(steps), columns, self.outputs, keeps_times)
        return C.select_in_pass(frame, select, columns, select.made_of())

    def of_records(self, records: DataFrame) -> DataFrame:
        """Return what comes out where all rows are records: their control columns and fields."""
        control = [name for name in records.columns if name.startswith(PREFIX)]
        for step in self.plan.steps:
            if isinstance(step, RowFilter):
                records = records.where(step.condition)
            else:
                records = records.withColumns({one.name: one.value for one in step.columns})
        return records.select(*control, *self.named_fields)

    def keeping_times(self, records: DataFrame) -> DataFrame:
        """Return records, and times of those that were dropped, without place and fields (worker/time)."""
        control = [name for name in records.columns if name.startswith(PREFIX)]
        noted, has_place = self._noted(records, C.SEQUENCE), _has_place(records, C.SEQUENCE)
        own = [named_field(F.when(has_place, column), field) for column, field in self.fields]
        return noted.select(*control, *own)

    def beside(self, records: DataFrame, place: str, names: Sequence[str]) -> DataFrame:
        """Return records with what comes out of each in more columns."""
        noted, has_place = self._noted(records, place), F.col(place).isNotNull()
        own = (F.when(has_place, column).alias(n) for n, (column, _) in zip(names, self.fields, strict=True))
        return noted.select(*records.columns, *own)

    def _noted(self, records: DataFrame, place: str) -> DataFrame:
        has_place = _has_place(records, place)
        for step in self.plan.steps:
            if isinstance(step, RowFilter):
                kept = F.when(has_place, F.when(step.condition, F.col(place))).otherwise(F.col(place))
                records = records.withColumn(place, kept)
            else:
                made = {one.name: F.when(has_place, one.value) for one in step.columns}
                records = records.withColumns(made)
        return records

    @property
    def drops(self) -> bool:
        return any(isinstance(step, RowFilter) for step in self.plan.steps)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.plan.outputs

    @cached_property
    def _steps(self) -> list[Selection | Column]:
        """The steps of the plan as control rows pass them."""
        is_record, found = F.col(C.KIND) == int(C.Kind.RECORD), list[Selection | Column]()
        for step in self.plan.steps:
            if isinstance(step, RowFilter):
                found.append(F.when(is_record, step.condition).otherwise(F.lit(True)))
            else:
                made = [F.when(is_record, one.value).alias(one.name) for one in step.columns]
                found.append(Selection([F.col("*"), *made]))
        return found


def read_functions(
    spark: SparkSession, functions: Sequence[Transform], schema: T.StructType, names: Sequence[str]
) -> tuple[T.StructType, RowByRow | Spoiler]:
    return read_functions_over(spark.createDataFrame([], schema), functions, names)


def read_functions_over(
    given: DataFrame, functions: Sequence[Transform], names: Sequence[str]
) -> tuple[T.StructType, RowByRow | Spoiler]:
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


def _has_place(frame: DataFrame, place: str) -> Column:
    """Return if a row is a record that was not dropped."""
    has_place = F.col(place).isNotNull()
    return has_place & (F.col(C.KIND) == int(C.Kind.RECORD)) if C.KIND in frame.columns else has_place


def named_field(column: Column, field: T.StructField) -> Column:
    # What a field is told with, such as a comment, would be lost behind CASE.
    return column.alias(field.name, metadata=field.metadata) if field.metadata else column.alias(field.name)


@dataclass(frozen=True, eq=False)
class InWorkers(ReadRows):
    #: Runs them, in one worker per task.
    deal: DealRows
    schema: T.StructType
    #: With the fields that go in; one may stand for several.
    columns: tuple[str, ...]

    @classmethod
    def of(
        cls,
        functions: Sequence[RecordFunction],
        schema: T.StructType,
        columns: Sequence[str],
        control: T.StructType,
    ) -> InWorkers:
        _check_types(functions[0].settings.name, schema)
        beside = [field for field in control if field.name not in (C.KIND, C.CHECKPOINT)]
        given = T.StructType([*beside, *schema])
        workers, made = in_turn(functions, given)
        fields = fields_of(made)
        names = tuple(f"{PREFIX}way_{at}" for at in range(len(fields)))
        into = tuple(f"{PREFIX}into_{at}" for at in range(len(schema)))
        dealt = DealtRows(0, into, given, InTurn(workers), fields, names)
        return cls(DealRows((dealt,), control), fields, tuple(columns))

    def over(self, frame: DataFrame) -> DataFrame:
        """Return control columns and, beside those of records, :attr:`fields` of what comes out."""
        own = [F.col(quoted(column)).alias(name) for column, name in self._renamed]
        given = frame.select(*self.deal.control.names, *own)
        return C.map_in_arrow(given, self.deal, self.deal.columns)

    @property
    def _renamed(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.columns, self.deal.inputs[0].columns, strict=True))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Do the same as :meth:`over` to batches."""
        return C.CopyColumns(self.deal.control, self._renamed), self.deal

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.deal.inputs[0].names


def in_turn(
    functions: Sequence[RecordFunction], given: T.StructType
) -> tuple[tuple[Worker, ...], T.StructType]:
    """Return what makes records of those with the columns `given`, and the columns that come out."""
    workers: list[Worker] = []
    for function in functions:
        # It runs in the tasks of the operator in front.
        here: Any = function
        here = replace(here, settings=replace(function.settings, parallelism=None))
        worker, given = here.in_worker(given)
        workers.append(worker)
    return tuple(workers), given


def fields_of(columns: T.StructType) -> T.StructType:
    return T.StructType([field for field in columns if not field.name.startswith(PREFIX)])


def _check_types(name: str, schema: T.StructType) -> None:
    """Refuse what a DataFrame function has made and no record in Python has, before the start."""
    for column in schema:
        if (why := unfit_for_rows(column.dataType)) is not None:
            raise SchemaError(
                f"'{name}' would be given the field '{column.name}', whose type no record in Python has",
                why=why,
                what_to_do="convert or drop it in front of the function",
            )


def has_frames_first(input_: Input) -> bool:
    """Whether an input's DataFrame functions, if it has any, stand in front of all others on its one path."""
    are_frames = [
        [
            frame_function(step) is not None
            for step in path.steps
            if not (isinstance(step, TransformNode) and is_partitioning(step.function))
        ]
        for path in input_.paths
    ]
    if len(are_frames) > 1:
        return not any(any(own) for own in are_frames)
    return are_frames[0] == sorted(are_frames[0], reverse=True)


def frame_function(step: Step) -> Transform | None:
    """Return the function of a step if it is one of a DataFrame, and not of single records or a move."""
    if not isinstance(step, TransformNode):
        return None
    function: object = step.function
    return None if isinstance(function, RecordFunction) or is_partitioning(function) else step.function
