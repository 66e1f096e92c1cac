"""Dataclasses as JSON, written and read by the type hints of their fields.

- A :class:`StoredObject` is stored as an object with a member per field, a :class:`StoredRow` as a list of
  its fields' values, and a :class:`StoredScalar` as the value of its only field.
- A hint is the type that is stored: `int`, `str`, `bool`, `float`, `Any`, an enum by its value, a class of
  these three or one with `to_json` and `from_json` of its own, a union of classes with a `TAG`; `X | None`,
  `tuple`, `Sequence`, `frozenset` (in order), `Mapping`. `Annotated` adds a :class:`Check`, or a
  :class:`Form` that replaces all of these.
- :func:`store_as` is the metadata of a field whose member has another name or place, or may be left out.

Reading is strict and converts nothing: a value of another type, a missing member, or a value that a class
refuses raises :class:`StoredFormError` with its place. Unknown members are ignored; a class that `IS_CLOSED`
refuses them. Nothing that is read names a class or runs code.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Annotated, Any, ClassVar, Self

from flinkish_spark.protocol.limits import UNLIMITED, Limit, UnusableValueError, check_whole

_Convert = Callable[[Any], Any]
_SCALARS = {
    int: ("a whole number", (int,)),
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    float: ("a number", (int, float)),
}
_UNIONS = (typing.Union, types.UnionType)
_ABSENT = object()
#: Key of our entry in a field's metadata.
_MEMBER = "flinkish_spark.stored"


class StoredFormError(ValueError):
    """A stored value does not have the expected form; the message says at which place."""

    def __init__(self, says: str, joint: str = ": ") -> None:
        super().__init__(says, joint)
        self._says, self._joint, self._place = says, joint, ""

    def __str__(self) -> str:
        return f"{self._place}{self._joint}{self._says}" if self._place else self._says

    def add_place(self, outer: str) -> None:
        joint = "." if outer and self._place and not self._place.startswith("[") else ""
        self._place = f"{outer}{joint}{self._place}"


class Presence(enum.Enum):
    """How a field appears among the members of its object."""

    ALWAYS = enum.auto()
    #: The member is left out if the field has its default.
    LEFT_OUT = enum.auto()
    #: The field has no member of its own: the members of its value are members of the object.
    INLINE = enum.auto()


@dataclass(frozen=True, slots=True)
class _Member:
    key: str = ""
    presence: Presence = Presence.ALWAYS
    at: int | None = None


def store_as(key: str = "", presence: Presence = Presence.ALWAYS, at: int | None = None) -> dict[str, Any]:
    return {_MEMBER: _Member(key, presence, at)}


LEFT_OUT = store_as(presence=Presence.LEFT_OUT)
INLINE = store_as(presence=Presence.INLINE)


@dataclass(frozen=True, slots=True)
class Form:
    """Functions that write and read a value; `write` is None if the value is JSON itself."""

    write: Any
    read: _Convert
    #: Returns the values of a row whose values are all JSON; None for everything else.
    get: Any = None


@dataclass(frozen=True, slots=True)
class Check:
    check: _Convert


def whole(least: int, most: Limit = UNLIMITED) -> Check:
    def check_bounds(value: Any) -> int:
        try:
            return check_whole("it", value, least, most)
        except UnusableValueError as error:
            raise _make_error(error.wanted, value) from None

    return Check(check_bounds)


class Record:
    """Base of the three stored forms; `from_json` and `to_json` are not called for the value of a field."""

    __slots__ = ()
    #: Presence of members whose fields have a default and no metadata.
    DEFAULTS: ClassVar[Presence] = Presence.ALWAYS
    #: True if reading refuses unknown members.
    IS_CLOSED: ClassVar[bool] = False
    #: A member, and the value by which it tells this class from others of a union.
    TAG: ClassVar[tuple[str, str] | None] = None

    def to_json(self) -> Any:
        return write(type(self), self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        return typing.cast(Self, read(cls, value))

    def _check_read(self) -> None:
        """Raise ValueError if the values read contradict each other; called after reading only."""


class StoredObject(Record):
    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return typing.cast("dict[str, Any]", write(type(self), self))


class StoredRow(Record):
    __slots__ = ()


class StoredScalar(Record):
    __slots__ = ()


def write(hint: Any, value: Any) -> Any:
    convert = _form(hint).write
    return value if convert is None else convert(value)


def read(hint: Any, value: Any) -> Any:
    return _form(hint).read(value)


@functools.cache
def _form(hint: Any) -> Form:
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        own = next((mark for mark in hint.__metadata__ if isinstance(mark, Form)), None)
        form = _form(args[0]) if own is None else Form(own.write, _wrap_errors(own.read))
        for mark in hint.__metadata__:
            if isinstance(mark, Check):
                form = Form(form.write, _read_and_check(form.read, _wrap_errors(mark.check)))
        return form
    if hint is Any:
        return Form(None, lambda value: value)
    if hint in _SCALARS:
        return Form(None, functools.partial(_scalar, *_SCALARS[hint]))
    if kind in _UNIONS:
        return _union(hint, args)
    if kind is tuple and args[-1] is not ...:
        return Form(_row_writer(args, tuple), _row_reader(args, lambda *given: given))
    if kind in (tuple, frozenset, collections.abc.Sequence):
        return _items(args[0], list if kind is collections.abc.Sequence else kind)
    if kind is collections.abc.Mapping:
        return _mapping(*args)
    if issubclass(kind, enum.Enum):
        return _enum(kind)
    if not issubclass(kind, Record):
        return Form(methodcaller("to_json"), _wrap_errors(kind.from_json))
    return _dataclass(kind)


def _dataclass(cls: Any) -> Form:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    if issubclass(cls, StoredScalar):
        return Form(attrgetter(*names), _alone_reader(cls, hints[names[0]]))
    if issubclass(cls, StoredRow):
        kinds = [hints[name] for name in names]
        further = [_find_attribute(kind) for kind in kinds]
        get = _getter([name + path for name, path in zip(names, further, strict=True)])
        rest = [Any if path else kind for kind, path in zip(kinds, further, strict=True)]
        is_plain = all(_form(kind).write is None for kind in rest)
        return Form(_row_writer(rest, get), _row_reader(kinds, cls), get if is_plain else None)
    members = [(field, hints[field.name], _member(cls, field)) for field in fields]
    return Form(_object_writer(cls, members), _object_reader(cls, members))


def _alone_reader(cls: Any, hint: Any) -> _Convert:
    convert = _form(hint).read
    # Every record of a checkpoint repeats the same few ids.
    make = functools.lru_cache(maxsize=1_000)(cls)

    return _wrap_errors(lambda value: make(value if type(value) is hint else convert(value)))


def _member(cls: type[Record], field: dataclasses.Field[Any]) -> _Member:
    has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    own = _Member(presence=cls.DEFAULTS) if has_default else _Member()
    return typing.cast(_Member, field.metadata.get(_MEMBER, own))


def _getter(paths: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(paths) > 1:
        return attrgetter(*paths)
    # attrgetter returns the value itself for one path, and refuses an empty list of paths.
    ones = [attrgetter(path) for path in paths]
    return lambda value: tuple(get(value) for get in ones)


def _object_writer(cls: Any, members: list[tuple[dataclasses.Field[Any], Any, _Member]]) -> _Convert:
    ordered = [one for one in members if one[2].at is None]
    for one in sorted((one for one in members if one not in ordered), key=lambda one: one[2].at or 0):
        ordered.insert(one[2].at or 0, one)
    keys = [member.key or field.name for field, _, member in ordered]
    # One attrgetter gets all values, also those that are an attribute of the field's value.
    further = ["" if m.presence is Presence.LEFT_OUT else _find_attribute(hint) for _, hint, m in ordered]
    get = _getter([field.name + path for (field, *_), path in zip(ordered, further, strict=True)])
    always: list[Any] = []
    optional: list[Any] = []
    inline = [key for key, one in zip(keys, ordered, strict=True) if one[2].presence is Presence.INLINE]
    for key, (field, hint, member), path in zip(keys, ordered, further, strict=True):
        convert = None if path else _form(hint).write
        if member.presence is Presence.LEFT_OUT:
            optional.append((key, _default(field)(), convert))
        elif convert is not None:
            always.append((key, convert))
    tag = dict([cls.TAG]) if cls.TAG else {}

    def write_object(value: Any) -> dict[str, Any]:
        # Short words here: a history has thousands of these objects.
        found = dict(zip(keys, get(value)))  # noqa: B905
        for key, convert in always:
            found[key] = convert(found[key])
        for key, default, convert in optional:
            one = found[key]
            if one is default or one == default:
                del found[key]
            elif convert is not None:
                found[key] = convert(one)
        return found

    def write_more(value: Any) -> dict[str, Any]:
        parts = [one if key in inline else {key: one} for key, one in write_object(value).items()]
        return {key: one for part in (tag, *parts) for key, one in part.items()}

    return write_more if inline or tag else write_object


def _find_attribute(hint: Any) -> str:
    """Return the attribute of a value that is its stored form; empty if there is none."""
    if not isinstance(hint, type):
        return ""
    if issubclass(hint, enum.Enum):
        return "._value_"
    return f".{dataclasses.fields(typing.cast(Any, hint))[0].name}" if issubclass(hint, StoredScalar) else ""


def _object_reader(cls: Any, members: list[tuple[dataclasses.Field[Any], Any, _Member]]) -> _Convert:
    steps = []
    for field, hint, member in members:
        key = "" if member.presence is Presence.INLINE else member.key or field.name
        may_lack = member.presence is Presence.LEFT_OUT
        steps.append((key, _kind(hint), _form(hint).read, _default(field) if may_lack else None))
    is_checked = cls._check_read is not Record._check_read
    known = {key for key, *_ in steps} | ({cls.TAG[0]} if cls.TAG else set())

    def read_object(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _make_error("an object", value)
        given = []
        for key, kind, convert, default in steps:
            # Here and not by a function: most values are of these kinds.
            one = value.get(key, _ABSENT) if key else value
            if type(one) is kind:
                given.append(one)
            elif one is not _ABSENT:
                try:
                    given.append(convert(one))
                except StoredFormError as error:
                    error.add_place(key)
                    raise
            elif default is None:
                raise StoredFormError(f"{key!r} is missing")
            else:
                given.append(default())
        if cls.IS_CLOSED and not known >= value.keys():
            raise StoredFormError(f"{min(value.keys() - known)!r} is not known")
        found = cls(*given)
        if is_checked:
            found._check_read()
        return found

    return _wrap_errors(read_object)


def _kind(hint: Any) -> Any:
    args = typing.get_args(hint)
    return args[0] if typing.get_origin(hint) in _UNIONS and args[1:] == (type(None),) else hint


def _default(field: dataclasses.Field[Any]) -> Callable[[], Any]:
    default, factory = field.default, field.default_factory
    return (lambda: default) if factory is dataclasses.MISSING else factory


def _make_error(wanted: str, value: Any) -> StoredFormError:
    # The value may be a whole record.
    return StoredFormError(f"must be {wanted}, got {value!r:.200}", " ")


def _wrap_errors(convert: _Convert) -> _Convert:
    def convert_value(value: Any) -> Any:
        try:
            return convert(value)
        except StoredFormError:
            raise
        except ValueError as error:
            raise StoredFormError(str(error)) from error

    return convert_value


def _read_and_check(convert: _Convert, check: _Convert) -> _Convert:
    return lambda value: check(convert(value))


def _scalar(wanted: str, kinds: tuple[type, ...], value: Any) -> Any:
    # By type(), since True is an int.
    if type(value) not in kinds:
        raise _make_error(wanted, value)
    return value


def _enum(choices: type[enum.Enum]) -> Form:
    members = {one.value: one for one in choices}

    def read_enum(value: Any) -> enum.Enum:
        try:
            return members[value]
        except (KeyError, TypeError):
            raise _make_error(f"one of {', '.join(map(str, members))}", value) from None

    return Form(attrgetter("_value_"), read_enum)


def _union(hint: Any, args: tuple[Any, ...]) -> Form:
    tags = {cls.TAG: _form(cls) for cls in args if getattr(cls, "TAG", None)}
    if len(tags) == len(args):
        return Form(methodcaller("to_json"), functools.partial(_read_tagged, tags))
    others = [one for one in args if one is not type(None)]
    if len(others) != 1:
        raise TypeError(f"the parts of {hint} cannot be told apart when they are stored")
    form = _form(others[0])
    convert = form.write
    return Form(
        None if convert is None else lambda value: None if value is None else convert(value),
        lambda value: None if value is None else form.read(value),
    )


def _read_tagged(tags: Mapping[tuple[str, str], Form], value: Any) -> Any:
    [key] = {key for key, _ in tags}
    if not isinstance(value, dict):
        raise _make_error("an object", value)
    form = tags.get((key, str(value.get(key))))
    if form is None:
        names = " or ".join(name for _, name in tags)
        raise StoredFormError(f"{key!r} is {value.get(key)!r} and not {names}: of a newer version?")
    return form.read(value)


def _row_writer(hints: Sequence[Any], get: Callable[[Any], tuple[Any, ...]]) -> _Convert:
    forms = [(at, _form(hint).write) for at, hint in enumerate(hints)]
    converts = [(at, convert) for at, convert in forms if convert is not None]

    def write_row(value: Any) -> list[Any]:
        found = list(get(value))
        for at, convert in converts:
            found[at] = convert(found[at])
        return found

    return write_row


def _row_reader(hints: Sequence[Any], make: Callable[..., Any]) -> _Convert:
    steps = [(_kind(hint), _form(hint).read) for hint in hints]

    def read_row(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(steps):
            raise _make_error(f"a list of {len(steps)} values", value)
        return make(*_read_each(value, steps))

    return _wrap_errors(read_row)


def _read_each(value: list[Any], steps: Iterable[tuple[Any, _Convert]]) -> list[Any]:
    given: list[Any] = []
    try:
        for one, (kind, convert) in zip(value, steps):  # noqa: B905
            given.append(one if type(one) is kind else convert(one))
    except StoredFormError as error:
        error.add_place(f"[{len(given)}]")
        raise
    return given


def _items(hint: Any, make: Callable[[Iterable[Any]], Any]) -> Form:
    form, kind = _form(hint), _kind(hint)
    write_item = form.write

    def read_items(value: Any) -> Any:
        if not isinstance(value, list):
            raise _make_error("a list", value)
        found = _read_each(value, itertools.repeat((kind, form.read)))
        result = make(found)
        if len(result) != len(found):
            raise _make_error("a list without repetitions", value)
        return result

    if make is frozenset:
        # A set has no order.
        return Form(lambda value: [write(hint, one) for one in sorted(value)], read_items)
    if form.get is not None:
        return Form(lambda value: list(map(list, map(form.get, value))), read_items)
    return Form(list if write_item is None else lambda value: list(map(write_item, value)), read_items)


def _mapping(key_hint: Any, hint: Any) -> Form:
    key_form, form = _form(key_hint), _form(hint)

    def write_mapping(value: Any) -> dict[Any, Any]:
        return {write(key_hint, key): write(hint, one) for key, one in value.items()}

    def read_mapping(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _make_error("an object", value)
        found = {}
        for key, one in value.items():
            try:
                found[key_form.read(key)] = one if type(one) is hint else form.read(one)
            except StoredFormError as error:
                error.add_place(f"[{key!r}]")
                raise
        return found

    is_plain = key_form.write is None and form.write is None
    return Form(dict if is_plain else write_mapping, read_mapping)


def expect_object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {value!r}")
    return value


def expect_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, got {value!r}")
    return value


def get_member(stored: Mapping[str, Any], name: str) -> Any:
    if name not in stored:
        raise ValueError(f"{name!r} is missing")
    return stored[name]
