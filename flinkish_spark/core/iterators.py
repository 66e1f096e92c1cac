"""What a user's code returns, gone through so that an iterator that fails is not one that ends.

Python says "there is no more" with an exception, StopIteration. A function that raises it for another reason
(most often a `next()` of something empty) ends a `map` that calls it, and whoever goes through that has the
first part and no error. Generators are safe from it (PEP 479). In other iterators the traceback tells: an end
has no frames of Python in it, but for those of the iterator's own methods. Where C takes a StopIteration for
an end itself, as in `chain` or `map(next, ...)`, nothing tells, and Python ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any, TypeVar

_T = TypeVar("_T")

#: What code of the user's raises. GeneratorExit is no Exception, and means something to generators only.
USER_ERRORS = (Exception, GeneratorExit)


class NotAnEnd(RuntimeError):
    """Code of the user's raised StopIteration where that would be taken for the end of something."""

    def __init__(self, error: StopIteration, what: str) -> None:
        super().__init__(f"StopIteration was raised by {what}: {error}".removesuffix(": "))
        self.what = what


#: What a call has returned that has run nothing.
NOT_RUN = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


class NotRun(TypeError):
    """A call of a function of the user's has returned a coroutine or a generator: nothing has run."""


def refuse_not_run(result: _T, what: str) -> _T:
    if type(result) in NOT_RUN:
        kind = type(result).__name__.replace("_", " ")
        if isinstance(result, CoroutineType):
            result.close()
        raise NotRun(f"{what} returned a {kind}, of which nothing has run: let it return the value itself")
    return result


def is_true(answer: Any, what: str) -> bool:
    """Return whether a function of the user's has said yes; what is yet to be run would be true."""
    return answer if answer is True or answer is False else bool(refuse_not_run(answer, what))


def elements_of(given: Iterable[_T]) -> Iterable[_T]:
    """Return the same elements; going through them raises where they only seem to end."""
    kind = type(given)
    if kind is list or kind is tuple or kind is GeneratorType:
        return given
    iterator = iter(refuse_not_run(given, "the function"))
    return iterator if type(iterator) is GeneratorType else _watched(iterator)


def pairs_of(given: Any) -> Any:
    return given if hasattr(given, "keys") else elements_of(given)


def called(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return a function that raises NotAnEnd where the given one raises StopIteration."""
    return partial(_call, function)


def _call(function: Callable[..., _T], *given: Any) -> _T:
    try:
        return function(*given)
    except StopIteration as error:
        name = getattr(function, "__name__", None) or type(function).__name__
        raise NotAnEnd(error, f"{name}()") from error


def _watched(iterator: Iterator[Any]) -> Iterator[Any]:
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
    """Return whether an iterator raised it itself; one may ask another one."""
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
