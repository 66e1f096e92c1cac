"""Functions of single records as DataFrame functions: map, flat_map, filter, process, lookup joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self
from uuid import uuid4

from pyspark.errors import AnalysisException
from pyspark.resource import ResourceProfile
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import NotRowByRow, RowFilter, RowPlan, Selection, row_plan
from flinkish_spark.core.arrow_pass import ComposedWorker, Worker, map_in_arrow
from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.errors import FlinkishError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.functions.stream import CoProcessFunction, ProcessFunction
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.planning.declare import (
    RecordCall,
    check_can_be_sent,
    infer_output,
    make_connected_calls,
    make_record_call,
)
from flinkish_spark.planning.factories import join_fields
from flinkish_spark.planning.partitioning import Rebalance, is_partitioning
from flinkish_spark.planning.stream_graph import Input, Step, StreamNode, TransformNode, UnionNode
from flinkish_spark.state.tables import as_fields
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import InputPath, InputPaths
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.select import SelectColumns
from flinkish_spark.transport.sink_rows import CONTROL
from flinkish_spark.types.ddl import ddl_of, parse_ddl, quote_name
from flinkish_spark.types.expressions import Expression
from flinkish_spark.types.hints import unfit_for_rows
from flinkish_spark.types.schemas import PREFIX, nullable, output_schema
from flinkish_spark.worker.functions import (
    ExpandRows,
    FilterRows,
    LookupRows,
    ProcessRows,
    RowFunction,
    SingleRow,
)
from flinkish_spark.worker.time import DroppedTimesKeeper


@dataclass
class TransformSettings:
    """Settings of a function that the user may change until the job starts."""

    name: str
    #: Number of tasks in which it runs; None for the tasks of its input.
    parallelism: int | None = None
    #: Resources of its tasks, which then run nothing else; None for the resources of the job.
    resources: ResourceProfile | None = None
    #: Its id in the job graph, which names the vertex of a failure; empty before it is planned.
    operator: str = ""


@dataclass
class ConnectedSettings(TransformSettings):
    """Settings of a function with two inputs, shared by its two transforms."""


class RecordFunction:
    """A function of single records, as a DataFrame function."""

    #: The kind of function in the job graph.
    does: ClassVar[str] = "function of single records"
    #: Shared with all copies of this function.
    settings: TransformSettings
    #: A wrapper of the worker: :class:`~flinkish_spark.worker.time.DroppedTimesKeeper` passes the event
    #: times of dropped records on.
    wraps: type[DroppedTimesKeeper] | None

    def keep_times(self) -> Self:
        changed: Any = self
        made: Self = replace(changed, wraps=DroppedTimesKeeper)
        return made

    def __call__(self, frame: DataFrame) -> DataFrame:
        tasks = self.settings.parallelism
        spread = frame if tasks is None else Rebalance(tasks)(frame)
        return map_in_arrow(spread, *self.make_wrapped_worker(frame.schema), self.settings.resources)

    def make_wrapped_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        """Return a worker for records with the columns `given`, and the columns that it returns."""
        worker, columns = self.make_worker(given)
        if self.wraps is None:
            return worker, columns
        wrapped = self.wraps(worker, columns)
        return wrapped, wrapped.columns

    def make_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        raise NotImplementedError


@dataclass(frozen=True)
class RowTransform(RecordFunction):
    function: RowFunction
    #: Fields of the result; None if they do not change.
    output: T.StructType | None
    settings: TransformSettings
    wraps: type[DroppedTimesKeeper] | None = None

    def replace_origins(self, origins: Origins) -> RowTransform:
        return replace(self, function=replace(self.function, origins=origins))

    def make_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        settings = self.settings
        function = replace(
            self.function,
            name=settings.name,
            parallelism=settings.parallelism,
            operator=settings.operator,
        )
        return self._make_row_worker(function, given)

    def _make_row_worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        if self.output is None:
            return FilterRows(function), given
        expand = ExpandRows(function, self.output, find_control_fields(given))
        return expand, expand.columns


@dataclass(frozen=True)
class ProcessTransform(RowTransform):
    #: Name of the side output; None for the main output.
    side: str | None = None

    def select_side_output(self, name: str, output: T.StructType) -> ProcessTransform:
        return replace(self, side=name, output=output)

    def _make_row_worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        assert self.output is not None
        rows = ProcessRows(function, self.output, find_control_fields(given), self.side)
        return rows, rows.columns


def find_control_fields(given: T.StructType) -> tuple[T.StructField, ...]:
    return tuple(field for field in given if field.name.startswith(PREFIX))


def make_map(function: Any, output: OutputType | None, name: str | None) -> RowTransform:
    made, name = make_record_call(function, "map"), name or _name_function(function, "map")
    fields = resolve_output_fields(output, made.call, name, is_iterable=False)
    return _make_transform("map", made, fields, TransformSettings(name))


def make_flat_map(function: Any, output: OutputType | None, name: str | None) -> RowTransform:
    made, name = make_record_call(function, "flat_map"), name or _name_function(function, "flat_map")
    fields = resolve_output_fields(output, made.call, name, is_iterable=True)
    return _make_transform("flat_map", made, fields, TransformSettings(name))


def make_filter(function: Any, name: str | None) -> RowTransform:
    made, name = make_record_call(function, "filter"), name or _name_function(function, "filter")
    return _make_transform("filter", made, None, TransformSettings(name))


def make_connected_transforms(
    method: str, first: Any, second: Any, output: OutputType | None, name: str | None
) -> tuple[RowTransform, RowTransform]:
    calls = make_connected_calls(first, second, method)
    names = dict.fromkeys(_name_function(one, method) for one in (first, second) if one is not None)
    name = name or ", ".join(names)
    settings, many = ConnectedSettings(name), method == "flat_map"
    left, right = (
        _make_transform(
            method, one, resolve_output_fields(output, one.call, name, other.call, is_iterable=many), settings
        )
        for one, other in (calls, calls[::-1])
    )
    return left, right


@check_arguments(
    "output",
    function="give a ProcessFunction of flinkish_spark.functions.stream; for state call key_by(...) first "
    "and give a KeyedProcessFunction, or call process_with_state()",
)
def make_process(function: ProcessFunction, output: OutputType | None, name: str | None) -> ProcessTransform:
    call = function.process_element
    name = name or _name_function(function, "process")
    fields = resolve_output_fields(output, call, name, is_iterable=True)
    return ProcessTransform(_make_row_function(name, call, function), fields, TransformSettings(name))


@check_arguments(
    "output",
    function="give a CoProcessFunction of flinkish_spark.functions.stream; for state call "
    "connect(...).key_by(...) and give a KeyedCoProcessFunction, or connect with a broadcast stream",
)
def make_co_process(
    function: CoProcessFunction, output: OutputType | None, name: str | None
) -> tuple[ProcessTransform, ProcessTransform]:
    name = name or _name_function(function, "process")
    fields = resolve_output_fields(output, function.process_element1, name, is_iterable=True)
    settings = ConnectedSettings(name)
    first, second = (
        ProcessTransform(_make_row_function(name, call, function), fields, settings)
        for call in (function.process_element1, function.process_element2)
    )
    return first, second


def find_connected_transforms(node: StreamNode) -> tuple[TransformNode, ...]:
    """Return the two transforms of a function with two inputs that make a stream, or none."""
    parents = node.parents if isinstance(node, UnionNode) else ()
    ways = [one for one in parents if isinstance(one, TransformNode)]
    made = [one.function.settings for one in ways if isinstance(one.function, RowTransform)]
    is_one = len(made) == len(parents) == 2 and made[0] is made[1]
    return tuple(ways) if is_one and isinstance(made[0], ConnectedSettings) else ()


def _make_transform(
    method: str, made: RecordCall, fields: T.StructType | None, settings: TransformSettings
) -> RowTransform:
    call = SingleRow(made.call) if method == "map" else made.call
    return RowTransform(_make_row_function(settings.name, call, made.rich), fields, settings)


def _make_row_function(name: str, call: Callable[..., Any], rich: RichFunction | None) -> RowFunction:
    function = RowFunction(name, call, rich)
    check_can_be_sent(function, "of", name)
    return function


def resolve_output_fields(
    output: OutputType | None,
    call: Callable[..., Any],
    name: str,
    *others: Callable[..., Any],
    is_iterable: bool,
) -> T.StructType:
    if output is None:
        return infer_output(call, f"'{name}'", *others, is_iterable=is_iterable)
    return output_schema(output, name)


def _name_function(function: Any, method: str) -> str:
    named = getattr(function, "__name__", type(function).__name__)
    return method if named == "<lambda>" else f"{method} {named}"


@dataclass(frozen=True)
class LookupTransform(RecordFunction):
    #: The join as declared; the type of the records is known when it is planned.
    join: LookupJoin
    #: Fields that its function makes; None for the fields of both sides.
    output: T.StructType | None
    settings: TransformSettings
    origins: Origins
    wraps: type[DroppedTimesKeeper] | None = None
    #: Name of the side output that is read; None for the main output.
    side: str | None = None
    #: Key under which Python workers keep answers, which all outputs share.
    kept_as: str = field(default_factory=lambda: uuid4().hex)
    counts_as: str = ""
    does: ClassVar[str] = "lookup join"

    def replace_origins(self, origins: Origins) -> LookupTransform:
        return replace(self, origins=origins)

    def select_side_output(self, name: str, output: T.StructType) -> LookupTransform:
        if self.join.function is None:
            raise GraphError(
                f"'{self.settings.name}' has no side output '{name}'",
                why="only a function can emit to it, and this join has none",
                what_to_do="give it a function=, which calls ctx.output(tag, row)",
            )
        return replace(self, side=name, output=output)

    def make_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        own = T.StructType([field for field in given if not field.name.startswith(PREFIX)])
        output, settings = self.output, self.settings
        if output is None:
            kind = parse_ddl(self.join.right_type)
            right = kind if isinstance(kind, T.StructType) else T.StructType([T.StructField("value", kind)])
            output = join_fields(own, right)
        join = replace(self.join, left_type=ddl_of(own))
        function = RowFunction(
            settings.name,
            join.key_of,
            origins=self.origins,
            counts_as=self.counts_as,
            operator=settings.operator,
        )
        rows = LookupRows(function, output, find_control_fields(given), join, self.side, kept_as=self.kept_as)
        return rows, rows.columns


def make_lookup(join: LookupJoin, output: OutputType | None, name: str) -> LookupTransform:
    if join.function is None and output is not None:
        raise SchemaError(
            f"'{name}' has an output and no function",
            why="without a function the output is the fields of the record and of the row",
            what_to_do="leave the output out, or give a function that makes it",
        )
    if join.function is not None and output is None:
        output = infer_output(join.function.process_element, f"'{name}'", is_iterable=True)
    # The row's fields are appended to the record's fields, so a STRUCT means its fields.
    join = replace(join, right_type=as_fields(join.right_type))
    check_can_be_sent(join, "of", name)
    fields = None if output is None else output_schema(output, name)
    return LookupTransform(join, fields, TransformSettings(name), Origins())


#: A stateless function from records to records.
Transform = Callable[[DataFrame], DataFrame]


def apply_transform(records: DataFrame, function: Transform) -> DataFrame:
    try:
        found = function(records)
    except FlinkishError:
        raise
    except AnalysisException as error:
        raise GraphError(
            f"Spark refuses what {describe_function(function)} of transform() does",
            why=str(error).partition("\n")[0],
            what_to_do=f"correct it; the records have {', '.join(_list_fields(records))}",
        ) from error
    except Exception as error:
        raise UserFunctionError(
            f"{describe_function(function)} of transform() failed: {describe_error(error)}",
            what_to_do="correct it: it must make a DataFrame of the DataFrame of records",
        ) from error
    if not isinstance(found, DataFrame):
        raise GraphError(
            f"{describe_function(function)} of transform() returned a {type(found).__name__}",
            what_to_do="return a DataFrame",
        )
    return found


def describe_function(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"'{name}'"


def _list_fields(records: DataFrame) -> list[str]:
    return [name for name in records.columns if not name.startswith(PREFIX)]


# After a keyed operator, records and control rows are in one frame, and a user's function must see records
# only. Splitting the frame would read the operator twice. If a function only projects and filters, its
# projections and filters are applied to the whole frame in a form that leaves control rows unchanged.

#: Prefix of columns that functions compute, before they get the names of fields.
_MADE = f"{PREFIX}made_"


@dataclass(frozen=True)
class NonRowTransform:
    """The first function that does more than look at single rows, and a description of what it does."""

    function: Transform
    what: str


class ReadRows:
    """Functions of single rows, applied to a frame in which control rows stay."""

    schema: T.StructType

    @property
    def outputs(self) -> tuple[str, ...]:
        raise NotImplementedError

    def apply(self, frame: DataFrame) -> DataFrame:
        raise NotImplementedError

    def find_workers(self) -> tuple[tuple[Worker, ...], Sequence[str]] | None:
        """Return workers that do the same to a sink's rows, and the column of each field after them.

        None if Spark computes a field.
        """
        raise NotImplementedError

    @cached_property
    def fields(self) -> tuple[tuple[Column, T.StructField], ...]:
        """Pairs of an output column, without the field's name, and the field."""
        return tuple(
            (F.col(quote_name(own)), field) for own, field in zip(self.outputs, self.schema, strict=True)
        )

    @cached_property
    def named_fields(self) -> list[Column]:
        return [alias_field(column, field) for column, field in self.fields]


@dataclass(frozen=True, eq=False)
class RowByRow(ReadRows):
    #: A plan over the columns of a frame with records and control rows.
    plan: RowPlan
    schema: T.StructType

    def apply(self, frame: DataFrame) -> DataFrame:
        for step in self._steps:
            frame = step.of(frame) if isinstance(step, Selection) else frame.where(step)
        return frame

    def select_in_arrow(self, frame: DataFrame, *, keeps_times: bool) -> DataFrame | None:
        """Apply the plan in the Arrow pass that reads a source's records; None if impossible."""
        steps = self._find_arrow_steps()
        if steps is None:
            return None
        control = [one for one in frame.schema if one.name.startswith(PREFIX)]
        fields = self.schema
        if keeps_times or C.KIND in frame.columns:
            control, fields = list(nullable(control)), nullable(fields)
        columns = T.StructType([*control, *fields])
        select = SelectColumns(steps, columns, self.outputs, keeps_times)
        return C.select_in_pass(frame, select, columns, select.find_inputs())

    def find_workers(self) -> tuple[tuple[Worker, ...], Sequence[str]] | None:
        steps = self._find_arrow_steps()
        if steps is None:
            return None
        fields = nullable(self.schema)
        select = SelectColumns(steps, T.StructType([*CONTROL, *fields]), self.outputs, keeps_times=False)
        return (select,), fields.names

    def _find_arrow_steps(self) -> tuple[Mapping[str, Expression] | Expression, ...] | None:
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
        return tuple(steps)

    def select_records(self, records: DataFrame) -> DataFrame:
        """Apply the plan to a frame without control rows; return control columns and fields."""
        control = [name for name in records.columns if name.startswith(PREFIX)]
        for step in self.plan.steps:
            if isinstance(step, RowFilter):
                records = records.where(step.condition)
            else:
                records = records.withColumns({one.name: one.value for one in step.columns})
        return records.select(*control, *self.named_fields)

    def keep_times(self, records: DataFrame) -> DataFrame:
        """Apply the plan; a dropped record leaves its time, without place and fields (worker/time)."""
        control = [name for name in records.columns if name.startswith(PREFIX)]
        noted, has_place = self._mark_dropped(records, C.SEQUENCE), _has_place(records, C.SEQUENCE)
        own = [alias_field(F.when(has_place, column), field) for column, field in self.fields]
        return noted.select(*control, *own)

    def append_columns(self, records: DataFrame, place: str, names: Sequence[str]) -> DataFrame:
        noted, has_place = self._mark_dropped(records, place), F.col(place).isNotNull()
        own = (F.when(has_place, column).alias(n) for n, (column, _) in zip(names, self.fields, strict=True))
        return noted.select(*records.columns, *own)

    def _mark_dropped(self, records: DataFrame, place: str) -> DataFrame:
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
        """The steps of the plan, in a form that passes control rows on."""
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
) -> tuple[T.StructType, RowByRow | NonRowTransform]:
    return read_functions_over(spark.createDataFrame([], schema), functions, names)


def read_functions_over(
    given: DataFrame, functions: Sequence[Transform], names: Sequence[str]
) -> tuple[T.StructType, RowByRow | NonRowTransform]:
    made = [given]
    for function in functions:
        made.append(apply_transform(made[-1], function))
    found, fields = row_plan(given, made[-1], tuple(names), _MADE), made[-1].schema
    if isinstance(found, RowPlan):
        return fields, RowByRow(found, fields)
    for function, behind in zip(functions, made[1:], strict=True):
        upto = row_plan(given, behind, tuple(names), _MADE)
        if isinstance(upto, NotRowByRow):
            return fields, NonRowTransform(function, upto.what)
    raise AssertionError("one of the functions does more than look at single rows")


def _has_place(frame: DataFrame, place: str) -> Column:
    has_place = F.col(place).isNotNull()
    return has_place & (F.col(C.KIND) == int(C.Kind.RECORD)) if C.KIND in frame.columns else has_place


def alias_field(column: Column, field: T.StructField) -> Column:
    # CASE would lose a field's metadata, such as a comment.
    return column.alias(field.name, metadata=field.metadata) if field.metadata else column.alias(field.name)


@dataclass(frozen=True, eq=False)
class WorkerPass(ReadRows):
    #: Runs the functions, in one worker per task.
    deal: InputPaths
    schema: T.StructType
    #: Columns of the input fields; several fields may have the same column.
    columns: tuple[str, ...]

    @classmethod
    def of(
        cls,
        functions: Sequence[RecordFunction],
        schema: T.StructType,
        columns: Sequence[str],
        control: T.StructType,
    ) -> WorkerPass:
        for column in schema:
            if (why := unfit_for_rows(column.dataType)) is not None:
                raise SchemaError(
                    f"'{functions[0].settings.name}' cannot get the field '{column.name}'",
                    why=why,
                    what_to_do="convert or drop it before the function",
                )
        beside = [field for field in control if field.name not in (C.KIND, C.CHECKPOINT)]
        given = T.StructType([*beside, *schema])
        workers, made = chain_workers(functions, given)
        fields = find_fields(made)
        names = tuple(f"{PREFIX}way_{at}" for at in range(len(fields)))
        into = tuple(f"{PREFIX}into_{at}" for at in range(len(schema)))
        dealt = InputPath(0, into, given, ComposedWorker(workers), fields, names)
        return cls(InputPaths((dealt,), control), fields, tuple(columns))

    def apply(self, frame: DataFrame) -> DataFrame:
        """Return control columns, and for records the output :attr:`fields`."""
        own = [F.col(quote_name(column)).alias(name) for column, name in self._input_names]
        given = frame.select(*self.deal.control.names, *own)
        return map_in_arrow(given, self.deal, self.deal.columns)

    @property
    def _input_names(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.columns, self.deal.inputs[0].columns, strict=True))

    def find_workers(self) -> tuple[tuple[Worker, ...], Sequence[str]]:
        return (C.CopyColumns(self.deal.control, self._input_names), self.deal), self.outputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.deal.inputs[0].names


def chain_workers(
    functions: Sequence[RecordFunction], given: T.StructType
) -> tuple[tuple[Worker, ...], T.StructType]:
    """Return a worker for each function, in order, and the columns that the last one returns."""
    workers: list[Worker] = []
    for function in functions:
        # The function runs in the tasks of the operator before it.
        here: Any = function
        here = replace(here, settings=replace(function.settings, parallelism=None))
        worker, given = here.make_worker(given)
        workers.append(worker)
    return tuple(workers), given


def find_fields(columns: T.StructType) -> T.StructType:
    return T.StructType([field for field in columns if not field.name.startswith(PREFIX)])


def has_frames_first(input_: Input) -> bool:
    """Return whether an input's DataFrame functions come first on its only path; True without any."""
    are_frames = [
        [
            find_frame_function(step) is not None
            for step in path.steps
            if not (isinstance(step, TransformNode) and is_partitioning(step.function))
        ]
        for path in input_.paths
    ]
    if len(are_frames) > 1:
        return not any(any(own) for own in are_frames)
    return are_frames[0] == sorted(are_frames[0], reverse=True)


def find_frame_function(step: Step) -> Transform | None:
    """Return the function of a step if it is a DataFrame function, not one of single records or a move."""
    if not isinstance(step, TransformNode):
        return None
    function: object = step.function
    return None if isinstance(function, RecordFunction) or is_partitioning(function) else step.function
