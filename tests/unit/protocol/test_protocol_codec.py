"""One codec for all that is stored: which forms there are, and what is refused, with its place."""

from __future__ import annotations

import enum
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pytest

from flinkish_spark.protocol import codec
from flinkish_spark.protocol.codec import (
    INLINE,
    LEFT_OUT,
    Check,
    Form,
    Presence,
    StoredFormError,
    StoredObject,
    StoredRow,
    StoredScalar,
    read,
    store_as,
    write,
)


@pytest.fixture(autouse=True)
def hints_anew() -> None:
    """Look at each hint here: a test of something else, which coverage does not trace, may have done so."""
    codec._form.cache_clear()


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, order=True)
class Number(StoredScalar):
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError(f"a number is not negative, got {self.value}")


@dataclass(frozen=True, slots=True)
class Place(StoredRow):
    number: Number
    color: Color
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Deep(StoredRow):
    """A row with a row in it."""

    place: Place
    numbers: frozenset[Number]


@dataclass(frozen=True, slots=True)
class One(StoredRow):
    number: int


class Foreign:
    """Has functions of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and other.text == self.text

    def to_json(self) -> Any:
        return [self.text]

    @classmethod
    def from_json(cls, value: Any) -> Foreign:
        if value == "older":
            raise StoredFormError("is older", " ")
        if not isinstance(value, list):
            raise ValueError("no list at all")
        return cls(*value)


@dataclass(frozen=True, slots=True)
class Circle(StoredObject):
    TAG: ClassVar = ("shape", "circle")

    radius: float


@dataclass(frozen=True, slots=True)
class Dot(StoredObject):
    TAG: ClassVar = ("shape", "dot")


def _even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


Even = Annotated[int, Check(_even)]
Hex = Annotated[int, Form(hex, lambda value: int(value, 16))]


@dataclass(frozen=True, slots=True)
class Part(StoredObject):
    a: int
    b: int = 2


@dataclass(frozen=True, slots=True)
class Whole(StoredObject):
    number: Number
    color: Color
    text: str = field(metadata=store_as("words"))
    flag: bool
    factor: float
    part: Part = field(metadata=INLINE)
    anything: Any = None
    maybe: Number | None = None
    places: tuple[Place, ...] = ()
    deep: tuple[Deep, ...] = ()
    ones: tuple[One, ...] = ()
    pair: tuple[str, Number] = ("", Number(0))
    listed: Sequence[str] = ()
    set: frozenset[str] = frozenset()
    by_name: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    by_number: Mapping[Hex, Color] = field(default_factory=dict)
    even: Even = 0
    shape: Circle | Dot = Dot()
    foreign: Foreign | None = None
    always: int = 5
    left: Mapping[str, Number] = field(default_factory=dict, metadata=LEFT_OUT)
    unset: Color | None = field(default=None, metadata=LEFT_OUT)
    first: str = field(default="1st", metadata=store_as(at=0))


WHOLE = Whole(
    Number(3),
    Color.RED,
    "hello",
    True,
    0.5,
    Part(1),
    {"x": [1, None]},
    Number(4),
    (Place(Number(1), Color.BLUE), Place(Number(2), Color.RED, "there")),
    (Deep(Place(Number(9), Color.RED), frozenset({Number(2), Number(1)})),),
    (One(7),),
    ("a", Number(5)),
    ["b", "a"],
    frozenset({"z", "y"}),
    {"t": {"0": 1}},
    {255: Color.BLUE},
    8,
    Circle(1),
    Foreign("f"),
    6,
    {"n": Number(1)},
    Color.BLUE,
)
STORED: dict[str, Any] = {
    "first": "1st",
    "number": 3,
    "color": "red",
    "words": "hello",
    "flag": True,
    "factor": 0.5,
    "a": 1,
    "b": 2,
    "anything": {"x": [1, None]},
    "maybe": 4,
    "places": [[1, "blue", None], [2, "red", "there"]],
    "deep": [[[9, "red", None], [1, 2]]],
    "ones": [[7]],
    "pair": ["a", 5],
    "listed": ["b", "a"],
    "set": ["y", "z"],
    "by_name": {"t": {"0": 1}},
    "by_number": {"0xff": "blue"},
    "even": 8,
    "shape": {"shape": "circle", "radius": 1},
    "foreign": ["f"],
    "always": 6,
    "left": {"n": 1},
    "unset": "blue",
}


def test_every_form_is_written_in_its_order_and_read_back() -> None:
    assert json.dumps(WHOLE.to_json()) == json.dumps(STORED)
    assert Whole.from_json(json.loads(json.dumps(STORED))) == WHOLE


def test_what_is_written_shares_nothing_with_the_value() -> None:
    again = WHOLE.to_json()
    again["by_name"]["t"] = again["listed"] = None
    assert WHOLE.to_json() == STORED


def test_defaults_stand_where_something_was_left_out_and_nowhere_else() -> None:
    shorter = {key: one for key, one in STORED.items() if key not in ("left", "unset")}
    found = Whole.from_json(shorter)
    assert (found.always, found.left, found.unset) == (6, {}, None)
    assert found.to_json() == shorter
    for key in shorter:
        with pytest.raises(StoredFormError, match=f"^{key!r} is missing$"):
            Whole.from_json({name: one for name, one in shorter.items() if name != key})


@dataclass(frozen=True, slots=True)
class Measured(StoredObject):
    DEFAULTS: ClassVar = Presence.LEFT_OUT

    name: str
    rows: int | None = None
    bytes: int | None = None
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Later(StoredObject):
    """Of a class whose None is a value, too."""

    name: str | None
    rows: int | None = field(default=None, metadata=LEFT_OUT)
    color: Color | None = None


def test_a_class_says_it_for_all_of_its_defaults() -> None:
    assert Measured("a").to_json() == {"name": "a"}
    assert Measured("a", 1, None, False).to_json() == {"name": "a", "rows": 1, "ok": False}
    assert Measured.from_json({"name": "a", "bytes": None, "more": 1}) == Measured("a")
    assert Later(None).to_json() == {"name": None, "color": None}
    assert Later("a", 1, Color.RED).to_json() == {"name": "a", "rows": 1, "color": "red"}
    assert Later.from_json({"name": None, "color": "red"}) == Later(None, None, Color.RED)


WRONG = [
    ("number", "3", "number must be a whole number, got '3'"),
    ("number", True, "number must be a whole number, got True"),
    ("number", 3.0, "number must be a whole number, got 3.0"),
    ("number", -1, "number: a number is not negative, got -1"),
    ("color", "green", "color must be one of red, blue, got 'green'"),
    ("color", [], "color must be one of red, blue, got []"),
    ("words", None, "words must be a text, got None"),
    ("flag", 1, "flag must be true or false, got 1"),
    ("factor", True, "factor must be a number, got True"),
    ("a", "x", "a must be a whole number, got 'x'"),
    ("maybe", "x", "maybe must be a whole number, got 'x'"),
    ("places", {}, "places must be a list, got {}"),
    ("places", [[1, "red"]], "places[0] must be a list of 3 values, got [1, 'red']"),
    ("places", [[1, "red", None], [1, "x", None]], "places[1][1] must be one of red, blue, got 'x'"),
    ("places", [7], "places[0] must be a list of 3 values, got 7"),
    ("places", [[-2, "red", None]], "places[0][0]: a number is not negative, got -2"),
    ("deep", [[[9, "red", None], [1, 1]]], "deep[0][1] must be a list without repetitions, got [1, 1]"),
    ("pair", ["a"], "pair must be a list of 2 values, got ['a']"),
    ("listed", ["a", 5], "listed[1] must be a text, got 5"),
    ("set", ["a", "a"], "set must be a list without repetitions, got ['a', 'a']"),
    ("set", [["a"]], "set[0] must be a text, got ['a']"),
    ("by_name", {"t": {"0": "x"}}, "by_name['t']['0'] must be a whole number, got 'x'"),
    ("by_name", [], "by_name must be an object, got []"),
    ("by_number", {"zz": "red"}, "by_number['zz']: invalid literal for int() with base 16: 'zz'"),
    ("even", 3, "even: 3 is odd"),
    ("even", "3", "even must be a whole number, got '3'"),
    ("shape", {"shape": "square"}, "shape: 'shape' is 'square' and not circle or dot: of a newer version?"),
    ("shape", {}, "shape: 'shape' is None and not circle or dot: of a newer version?"),
    ("shape", 5, "shape must be an object, got 5"),
    ("shape", {"shape": "circle", "radius": "1"}, "shape.radius must be a number, got '1'"),
    ("foreign", 5, "foreign: no list at all"),
    ("foreign", "older", "foreign is older"),
    ("left", {"n": -1}, "left['n']: a number is not negative, got -1"),
]


@pytest.mark.parametrize(("key", "wrong", "message"), WRONG, ids=[case[2] for case in WRONG])
def test_what_is_wrong_is_named_with_its_place(key: str, wrong: Any, message: str) -> None:
    with pytest.raises(StoredFormError) as caught:
        Whole.from_json({**STORED, key: wrong})
    assert str(caught.value) == message
    assert "".join(traceback.format_exception(caught.value))


def test_a_whole_of_the_wrong_kind_has_no_place() -> None:
    for cls, wrong, message in (
        (Whole, [], "must be an object, got []"),
        (Place, 5, "must be a list of 3 values, got 5"),
        (Number, "x", "must be a whole number, got 'x'"),
        (Number, -1, "a number is not negative, got -1"),
    ):
        with pytest.raises(StoredFormError) as caught:
            cls.from_json(wrong)
        assert str(caught.value) == message


@dataclass(frozen=True, slots=True)
class Closed(StoredObject):
    IS_CLOSED: ClassVar = True
    TAG: ClassVar = ("kind", "closed")

    first: Number
    last: Number

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError("a range runs forward")

    def _check_read(self) -> None:
        if self.first == Number(7):
            raise ValueError("7 is never stored")


def test_a_class_may_refuse_members_that_it_does_not_know() -> None:
    known = Closed(Number(1), Number(2))
    assert Closed.from_json(known.to_json()) == known
    assert read(tuple[Closed, ...], write(tuple[Closed, ...], (known,))) == (known,)
    with pytest.raises(StoredFormError, match=r"^'more' is not known$"):
        Closed.from_json({**known.to_json(), "more": 1})
    assert Part.from_json({"a": 1, "b": 3, "more": 1}) == Part(1, 3)


def test_what_a_class_refuses_is_refused_when_it_is_read() -> None:
    with pytest.raises(StoredFormError, match=r"^\[1\]: a range runs forward$"):
        read(tuple[Closed, ...], [{"first": 1, "last": 2}, {"first": 2, "last": 1}])
    assert Closed(Number(7), Number(8)).to_json()["first"] == 7
    with pytest.raises(StoredFormError, match=r"^7 is never stored$"):
        Closed.from_json({"first": 7, "last": 8})


@dataclass(frozen=True, slots=True)
class Ends(StoredRow):
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ValueError("a range runs forward")


def test_what_a_row_refuses_is_refused_when_it_is_read() -> None:
    with pytest.raises(StoredFormError, match=r"^\['a'\]: a range runs forward$"):
        read(Mapping[str, Ends], {"a": [2, 1]})


def test_parts_that_nothing_tells_from_each_other_are_no_form() -> None:
    for hint in (int | str, Closed | Part, int | str | None):
        with pytest.raises(TypeError, match="cannot be told apart"):
            read(hint, 1)


def test_values_without_a_class_have_forms_too() -> None:
    assert (write(int, 5), read(int, 5)) == (5, 5)
    assert Number(5).to_json() == 5
    assert write(Mapping[str, Number], {"a": Number(1)}) == {"a": 1}
    assert read(Mapping[str, Number | None], {"a": 1, "b": None}) == {"a": Number(1), "b": None}
    assert write(Number | None, None) is None
    assert read(tuple[int | None, ...], [1, None]) == (1, None)
