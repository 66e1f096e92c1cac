"""Folds of windows element by element: for windows that columns cannot have, with the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flinkish_spark.aggregates import AggregateColumn, ElementChoice
from flinkish_spark.functions import AggregateFunction
from flinkish_spark.operators.stored_elements import ElementType
from flinkish_spark.operators.value_folds import element_reduce, value_fold
from flinkish_spark.runtime.ddl import type_text
from flinkish_spark.windows.functions import ProcessWindowFunction, WindowContext, WithWindow
from flinkish_spark.windows.spec import AggregateWindow, ReduceWindow, WindowComputation


class KeysAndWindow(ProcessWindowFunction):
    """Puts those parts of the key that are fields before what was computed, and the window's bounds behind.

    Parameters
    ----------
    places
        Which parts of the key.
    key_count
        How many parts it has; a key of one part is no tuple.
    """

    def __init__(self, places: tuple[int, ...], key_count: int) -> None:
        self._places, self._key_count = places, key_count

    def process(self, key: Any, context: WindowContext, elements: Sequence[Any]) -> Iterable[Any]:
        """Return the row."""
        parts = (key,) if self._key_count == 1 else key
        own, window = [parts[at] for at in self._places], context.window
        return [(*own, *element, window.start, window.end) for element in elements]


class FoldedField(AggregateFunction):
    """The sum, least or greatest of a field; null of nulls alone, which is a result as any other.

    Parameters
    ----------
    column
        SUM, MIN or MAX of a field that the elements have.
    input_type
        DDL of the elements: fields.
    """

    def __init__(self, column: AggregateColumn, input_type: str) -> None:
        fields = ElementType(input_type).fields
        self._at = [field.name for field in fields].index(column.field or "")
        kind = fields[self._at].dataType
        #: Type of the accumulator: a tuple, so that a null in it is not none.
        self.kept = f"value {type_text(kind)}"
        self._fold = value_fold(column.fold, column.field or "", kind)

    def create_accumulator(self) -> Any:
        """Return that of no element."""
        return (None,)

    def add(self, value: Any, accumulator: Any) -> Any:
        """Return the accumulator with an element; raise AggregateOverflow if its sum leaves the type."""
        return (self._fold(accumulator[0], value[self._at]),)

    def get_result(self, accumulator: Any) -> Any:
        """Return a row of the value."""
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        """Return what two have together."""
        return (self._fold(first[0], second[0]),)


def folded_field(column: AggregateColumn, input_type: str, keys: KeysAndWindow) -> WindowComputation:
    """Return what emits the key, a fold of a field and the window; a window keeps one value."""
    fold = FoldedField(column, input_type)
    return AggregateWindow(fold, fold.kept, keys)


def chosen_element(choice: ElementChoice, input_type: str) -> WindowComputation:
    """Return what emits the best element and the window; a window keeps one element."""
    return ReduceWindow(element_reduce(choice, input_type), WithWindow())
