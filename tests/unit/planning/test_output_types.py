"""What functions emit, by their hints; outputs, tags and states that are declared without DDL."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    AggregateFunction,
    AggregatingStateDescriptor,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.joins.spec import CoGroupFunction, ProcessJoinFunction
from flinkish_spark.planning.declare import infer_output
from flinkish_spark.planning.stream_graph import KeyedNode
from flinkish_spark.state.operator_state import OperatorListDescriptor, OperatorLists
from flinkish_spark.types.hints import maker_of
from flinkish_spark.types.schemas import output_schema
from flinkish_spark.windows.assigners import TumblingEventTimeWindows
from flinkish_spark.windows.functions import ProcessWindowFunction, WindowBounds
from tests.support.operator_harness import BroadcastHarness, OperatorHarness
from tests.unit.planning.test_stream_settings import Nowhere, environment

if TYPE_CHECKING:
    from somewhere import Context


@dataclasses.dataclass
class Total:
    user: str
    total: int


class Mean(NamedTuple):
    user: str
    mean: float


TOTAL = "struct<user:string,total:bigint>"
MEAN = "struct<user:string,mean:double>"


class Process(KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Context) -> Iterator[Total]:
        yield Total(value.user, 1)


class OnlyTimers(KeyedProcessFunction):
    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(5)

    def on_timer(self, time_ms: int, ctx: Any) -> Generator[Mean, None, None]:
        yield Mean(ctx.get_current_key(), 1.0)


class Second(KeyedCoProcessFunction):
    def process_element1(self, value, ctx):
        return None

    def process_element2(self, value: Any, ctx: Any) -> Iterable[Total]:
        return [Total(value.user, 1)]


class OfWindow(ProcessWindowFunction):
    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Mean]:
        yield Mean(key, 1.0)


class Silent(ProcessWindowFunction):
    def process(self, key, context, elements):
        return []


class Counted(AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + 1

    def get_result(self, accumulator: int) -> Total | None:
        return Total("all", accumulator)

    def merge(self, first: int, second: int) -> int:
        return first + second


class Pairs(ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        yield left.user, right.amount


class Groups(CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Iterator[Mean]:
        yield Mean(key, 0.5)


@pytest.fixture
def orders() -> DataStream:
    return environment().from_source(Nowhere(), uid="orders")


def fields_of_node(stream: DataStream) -> str:
    """Return what the operator that made a stream is known to emit."""
    node: Any = stream._node
    assert isinstance(node, KeyedNode)
    found: Any = node.output if node.output is not None else node.function.find_output(T.StructType())
    return str(found.simpleString())


def test_functions_with_state_emit_what_a_hint_of_theirs_says(orders: DataStream) -> None:
    """The hint for the context names what is only there for type checkers: it is not read."""
    by_user = orders.key_by("user")
    assert fields_of_node(by_user.process(Process(), uid="a")) == TOTAL
    assert fields_of_node(by_user.process(OnlyTimers(), uid="b")) == MEAN
    assert fields_of_node(by_user.connect(by_user).process(Second(), uid="c")) == TOTAL
    assert fields_of_node(by_user.aggregate(Counted(), accumulator=int, uid="d")) == TOTAL


def test_windows_and_joins_emit_what_the_hints_of_their_functions_say(orders: DataStream) -> None:
    by_user = orders.key_by("user")
    windows = by_user.window(TumblingEventTimeWindows(60_000))
    assert fields_of_node(windows.process(OfWindow(), uid="a")) == MEAN
    assert fields_of_node(windows.aggregate(Counted(), accumulator="LONG", uid="b")) == TOTAL
    assert fields_of_node(windows.aggregate(Counted(), OfWindow(), accumulator=int, uid="c")) == MEAN
    bounds = windows.aggregate(Counted(), WindowBounds(), accumulator=T.LongType(), uid="d")
    assert fields_of_node(bounds) == f"{TOTAL[:-1]},window_start:timestamp,window_end:timestamp>"
    assert fields_of_node(windows.reduce(max, OfWindow(), uid="e")) == MEAN
    join = by_user.join(by_user)
    pairs = join.interval(lower_ms=0, upper_ms=1, function=Pairs(), uid="f")
    assert fields_of_node(pairs) == "struct<_1:string,_2:bigint>"
    assert fields_of_node(join.co_group(TumblingEventTimeWindows(1), Groups(), uid="g")) == MEAN


def test_without_a_hint_the_error_says_which_operator_and_what_to_annotate(orders: DataStream) -> None:
    windows = orders.key_by("user").window(TumblingEventTimeWindows(60_000))
    with pytest.raises(
        SchemaError, match=r"'totals' is not known.*process\(\) returns be `-> Iterator\[Total"
    ):
        windows.process(Silent(), uid="totals")
    with pytest.raises(SchemaError, match=r"process\(\): there is no hint for what it returns"):
        windows.reduce(max, Silent(), uid="totals")

    class OneRow(Process):
        def process_element(self, value: Any, ctx: Any) -> Total:  # type: ignore[override]
            return Total("ann", 1)

    with pytest.raises(SchemaError, match=r"Total is one row, and it returns rows: Iterator\[Total\]"):
        orders.key_by("user").process(OneRow(), uid="totals")
    with pytest.raises(SchemaError, match=r"the accumulator of 'totals' cannot be of the type 5"):
        windows.aggregate(Counted(), accumulator=5, uid="totals")  # type: ignore[arg-type]


def test_hints_are_found_wherever_a_function_has_them() -> None:
    @dataclasses.dataclass
    class Local:
        word: str

    def rows(record: Any, times: int) -> Iterator[Local]:
        yield Local(record.word * times)

    class Called:
        def __call__(self, record: Any) -> Local:
            return Local(record.word)

    assert infer_output(functools.partial(rows, times=2), "it", is_iterable=True).names == ["word"]
    assert infer_output(Called(), "it", is_iterable=False).names == ["word"]
    Called.__call__.__annotations__["return"] = Iterator["Total"]
    assert infer_output(Called(), "it", is_iterable=True).names == ["user", "total"]
    Called.__call__.__annotations__["return"] = "Iterator[Nobody]"
    with pytest.raises(SchemaError, match=r"hint 'Iterator\[Nobody\]' cannot be read here"):
        infer_output(Called(), "it", is_iterable=True)


@pytest.mark.parametrize(
    "declared", ["at STRUCT<x: INT, x: INT>", "ats ARRAY<STRUCT<x: INT, y: INT, x: INT>>"]
)
def test_fields_of_one_name_within_a_field_are_refused(orders: DataStream, declared: str) -> None:
    with pytest.raises(SchemaError, match=r"'places' cannot be read.*'x' is there 2 times"):
        orders.map(lambda order: ((1, 2),), output=declared, name="places")


def test_an_output_is_said_with_a_class_or_a_type_of_sparks_too(orders: DataStream) -> None:
    declared = T.StructType().add("user", "string").add("total", "long")
    for number, output in enumerate(("user STRING, total LONG", declared, Total)):
        made = orders.key_by("user").process(Process(), output=output, uid=f"totals{number}")
        assert fields_of_node(made) == TOTAL
        tag = OutputTag("late", output)
        side: Any = made.get_side_output(tag)._node
        assert side.output.simpleString() == TOTAL
    assert output_schema(Mean, "it").simpleString() == MEAN
    for wrong in (5, int, "total", T.StructType, object, T.StructType()):
        with pytest.raises(SchemaError, match="the output of 'it'"):
            output_schema(wrong, "it")  # type: ignore[arg-type]


# -- states -----------------------------------------------------------------------------------------
@dataclasses.dataclass
class Place:
    city: str
    number: int | None = None


@dataclasses.dataclass
class Account:
    total: int
    home: Place | None
    former: list[Place]


class Larger:
    def reduce(self, first: Place, second: Place) -> Place:
        return max(first, second, key=lambda place: place.number or 0)


class Sum(AggregateFunction):
    def create_accumulator(self) -> Mean:
        return Mean("", 0.0)

    def add(self, value: Any, accumulator: Mean) -> Mean:
        return accumulator._replace(mean=accumulator.mean + (value.number or 0))

    def get_result(self, accumulator: Mean) -> float:
        return accumulator.mean


class Classes(KeyedProcessFunction):
    """Keeps instances in all kinds of states, and emits what they were before."""

    def open(self, context):
        self.account = context.get_state(ValueStateDescriptor("account", Account))
        self.places = context.get_list_state(ListStateDescriptor("places", Place))
        self.by_city = context.get_map_state(MapStateDescriptor("by_city", str, Place))
        self.largest = context.get_reducing_state(ReducingStateDescriptor("largest", Larger(), Place))
        self.sum = context.get_aggregating_state(AggregatingStateDescriptor("sum", Sum(), Mean))

    def process_element(self, place, ctx):
        account = self.account.value()
        yield account, list(self.places), dict(self.by_city), self.largest.get(), self.sum.get()
        former = [] if account is None else [*account.former, account.home]
        self.account.update(Account(1 if account is None else account.total + 1, place, former))
        self.places.add(place)
        self.by_city[place.city] = place
        self.largest.add(place)
        self.sum.add(place)


def test_states_of_classes_hold_instances_in_the_next_micro_batch_too() -> None:
    harness = OperatorHarness(Classes(), key=lambda place: 1, key_type="INT")
    first, second = Place("Oslo", 3), Place("Bergen", 2)
    for place in (first, second, Place("Moss")):
        harness.push(place)
    assert harness.take().rows == [
        (None, [], {}, None, None),
        (Account(1, first, []), [first], {"Oslo": first}, first, 3.0),
        (Account(2, second, [first]), [first, second], {"Oslo": first, "Bergen": second}, first, 5.0),
    ]


@pytest.mark.parametrize(
    "given,ddl",
    [
        ("total LONG, at DATE", "total LONG, at DATE"),
        (T.LongType(), "bigint"),
        (T.StructType().add("total", "long", False).add("at", "date"), "total bigint, at date"),
        (T.ArrayType(T.DecimalType(9, 2)), "array<decimal(9,2)>"),
        (int, "bigint"),
        (str | None, "string"),
        (dict[str, list[int]], "map<string,array<bigint>>"),
        (Total, "user string, total bigint"),
        (tuple[str, int], "_1 string, _2 bigint"),
    ],
)
def test_a_state_is_declared_with_ddl_or_a_type_and_stores_ddl(given: Any, ddl: str) -> None:
    assert ValueStateDescriptor("s", given).value_type == ddl
    assert ReducingStateDescriptor("s", Larger(), given).value_type == ddl
    assert AggregatingStateDescriptor("s", Sum(), given).accumulator_type == ddl
    assert ListStateDescriptor("s", given).element_type == ddl
    assert MapStateDescriptor("s", "STRING", given).value_type == ddl
    assert OperatorListDescriptor("s", given).element_type == ddl


@pytest.mark.parametrize("wrong", [5, None, "LONGISH", object, T.LongType, int | str, T.StructType()])
def test_what_is_no_type_of_a_state_is_refused_with_the_states_name(wrong: Any) -> None:
    for declare in (ValueStateDescriptor, ListStateDescriptor, OperatorListDescriptor):
        with pytest.raises(SchemaError, match="the state 'seen' cannot have the type"):
            declare("seen", wrong)
    with pytest.raises(SchemaError, match="the state 'seen' cannot have the type"):
        MapStateDescriptor("seen", wrong, "LONG")
    with pytest.raises(SchemaError, match="A key of a map is a scalar"):
        MapStateDescriptor("seen", Place, "LONG")


def test_descriptors_are_values_that_travel_and_are_replaced_with_their_classes() -> None:
    declared = ValueStateDescriptor("home", Place, default=Place("Oslo"))
    again = pickle.loads(pickle.dumps(dataclasses.replace(declared, name="other")))
    assert (again.name, again.value_type, again.default) == ("other", declared.value_type, declared.default)
    assert again.value_type.hint is Place and repr(declared).startswith("ValueStateDescriptor(name='home'")
    assert declared == ValueStateDescriptor("home", "city string, number bigint", Place("Oslo"))


def test_broadcast_and_operator_list_states_hold_instances() -> None:
    from flinkish_spark import KeyedBroadcastProcessFunction

    limits = MapStateDescriptor("limits", str, Place)

    class Limited(KeyedBroadcastProcessFunction):
        def process_element(self, value, ctx):
            yield ctx.get_broadcast_state(limits)["all"]

        def process_broadcast_element(self, value, ctx):
            ctx.get_broadcast_state(limits)["all"] = value

    harness = BroadcastHarness(Limited(), [limits], key=lambda value: value, key_type="INT")
    harness.micro_batch(broadcast=[(Place("Oslo", 3), None)], elements=[(1, None)])
    assert harness.take().rows == [Place("Oslo", 3)]
    items = OperatorListDescriptor("places", Place)
    lists = OperatorLists("uid", [items], None)
    lists.state(items).add(Place("Moss", 1))
    assert OperatorLists("uid", [items], lists.dump()).state(items).get() == [Place("Moss", 1)]


@dataclasses.dataclass
class WithOneMore:
    total: int
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.total * 2


@dataclasses.dataclass
class WithInitVar:
    total: int
    factor: dataclasses.InitVar[int]
    offset: dataclasses.InitVar[int] = 0


@dataclasses.dataclass
class WithDefaultInitVar:
    total: int
    offset: dataclasses.InitVar[int] = 0


@dataclasses.dataclass(init=False)
class WithItsOwnInit:
    total: int

    def __init__(self, amounts: list[int]) -> None:
        self.total = sum(amounts)


@pytest.mark.parametrize(
    "kind,says",
    [
        (WithOneMore, "doubled"),
        (WithInitVar, "factor"),
        (WithDefaultInitVar, "'offset', an InitVar"),
        (WithItsOwnInit, "total"),
        (list[WithOneMore], "doubled"),
        (WithOneMore | None, "doubled"),
    ],
)
def test_a_class_that_cannot_be_made_of_its_fields_is_no_type_of_a_state(
    kind: Any, says: str, orders: DataStream
) -> None:
    for declare in (
        lambda: ValueStateDescriptor("s", kind),
        lambda: ListStateDescriptor("s", kind),
        lambda: MapStateDescriptor("s", int, kind),
        lambda: orders.key_by("user").aggregate(Counted(), accumulator=kind, uid="a"),
        lambda: OperatorListDescriptor("s", kind),
    ):
        with pytest.raises(SchemaError, match="the type") as refused:
            declare()
        assert says in str(refused.value)


def test_a_class_that_makes_more_of_its_fields_is_made_again_by_them() -> None:
    @dataclasses.dataclass
    class Plain:
        kinds: ClassVar[int] = 3
        total: int
        seen: int = dataclasses.field(default=0, kw_only=True)

        def __post_init__(self) -> None:
            self.seen += 1

    made = maker_of(Plain)
    assert made is not None and made({"total": 1, "seen": 1}) == Plain(1, seen=1)


def _hinted(hint: str) -> Any:
    def rows(record: Any) -> Any:
        return record

    rows.__annotations__ = {"return": hint}
    return rows


@dataclasses.dataclass
class WithUnreadableField:
    at: "dataclasses.nothing"  # type: ignore[name-defined]  # noqa: UP037


@pytest.mark.parametrize(
    "call,says",
    [
        (_hinted("dataclasses.nothing"), "'dataclasses.nothing' cannot be read here: AttributeError"),
        (_hinted("1 / 0"), "'1 / 0' cannot be read here: ZeroDivisionError"),
        (_hinted("[][1]"), "cannot be read here: IndexError"),
        (_hinted("list["), "cannot be read here: SyntaxError"),
        (_hinted("Nobody"), "cannot be read here: NameError"),
        (_hinted("WithUnreadableField"), "the hints of WithUnreadableField cannot be read: AttributeError"),
    ],
)
def test_a_hint_that_cannot_be_evaluated_is_named_whatever_it_raises(call: Any, says: str) -> None:
    with pytest.raises(SchemaError, match=r"the output of 'x' is not known") as refused:
        infer_output(call, "'x'", is_iterable=False)
    assert says in str(refused.value)


def test_a_variable_around_that_has_no_value_yet_is_no_error_of_the_hint() -> None:
    def made() -> Any:
        def rows(record: Any) -> Mean:
            return Mean(record, later)

        if not rows:
            later = 1.0
        return rows

    assert infer_output(made(), "'x'", is_iterable=False).simpleString() == MEAN
