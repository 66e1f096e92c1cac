"""Keys as a user names them: columns, expressions, or a function that makes them of records in Python."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.arguments import refuse_if_never_run
from flinkish_spark.errors import GraphError, SchemaError
from flinkish_spark.functions import RichFunction
from flinkish_spark.graph.declared import check_can_be_sent
from flinkish_spark.graph.output_types import return_hint
from flinkish_spark.runtime.column_functions import AppendColumns
from flinkish_spark.runtime.columns import PREFIX, map_in_arrow
from flinkish_spark.runtime.hinted_types import (
    NoSuchType,
    StateType,
    declared_type,
    fields_of,
    type_of,
    without_none,
)
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.row_functions import One, RowFunction
from flinkish_spark.runtime.usable_types import first_required
from flinkish_spark.stream_functions import KeySelector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Types whose values are not equal to themselves reliably, or cannot be a Python dict's key.
UNFIT_KEYS = (
    T.ArrayType,
    T.MapType,
    T.StructType,
    T.FloatType,
    T.DoubleType,
    T.VariantType,
)
_SAY_IT = 'say key="STRING", or key="user STRING, product LONG" for a tuple'


@dataclass(frozen=True)
class KeyFunction:
    """Makes the key of a record in Python.

    Parameters
    ----------
    call
        From a record to a row with the parts of its key.
    rich
        Opened in each task, if it wants to be.
    parts
        The key's, in order.
    """

    call: Callable[[Any], Any]
    rich: RichFunction | None
    parts: T.StructType


Key = str | Column | KeyFunction


def chosen_keys(keys: Sequence[Any], declared: StateType | None) -> tuple[Key, ...]:
    """Return what a stream is keyed by, checked.

    Parameters
    ----------
    declared
        Type of what a function returns; None if its hint says it.

    Raises
    ------
    GraphError, SchemaError, UserFunctionError
        There is no key, or one that cannot be used.
    """
    if not keys:
        raise GraphError("key_by() got no key", what_to_do='name a column: key_by("user")')
    functions = [key for key in keys if is_key_function(key)]
    if functions and len(keys) > 1:
        raise GraphError(
            "key_by() got a function and another key",
            why="a function makes the whole key",
            what_to_do="let it return a tuple: "
            'key_by(lambda order: (order.user, order.product), key="user STRING, product LONG")',
        )
    if functions:
        return (_key_function(functions[0], declared),)
    for key in keys:
        if not isinstance(key, str | Column) or (isinstance(key, str) and not key):
            raise GraphError(
                f"key_by() got {key!r} ({type(key).__name__})",
                why="a key is the name of a column, a column expression or a function of a record",
                what_to_do='name them one by one: key_by("user", "product")',
            )
    if declared is not None:
        raise GraphError(
            f"key_by() got key={declared!r} without a function",
            why="the types of columns are known",
            what_to_do="leave it out",
        )
    return tuple(keys)


def is_key_function(key: Any) -> bool:
    """Whether a key that a user names is a function of a record."""
    return isinstance(key, KeySelector) or (callable(key) and not isinstance(key, str | Column))


def callable_of(function: Any, method: str) -> tuple[Callable[[Any], Any], RichFunction | None]:
    """Return what makes a key, and what has to be opened for it.

    Raises
    ------
    GraphError
        It is no function and no instance of a KeySelector.
    """
    if isinstance(function, KeySelector):
        return function.get_key, function
    if not callable(function) or (isinstance(function, type) and issubclass(function, KeySelector)):
        raise GraphError(
            f"{method} got {function!r} ({type(function).__name__}) as its key",
            what_to_do="give it a function of one record, or an instance of a KeySelector",
        )
    return function, None


def _key_function(function: Any, declared: StateType | None) -> KeyFunction:
    call, rich = callable_of(function, "key_by()")
    refuse_if_never_run(call, "the function of key_by()")
    kind = _hinted(call) if declared is None else _declared(declared)
    check_can_be_sent(call, "of", "key_by")
    if isinstance(kind, T.StructType):
        made = KeyFunction(call, rich, kind)
    else:
        made = KeyFunction(One(call), rich, T.StructType([T.StructField("key", kind)]))
    for part in made.parts:
        refuse_unfit_key(part.dataType, "the function of key_by() makes", part.name)
    return made


def no_such_key(uid: str, key: str, fields: T.StructType) -> GraphError:
    """Return the error of an operator that is keyed by the name of a field that its records do not have."""
    return GraphError(
        f"operator '{uid}' is keyed by '{key}', which its records do not have",
        why=f"they have {', '.join(fields.names)}",
        what_to_do="name one of them; an expression, or a field of a STRUCT, is a Column: "
        'key_by(F.expr("amount % 2")), key_by(F.col("address.city"))',
        uid=uid,
    )


def refuse_unfit_key(kind: T.DataType, what: str, name: str) -> None:
    """Raise GraphError for a key of a type whose values cannot be compared."""
    if isinstance(kind, UNFIT_KEYS):
        raise GraphError(
            f"{what} {name}, a {kind.simpleString()}",
            why="values of that type cannot be compared reliably",
            what_to_do="key by its parts: a string, a whole number, a date, a timestamp or a decimal",
        )
    if isinstance(kind, T.StringType) and not kind.isUTF8BinaryCollation():
        raise GraphError(
            f"{what} {name}, a {kind.simpleString()}",
            why="Spark takes different texts for equal under its collation, and state in Python would not",
            what_to_do=f"key by a STRING that is the same for equal texts, such as F.expr('lower({name})')",
        )


def _declared(declared: StateType) -> T.DataType:
    try:
        kind = declared_type(declared)
        if isinstance(declared, str) and (name := first_required(kind)) is not None:
            raise NoSuchType(f"{name!r} is NOT NULL, and null is a key like others: leave NOT NULL away")
        return kind
    except NoSuchType as error:
        what = f"the type of the key is {declared!r}"
        if isinstance(declared, str):
            what = "the type of the key cannot be read"
        raise SchemaError(what, why=str(error), what_to_do=_SAY_IT) from None


def _hinted(call: Callable[[Any], Any]) -> T.DataType:
    """Return the type of what a function returns, by its hint: one value, or the parts of a tuple."""
    try:
        return _type_of(return_hint(call))
    except NoSuchType as error:
        raise SchemaError(
            "the type of the key that the function of key_by() makes is not known",
            why=str(error),
            what_to_do=f"{_SAY_IT}; or give the function a hint for what it returns",
        ) from None


def _type_of(hint: Any) -> T.DataType:
    hint = without_none(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments and Ellipsis not in arguments:
        return T.StructType([T.StructField(f"key{at}", type_of(one)) for at, one in enumerate(arguments)])
    try:
        return fields_of(hint)
    except NoSuchType:
        return type_of(hint)


def with_computed_keys(
    frame: DataFrame, keys: Sequence[Key], uid: str, origins: Origins
) -> tuple[DataFrame, tuple[str | Column, ...]]:
    """Return a frame with the columns that a function makes keys in, and what it is keyed by then.

    The key groups are those of columns with the same values, since Spark computes the hash of both.

    Parameters
    ----------
    frame
        Records, or records and control rows.
    uid
        The operator's, for errors.
    """
    functions = [key for key in keys if isinstance(key, KeyFunction)]
    if not functions:
        return frame, tuple(key for key in keys if not isinstance(key, KeyFunction))
    worker = key_worker(functions[0], frame.schema, uid, origins)
    # Columns and not names: to an aggregate these keys are no fields of the records.
    return map_in_arrow(frame, worker, worker.columns), tuple(F.col(name) for name in worker.names)


def key_worker(key: KeyFunction, given: T.StructType, uid: str, origins: Origins) -> AppendColumns:
    """Return what adds the parts of an operator's key to rows of `given`; see :func:`with_computed_keys`."""
    function = RowFunction(uid, key.call, key.rich, origins, f"the key function of operator '{uid}'")
    names = tuple(f"{PREFIX}key{at}" for at in range(len(key.parts)))
    return AppendColumns(function, given, key.parts, names)
