"""Checks of what users give, made once by declared types: of fields, and of the arguments of calls.

An annotation says what is allowed: types, None and UNLIMITED if it names them, texts (``Literal["python"]``),
the form of a text, or of each text in a list (``Annotated[str, TextPattern(...)]``), bounds of a number
(``Annotated[int, Range(1, 100)]``), and how many arguments a function gets
(``Annotated[Callable[..., Any], Arity(1)]``). Lengths of time and paths are held as int and str, sequences
of texts as a tuple. A protocol is met by an object with its methods. A number without bounds has a rule of
its own. A type that only type checkers import is not checked, and neither is a secret (``repr=False``).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.validation import (
    check_function,
    check_methods,
    members_of,
    methods_of,
    raise_config_errors,
    to_ms,
    to_path,
    unusable,
)
from flinkish_spark.protocol.limits import UNLIMITED, NoLimit, check_factor, check_limit, check_whole


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number; both belong to the range."""

    least: Any
    most: Any = UNLIMITED

    def check(self, name: str, value: Any, kinds: Sequence[Any]) -> None:
        if float in kinds:
            check_factor(name, value, self.least, self.most)
        elif NoLimit in kinds:
            check_limit(name, value, self.least, self.most)
        else:
            check_whole(name, value, self.least, self.most)


@dataclass(frozen=True, slots=True)
class Arity:
    count: int


@dataclass(frozen=True, slots=True)
class TextPattern:
    """A regular expression for the whole of a text, and what it means in words."""

    pattern: str
    wanted: str

    def check(self, name: str, value: Any, what_to_do: str) -> None:
        for one in (value,) if isinstance(value, str) else value:
            if not re.fullmatch(self.pattern, one, re.DOTALL):
                raise unusable(name, value, wanted=self.wanted, what_to_do=what_to_do)


#: A text that names something.
Name = Annotated[str, TextPattern(".+", "a text that is not empty")]
#: A list of such texts.
Names = Annotated[Sequence[str], TextPattern(".+", "a list of texts that are not empty")]

_UNIONS = (typing.Union, types.UnionType)
_CallT = TypeVar("_CallT", bound=Callable[..., Any])


def check_fields(settings: Any, what_to_do: str = "", **by_field: str) -> None:
    """Raise ConfigError for a field whose value its annotation does not allow; convert times and paths."""
    for field, rule in _rules_of(cast(Hashable, type(settings))):
        value = getattr(settings, field.name)
        held = rule.hold(field.name, value, by_field.get(field.name, what_to_do) or rule.advice)
        if held is not value:
            object.__setattr__(settings, field.name, held)


def check_arguments(*apart: str, **what_to_do: str) -> Callable[[_CallT], _CallT]:
    """Let a public call raise ConfigError for an argument that its annotation does not allow.

    Arguments that are named in `apart` have a check of their own.
    """

    def decorate(call: _CallT) -> _CallT:
        signature = inspect.signature(call)

        @functools.cache
        def find_rules() -> dict[str, _Rule]:
            # At the first call, since classes of one module name each other.
            rules = {
                one.name: _make_rule(one.name, one.annotation, call.__module__, one.default is not one.empty)
                for one in signature.parameters.values()
                if one.annotation is not one.empty
                and one.kind is not one.VAR_KEYWORD
                and one.name not in apart
            }
            return {name: rule for name, rule in rules.items() if rule is not None}

        @functools.wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            try:
                bound = signature.bind(*given, **named)
            except TypeError:
                # Python's own error names the function.
                return call(*given, **named)
            for name, rule in find_rules().items():
                if name in bound.arguments:
                    value, advice = bound.arguments[name], what_to_do.get(name) or rule.advice
                    is_many = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                    many = value if is_many else (value,)
                    held = tuple(rule.hold(name, one, advice) for one in many)
                    bound.arguments[name] = held if is_many else held[0]
            return call(*bound.args, **bound.kwargs)

        return cast(_CallT, run)

    return decorate


@dataclass(frozen=True, slots=True)
class _Rule:
    kinds: tuple[Any, ...]
    bounds: Range | None
    takes: int | None
    text: TextPattern | None
    convert: Callable[[str, Any], Any]
    advice: str

    def hold(self, name: str, value: Any, what_to_do: str) -> Any:
        """Return the value as the field holds it; raise ConfigError if it may not hold it."""
        if value is None and type(None) in self.kinds:
            return None
        value = self.convert(name, value)
        if self.takes is not None:
            check_function(value, name, self.takes)
            return value
        for kind in self.kinds:
            if kind not in (int, float) and _fits(value, kind):
                _check_members(name, value, kind)
                if self.text is not None and isinstance(value, str | Sequence):
                    self.text.check(name, value, what_to_do)
                return tuple(value) if typing.get_origin(kind) in (tuple, Sequence) else value
        if int in self.kinds or float in self.kinds:
            if self.bounds is not None:
                with raise_config_errors(what_to_do):
                    self.bounds.check(name, value, self.kinds)
            return value
        names = [one for kind in self.kinds if isinstance(kind, type) for one in members_of(kind)]
        wanted = self._describe(names)
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            # It may have a secret in it.
            members = () if isinstance(value, Mapping) else sorted({type(one).__name__ for one in value})
            what = f"{name} is a {type(value).__name__}{' of ' if members else ''}{', '.join(members)}"
            raise ConfigError(what, why=f"it must be {wanted}", what_to_do=what_to_do, setting=name)
        raise unusable(name, value, wanted=wanted, what_to_do=what_to_do, choices=names)

    def _describe(self, choices: Sequence[str]) -> str:
        """Return what is wanted: choices by name, other classes as instances."""
        classes = [one for one in self.kinds if isinstance(one, type) and one is not type(None)]
        names = [one.__name__ for one in classes if not issubclass(one, enum.Enum) and not _is_protocol(one)]
        methods = [name for one in classes if _is_protocol(one) for name in methods_of(one)]
        parts = [f"one of {', '.join(choices)}"] if choices else []
        parts += [" or ".join(map(repr, typing.get_args(one))) for one in self.kinds if _is_literal(one)]
        parts += [f"an instance of {' or '.join(names)}"] if names else []
        parts += [f"an object with the methods {', '.join(f'{one}()' for one in methods)}"] if methods else []
        maps = [typing.get_args(one)[1] for one in self.kinds if typing.get_origin(one) is Mapping]
        parts += [f"a dict with texts as keys{_describe_values(one)}" for one in maps]
        lists = [typing.get_args(one)[0] for one in self.kinds if typing.get_origin(one) in (tuple, Sequence)]
        parts += [f"a list of {'texts' if one is str else one.__name__}" for one in lists]
        return ", or ".join(parts)


def _fits(value: Any, kind: Any) -> bool:
    found, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if _is_literal(kind):
        return isinstance(value, str) and value in parts
    if parts and found in (tuple, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str) and _are(value, parts[0])
    if parts and found is Mapping:
        is_map = isinstance(value, Mapping) and _are(value, parts[0])
        return is_map and (not _is_plain(parts[1]) or _are(value.values(), parts[1]))
    is_protocol = _is_protocol(found)
    if is_protocol or inspect.isabstract(found):
        # A class has them too, and each of them would miss its `self` when it is called.
        has_all = all(callable(getattr(value, name, None)) for name in methods_of(found))
        return has_all and not isinstance(value, type) and (is_protocol or isinstance(value, found))
    return isinstance(value, found)


def _check_members(name: str, value: Any, kind: Any) -> None:
    """Raise ConfigError for a method that cannot run, of an object or of one in a list."""
    is_list = typing.get_origin(kind) in (tuple, Sequence)
    wanted = typing.get_args(kind)[0] if is_list else kind
    for one in value if is_list else (value,):
        if type(one) is not wanted and not isinstance(one, str | Mapping | Sequence):
            check_methods(one, wanted, f"the {type(one).__name__} that is given as {name}")


def _is_plain(kind: Any) -> bool:
    return isinstance(kind, type) and typing.get_origin(kind) is None


def _describe_values(kind: Any) -> str:
    return f", and a {'text' if kind is str else kind.__name__} for each" if _is_plain(kind) else ""


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _are(values: Iterable[Any], kind: Any) -> bool:
    return kind is Any or all(_fits(one, kind) for one in values)


def _keep(_: str, value: Any) -> Any:
    return value


#: How the value of a field is converted, by a word of its annotation.
_CONVERTED: dict[str, Callable[[str, Any], Any]] = {
    "Milliseconds": to_ms,
    "PathText": lambda _, value: to_path(value),
}


@functools.cache
def _rules_of(kind: type) -> tuple[tuple[dataclasses.Field[Any], _Rule], ...]:
    fields = [one for one in dataclasses.fields(kind) if one.init and one.repr]
    rules = ((one, _rule_of(kind, one)) for one in fields)
    return tuple((one, rule) for one, rule in rules if rule is not None)


def _rule_of(kind: type, field: dataclasses.Field[Any]) -> _Rule | None:
    """Return the rule that a field's annotation means; None if it cannot be read, or says nothing."""
    owner = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
    ours = [base for base in kind.__mro__ if base.__module__.startswith("flinkish_spark.")]
    if ours and owner not in ours:
        # A field that a user's subclass of ours has added.
        return None
    has_default = not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
    return _make_rule(field.name, field.type, owner.__module__, has_default)


def _make_rule(name: str, annotation: Any, module: str, has_default: bool) -> _Rule | None:
    try:
        # Alone, since another field's type may be one that cannot be read.
        alone = type("", (), {"__annotations__": {"hint": annotation}, "__module__": module})
        hint = typing.get_type_hints(alone, include_extras=True)["hint"]
    except NameError:
        return None
    notes: list[Any] = []
    parts = [hint]
    kinds: list[Any] = []
    while parts:
        one = parts.pop(0)
        if typing.get_origin(one) is Annotated:
            one, *more = typing.get_args(one)
            notes += more
        if typing.get_origin(one) in _UNIONS:
            parts = [*typing.get_args(one), *parts]
        else:
            origin = typing.get_origin(one)
            kinds.append(type(None) if one is None else origin if _is_protocol(origin) else one)
    takes = next((one.count for one in notes if isinstance(one, Arity)), None)
    if Any in kinds or (takes is None and any(typing.get_origin(one) is Callable for one in kinds)):
        return None
    convert = next((one for word, one in _CONVERTED.items() if word in str(annotation)), _keep)
    bounds = next((one for one in notes if isinstance(one, Range)), None)
    text = next((one for one in notes if isinstance(one, TextPattern)), None)
    return _Rule(tuple(kinds), bounds, takes, text, convert, _advise(kinds, name, has_default))


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOU" else "a"


def _advise(kinds: Sequence[Any], name: str, has_default: bool) -> str:
    ours = [one.__name__ for one in kinds if getattr(one, "__module__", "").startswith("flinkish_spark.")]
    names = [one for one in ours if one != "NoLimit"]
    advice = f"give {' or '.join(f'{_article(name)} {name}' for name in names)}"
    if any(isinstance(one, type) and issubclass(one, enum.Enum) for one in kinds):
        advice = "give one of these, without quotes"
    elif any(inspect.isabstract(one) for one in kinds):
        advice = f"give an object of a subclass of {' or '.join(names)}"
    elif not names:
        advice = f"correct {name}"
    return f"{advice}, or leave it out" if has_default else advice
