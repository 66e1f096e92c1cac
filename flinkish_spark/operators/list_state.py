"""Operator list state: items of a parallel copy of an operator, which are dealt anew when it is rescaled.

It belongs to no key. A source keeps its positions there, a sink its open files.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from flinkish_spark.arguments import instance_of
from flinkish_spark.operators.operator_values import (
    OperatorValueMismatch,
    declared_values,
    pack_tables,
    table_of,
    unpack_tables,
)
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.hinted_types import StateType
from flinkish_spark.state.descriptors import set_fields, state_type
from flinkish_spark.state.handed_out import may_change, naming_of
from flinkish_spark.user_iterators import elements_of

#: What a stored value says of itself.
LIST_KIND = "operator list state"


class Redistribution(enum.Enum):
    """Who gets which items when the number of copies has changed.

    SPLIT: each item goes to one copy, about equally many to each, in their order. UNION: every copy gets all
    items, of all copies one after the other, and chooses; also where the number has not changed, as in
    Flink.
    """

    SPLIT = "SPLIT"
    UNION = "UNION"


@dataclass(frozen=True, slots=True, init=False)
class OperatorListDescriptor:
    """Name and element type of an operator list state.

    Parameters
    ----------
    name
        Unique within the operator.
    element_type
        Of an item, as of a :class:`~flinkish_spark.state.ValueStateDescriptor`; the attribute is its DDL.
    redistribution
        Who gets which items of a checkpoint.

    Raises
    ------
    SchemaError
        It is no type that a state can have.

    Examples
    --------
    >>> OperatorListDescriptor("positions", "file STRING, offset LONG").redistribution
    <Redistribution.SPLIT: 'SPLIT'>
    """

    name: str
    element_type: str
    redistribution: Redistribution = Redistribution.SPLIT

    def __init__(
        self, name: str, element_type: StateType, redistribution: Redistribution = Redistribution.SPLIT
    ) -> None:
        what_to_do = "give Redistribution.SPLIT or Redistribution.UNION"
        instance_of("redistribution", redistribution, Redistribution, what_to_do=what_to_do)
        set_fields(
            self, name=name, element_type=state_type(name, element_type), redistribution=redistribution
        )

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the stored items."""
        kind = to_arrow_type(parse_ddl(self.element_type), timezone="UTC")
        return pa.schema([pa.field("item", kind)])


class OperatorListState:
    """The items of one copy: iterate, `len`, `add`, `add_all`, `update`, `clear`.

    Parameters
    ----------
    items
        Its content.
    element_type
        As of the descriptor.
    """

    __slots__ = ("_items", "_lends", "_naming", "is_changed")

    def __init__(self, items: Iterable[Any], element_type: str) -> None:
        self._items, self.is_changed = list(items), False
        self._naming, self._lends = naming_of(element_type), may_change(element_type)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        return len(self._items)

    def get(self) -> list[Any]:
        """Return a copy of the items."""
        # Whoever changes an item in place need not put it back.
        self.is_changed |= self._lends and bool(self._items)
        return list(self._items)

    def add(self, item: Any) -> None:
        """Append an item; None is refused, as Flink does."""
        self.add_all((item,))

    def add_all(self, items: Iterable[Any]) -> None:
        """Append items."""
        self.update([*self._items, *elements_of(items)])

    def update(self, items: Iterable[Any]) -> None:
        """Replace the items."""
        replaced = list(elements_of(items))
        if None in replaced:
            raise ValueError("an operator list state takes no None")
        self._items = replaced if self._naming is None else list(map(self._naming, replaced))
        self.is_changed = True

    def clear(self) -> None:
        """Remove all items."""
        self.update(())


class OperatorLists:
    """The operator list states of one copy of an operator.

    Parameters
    ----------
    uid
        Of the operator.
    descriptors
        Of the states.
    value
        What :meth:`dump` returned, or :func:`redistribute` made for this copy; None at the beginning.

    Raises
    ------
    FrameError
        The value is damaged.
    OperatorValueMismatch
        It belongs to another operator, or a state is stored with another type than it is declared with.
    """

    def __init__(
        self, uid: str, descriptors: Sequence[OperatorListDescriptor], value: bytes | memoryview | None
    ) -> None:
        self._uid = uid
        self._descriptors = {descriptor.name: descriptor for descriptor in descriptors}
        schemas = {name: one.schema for name, one in self._descriptors.items()}
        stored = unpack_tables(uid, LIST_KIND, schemas, value)
        self._states = {
            name: OperatorListState(_items_of(one, stored[name]) if name in stored else (), one.element_type)
            for name, one in self._descriptors.items()
        }

    def state(self, descriptor: OperatorListDescriptor) -> OperatorListState:
        """Return a state.

        Raises
        ------
        OperatorValueMismatch
            It is not declared.
        """
        if self._descriptors.get(descriptor.name) != descriptor:
            raise OperatorValueMismatch(f"there is no {LIST_KIND} '{descriptor.name}' as {descriptor}")
        return self._states[descriptor.name]

    @property
    def is_changed(self) -> bool:
        """Whether there is something to store."""
        return any(state.is_changed for state in self._states.values())

    def dump(self) -> bytes:
        """Return the value to store.

        Raises
        ------
        StateValueError
            An item does not fit its declared type.
        """
        tables = {
            name: table_of(f"{LIST_KIND} {name!r}", self._descriptors[name].schema, [state.get()])
            for name, state in self._states.items()
        }
        return pack_tables(self._uid, LIST_KIND, tables)


def redistribute(
    uid: str,
    descriptors: Sequence[OperatorListDescriptor],
    values: Sequence[bytes | memoryview | None],
    parallelism: int,
) -> list[bytes]:
    """Return the values of the copies of a restored operator.

    Parameters
    ----------
    values
        What the copies of the checkpoint stored, in their order; None for one that stored nothing.
    parallelism
        How many copies there are now; at least 1.

    Raises
    ------
    ValueError
        The parallelism is not positive.
    FrameError, OperatorValueMismatch
        A value cannot be read.
    """
    if parallelism < 1:
        raise ValueError(f"an operator has at least one copy, not {parallelism}")
    before = [OperatorLists(uid, descriptors, value) for value in values]
    after = [OperatorLists(uid, descriptors, None) for _ in range(parallelism)]
    for descriptor in descriptors:
        items = [one.state(descriptor).get() for one in before]
        for copy, own in zip(after, dealt(items, descriptor.redistribution, parallelism), strict=True):
            copy.state(descriptor).update(own)
    return [copy.dump() for copy in after]


def dealt(items: Sequence[list[Any]], how: Redistribution, parallelism: int) -> list[list[Any]]:
    """Return which items each of the new copies gets.

    Examples
    --------
    >>> dealt([["a", "b"], [], ["c"]], Redistribution.SPLIT, 2)
    [['a', 'b'], ['c']]
    >>> dealt([["a", "b"], ["c"]], Redistribution.UNION, 2)
    [['a', 'b', 'c'], ['a', 'b', 'c']]
    """
    together = [item for own in items for item in own]
    if how is Redistribution.UNION:
        return [list(together) for _ in range(parallelism)]
    if len(items) == parallelism:
        return [list(own) for own in items]
    least, more = divmod(len(together), parallelism)
    bounds = [at * least + min(at, more) for at in range(parallelism + 1)]
    return [together[begin:end] for begin, end in itertools.pairwise(bounds)]


def _items_of(descriptor: OperatorListDescriptor, table: pa.RecordBatch) -> list[Any]:
    return declared_values(table.column(0), descriptor.element_type)
