"""Columns that a vectorised function gives a state, as columns of its declared type; nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from flinkish_spark.operators.decoded_values import StateValueError
from flinkish_spark.operators.key_index import Array, KeyIndex
from flinkish_spark.operators.table_codec import TableLayout
from flinkish_spark.runtime.arrow_values import ValueMismatch, is_of_kind, strict_array
from flinkish_spark.runtime.emitted_columns import first_of, first_refused, first_valid
from flinkish_spark.runtime.python_values import to_values
from flinkish_spark.runtime.repeated_keys import first_repeated
from flinkish_spark.runtime.silent_changes import exact_cast


@dataclass(frozen=True)
class GivenColumns:
    """What may be given to a state.

    Parameters
    ----------
    layout
        Of the state.
    index, chosen
        The keys, and the numbers of those that get a value.
    """

    layout: TableLayout
    index: KeyIndex
    chosen: Array

    def of(self, values: Sequence[Any]) -> list[pa.Array]:
        """Return a column per column of the state's type, as long as `chosen`.

        Raises
        ------
        StateValueError
            They do not fit the declared type.
        """
        kinds = self.layout.values
        if not isinstance(values, list | tuple) or len(values) != len(kinds):
            given = f"{len(values)} columns" if isinstance(values, list | tuple) else type(values).__name__
            names = f": {', '.join(self.layout.value_names)}" if self.layout.value_names else ""
            raise self._refused(f"it is a list of {len(kinds)} columns{names}; {given} came")
        return [self._column(at, *one) for at, one in enumerate(zip(values, kinds, strict=True))]

    def _column(self, at: int, given: Any, kind: pa.DataType) -> pa.Array:
        try:
            array = _as_array(given, kind)
        except ValueMismatch as error:
            wrong = next((at for at, value in enumerate(given) if value is error.value), None)
            raise self._wrong(at, wrong, len(given), str(error)) from error
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise self._wrong(at, None, 0, f"{type(given).__name__}: {error}") from error
        if len(array) not in (len(self.chosen), len(self.index)):
            raise self._wrong(at, None, 0, f"{len(array)} values for {len(self.chosen)} of the keys")
        # Of a time a DATE keeps the day, as where single values are put.
        is_day = pa.types.is_date(kind) and pa.types.is_timestamp(array.type)
        if not is_day and not is_of_kind(array.type, kind):
            says = f"the column has the type {array.type}, declared is {kind}{first_of(array)}"
            raise self._wrong(at, first_valid(array), len(array), says)
        if len(array) != len(self.chosen):
            array = array.take(pa.array(self.chosen))
        try:
            cast = array if array.type == kind else exact_cast(array, kind)
        except pa.ArrowException as error:
            wrong = first_refused(len(array), lambda count: exact_cast(array.slice(0, count), kind))
            raise self._wrong(at, wrong, len(array), str(error)) from error
        if (found := first_repeated(cast)) is not None:
            wrong, key = found
            raise self._wrong(at, wrong, len(cast), f"a map has the key {key!r} twice")
        return cast

    def _wrong(self, at: int, wrong: int | None, count: int, says: str) -> StateValueError:
        """Return the error of a column, and of one of so many values."""
        names = self.layout.value_names
        what = f"field {names[at]!r}" if names else "the value"
        if wrong is None:
            return self._refused(f"{what}: {says}")
        number = int(self.chosen[wrong]) if count == len(self.chosen) else wrong
        parts = [to_values(column.slice(number, 1))[0] for column in self.index.keys]
        key = parts[0] if len(parts) == 1 else tuple(parts)
        return self._refused(f"{what} of key {key!r:.200}: {says}")

    def _refused(self, says: str) -> StateValueError:
        return StateValueError(f"state {self.layout.name!r} got a wrong value: {says}")


def _as_array(given: Any, kind: pa.DataType) -> pa.Array:
    """Return a column of any library; of Python's objects one of the declared type."""
    if isinstance(given, pa.Array):
        return given
    is_of_objects = isinstance(given, pd.Series | np.ndarray) and given.dtype.kind == "O"
    if is_of_objects and isinstance(given, pd.Series):
        given = given.astype(object).where(given.notna(), None)
    if is_of_objects or isinstance(given, list | tuple):
        return strict_array(list(given), kind)
    made = given if isinstance(given, pa.ChunkedArray) else pa.array(given)
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made
