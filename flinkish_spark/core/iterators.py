"""What a user's code returns, gone through so that an iterator that fails is not one that ends.

Python says "there is no more" with an exception, StopIteration. A function that raises it for another reason
(most often a `next()` of something empty) ends a `map` that calls it, and whoever goes through that has the
first part and no error. Generators have been safe from it since PEP 479; `map`, `filter`, what is in
`itertools`, and iterators that are written as classes are not.

Two things tell the difference. What is built of functions and other iterators says of which, so it is built
again with functions that cannot be mistaken. And the end of an iterator has no frames of Python in its
traceback, but for those of the iterator's own methods.
"""

from __future__ import annotations

import gc
import itertools
import warnings
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


#: Nothing can fail in these, or what fails is not taken for the end.
_SOUND: frozenset[type] = frozenset(
    {
        GeneratorType,
        *map(type, map(iter, ([], (), {}, {}.values(), {}.items(), set(), frozenset(), range(0), "", b""))),
    }
)
_BY_INDEX = type(iter(type("Indexed", (), {"__getitem__": lambda self, at: at})()))
_BY_CALLS = type(iter(int, 1))
#: Made of functions and iterators, which their `__reduce__` tells; for `itertools` until Python 3.13.
_BUILT: frozenset[type] = frozenset(
    {
        map, filter, zip, enumerate, itertools.accumulate, itertools.chain, itertools.compress,
        itertools.cycle, itertools.dropwhile, itertools.filterfalse, itertools.groupby, itertools.islice,
        itertools.starmap, itertools.takewhile, itertools.zip_longest,
    }
)  # fmt: skip


def elements_of(given: Iterable[_T]) -> Iterable[_T]:
    """Return the same elements; going through them raises where they only seem to end."""
    kind = type(given)
    if kind is list or kind is tuple or kind is GeneratorType:
        return given
    return _sound(iter(refuse_not_run(given, "the function")))


def pairs_of(given: Any) -> Any:
    return given if hasattr(given, "keys") else elements_of(given)


def called(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return a function that raises NotAnEnd where the given one raises StopIteration."""
    return partial(_call, function)


def _call(function: Callable[..., _T], *given: Any) -> _T:
    try:
        return function(*given)
    except StopIteration as error:
        raise NotAnEnd(error, _name(function)) from error


def _name(function: Any) -> str:
    return f"{getattr(function, '__name__', None) or type(function).__name__}()"


def _sound(iterator: Iterator[Any]) -> Iterator[Any]:
    kind = type(iterator)
    if kind in _SOUND:
        return iterator
    if kind is _BY_INDEX:
        return _of_sequence(iterator)
    if kind is _BY_CALLS:
        return _of_calls(iterator)
    if kind is itertools.pairwise:
        return _paired(iterator)
    rebuilt = _rebuilt(iterator) if kind in _BUILT else None
    return _watched(iterator if rebuilt is None else rebuilt)


def _rebuilt(iterator: Iterator[Any]) -> Iterator[Any] | None:
    """Return an iterator that goes on from here with sound parts; None where it does not tell its parts."""
    if (going_on := _of_held(iterator)) is not None:
        return going_on
    with warnings.catch_warnings():
        # Told of `itertools` from Python 3.12 on: they will not tell their parts any more.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            make, given, *state = _parts_of(iterator)
        except TypeError:
            return None
        made: Any = make(*map(_sound_part, given))
        if state and state[0] is not None:
            made.__setstate__(state[0])
    rebuilt: Iterator[Any] = iter(made)
    return rebuilt


def _parts_of(iterator: Iterator[Any]) -> Any:
    return iterator.__reduce__()


def _sound_part(part: Any) -> Any:
    if isinstance(part, Iterator):
        return _sound(part)
    return called(part) if callable(part) else part


def _chained(source: Iterator[Iterable[Any]], *active: Iterator[Any]) -> Iterator[Any]:
    for one in active:
        yield from _sound(one)
    for other in _sound(source):
        yield from elements_of(other)


def _paired(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return the same pairs; it has no `__reduce__`, but tells the garbage collector what it holds."""
    held = _held_by(iterator)
    if not held or not hasattr(held[0], "__next__"):
        return iter(())  # It is over.
    # Behind its iterator is the first element of the next pair, once it has begun, and its last result.
    begun = held[1 : 1 + len(held) - len(_held_by(itertools.pairwise(())))]
    return itertools.pairwise(itertools.chain(begun, _sound(held[0])))


def _of_held(iterator: Iterator[Any]) -> Iterator[Any] | None:
    """Return the same out of what the garbage collector is told, of those that go on where a part ends.

    Behind the others a failure is an end, with frames. From Python 3.14 on `itertools` has no `__reduce__`;
    before, that of a `groupby` forgets of which group some was read.
    """
    kind, held = type(iterator), _held_by(iterator)
    if kind is itertools.chain:
        return _chained(*held) if held else iter(())
    if kind is itertools.groupby:
        return _grouped(*held)
    if kind is itertools.cycle and len(held) == 2:
        return _cycled(*held)
    if kind is itertools.zip_longest:
        parts, _, fill = held
        # A part that is over is missing in the tuple: nobody may look into it then.
        if len(gc.get_referents(parts)) == len(parts):
            return itertools.zip_longest(*map(_sound, parts), fillvalue=fill)
    return None


def _grouped(iterator: Iterator[Any], key: Callable[[Any], Any] | None, *state: Any) -> Iterator[Any]:
    """Return the groups behind the one that was begun, whose key and next element are in `state`."""
    key_of = None if key is None else called(key)
    rest = itertools.chain(state[2:], _sound(iterator))
    if not state:
        return itertools.groupby(rest, key_of)

    def is_in_begun(one: Any) -> bool:
        its = one if key_of is None else key_of(one)
        return its is state[0] or bool(its == state[0])

    return itertools.groupby(itertools.dropwhile(is_in_begun, rest), key_of)


def _cycled(iterator: Iterator[Any], seen: list[Any]) -> Iterator[Any]:
    again = [*seen]
    for one in _sound(iterator):
        again.append(one)
        yield one
    while again:
        yield from again


def _held_by(iterator: Iterator[Any]) -> list[Any]:
    return [one for one in gc.get_referents(iterator) if one is not type(iterator)]


def _of_sequence(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield what `__getitem__` returns for 0, 1, 2, ...; Python takes StopIteration of it for the end."""
    _, (sequence,), *at = _parts_of(iterator)
    if not at:
        return
    for index in itertools.count(at[0]):
        try:
            one = _call(sequence.__getitem__, index)
        except IndexError:
            return
        yield one


def _of_calls(iterator: Iterator[Any]) -> Iterator[Any]:
    _, (function, *sentinel) = _parts_of(iterator)
    return iter(called(function), sentinel[0]) if sentinel else iter(())


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
