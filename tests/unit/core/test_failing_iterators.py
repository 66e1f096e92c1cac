"""What a user's code returns fails while it is gone through: that is an error, and not the end of it.

`failing` gives 1 and 2 and raises StopIteration at 3: whoever takes that for the end has [1, 2] and no error.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    BroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.checkpoint.hooks import HookError, MasterHooks
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.connectors.splits import SplitSource, SplitStreamReader, read_piece
from flinkish_spark.contracts.hooks import MasterHook
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.iterators import NotAnEnd, elements_of, guard_call, pairs_of
from flinkish_spark.functions.stream import ProcessFunction
from flinkish_spark.joins import CoGroupFunction, LookupTable, ProcessJoinFunction
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.state.operator_state import OperatorListState
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types.row_form import RowForm
from flinkish_spark.windows import ProcessWindowFunction, TumblingEventTimeWindows
from flinkish_spark.worker.functions import ExpandRows, FilterRows, ProcessRows, RowFunction
from flinkish_spark.worker.keyed_operator import OperatorError

NUMBERS = [1, 2, 3, 4]


def first_of(self: Iterator[int]) -> int:
    """A function, and no method, of an iterator."""
    return next(self)


def failing(number: int) -> int:
    if number == 3:
        raise StopIteration("no such number")
    return number


def rows_of(number: int) -> tuple[int]:
    return (failing(number),)


class Counting:
    """Counts up to 3, as iterators are written; one that says so in a method of its own."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number if self.number <= 3 else self._over()

    def _over(self) -> int:
        raise StopIteration


class CountingMore(Counting):
    def __next__(self) -> int:
        return super().__next__()


class Converting(Counting):
    def __next__(self) -> int:
        return failing(super().__next__())

    def lazy(self) -> Iterator[int]:
        return map(lambda number: next(iter([number] * (3 - number - self.number))), NUMBERS)


class Indexed:
    def __init__(self, at: Callable[[int], int]) -> None:
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise IndexError
        return self.at(index)


@pytest.mark.parametrize(
    "given",
    [
        lambda: map(failing, NUMBERS),
        # At the last one there is nothing left that could tell.
        lambda: map(failing, [1, 2, 3]),
        lambda: map(Mock(side_effect=[1, 2]), NUMBERS),
        lambda: filter(failing, NUMBERS),
        lambda: filter(None, map(failing, NUMBERS)),
        lambda: enumerate(map(failing, NUMBERS)),
        lambda: itertools.starmap(failing, [(1,), (3,)]),
        lambda: itertools.takewhile(failing, NUMBERS),
        lambda: itertools.dropwhile(failing, NUMBERS[2:]),
        lambda: itertools.islice(map(failing, NUMBERS), 4),
        lambda: itertools.accumulate(NUMBERS, lambda made, number: made + failing(number)),
        lambda: itertools.groupby(NUMBERS, failing),
        lambda: itertools.pairwise(map(failing, NUMBERS)),
        lambda: Converting(),
        lambda: map(str, Converting()),
        lambda: Converting().lazy(),
        lambda: map(first_of, [iter([1]), iter([2]), iter([])]),
    ],
)
def test_a_failure_is_not_the_end(given: Callable[[], Any]) -> None:
    with pytest.raises(NotAnEnd, match=r"StopIteration was raised by .*") as raised:
        list(elements_of(given()))
    assert isinstance(raised.value.__cause__, StopIteration)


def test_a_failure_of_a_generator_is_none_either() -> None:
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        list(elements_of(failing(number) for number in NUMBERS))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (lambda: Counting(), [1, 2, 3]),
        (lambda: CountingMore(), [1, 2, 3]),
        (lambda: itertools.chain(Counting(), CountingMore()), [1, 2, 3, 1, 2, 3]),
        (lambda: itertools.chain(), []),
        (lambda: map(failing, [1, 2]), [1, 2]),
        (lambda: itertools.islice(map(failing, NUMBERS), 2), [1, 2]),
        (lambda: itertools.islice(itertools.count(), 2, 9, 3), [2, 5, 8]),
        (lambda: itertools.accumulate([1, 2], initial=5), [5, 6, 8]),
        (lambda: itertools.pairwise([1, 2, 3]), [(1, 2), (2, 3)]),
        (lambda: itertools.pairwise([1]), []),
        (lambda: itertools.pairwise(Counting()), [(1, 2), (2, 3)]),
        (
            lambda: ((key, [*same]) for key, same in elements_of(itertools.groupby("aab"))),
            [("a", ["a", "a"]), ("b", ["b"])],
        ),
        (lambda: itertools.zip_longest(), []),
        (lambda: itertools.islice(elements_of(itertools.cycle("ab")), 5), ["a", "b", "a", "b", "a"]),
        (lambda: itertools.cycle(()), []),
        (lambda: Indexed(lambda index: index), [0, 1, 2, 3]),
        (lambda: (number for number in [1]), [1]),
        (lambda: reversed([1, 2]), [2, 1]),
        (lambda: {1: 2}.items(), [(1, 2)]),
        (lambda: pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), []), []),
        (lambda: csv.DictReader(io.StringIO("a\n1\n")), [{"a": "1"}]),
        (lambda: iter([1, 2, None].copy().pop, 1), [None, 2]),
        (lambda: (1, 2), [1, 2]),
    ],
)
def test_an_end_is_one(given: Callable[[], Any], wanted: list[Any]) -> None:
    assert list(elements_of(given())) == wanted


def test_lists_tuples_and_generators_are_left_alone() -> None:
    for given in ([1], (1,), (one for one in [1])):
        assert elements_of(given) is given
    assert pairs_of(given := {1: 2}) is given
    assert dict(pairs_of(zip("a", [1], strict=True))) == {"a": 1}
    assert guard_call(len)([1]) == 1


# -- functions of single records ---------------------------------------------------------------------------
OUT = T.StructType([T.StructField("n", T.LongType())])
IN = pa.RecordBatch.from_pydict(
    {
        "n": pa.array([7, 8], pa.int64()),
        C.CHANNEL: pa.array([0, 0], pa.int64()),
        C.SEQUENCE: pa.array([40, 41], pa.int64()),
    }
)


def at_8(what: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda record: what() if record.n == 8 else [(0,)]


def raising(error: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


LAZY = [
    lambda: map(rows_of, NUMBERS),
    raising(StopIteration("no such number")),
    raising(StopAsyncIteration("no such number")),
    raising(GeneratorExit("no such number")),
]


@pytest.mark.parametrize("what", LAZY)
def test_a_function_of_records_is_blamed_with_the_record(what: Callable[[], Any]) -> None:
    stage = ExpandRows(RowFunction("halves", at_8(what), origins=Origins(("in",))), OUT, ())
    with pytest.raises(OperatorError) as raised:
        list(stage(iter([IN])))
    told = json.loads(str(raised.value).partition(" ")[2])
    assert (told["uid"], told["topic"], told["partition"], told["offset"]) == ("halves", "in", 0, 41)
    assert "no such number" in told["error"]


@pytest.mark.parametrize("error", [StopIteration("none"), GeneratorExit("none")])
def test_a_filter_and_a_process_function_are_blamed_too(error: BaseException) -> None:
    stages = [
        FilterRows(RowFunction("f", at_8(raising(error)))),
        ProcessRows(RowFunction("f", lambda record, ctx: map(at_8(raising(error)), [record])), OUT, ()),
    ]
    for stage in stages:
        with pytest.raises(OperatorError, match='"sequence": 41'):
            list(stage(iter([IN])))  # type: ignore[operator]


def test_a_row_whose_property_fails_is_not_left_out() -> None:
    @dataclasses.dataclass
    class Row:
        a: int
        n: int

    rows = [Row(1, 2), Row(3, 4)]
    Row.n = property(lambda row: failing(3))  # type: ignore[assignment]
    with pytest.raises(StopIteration):
        RowForm(["a", "n"]).tuples(list(rows))


# -- operators ---------------------------------------------------------------------------------------------
ORDERS = "user STRING, amount LONG"


class OnElement(KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        return map(rows_of, NUMBERS)


class OnTimer(KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> None:
        ctx.timer_service().register_event_time_timer(5)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return map(rows_of, NUMBERS)


class WithoutKey(ProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        return map(rows_of, NUMBERS)


class ByBatch(VectorizedProcessFunction):
    def process_batch(self, batch: Any, ctx: Any) -> Any:
        return map(lambda number: pa.record_batch({"n": [failing(number)]}), NUMBERS)


class ByBatchAtOnce(VectorizedProcessFunction):
    def process_batch(self, batch: Any, ctx: Any) -> Any:
        raise StopIteration("no such number")


class AtOnce(KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        raise StopIteration("no such number")


class IntoAState(KeyedProcessFunction):
    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        self.change = change

    def open(self, context: Any) -> None:
        self.list = context.get_list_state(ListStateDescriptor("list", "LONG"))
        self.map = context.get_map_state(MapStateDescriptor("map", "LONG", "LONG"))

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.change(self.list, self.map)
        return [(0,)]


def _slice(values: Any, _: Any) -> None:
    values[:] = map(failing, NUMBERS)


def pairs() -> Any:
    return map(lambda number: (failing(number), 0), NUMBERS)


@pytest.mark.parametrize(
    ("function", "key"),
    [
        (OnElement(), "user"),
        (OnTimer(), "user"),
        (WithoutKey(), None),
        (ByBatch(), "user"),
        (ByBatchAtOnce(), "user"),
        (AtOnce(), "user"),
        (IntoAState(lambda values, _: values.update(map(failing, NUMBERS))), "user"),
        (IntoAState(lambda values, _: values.extend(map(failing, NUMBERS))), "user"),
        (IntoAState(_slice), "user"),
        (IntoAState(lambda _, values: values.update(pairs())), "user"),
        (IntoAState(lambda _, values: values.put_all(pairs())), "user"),
    ],
)
def test_an_operator_is_blamed(function: Any, key: str | None) -> None:
    more = {} if key is None else {"key": key}
    harness = ProgramHarness.of(function, ORDERS, output="n LONG", uid="halves", **more)
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        harness.push(("ann", 1), 3)
        harness.watermark(9)
    assert "no such number" in str(raised.value)
    assert raised.value.__notes__ == ["in the operator 'halves'"]


class OfWindows(ProcessWindowFunction):
    def process(self, key: Any, context: Any, elements: Any) -> Any:
        return map(rows_of, NUMBERS)


class OfPairs(ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Any:
        return map(rows_of, NUMBERS)


class OfPairsAtOnce(ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Any:
        raise StopIteration("no such number")


class OfGroups(CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Any:
        return map(rows_of, NUMBERS)


class OfRules(BroadcastProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        return map(rows_of, NUMBERS)

    def process_broadcast_element(self, value: Any, ctx: Any) -> Any:
        return map(rows_of, NUMBERS)


class OfKeys(LookupTable):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def lookup(self, keys: Any) -> Any:
        return self.rows


def joined(one: Any, two: Any) -> Any:
    return one.key_by("user").join(two.key_by("user"))


WINDOWS = TumblingEventTimeWindows(5)
RULES = MapStateDescriptor("rules", "STRING", "LONG")


@pytest.mark.parametrize(
    "program",
    [
        lambda one, two: one.key_by("user").window(WINDOWS).process(OfWindows(), output="n LONG", uid="h"),
        lambda one, two: (
            one.key_by("user").window(WINDOWS).reduce(lambda a, b: a, OfWindows(), output="n LONG", uid="h")
        ),
        lambda one, two: (
            one.key_by("user")
            .window(WINDOWS)
            .emit_retractions()
            .process(OfWindows(), output="n LONG", uid="h")
        ),
        lambda one, two: joined(one, two).window(WINDOWS, function=OfPairs(), output="n LONG", uid="h"),
        lambda one, two: joined(one, two).window(WINDOWS, function=OfPairsAtOnce(), output="n LONG", uid="h"),
        lambda one, two: joined(one, two).co_group(WINDOWS, OfGroups(), output="n LONG", uid="h"),
        lambda one, two: joined(one, two).interval(
            lower_ms=0, upper_ms=0, function=OfPairs(), output="n LONG", uid="h"
        ),
        lambda one, two: joined(one, two).temporal(function=OfPairs(), output="n LONG", uid="h"),
        lambda one, two: one.lookup_join(
            OfKeys({"ann": [(1,)]}), "n LONG", key=lambda one: one.user, function=OfPairs(), output="n LONG"
        ),
        lambda one, two: one.connect(two.broadcast(RULES)).process(OfRules(), output="n LONG", uid="h"),
    ],
)
def test_windows_joins_and_broadcasts_are_blamed(program: Any) -> None:
    harness = ProgramHarness(program, ORDERS, ORDERS)
    with pytest.raises(RuntimeError, match=r"StopIteration was raised by .*: no such number"):
        harness.push(("ann", 1), 3, source=1)
        harness.push(("ann", 1), 3)
        harness.watermark(9)


def test_an_operator_list_state_takes_all_or_nothing() -> None:
    state = OperatorListState([7], "LONG")
    for change in (state.update, state.add_all):
        with pytest.raises(NotAnEnd):
            change(map(failing, NUMBERS))
    assert state.get() == [7]


# -- sources and hooks -------------------------------------------------------------------------------------
class Numbers(SplitSource):
    schema = "n LONG"

    def splits(self) -> Any:
        return ["all"]

    def latest(self, split: str, start: Any, limit: Any) -> Any:
        return 4

    def read(self, split: str, start: Any, end: Any) -> Any:
        return map(rows_of, NUMBERS)


class NoSplits(Numbers):
    def splits(self) -> Any:
        return map(lambda number: str(failing(number)), NUMBERS)


@pytest.mark.parametrize(("source", "method"), [(Numbers(), "read"), (NoSplits(), "splits")])
def test_a_source_is_blamed_with_the_method(source: SplitSource, method: str, tmp_path: Any) -> None:
    reader = SplitStreamReader(source.bind("in"), str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"{method}\(\) of source 'in'.*no such number"):
        start = reader.initialOffset()
        for piece in reader.partitions(start, reader.latestOffset(start, None)):  # type: ignore[arg-type]
            list(read_piece(reader.source, piece))


def test_a_collection_is_all_of_it() -> None:
    with pytest.raises((FlinkishError, NotAnEnd), match="no such number"):
        CollectionSource(map(rows_of, NUMBERS), "n LONG")


def test_the_state_of_a_hook_is_all_of_it() -> None:
    class Hook(MasterHook):
        name = "facts"

        def trigger(self, checkpoint_id: int) -> Any:
            return map(lambda number: (str(failing(number)), number), NUMBERS)

        def restore(self, checkpoint_id: int, state: Any) -> None:
            pass

    with pytest.raises(HookError, match="no such number"):
        MasterHooks([Hook()]).trigger(CheckpointId(1))
