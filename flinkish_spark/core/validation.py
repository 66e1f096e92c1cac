"""Checks of what a user hands to a public call, at that call.

Nothing is converted, and nothing that is wrong counts as left out: a word is no enum, None no number,
a class none of its instances. The rules of `protocol/` raise ValueError for their own values;
:func:`refused_as_config_errors` makes what a user sees of that.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Return the error about an argument.

    Parameters
    ----------
    name
        The argument; its value is a time in milliseconds if it ends with ``_ms``.
    value
        What it was given.
    wanted
        What it must be, as the end of "it must be".
    what_to_do
        What to write in its place.
    choices
        The members of an enum, as code says them: a text that is like one of them may mean it.
    """
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
def refused_as_config_errors(what_to_do: str) -> Iterator[None]:
    """Raise ConfigError in place of the ValueError of a rule."""
    try:
        yield
    except UnusableValueError as wrong:
        raise unusable(
            wrong.name, wrong.value, wanted=wrong.wanted, what_to_do=what_to_do, choices=wrong.choices
        ) from None
    except ValueError as wrong:
        raise ConfigError(str(wrong), what_to_do=what_to_do) from None


def instance_of(name: str, value: object, kind: type[_T], *, what_to_do: str) -> _T:
    """Return `value` if it is an instance of `kind`, else raise ConfigError."""
    if not isinstance(value, kind):
        wanted = f"an instance of {kind.__name__}"
        raise unusable(name, value, wanted=wanted, what_to_do=what_to_do, choices=members_of(kind))
    return value


def members_of(kind: type) -> list[str]:
    """Return the members of an enum as code says them; none of any other class."""
    return [f"{kind.__name__}.{one.name}" for one in kind] if issubclass(kind, enum.Enum) else []


def to_ms(name: str, value: Duration) -> int:
    """Return a length of time in milliseconds; what is no timedelta and no text is left to other checks.

    Examples
    --------
    >>> to_ms("timeout_ms", "10 seconds")
    10000
    """
    with refused_as_config_errors('give milliseconds, or a length of time as text: "10 seconds"'):
        found: int = milliseconds(name, value)
    return found


def to_path(value: str | os.PathLike[str]) -> str:
    """Return a path as text; what is no path is left to other checks."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def hold_plain_values(settings: Any) -> None:
    """Make plain values of what a dataclass was given for its fields of `Milliseconds` and `PathText`."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "Milliseconds" in str(field.type):
            object.__setattr__(settings, field.name, to_ms(field.name, value))
        elif "PathText" in str(field.type):
            object.__setattr__(settings, field.name, to_path(value))


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
    """Return what an argument holds by name, nothing if it was left out, else raise ConfigError.

    Examples
    --------
    >>> values_by_name("options", None, what_to_do="leave it out")
    {}
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise unusable(name, value, wanted="a dict with texts as keys", what_to_do=what_to_do)
    return dict(value)


def with_methods_of(name: str, value: _T, protocol: type, *, what_to_do: str) -> _T:
    """Return `value` if it is an object with the public methods of `protocol`, else raise ConfigError.

    Parameters
    ----------
    protocol
        A protocol or an abstract class; its properties are not looked at.
    """
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if name[0] != "_"]
    # A class has them too, and each of them would miss its `self` when it is called.
    if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
        wanted = f"an object with the methods {', '.join(f'{method}()' for method in methods)}"
        raise unusable(name, value, wanted=wanted, what_to_do=what_to_do)
    return value


def function_object(name: str, value: _T, kind: str, *methods: str) -> _T:
    """Return an object with these methods; raise ConfigError for anything else, also for its class."""
    if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
        raise unusable(
            name, value, wanted=f"an instance of a subclass of {kind}", what_to_do="make one: `MyFunction()`"
        )
    refuse_async(value, methods, f"the {type(value).__name__} that is given as {name}")
    return value


def can_take(function: object, count: int) -> bool:
    """Return whether a function can be called with so many arguments; also where nobody can tell.

    Examples
    --------
    >>> can_take(lambda record: record, 1), can_take(lambda record: record, 2)
    (True, False)
    """
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        # Functions in C may not say what they take.
        return True
    return True


def function_of_two(name: str, value: Callable[[Any, Any], _T]) -> Callable[[Any, Any], _T]:
    """Return a function of two elements; raise ConfigError if it is none."""
    if not can_take(value, 2):
        raise unusable(name, value, wanted="a function of two elements", what_to_do="give one, as a lambda")
    refuse_async(value, (), f"what is given as {name}")
    return value


def reducer(name: str, value: _T) -> _T:
    """Return an object with `reduce`, or a function of two; raise ConfigError for anything else."""
    if isinstance(value, type) or not callable(getattr(value, "reduce", None)):
        checked: Any = value
        function_of_two(name, checked)
        return value
    refuse_async(value, ("reduce",), f"the {type(value).__name__} that is given as {name}")
    return value


def check_aggregate(aggregate: object) -> None:
    """Raise ConfigError unless it is an object that aggregates."""
    methods = ("create_accumulator", "add", "get_result")
    function_object("aggregate", aggregate, "AggregateFunction", *methods)


def refuse_if_never_run(function: object, what: str) -> None:
    """Refuse a function of which a call runs nothing: one that is async, or a generator.

    Nobody awaits or goes through what it returns, and nothing says that it was never run.

    Parameters
    ----------
    what
        How the message begins.

    Raises
    ------
    ConfigError
        With what to do instead.

    Examples
    --------
    >>> refuse_if_never_run(print, "print()")
    """
    why = _why_never_run(function)
    if why:
        raise ConfigError(
            f"{what} would never run",
            why=why,
            what_to_do="define it with `def` and without `yield`; asyncio.run() can be called inside",
        )


def refuse_async(given: object, methods: Sequence[str], what: str) -> None:
    """Refuse a function that is to yield rows, or an object with such methods, if a call runs nothing.

    Parameters
    ----------
    methods
        Names of those that are called; of a function none.
    what
        Names the operator.

    Raises
    ------
    ConfigError
        One is async.
    """
    for one in [getattr(given, name, None) for name in methods] or [given]:
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise ConfigError(
                f"{one.__name__}() of {what} would never run",
                why="it is async, and nobody awaits it",
                what_to_do="define it with `def`; what awaits a system outside is an AsyncFunction, for "
                "AsyncDataStream",
            )


def _why_never_run(function: object) -> str:
    # Of an object its method; of a function this is the same again.
    for one in (function, getattr(type(function), "__call__", None)):  # noqa: B004
        if inspect.iscoroutinefunction(one):
            return "it is a coroutine function"
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            return "it is a generator function"
    return ""
