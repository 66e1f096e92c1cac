"""Elements of two inputs as one type, so that one state can hold both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.joins.kinds import Side
from flinkish_spark.operators.stored_elements import ElementType, Named
from flinkish_spark.runtime.ddl import ddl_of


class TaggedElement(tuple[Any, ...]):
    """An element of either input: the number of the input, the left fields, the right fields.

    It is made by a :class:`TaggedUnion`; where it is not of the left input, the left fields are null.
    """

    __slots__ = ()
    _value_of: Callable[[tuple[Any, ...]], Any]

    @property
    def side(self) -> Side:
        """Which input it came from."""
        return Side(self[0])

    @property
    def value(self) -> Any:
        """The element itself."""
        return type(self)._value_of(self)


class TaggedUnion(ElementType):
    """The type of elements of two inputs.

    Parameters
    ----------
    left, right
        The types of the inputs.

    Examples
    --------
    >>> union = TaggedUnion(ElementType("user STRING, n LONG"), ElementType("STRING"))
    >>> union.ddl
    'side int, left_user string, left_n bigint, right_value string'
    >>> tag_left, tag_right = union.tagging()
    >>> tag_right("x"), tag_right("x").value, tag_left(("ann", 1)).value
    ((1, None, None, 'x'), 'x', Record(user='ann', n=1))
    """

    def __init__(self, left: ElementType, right: ElementType) -> None:
        fields = [
            T.StructField(f"{side}_{field.name}", field.dataType)
            for side, element in (("left", left), ("right", right))
            for field in element.fields
        ]
        # As DDL that takes whatever names the inputs have: `order id`, `größe`.
        super().__init__(ddl_of(T.StructType([T.StructField("side", T.IntegerType()), *fields])))
        # The dataclass is frozen.
        object.__setattr__(self, "_left", left)
        object.__setattr__(self, "_right", right)

    _left: ElementType
    _right: ElementType

    def naming(self) -> Named:
        """Return what makes a tagged element of a plain tuple."""
        tagged = self._class()
        return lambda value: tagged(value) if type(value) is tuple else value

    def tagging(self) -> tuple[Named, Named]:
        """Return what makes tagged elements of left ones, and of right ones."""
        tagged, left, right = self._class(), self._left, self._right
        no_left, no_right = (None,) * len(left.fields), (None,) * len(right.fields)
        return (
            lambda value: tagged((0, *left.spread(value), *no_right)),
            lambda value: tagged((1, *no_left, *right.spread(value))),
        )

    def split(self, elements: Iterable[TaggedElement]) -> tuple[list[Any], list[Any]]:
        """Return the left and the right elements, in their order."""
        sides: tuple[list[Any], list[Any]] = ([], [])
        for element in elements:
            sides[element[0]].append(element.value)
        return sides

    def _class(self) -> type[TaggedElement]:
        behind = 1 + len(self._left.fields)
        left, right = self._left.gathering(), self._right.gathering()

        class Tagged(TaggedElement):
            __slots__ = ()

            @staticmethod
            def _value_of(fields: tuple[Any, ...]) -> Any:
                return right(fields[behind:]) if fields[0] else left(fields[1:behind])

        return Tagged
