"""map, flat_map and filter: functions over single rows as DataFrame functions, which `transform` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import types as T

from flinkish_spark.errors import GraphError, UserFunctionError
from flinkish_spark.functions import FilterFunction, FlatMapFunction, MapFunction, RichFunction
from flinkish_spark.graph.declared import output_schema
from flinkish_spark.graph.output_types import inferred_output
from flinkish_spark.runtime.columns import PREFIX
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.row_functions import ExpandRows, FilterRows, One, RowFunction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class RowTransform:
    """A DataFrame function that runs a function over rows in Python workers.

    Parameters
    ----------
    output
        Fields of the result; None where they stay as they are.
    """

    function: RowFunction
    output: T.StructType | None

    def located(self, origins: Origins) -> RowTransform:
        """Return the same for records of which it is known where they come from."""
        return replace(self, function=replace(self.function, origins=origins))

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Return the transformed frame; called by the planner, or once per micro-batch."""
        worker: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
        if self.output is None:
            worker, columns = FilterRows(self.function), frame.schema
        else:
            carried = tuple(field for field in frame.schema if field.name.startswith(PREFIX))
            expand = ExpandRows(self.function, self.output, carried)
            worker, columns = expand, expand.columns
        return frame.mapInArrow(worker, columns)


def map_rows(function: Any, output: str | T.StructType | None, name: str | None) -> RowTransform:
    """Return the transform that makes one row of each."""
    call, rich = _callable(function, MapFunction, "map")
    name = name or _name_of(function, "map")
    fields = _fields(output, call, name, is_iterable=False)
    return _checked(RowTransform(RowFunction(name, One(call), rich), fields))


def flat_map_rows(function: Any, output: str | T.StructType | None, name: str | None) -> RowTransform:
    """Return the transform that makes any number of rows of each."""
    call, rich = _callable(function, FlatMapFunction, "flat_map")
    name = name or _name_of(function, "flat_map")
    fields = _fields(output, call, name, is_iterable=True)
    return _checked(RowTransform(RowFunction(name, call, rich), fields))


def filter_rows(function: Any, name: str | None) -> RowTransform:
    """Return the transform that keeps some rows."""
    call, rich = _callable(function, FilterFunction, "filter")
    return _checked(RowTransform(RowFunction(name or _name_of(function, "filter"), call, rich), None))


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
    output: str | T.StructType | None, call: Callable[[Any], Any], name: str, *, is_iterable: bool
) -> T.StructType:
    if output is None:
        return inferred_output(call, f"'{name}'", is_iterable=is_iterable)
    return output_schema(output, name)


def _name_of(function: Any, method: str) -> str:
    named = getattr(function, "__name__", type(function).__name__)
    return method if named == "<lambda>" else f"{method} {named}"


def _checked(transform: RowTransform) -> RowTransform:
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
