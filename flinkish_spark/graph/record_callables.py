"""Functions of single records as a user gives them: what is called, and what has to be opened for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flinkish_spark.arguments import refuse_async, refuse_if_never_run
from flinkish_spark.errors import GraphError
from flinkish_spark.functions import FilterFunction, FlatMapFunction, MapFunction, RichFunction
from flinkish_spark.stream_functions import CoFlatMapFunction, CoMapFunction

#: By method: the class that stands for a function of one record, the one for two inputs, its two methods.
_KINDS: dict[str, tuple[type[RichFunction], type[RichFunction] | None, tuple[str, str]]] = {
    "map": (MapFunction, CoMapFunction, ("map1", "map2")),
    "flat_map": (FlatMapFunction, CoFlatMapFunction, ("flat_map1", "flat_map2")),
    "filter": (FilterFunction, None, ("", "")),
}


@dataclass(frozen=True)
class RecordCall:
    """What is called with each record of one input.

    Parameters
    ----------
    call
        From a record to what comes of it.
    rich
        Whose method that is, to be opened and closed; None for a plain function.
    """

    call: Callable[[Any], Any]
    rich: RichFunction | None


def record_call(function: Any, method: str, uid: str | None = None) -> RecordCall:
    """Return what `map`, `flat_map` or `filter` of a stream calls.

    Raises
    ------
    GraphError
        It cannot be called with a record.
    ConfigError
        It is async, or a generator where one result is wanted: a call would run nothing.
    """
    kind = _KINDS[method][0]
    if isinstance(function, kind):
        return _checked(RecordCall(getattr(function, method), function), method, uid)
    if not callable(function) or (isinstance(function, type) and issubclass(function, RichFunction)):
        raise GraphError(
            f"{_where(method, uid)} got {_what(function)}",
            what_to_do=f"give it a function of one record, or an instance of a {kind.__name__} subclass",
            uid=uid or "",
        )
    return _checked(RecordCall(function, None), method, uid)


def connected_calls(
    first: Any, second: Any, method: str, uid: str | None = None
) -> tuple[RecordCall, RecordCall]:
    """Return what `map` or `flat_map` of connected streams calls with the records of each.

    Parameters
    ----------
    first, second
        One object with a method for each input; or a function for each.

    Raises
    ------
    GraphError, ConfigError
        As of :func:`record_call`; or there is one function too many, or too few.
    """
    kind, methods = _KINDS[method][1:]
    assert kind is not None
    if isinstance(first, kind):
        if second is None:
            left, right = (_checked(RecordCall(getattr(first, one), first), method, uid) for one in methods)
            return left, right
        why = f"a {kind.__name__} has a method for each of the two streams"
    elif second is None:
        why = "two streams are connected"
    else:
        return record_call(first, method, uid), record_call(second, method, uid)
    raise GraphError(
        f"{_where(method, uid)} of connected streams got {_what(first)}, and "
        f"{'nothing' if second is None else _what(second)} beside it",
        why=why,
        what_to_do=f"give it an instance of a {kind.__name__} subclass alone, or a function for each stream",
        uid=uid or "",
    )


def _checked(made: RecordCall, method: str, uid: str | None) -> RecordCall:
    if method == "flat_map":
        refuse_async(made.call, (), _where(method, uid))
    else:
        refuse_if_never_run(made.call, f"the function of {_where(method, uid)}")
    return made


def _where(method: str, uid: str | None) -> str:
    return f"{method}()" if uid is None else f"{method}() of '{uid}'"


def _what(function: Any) -> str:
    if isinstance(function, type):
        return f"the class {function.__name__}"
    return f"a {type(function).__name__}"
