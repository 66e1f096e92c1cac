"""map, flat_map, filter and process: functions over single rows as DataFrame functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import cloudpickle
from pyspark.sql import types as T

from flinkish_spark.arguments import refuse_async
from flinkish_spark.errors import GraphError, UserFunctionError
from flinkish_spark.graph.declared import output_schema
from flinkish_spark.graph.located import LocatedTransform
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.partitioning import Spread
from flinkish_spark.graph.record_callables import RecordCall, connected_calls, record_call
from flinkish_spark.graph.stream_graph import StreamNode, TransformNode, UnionNode
from flinkish_spark.runtime.columns import PREFIX, map_in_arrow
from flinkish_spark.runtime.hinted_types import OutputType
from flinkish_spark.runtime.kept_times import KeepsTimes, Worker
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.process_functions import ProcessRows
from flinkish_spark.runtime.row_functions import ExpandRows, FilterRows, One, RowFunction
from flinkish_spark.stream_functions import CoProcessFunction, ProcessFunction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class TransformSettings:
    """What a user says of a function behind the call that made it; up to the start of the job.

    Parameters
    ----------
    name
        What errors call it.
    parallelism
        In how many tasks it runs; None for those in which its records are.
    """

    name: str
    parallelism: int | None = None


@dataclass
class ConnectedSettings(TransformSettings):
    """Those of a function with two inputs, which both its transforms have."""


@dataclass(frozen=True)
class RowTransform(LocatedTransform):
    """A DataFrame function that runs a function over rows in Python workers.

    Parameters
    ----------
    output
        Fields of the result; None where they stay as they are.
    settings
        Shared with all that is made of this.
    wraps
        What is put around the worker: with a :class:`~flinkish_spark.runtime.kept_times.KeepsTimes` the times
        of records that the function drops go on.
    """

    function: RowFunction
    output: T.StructType | None
    settings: TransformSettings
    wraps: type[KeepsTimes] | None = None

    def located(self, origins: Origins) -> RowTransform:
        """Return the same for records of which it is known where they come from."""
        return replace(self, function=replace(self.function, origins=origins))

    def keeping_times(self) -> RowTransform:
        """Return the same for records whose times are reported behind it."""
        return replace(self, wraps=KeepsTimes)

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Return the transformed frame; called by the planner, or once per micro-batch."""
        tasks = self.settings.parallelism
        spread = frame if tasks is None else Spread(tasks)(frame)
        worker, columns = self.in_worker(frame.schema)
        if self.wraps is not None:
            wrapped = self.wraps(worker, columns)
            return map_in_arrow(spread, wrapped, wrapped.columns)
        return map_in_arrow(spread, worker, columns)

    def in_worker(self, given: T.StructType) -> tuple[Worker, T.StructType]:
        """Return what runs in the workers for rows with these columns, and the columns that come out."""
        settings = self.settings
        function = replace(self.function, name=settings.name, parallelism=settings.parallelism)
        return self._worker(function, given)

    def _worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        """Return what runs in the workers, and the columns that come out."""
        if self.output is None:
            return FilterRows(function), given
        expand = ExpandRows(function, self.output, _carried(given))
        return expand, expand.columns


@dataclass(frozen=True)
class ProcessTransform(RowTransform):
    """Runs a process function, for one of its outputs.

    Parameters
    ----------
    side
        Name of the side output; None for the main output.
    """

    side: str | None = None

    def of_side(self, name: str, output: T.StructType) -> ProcessTransform:
        """Return the same function, for a side output."""
        return replace(self, side=name, output=output)

    def _worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        assert self.output is not None
        rows = ProcessRows(function, self.output, _carried(given), self.side)
        return rows, rows.columns


def _carried(given: T.StructType) -> tuple[T.StructField, ...]:
    return tuple(field for field in given if field.name.startswith(PREFIX))


MadeT = TypeVar("MadeT", bound=RowTransform)


def map_rows(function: Any, output: OutputType | None, name: str | None) -> RowTransform:
    """Return the transform that makes one row of each."""
    made, name = record_call(function, "map"), name or _name_of(function, "map")
    fields = _fields(output, made.call, name, is_iterable=False)
    return _of_call("map", made, fields, TransformSettings(name))


def flat_map_rows(function: Any, output: OutputType | None, name: str | None) -> RowTransform:
    """Return the transform that makes any number of rows of each."""
    made, name = record_call(function, "flat_map"), name or _name_of(function, "flat_map")
    fields = _fields(output, made.call, name, is_iterable=True)
    return _of_call("flat_map", made, fields, TransformSettings(name))


def filter_rows(function: Any, name: str | None) -> RowTransform:
    """Return the transform that keeps some rows."""
    made, name = record_call(function, "filter"), name or _name_of(function, "filter")
    return _of_call("filter", made, None, TransformSettings(name))


def connected_rows(
    method: str, first: Any, second: Any, output: OutputType | None, name: str | None
) -> tuple[RowTransform, RowTransform]:
    """Return the transforms of `map` or `flat_map` of two connected streams, one for each."""
    calls = connected_calls(first, second, method)
    names = dict.fromkeys(_name_of(one, method) for one in (first, second) if one is not None)
    name = name or ", ".join(names)
    settings, many = ConnectedSettings(name), method == "flat_map"
    left, right = (
        _of_call(method, one, _fields(output, one.call, name, other.call, is_iterable=many), settings)
        for one, other in (calls, calls[::-1])
    )
    return left, right


def process_rows(function: Any, output: OutputType | None, name: str | None) -> ProcessTransform:
    """Return the transform that calls a process function."""
    if not isinstance(function, ProcessFunction):
        raise GraphError(
            f"process() got a {type(function).__name__}",
            why="a stream without a key takes a function without state",
            what_to_do="give it an instance of a ProcessFunction of flinkish_spark.stream_functions; for "
            "state call key_by(...) first and give a KeyedProcessFunction, or call process_with_state()",
        )
    call = function.process_element
    refuse_async(function, ("process_element",), f"the {type(function).__name__} of process()")
    name = name or _name_of(function, "process")
    fields = _fields(output, call, name, is_iterable=True)
    return _checked(ProcessTransform(RowFunction(name, call, function), fields, TransformSettings(name)))


def co_process_rows(
    function: Any, output: OutputType | None, name: str | None
) -> tuple[ProcessTransform, ProcessTransform]:
    """Return the transforms that call a process function with two inputs, one for each."""
    if not isinstance(function, CoProcessFunction):
        raise GraphError(
            f"process() got a {type(function).__name__}",
            why="two streams without keys are connected, and what reads them has no state",
            what_to_do="give it an instance of a CoProcessFunction of flinkish_spark.stream_functions; for "
            "state call connect(...).key_by(...) and give a KeyedCoProcessFunction, or connect with a "
            "broadcast stream",
        )
    methods = ("process_element1", "process_element2")
    refuse_async(function, methods, f"the {type(function).__name__} of process()")
    name = name or _name_of(function, "process")
    fields = _fields(output, function.process_element1, name, is_iterable=True)
    settings = ConnectedSettings(name)
    first, second = (
        _checked(ProcessTransform(RowFunction(name, call, function), fields, settings))
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
    return _checked(RowTransform(RowFunction(settings.name, call, made.rich), fields, settings))


def _fields(
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


def _checked(transform: MadeT) -> MadeT:
    try:
        cloudpickle.dumps(transform.function)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UserFunctionError(
            f"the function of '{transform.function.name}' cannot be sent to the workers",
            why=f"{type(error).__name__}: {error}",
            what_to_do="make sessions, locks and connections in open(), not outside of it",
            uid=transform.function.name,
        ) from error
    return transform
