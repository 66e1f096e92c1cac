"""Checks of the arguments of public calls, made at the call.

Nothing is converted, and no wrong value counts as left out: a word is no enum, None no number, a class none
of its instances. The rules of `protocol/` raise ValueError for their own values; :func:`raise_config_errors`
turns that into an error for users.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.suggestions import closest
from flinkish_spark.protocol.durations import Duration, milliseconds
from flinkish_spark.protocol.limits import UnusableValueError

_T = TypeVar("_T")


def unusable(
    name: str, value: object, *, wanted: str, what_to_do: str, choices: Sequence[str] = ()
) -> ConfigError:
    unit = " (milliseconds)" if name.endswith("_ms") and "millisecond" not in wanted else ""
    names = {one.rpartition(".")[2]: one for one in choices}
    near = closest(value.rpartition(".")[2], names) if isinstance(value, str) else ""
    return ConfigError(
        f"{name} is {value!r} ({type(value).__name__})",
        why=f"it must be {wanted}{unit}" + (f". {near}" if near else ""),
        what_to_do=what_to_do,
        setting=name,
        value=value,
    )


@contextmanager
def raise_config_errors(what_to_do: str) -> Iterator[None]:
    """Raise a ConfigError in place of the ValueError of a rule in the block."""
    try:
        yield
    except UnusableValueError as wrong:
        raise unusable(
            wrong.name, wrong.value, wanted=wrong.wanted, what_to_do=what_to_do, choices=wrong.choices
        ) from None
    except ValueError as wrong:
        raise ConfigError(str(wrong), what_to_do=what_to_do) from None


def instance_of(name: str, value: object, kind: type[_T], *, what_to_do: str) -> _T:
    if not isinstance(value, kind):
        wanted = f"an instance of {kind.__name__}"
        raise unusable(name, value, wanted=wanted, what_to_do=what_to_do, choices=members_of(kind))
    return value


def members_of(kind: type) -> list[str]:
    return [f"{kind.__name__}.{one.name}" for one in kind] if issubclass(kind, enum.Enum) else []


def to_ms(name: str, value: Duration) -> int:
    """Return a length of time in milliseconds; other types than timedelta and str are returned unchanged."""
    with raise_config_errors('give milliseconds, or a length of time as text: "10 seconds"'):
        found: int = milliseconds(name, value)
    return found


def to_path(value: str | os.PathLike[str]) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def refuse_unknown_parameters(kind: type, given: Iterable[str]) -> None:
    """Raise TypeError about a parameter that the constructor of a class does not have, as Python does."""
    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    for name in given:
        if name not in known and not takes_all:
            names = [one for one in known if one != "self"]
            near = closest(name, names)
            meant = f"{near} To do: correct the name." if near else f"To do: choose from {', '.join(names)}."
            raise TypeError(f"{kind.__name__} has no parameter '{name}'. {meant}")


def values_by_name(name: str, value: object, *, what_to_do: str) -> dict[str, Any]:
    """Return a dict argument, empty if it was left out; raise ConfigError if it is no dict with text keys."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise unusable(name, value, wanted="a dict with texts as keys", what_to_do=what_to_do)
    return dict(value)


_ASYNC = "it is async, and nobody awaits it"
_GENERATOR = "it is a generator function"
_ASYNC_GENERATOR = "it is async, and a generator function"
_DEFINE = {
    _ASYNC: "define it with `def`; a function that awaits a system outside is an AsyncFunction, for "
    "AsyncDataStream",
    _GENERATOR: "define it without `yield`",
    _ASYNC_GENERATOR: "define it with `def` and without `yield`",
}


def check_function(function: object, what: str, takes: int | None, *, is_rows: bool = False) -> None:
    """Raise ConfigError unless a user's function can be called with this number of arguments, and runs."""
    wanted = "a function" if takes is None else f"a function that can be called with {_arguments(takes)}"
    # A class of ours is meant to be made; any other one may be a function, as `int` is.
    is_ours = isinstance(function, type) and any(
        base.__module__.startswith("flinkish_spark.") for base in function.__mro__
    )
    if not callable(function) or is_ours:
        raise unusable(what, function, wanted=wanted, what_to_do="give one, as a lambda")
    why = _why_not_run(function)
    if why and not (is_rows and why == _GENERATOR):
        raise _never_run(what, why)
    if takes is not None and not can_take(function, takes):
        raise unusable(what, function, wanted=wanted, what_to_do=f"let it take {_arguments(takes)}")


def check_methods(value: object, kind: type, what: str, *, may_await: Sequence[str] = ()) -> None:
    """Raise ConfigError unless each method of an object can be called as its class declares, and runs."""
    # A method may be a generator if the class declares that it returns rows, and async if the class's is.
    first = 0 if isinstance(value, type) else 1
    for name, own in methods_of(kind).items():
        method = getattr(value, name, None)
        if method is None or getattr(method, "__func__", method) is own:
            continue
        is_awaited = inspect.iscoroutinefunction(own) or name in may_await
        _check_method(method, name, what, _list_required(own)[first:], _returns_rows(own), is_awaited)


def _check_method(
    method: object,
    name: str,
    what: str,
    takes: Sequence[str],
    is_rows: bool = False,
    is_awaited: bool = False,
) -> None:
    said = f"{what}{name}()" if what.endswith(".") else f"{name}() of {what}"
    why = _why_not_run(method)
    if not (is_rows and why == _GENERATOR) and not (is_awaited and why == _ASYNC) and why:
        raise _never_run(said, why)
    if not can_take(method, len(takes)):
        raise ConfigError(
            f"{said} cannot be called with {_arguments(len(takes))}",
            what_to_do=f"define it as `def {name}({', '.join(['self', *takes])})`",
        )


def function_object(name: str, value: _T, kind: type) -> _T:
    """Return the value if it has the methods of a function class; raise ConfigError otherwise."""
    needed = [one for one, own in methods_of(kind).items() if getattr(own, "__isabstractmethod__", False)]
    _check_object(name, value, kind.__name__, needed)
    check_methods(value, kind, f"the {type(value).__name__} that is given as {name}")
    return value


def _check_object(name: str, value: object, kind: str, needed: Iterable[str]) -> None:
    if isinstance(value, type) or not all(callable(getattr(value, one, None)) for one in needed):
        raise unusable(
            name, value, wanted=f"an instance of a subclass of {kind}", what_to_do="make one: `MyFunction()`"
        )


#: Aggregate and reduce functions are duck-typed: the parameters of each method.
_OPENED = {"open": ("context",), "close": ()}
_AGGREGATE: dict[str, tuple[str, ...]] = {
    "create_accumulator": (),
    "add": ("value", "accumulator"),
    "get_result": ("accumulator",),
}
_AGGREGATE_TOO: dict[str, tuple[str, ...]] = {
    "merge": ("first", "second"),
    "retract": ("value", "accumulator"),
    **_OPENED,
}


def check_aggregate(aggregate: object, *, name: str = "aggregate", retracts: bool = False) -> None:
    """Raise ConfigError unless it has the methods of an AggregateFunction, and `retract` if `retracts`."""
    needed = ["retract"] if retracts else list(_AGGREGATE)
    _check_object(name, aggregate, f"AggregateFunction{' with retract' if retracts else ''}", needed)
    _check_duck(name, aggregate, {**_AGGREGATE, **_AGGREGATE_TOO})


def reducer(name: str, value: _T) -> _T:
    """Return an object with `reduce`, or a function of two; raise ConfigError for anything else."""
    if isinstance(value, type) or not callable(getattr(value, "reduce", None)):
        check_function(value, name, 2)
    else:
        _check_duck(name, value, {"reduce": ("first", "second"), **_OPENED})
    return value


def _check_duck(name: str, value: object, methods: Mapping[str, Sequence[str]]) -> None:
    for method, takes in methods.items():
        if (own := getattr(value, method, None)) is not None:
            # It may be another function under that name.
            named = getattr(own, "__name__", method)
            _check_method(own, named, f"the {type(value).__name__} that is given as {name}", takes)


def can_take(function: object, count: int) -> bool:
    """Return whether a function can be called with `count` arguments; True if that cannot be known."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        # Functions in C may have no signature.
        return True
    return True


def _never_run(what: str, why: str) -> ConfigError:
    return ConfigError(f"{what} would never run", why=why, what_to_do=_DEFINE[why])


def _why_not_run(function: object) -> str:
    """Return why a call of the function would run nothing; empty if it would run."""
    while isinstance(function, functools.partial | functools._lru_cache_wrapper):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    # Of an object its method; of a function this is the same again.
    for one in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(one):
            return _ASYNC
        if inspect.isasyncgenfunction(one):
            return _ASYNC_GENERATOR
        if inspect.isgeneratorfunction(one):
            return _GENERATOR
    return ""


@functools.cache
def methods_of(kind: type) -> dict[str, Any]:
    return {name: own for name, own in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


def _returns_rows(function: Any) -> bool:
    said = str(getattr(function, "__annotations__", {}).get("return", ""))
    return any("Itera" in str(function.__globals__.get(word, word)) for word in re.findall(r"\w+", said))


def _list_required(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in by_place and one.default is one.empty]


def _arguments(count: int) -> str:
    return {0: "no argument", 1: "one argument"}.get(count, f"{count} arguments")
