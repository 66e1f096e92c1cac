"""map, flat_map and filter without Spark: batches in, batches out; and what hints say about the output."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Optional

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import FilterFunction, FlatMapFunction, MapFunction
from flinkish_spark.checkpoint.failures import RepeatableUserError, classify
from flinkish_spark.core.errors import GraphError, SchemaError, UserFunctionError
from flinkish_spark.planning.declare import infer_output
from flinkish_spark.planning.transforms import make_filter, make_flat_map, make_map
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types.hints import NoSuchType, fields_of, type_of
from flinkish_spark.worker.keyed_operator import OperatorError


@dataclasses.dataclass
class Word:
    text: str
    count: int | None


class Pair(NamedTuple):
    left: int
    right: list[float]


@dataclasses.dataclass
class Nested:
    pair: Pair
    words: dict[str, Word]
    at: datetime.datetime
    price: Optional[decimal.Decimal]  # noqa: UP045 - users write both


def rows(*records: tuple[Any, ...], channel: int = 0) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "text": pa.array([text for text, _ in records], pa.string()),
            "amount": pa.array([amount for _, amount in records], pa.int64()),
            C.CHANNEL: pa.array([channel] * len(records), pa.int64()),
            C.SEQUENCE: pa.array(range(40, 40 + len(records)), pa.int64()),
        }
    )


class Frame:
    """Stands for a DataFrame: keeps what mapInArrow is given, and runs it."""

    def __init__(self, *batches: pa.RecordBatch) -> None:
        self.batches, self.columns = batches, list(batches[0].schema.names)
        kinds = {"text": T.StringType()}
        self.schema = T.StructType(
            [T.StructField(name, kinds.get(name, T.LongType())) for name in batches[0].schema.names]
        )

    def mapInArrow(self, worker: Any, columns: T.StructType) -> list[dict[str, Any]]:
        out = [batch for batch in worker(iter(self.batches))]
        assert all(batch.schema.names == columns.names for batch in out)
        return [row for batch in out for row in batch.to_pylist()]


def test_map_makes_one_row_of_each_and_keeps_its_place() -> None:
    made = make_map(lambda r: (r.text.upper(), r.amount), "word STRING, n LONG", None)
    assert made(Frame(rows(("a", 1), ("b", None)))) == [  # type: ignore[arg-type, comparison-overlap]
        {"word": "A", "n": 1, C.CHANNEL: 0, C.SEQUENCE: 40},
        {"word": "B", "n": None, C.CHANNEL: 0, C.SEQUENCE: 41},
    ]


def test_flat_map_makes_any_number_of_rows_which_all_have_the_place_of_theirs() -> None:
    def split(record: Any) -> Iterator[Word] | None:
        if record.amount == 0:
            return None
        return (Word(part, record.amount) for part in record.text.split())

    made: Any = make_flat_map(split, None, None)
    out = made(Frame(rows(("a b", 1), ("c", 0)), rows(("d", 2))))
    assert [(r["text"], r["count"], r[C.SEQUENCE]) for r in out] == [("a", 1, 40), ("b", 1, 40), ("d", 2, 40)]


def test_filter_keeps_rows_as_they_are() -> None:
    kept: Any = make_filter(lambda r: r.amount and r.amount > 1, None)
    assert [r["amount"] for r in kept(Frame(rows(("a", 1), ("b", 2), ("c", None))))] == [2]


class Prefix(MapFunction, FlatMapFunction, FilterFunction):
    def open(self, context: Any) -> None:
        self.prefix = f"{context.uid}:"

    def map(self, value: Any) -> tuple[str]:
        return (self.prefix + value.text,)

    def flat_map(self, value: Any) -> Iterator[tuple[str]]:
        yield self.map(value)

    def filter(self, value: Any) -> bool:
        return (self.prefix + value.text) == "mine:a"


def test_functions_are_opened_in_the_worker() -> None:
    frame: Any = Frame(rows(("a", 1), ("b", 2)))
    mapped: Any = make_map(Prefix(), "t STRING", "mine")(frame)
    assert [r["t"] for r in mapped] == ["mine:a", "mine:b"]
    flat: Any = make_flat_map(Prefix(), "t STRING", "mine")(frame)
    assert [r["t"] for r in flat] == ["mine:a", "mine:b"]
    kept: Any = make_filter(Prefix(), "mine")(frame)
    assert [r["text"] for r in kept] == ["a"]


class WantsState(Prefix):
    def open(self, context: Any) -> None:
        context.get_state(None)


def test_a_function_without_a_key_has_no_state() -> None:
    frame: Any = Frame(rows(("a", 1)))
    with pytest.raises(RuntimeError, match=r"'mine' asks for state .* call key_by"):
        make_map(WantsState(), "t STRING", "mine")(frame)


class Failing(Prefix):
    """Raises in the methods that it is told of, and says in which it was called."""

    calls: ClassVar[list[str]] = []

    def __init__(self, *failing: str) -> None:
        self.failing = failing

    def _call(self, method: str) -> None:
        Failing.calls.append(method)
        if method in self.failing:
            raise LookupError(f"no table in {method}")

    def open(self, context: Any) -> None:
        self._call("open")
        super().open(context)

    def map(self, value: Any) -> tuple[str]:
        self._call("map")
        return super().map(value)

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize(
    ("failing", "calls", "told"),
    [
        (["open"], ["open", "close"], "open() of operator 'mine'"),
        (["open", "close"], ["open", "close"], "open() of operator 'mine'"),
        (["close"], ["open", "map", "close"], "close() of operator 'mine'"),
        (["map"], ["open", "map", "close"], "the function of operator 'mine'"),
        # What failed first is told, and what it was said at the record.
        (["map", "close"], ["open", "map", "close"], "the function of operator 'mine'"),
    ],
)
def test_a_function_is_closed_whatever_fails_and_the_first_failure_is_told(
    failing: list[str], calls: list[str], told: str
) -> None:
    Failing.calls.clear()
    frame: Any = Frame(rows(("a", 1)))
    with pytest.raises(OperatorError) as failed:
        make_map(Failing(*failing), "t STRING", "mine")(frame)
    assert Failing.calls == calls
    error = classify(failed.value)
    assert isinstance(error, RepeatableUserError)
    assert told in str(error) and f"LookupError: no table in {failing[0]}" in str(error)


@pytest.mark.parametrize(
    "transform,says",
    [
        (make_map(lambda r: (1 // r.amount,), "n LONG", "share"), "ZeroDivisionError"),
        (make_flat_map(lambda r: [(1 // r.amount,)], "n LONG", "share"), "ZeroDivisionError"),
        (make_filter(lambda r: 1 // r.amount, "share"), "ZeroDivisionError"),
        (make_map(lambda r: ("x" if r.amount == 0 else 1,), "n LONG", "share"), "field 'n' of type int64"),
        (make_map(lambda r: (1,) * (1 + (r.amount == 0)), "n LONG", "share"), "emitted 2 fields"),
        (make_map(lambda r: {"m" if r.amount == 0 else "n": 1}, "n LONG", "share"), "emitted the field 'm'"),
        (make_map(lambda r: 7 if r.amount == 0 else (7,), "n LONG", "share"), "emitted a int"),
    ],
)
def test_an_error_names_the_function_and_the_record(transform: Any, says: str) -> None:
    frame: Any = Frame(rows(("a", 1), ("b", 0), ("c", 2), channel=3))
    with pytest.raises(OperatorError) as failed:
        transform.replace_origins(Origins(("orders",)))(frame)
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert {name: facts[name] for name in ("uid", "topic", "partition", "offset")} == {
        "uid": "share",
        "topic": "orders",
        "partition": 3,
        "offset": 41,
    }
    assert says in facts["error"]


@pytest.mark.parametrize("made", [make_map, make_flat_map])
def test_what_cannot_be_called_or_sent_is_refused(made: Any) -> None:
    with pytest.raises(GraphError, match="got a int"):
        made(7, "n LONG", None)
    lock = threading.Lock()
    with pytest.raises(UserFunctionError, match="cannot be sent"):
        made(lambda r: (lock,), "n LONG", None)
    with pytest.raises(SchemaError, match="no hint for what it returns"):
        made(lambda r: (1,), None, None)
    with pytest.raises(GraphError, match="got a str"):
        make_filter("amount > 1", None)


def test_hints_say_the_fields() -> None:
    assert fields_of(Nested).simpleString() == (
        "struct<pair:struct<left:bigint,right:array<double>>,"
        "words:map<string,struct<text:string,count:bigint>>,at:timestamp,price:decimal(38,18)>"
    )

    def one(record: Any) -> Word | None: ...

    def some(record: Any) -> list[Pair]: ...

    assert infer_output(one, "it", is_iterable=False) == fields_of(Word)
    assert infer_output(some, "it", is_iterable=True) == fields_of(Pair)


@dataclasses.dataclass
class Tree:
    left: Tree | None


def test_a_class_that_is_a_part_of_itself_is_refused_and_a_span_of_time_is_an_interval() -> None:
    with pytest.raises(NoSuchType, match="Tree contains itself"):
        fields_of(Tree)
    assert type_of(datetime.timedelta | None) == T.DayTimeIntervalType()


@pytest.mark.parametrize("hint", [object, set[int], int | str, list, complex, Any])
def test_what_has_no_counterpart_is_refused(hint: Any) -> None:
    with pytest.raises(NoSuchType):
        type_of(hint)


def test_hints_that_say_no_fields_are_refused_with_what_to_do() -> None:
    def number(record: Any) -> int: ...

    def bare(record: Any) -> Iterator: ...  # type: ignore[type-arg]

    for function, is_iterable in [(number, False), (bare, True), (number, True)]:
        with pytest.raises(SchemaError, match="say output="):
            infer_output(function, "it", is_iterable=is_iterable)
