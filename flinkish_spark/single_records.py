"""What a stream does with single records in Python: map, flat_map, filter, process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from flinkish_spark.graph.python_transforms import filter_rows, flat_map_rows, map_rows, process_rows
from flinkish_spark.runtime.hinted_types import OutputType
from flinkish_spark.stream_functions import ProcessFunction

if TYPE_CHECKING:
    from flinkish_spark.graph.frame_transforms import Transform


class SingleRecords(ABC):
    """The part of a `DataStream` that calls functions of the user's with single records."""

    @abstractmethod
    def _behind(self, function: Transform) -> Self:
        """Return the stream behind a DataFrame function."""

    def map(self, function: Any, *, output: OutputType | None = None, name: str | None = None) -> Self:
        """Make one row of each record, in Python.

        What columns can say, :meth:`transform` says many times as fast: it stays in the JVM.

        Parameters
        ----------
        function
            From a record, a named tuple, to a row: tuple, named tuple, Row, dict or dataclass; or a
            :class:`~flinkish_spark.MapFunction`. Without state, and the same for the same record.
        output
            Fields of the rows, as DDL or StructType; by default what the function's hint says.
        name
            What errors call it.

        Raises
        ------
        GraphError, UserFunctionError
            It cannot be called, or not be sent to the workers.
        SchemaError
            The output is not known, or is no list of fields.
        """
        return self._behind(map_rows(function, output, name))

    def flat_map(self, function: Any, *, output: OutputType | None = None, name: str | None = None) -> Self:
        """Make any number of rows of each record, in Python; see :meth:`map`.

        Parameters
        ----------
        function
            Returns or yields rows; or a :class:`~flinkish_spark.FlatMapFunction`. A hint like
            ``Iterator[Word]`` says the fields.
        """
        return self._behind(flat_map_rows(function, output, name))

    def filter(self, function: Any, *, name: str | None = None) -> Self:
        """Keep the records for which a function says so, in Python; see :meth:`map`.

        Parameters
        ----------
        function
            From a record to a truth value, or a :class:`~flinkish_spark.FilterFunction`.
        """
        return self._behind(filter_rows(function, name))

    def process(
        self,
        function: ProcessFunction,
        *,
        output: OutputType | None = None,
        name: str | None = None,
    ) -> Self:
        """Make any number of rows of each record, to several outputs, in Python; see :meth:`map`.

        It has no state and no timers; those are for `key_by(...).process(...)`.

        Parameters
        ----------
        function
            Runs once for each of its outputs that is read.
        output
            Fields of the main output; by default what the hint of `process_element` says.
        name
            What errors call it.

        Raises
        ------
        GraphError, UserFunctionError
            It is no ProcessFunction, or cannot be sent to the workers.
        SchemaError
            The output is not known, or is no list of fields.
        """
        return self._behind(process_rows(function, output, name))
