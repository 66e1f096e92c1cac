"""map, flat_map, filter and process: functions over single rows as DataFrame functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import cloudpickle
from pyspark.sql import types as T

from flinkish_spark.errors import GraphError, UserFunctionError
from flinkish_spark.functions import FilterFunction, FlatMapFunction, MapFunction, RichFunction
from flinkish_spark.graph.declared import output_schema
from flinkish_spark.graph.located import LocatedTransform
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.graph.partitioning import Spread
from flinkish_spark.runtime.columns import PREFIX
from flinkish_spark.runtime.kept_times import KeepsTimes, Worker
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.process_functions import ProcessRows
from flinkish_spark.runtime.row_functions import ExpandRows, FilterRows, One, RowFunction
from flinkish_spark.stream_functions import ProcessFunction

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
        function = replace(self.function, name=self.settings.name)
        tasks = self.settings.parallelism
        spread = frame if tasks is None else Spread(tasks)(frame)
        worker, columns = self._worker(function, frame.schema)
        if self.wraps is not None:
            wrapped = self.wraps(worker, columns)
            return spread.mapInArrow(wrapped, wrapped.columns)
        return spread.mapInArrow(worker, columns)

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


def map_rows(function: Any, output: str | T.StructType | None, name: str | None) -> RowTransform:
    """Return the transform that makes one row of each."""
    call, rich = _callable(function, MapFunction, "map")
    name = name or _name_of(function, "map")
    fields = _fields(output, call, name, is_iterable=False)
    return _checked(RowTransform(RowFunction(name, One(call), rich), fields, TransformSettings(name)))


def flat_map_rows(function: Any, output: str | T.StructType | None, name: str | None) -> RowTransform:
    """Return the transform that makes any number of rows of each."""
    call, rich = _callable(function, FlatMapFunction, "flat_map")
    name = name or _name_of(function, "flat_map")
    fields = _fields(output, call, name, is_iterable=True)
    return _checked(RowTransform(RowFunction(name, call, rich), fields, TransformSettings(name)))


def filter_rows(function: Any, name: str | None) -> RowTransform:
    """Return the transform that keeps some rows."""
    call, rich = _callable(function, FilterFunction, "filter")
    name = name or _name_of(function, "filter")
    return _checked(RowTransform(RowFunction(name, call, rich), None, TransformSettings(name)))


def process_rows(function: Any, output: str | T.StructType | None, name: str | None) -> ProcessTransform:
    """Return the transform that calls a process function."""
    if not isinstance(function, ProcessFunction):
        raise GraphError(
            f"process() got a {type(function).__name__}",
            why="a stream without a key takes a function without state",
            what_to_do="give it an instance of a ProcessFunction of flinkish_spark.stream_functions; for "
            "state call key_by(...) first and give a KeyedProcessFunction, or call process_with_state()",
        )
    call = function.process_element
    name = name or _name_of(function, "process")
    fields = _fields(output, call, name, is_iterable=True)
    return _checked(ProcessTransform(RowFunction(name, call, function), fields, TransformSettings(name)))


def _callable(function: Any, kind: type, method: str) -> tuple[Callable[[Any], Any], RichFunction | None]:
    if isinstance(function, kind):
        assert isinstance(function, RichFunction)
        return getattr(function, method), function
    if not callable(function):
        raise GraphError(
            f"{method}() got a {type(function).__name__}",
            what_to_do=f"give it a function of one record, or a {kind.__name__}",
        )
    return function, None


def _fields(
    output: str | T.StructType | None, call: Callable[..., Any], name: str, *, is_iterable: bool
) -> T.StructType:
    if output is None:
        return inferred_output(call, f"'{name}'", is_iterable=is_iterable)
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
