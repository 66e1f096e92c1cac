"""What a function emits, by the hints of its methods, where nobody says it as DDL."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.errors import SchemaError
from flinkish_spark.functions import AggregateFunction
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.hinted_types import NoSuchType, fields_of, is_record, named, without_none
from flinkish_spark.windows.functions import WINDOW_BOUNDS, ProcessWindowFunction, WithWindow

_MANY = (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator)
_LISTS = (list, collections.abc.Sequence)

#: Stands for a hint that is not there.
_NO_HINT = inspect.Signature.empty


def inferred_output(
    call: Callable[..., Any], what: str, *others: Callable[..., Any], is_iterable: bool
) -> T.StructType:
    """Return the fields of the rows that a function emits, by the hints for what it returns.

    Parameters
    ----------
    what
        Names the operator in errors.
    others
        What else emits such rows; the first function counts whose hint says fields.
    is_iterable
        Whether a call returns several rows, as a generator does.

    Raises
    ------
    SchemaError
        None has a hint for what it returns that says fields.

    Examples
    --------
    >>> def rows(line: str) -> collections.abc.Iterator[tuple[str, int]]:
    ...     yield line, len(line)
    >>> inferred_output(rows, "'lengths'", is_iterable=True).simpleString()
    'struct<_1:string,_2:bigint>'
    """
    reasons = []
    for one in (call, *others):
        try:
            hint = return_hint(one)
            return fields_of(_row_of(hint) if is_iterable else without_none(hint))
        except NoSuchType as error:
            reasons.append(f"{_name_of(one)}: {error}")
    hint_text = "Iterator[Total]" if is_iterable else "Total"
    raise SchemaError(
        f"the output of {what} is not known",
        why="; ".join(reasons),
        what_to_do='say output="user STRING, total LONG", or let the hint for what '
        f"{_name_of(call)} returns be `-> {hint_text}`, with a dataclass or a NamedTuple `Total`",
    )


def aggregate_output(
    aggregate: AggregateFunction, then: ProcessWindowFunction | None, what: str
) -> T.StructType:
    """Return the fields of the results of an aggregate, or of what a window function makes of them.

    Raises
    ------
    SchemaError
        As of :func:`inferred_output`.
    """
    if then is not None and not isinstance(then, WithWindow):
        return inferred_output(then.process, what, is_iterable=True)
    result = inferred_output(aggregate.get_result, what, is_iterable=False)
    if then is None:
        return result
    bounds = parse_ddl(WINDOW_BOUNDS)
    assert isinstance(bounds, T.StructType)
    return T.StructType([*result, *bounds])


def return_hint(call: Callable[..., Any]) -> Any:
    """Return the hint for what a function returns; the other hints are not read.

    Raises
    ------
    NoSuchType
        It has none, or one that cannot be evaluated.
    """
    while isinstance(call, functools.partial):
        call = call.func
    # An object that can be called has its hints where it says how.
    routine: Any = call if inspect.isroutine(call) else type(call).__call__
    routine = inspect.unwrap(getattr(routine, "__func__", routine))
    hint = getattr(routine, "__annotations__", {}).get("return", _NO_HINT)
    if hint is _NO_HINT:
        raise NoSuchType("there is no hint for what it returns")
    # Classes that are defined in a function are known to those that use them.
    holder: Any = type("Holder", (), {"__annotations__": {"row": hint}})
    try:
        return typing.get_type_hints(holder, routine.__globals__, _nonlocals(routine))["row"]
    except Exception as error:
        # A hint may be any expression, which may raise anything.
        says = f"{type(error).__name__}: {error}"
        raise NoSuchType(f"its hint {hint!r} cannot be read here: {says}") from None


def _nonlocals(routine: Any) -> dict[str, Any]:
    """Return the variables of the functions around one that it uses; those without a value are left out."""
    found = {}
    for name, cell in zip(routine.__code__.co_freevars, routine.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _row_of(hint: Any) -> Any:
    """Return what an iterable holds."""
    plain = without_none(hint)
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin in (*_MANY, *_LISTS) and arguments:
        return arguments[0]
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return arguments[0]
    if is_record(plain):
        raise NoSuchType(f"{named(plain)} is one row, and it returns rows: Iterator[{named(plain)}]")
    raise NoSuchType(f"{named(hint)} does not say what it holds")


def _name_of(call: Callable[..., Any]) -> str:
    return f"{getattr(call, '__name__', type(call).__name__)}()"
