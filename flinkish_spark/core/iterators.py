"""Iteration over results of user code, in which a failure is not taken for the end.

Python ends an iteration with an exception, StopIteration. A function that raises it for another reason (most
often by a `next()` of something empty) ends a `map` that calls it: the caller gets the first elements and no
error. Generators are safe from it (PEP 479). In other iterators the traceback tells: that of a true end has
no frames of Python but those of the iterator's own methods. If C code swallows the StopIteration, as in
`chain` or `map(next, ...)`, nothing tells, and the iteration ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any, TypeVar

_T = TypeVar("_T")

#: Errors that user code raises. GeneratorExit is no Exception, and means something to generators only.
USER_ERRORS = (Exception, GeneratorExit)


class NotAnEnd(RuntimeError):
    """User code raised StopIteration where that would be taken for the end of an iteration."""

    def __init__(self, error: StopIteration, what: str) -> None:
        super().__init__(f"StopIteration was raised by {what}: {error}".removesuffix(": "))
        self.what = what


#: Types of results of calls that have run nothing yet.
NOT_RUN = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


class NotRun(TypeError):
    """A call of a user's function returned a coroutine or a generator: nothing has run."""


def refuse_not_run(result: _T, what: str) -> _T:
    if type(result) in NOT_RUN:
        kind = type(result).__name__.replace("_", " ")
        if isinstance(result, CoroutineType):
            result.close()
        raise NotRun(f"{what} returned a {kind}, of which nothing has run: let it return the value itself")
    return result


def is_true(answer: Any, what: str) -> bool:
    """Return whether a user's function returned true; refuse a coroutine, which would count as true."""
    return answer if answer is True or answer is False else bool(refuse_not_run(answer, what))


def elements_of(given: Iterable[_T]) -> Iterable[_T]:
    """Return the same elements; iterating over them raises NotAnEnd if they only seem to end."""
    kind = type(given)
    if kind is list or kind is tuple or kind is GeneratorType:
        return given
    iterator = iter(refuse_not_run(given, "the function"))
    return iterator if type(iterator) is GeneratorType else _watch(iterator)


def pairs_of(given: Any) -> Any:
    return given if hasattr(given, "keys") else elements_of(given)


def guard_call(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return a function that raises NotAnEnd where the given one raises StopIteration."""
    return partial(_call, function)


def _call(function: Callable[..., _T], *given: Any) -> _T:
    try:
        return function(*given)
    except StopIteration as error:
        name = getattr(function, "__name__", None) or type(function).__name__
        raise NotAnEnd(error, f"{name}()") from error


def _watch(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            one = next(iterator)
        except StopIteration as error:
            frame = _innermost(error.__traceback__)
            if frame is None or _is_method_of_iterator(frame):
                return
            raise NotAnEnd(error, f"{frame.f_code.co_name}()") from error
        yield one


def _innermost(trace: TracebackType | None) -> FrameType | None:
    """Return the frame of Python below ours in which an error was raised; None if there is none."""
    found, trace = None, None if trace is None else trace.tb_next
    while trace is not None:
        # Cython makes frames, too, by the names of its methods; an end is raised there as in C.
        if "." not in trace.tb_frame.f_code.co_name:
            found = trace.tb_frame
        trace = trace.tb_next
    return found


def _is_method_of_iterator(frame: FrameType) -> bool:
    """Return whether the frame is of an iterator's own method; one iterator may call another."""
    code = frame.f_code
    if code.co_name == "__next__":
        return True
    if not code.co_argcount:
        return False
    kind = type(frame.f_locals.get(code.co_varnames[0]))
    if not issubclass(kind, Iterator):
        return False
    methods = (one for base in kind.__mro__ for one in vars(base).values())
    return any(getattr(one, "__code__", None) is code for one in methods)
