"""What the state of an operator means: every setting is a part of it, or is known to be harmless."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    AggregateColumn,
    AggregateFunction,
    Fold,
    KeyedProcessFunction,
    OutputTag,
    StateTtl,
    TtlUpdate,
    ValueStateDescriptor,
)
from flinkish_spark.cep import CEP, AfterMatchSkip, OpenMatches, Overflow, Pattern, PatternProcessFunction
from flinkish_spark.cep import factories as pattern_factories
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.match_recognize import match_recognize
from flinkish_spark.cep.matches_in_sql import TextPart
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.cep.stages import Stage, Times, WithinType
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.functions.aggregates import ElementChoice, FieldAggregate
from flinkish_spark.joins import IntervalJoin, JoinType, TemporalJoin, WindowCoGroup, WindowJoin
from flinkish_spark.joins.spec import CoGroupFunction, ProcessJoinFunction
from flinkish_spark.planning import factories
from flinkish_spark.planning.meaning import describe_meaning, find_rules
from flinkish_spark.planning.stream_graph import KeyedEntry, KeyedNode, KeyFunction
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.restore import (
    JobShape,
    Misfit,
    OperatorShape,
    RestoreRules,
    check_restore,
    find_changed_meaning,
)
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata
from flinkish_spark.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
)
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.windows import (
    ContinuousEventTimeTrigger,
    CountEvictor,
    CountTrigger,
    DeltaEvictor,
    EventTimeSessionWindows,
    EventTimeTrigger,
    Evict,
    GlobalWindows,
    ProcessingTimeSessionWindows,
    ProcessWindowFunction,
    PurgingTrigger,
    SlidingEventTimeWindows,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    assigners,
    evictors,
    triggers,
)
from flinkish_spark.windows.spec import AggregateWindow, ProcessWindow, ReduceWindow, WindowSpec

ORDERS = "user STRING, amount LONG"
LATE, LOST = OutputTag("late", ORDERS), OutputTag("lost", "amount LONG")


def one_of_two(first: Any, second: Any) -> Any:
    return first


class Sum(AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + int(value.amount)

    def get_result(self, accumulator: int) -> tuple[int]:
        return (accumulator,)

    def merge(self, first: int, second: int) -> int:
        return first + second


class Contents(ProcessWindowFunction):
    def process(self, key: Any, ctx: Any, elements: Any) -> Any:
        yield (len(elements),)


class Pairs(ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Any:
        yield left, right


class Groups(CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Any:
        yield (len(lefts),)


class Found(PatternProcessFunction):
    def process_match(self, match: Any, ctx: Any) -> Any:
        yield (match["a"][0].amount,)

    def process_timed_out_match(self, match: Any, ctx: Any) -> Any:
        ctx.output(LOST, (match["a"][0].amount,))


PATTERN = (
    Pattern.begin("a", AfterMatchSkip.to_first("a"))
    .where(lambda event: event.amount == 1)
    .times(1, 3)
    .greedy()
    .followed_by("b")
    .within(50)
)
INNER = Pattern.begin(Pattern.begin("c").next("d")).within(5, WithinType.PREVIOUS_AND_CURRENT)


def looked_for(pattern: Pattern) -> LookedFor:
    return LookedFor("one", compile_pattern(pattern), pattern.skip, pattern.stages)


SEARCH = PatternSearch(
    (looked_for(PATTERN),), Found(), TimeDomain.EVENT_TIME, "at", one_of_two, LATE, OpenMatches(2), ("x",)
)
COLUMNS = (AggregateColumn("x", Fold.SUM, "amount"), AggregateColumn("n", Fold.COUNT))
SPEC = WindowSpec(TumblingEventTimeWindows(10, 1), CountTrigger(3), CountEvictor(2), 5, LATE, "gone")
TTL = StateTtl(10)
#: One of each specification, with everything said.
SPECIFICATIONS: list[Any] = [
    factories.Windows(SPEC, ReduceWindow(one_of_two), T.StructType()),
    factories.Windows(WindowSpec(SlidingEventTimeWindows(10, 5, 1)), AggregateWindow(Sum(), "LONG")),
    factories.Windows(
        WindowSpec(EventTimeSessionWindows(5), PurgingTrigger(ContinuousEventTimeTrigger(7))),
        ProcessWindow(Contents()),
    ),
    factories.Windows(
        WindowSpec(GlobalWindows(), CountTrigger(3, 2), TimeEvictor(5)), ReduceWindow(one_of_two)
    ),
    factories.Windows(
        WindowSpec(GlobalWindows(), evictor=DeltaEvictor(5.0, one_of_two, Evict.AFTER)),
        ReduceWindow(one_of_two),
    ),
    factories.FoldingWindows(SPEC, COLUMNS),
    factories.FoldingWindows(SPEC, ElementChoice(Fold.MIN, "amount")),
    factories.Reducing(one_of_two, TTL),
    factories.ReducingColumns(one_of_two, TTL),
    factories.Aggregating(Sum(), "LONG", TTL),
    factories.AggregatingColumns(Sum(), "LONG", TTL),
    factories.ChangelogAggregating("_row_kind", TTL, Sum(), "LONG"),
    factories.ChangelogFolding("_row_kind", TTL, COLUMNS, ("user",)),
    factories.Normalizing("_row_kind", TTL),
    factories.FoldingElements(FieldAggregate(Fold.SUM, "amount"), TTL),
    factories.FoldingElements(ElementChoice(Fold.MIN, "amount"), TTL),
    factories.FoldingColumns(COLUMNS, TTL),
    pattern_factories.Patterns(SEARCH),
    pattern_factories.Patterns(dataclasses.replace(SEARCH, patterns=(looked_for(INNER),))),
    pattern_factories.RowPatterns(
        match_recognize(
            "ORDER BY at MEASURES A.x AS x PATTERN (A B) WITHIN INTERVAL '4' SECOND DEFINE A AS x > 1"
        ),
        ("user",),
        LATE,
        TextPart("SELECT", 0, 6),
    ),
    factories.Joining(
        IntervalJoin("a LONG", "b LONG", -1, 5, function=Pairs(), left_late=LATE, right_late=LATE)
    ),
    factories.Joining(TemporalJoin("a LONG", "b LONG", JoinType.LEFT, Pairs(), lambda one: False, TTL, LATE)),
    factories.Joining(
        WindowJoin("a LONG", "b LONG", WindowSpec(TumblingEventTimeWindows(10)), function=Pairs())
    ),
    factories.Joining(
        WindowCoGroup("a LONG", "b LONG", WindowSpec(TumblingEventTimeWindows(10)), Groups(), LATE, LATE)
    ),
]
#: What may change, of all of them.
HARMLESS = {kind: names for one in SPECIFICATIONS for kind, names in find_rules(one).harmless.items()}
#: They say nothing themselves: code, and states whose names and types are stored with these.
OF_CODE = {factories.BroadcastFunctions}


def meaning(function: Any, keys: tuple[Any, ...] = ("user",)) -> dict[str, str]:
    sources = [SourceNode(uid, None) for uid in ("orders", "rates")]  # type: ignore[arg-type]
    entries = tuple(KeyedEntry(source, keys) for source in sources)
    both = isinstance(function, factories.Joining)
    return describe_meaning(KeyedNode("op", entries if both else entries[:1], function, None, 128))


def is_of_product(value: Any) -> bool:
    return type(value).__module__.startswith("flinkish_spark.")


def settings_of(value: Any) -> dict[str, Any]:
    """Return the settings of a specification, by name; none of what is no specification."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value).__module__ in (assigners.__name__, triggers.__name__, evictors.__name__):
        return {name: vars(value)[f"_{name}"] for name in inspect.signature(type(value)).parameters}
    return {}


def with_setting(value: Any, name: str, changed: Any) -> Any:
    """Return a specification with another setting, whether or not its constructor would take it."""
    if dataclasses.is_dataclass(value):
        made = object.__new__(type(value))
        for field in dataclasses.fields(value):
            object.__setattr__(
                made, field.name, changed if field.name == name else getattr(value, field.name)
            )
        return made
    return type(value)(**{**settings_of(value), name: changed})


Change = tuple[type, str, Any]


def changes(value: Any) -> Iterator[tuple[Change, Any]]:
    """Yield a value with one setting changed, at any depth: whose setting, which, and what it is then."""
    if isinstance(value, tuple) and value and is_of_product(value[0]):
        for at, one in enumerate(value):
            yield from ((what, (*value[:at], new, *value[at + 1 :])) for what, new in changes(one))
        return
    if not is_of_product(value) or isinstance(value, enum.Enum):
        return
    for name, own in settings_of(value).items():
        for new in others(own):
            yield (type(value), name, own), with_setting(value, name, new)
        if name not in HARMLESS.get(type(value), ()):
            yield from ((what, with_setting(value, name, new)) for what, new in changes(own))


def others(value: Any) -> list[Any]:
    """Return what else could stand in the place of a value; nothing of what is a specification itself."""
    if isinstance(value, enum.Enum):
        return [one for one in type(value) if one is not value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, dict):
        return [{**value, "WITHIN": "INTERVAL '9' SECOND"}]
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return [(*value[:-1], value[-1] + "x")]
    return []


@pytest.mark.parametrize("specification", SPECIFICATIONS, ids=lambda one: type(one).__name__)
def test_every_setting_is_a_part_of_the_meaning_or_known_to_be_harmless(specification: Any) -> None:
    before = meaning(specification)
    assert meaning(specification) == before
    for (kind, name, own), changed in changes(specification):
        says = find_changed_meaning(before, meaning(changed))
        if name in HARMLESS.get(kind, ()):
            assert not says, (kind, name)
        else:
            assert says and not says.endswith(f"{own} -> {own}"), (kind, name, own)


def reached(value: Any) -> Iterator[tuple[type, str]]:
    """Yield the settings that a specification has and says, at any depth."""
    if isinstance(value, tuple):
        for one in value:
            yield from reached(one)
    elif is_of_product(value) and not isinstance(value, enum.Enum | OutputTag):
        for name, own in settings_of(value).items():
            if own is not None:
                yield type(value), name
                yield from reached(() if name in HARMLESS.get(type(value), ()) else own)


def test_no_specification_and_no_setting_is_left_out() -> None:
    made = {type(one) for one in SPECIFICATIONS} | OF_CODE
    declared = {
        one
        for module in (factories, pattern_factories)
        for one in vars(module).values()
        if inspect.isclass(one) and one.__module__ == module.__name__ and dataclasses.is_dataclass(one)
    }
    assert declared - {factories.ChangelogFactory} == made
    known = set(reached(tuple(SPECIFICATIONS)))
    for kind, names in HARMLESS.items():
        assert names <= {name for name in _names(kind)}, kind
    for kind in {kind for kind, _ in known}:
        missing = {name for name in _names(kind)} - {name for one, name in known if one is kind}
        # Said by other samples of their own, or None in whatever these can be.
        assert missing <= _NEVER_SET.get(kind, set()), (kind, missing)


#: What no sample can say beside the rest of it.
_NEVER_SET: dict[type, set[str]] = {
    AggregateWindow: {"then"},
    ReduceWindow: {"then"},
    Stage: {"until"},
    Times: {"window_ms"},
    WindowJoin: {"left_late", "right_late"},
}


def _names(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [one.name for one in dataclasses.fields(kind)]
    return list(inspect.signature(kind).parameters)


@pytest.mark.parametrize("module", [assigners, triggers, evictors])
def test_what_a_window_s_part_is_made_with_is_kept_under_its_name(module: Any) -> None:
    """Else it would not be found: a constructor's parameter `size_ms` is the attribute `_size_ms`."""
    arguments: dict[str, Any] = {
        "size": 3,
        "slide": 2,
        "first": 2,
        "size_ms": 10,
        "slide_ms": 5,
        "offset_ms": 1,
        "gap_ms": 5,
        "gap_ms_of": lambda one: 5,
        "count": 3,
        "trigger": EventTimeTrigger(),
        "interval_ms": 5,
        "keep_ms": 5,
        "threshold": 5.0,
        "delta": one_of_two,
        "when": Evict.AFTER,
    }
    for kind in vars(module).values():
        is_concrete = (
            inspect.isclass(kind) and kind.__module__ == module.__name__ and not inspect.isabstract(kind)
        )
        bases = (assigners.WindowAssigner, triggers.Trigger, evictors.Evictor)
        if not is_concrete or not issubclass(kind, bases) or kind.__name__.startswith("_"):
            continue
        given = {name: arguments[name] for name in inspect.signature(kind).parameters}
        assert settings_of(kind(**given)) == given


class Silent(EventTimeTrigger):
    """Leaves windows to their clean-up."""

    def on_element(self, *_: Any) -> Any:
        return triggers.TriggerResult.CONTINUE


def test_classes_of_the_program_are_code_and_what_they_derive_from_counts() -> None:
    class Hourly(TumblingEventTimeWindows):
        pass

    class Own(triggers.Trigger):
        def __init__(self) -> None:
            self.made = object()

        def on_element(self, *_: Any) -> Any:
            return triggers.TriggerResult.FIRE

        on_event_time = on_processing_time = on_element

        def clear(self, *_: Any) -> None:
            pass

    def of(assigner: Any, trigger: Any = None) -> dict[str, str]:
        return meaning(factories.FoldingWindows(WindowSpec(assigner, trigger), COLUMNS))

    assert find_changed_meaning(of(Hourly(10)), of(TumblingEventTimeWindows(10))) == ""
    assert of(Hourly(10), Own()) == of(Hourly(10), Own())
    assert (
        find_changed_meaning(of(Hourly(10)), of(Hourly(10), Own()))
        == "spec.trigger: EventTimeTrigger -> Trigger"
    )
    # It decides itself when it fires, so it is not what it derives from.
    assert (
        find_changed_meaning(of(Hourly(10), Silent()), of(Hourly(10)))
        == "spec.trigger: EventTimeTrigger of the program -> EventTimeTrigger"
    )
    assert of(Hourly(10), Silent()) == of(Hourly(10), Silent())
    # The assigner's own trigger is the same as none.
    assert of(Hourly(10), EventTimeTrigger()) == of(Hourly(10))


def test_the_columns_of_a_table_may_change_their_order() -> None:
    turned = factories.FoldingColumns(COLUMNS[::-1])
    assert find_changed_meaning(meaning(factories.FoldingColumns(COLUMNS)), meaning(turned)) == ""
    more = factories.FoldingColumns((*COLUMNS, AggregateColumn("m", Fold.MIN, "amount")))
    says = "columns: n COUNT(*), x SUM(amount) -> m MIN(amount), n COUNT(*), x SUM(amount)"
    assert find_changed_meaning(meaning(factories.FoldingColumns(COLUMNS)), meaning(more)) == says


def test_the_key_is_a_part_of_the_meaning() -> None:
    function = factories.Reducing(one_of_two)
    by_function = KeyFunction(lambda one: one, None, T.StructType())
    before = meaning(function, ("user", "city"))
    assert find_changed_meaning(before, meaning(function, ("city", "user"))) == (
        "key of input 1: user, city -> city, user"
    )
    assert meaning(function, (by_function,))["key of input 1"] == "a function of the program"
    spread = KeyedEntry(None, (), Distribution.BY_CHANNEL)  # type: ignore[arg-type]
    assert "key of input 1" not in describe_meaning(KeyedNode("op", (spread,), function, None, 128))


def test_functions_are_code() -> None:
    class Other(KeyedProcessFunction):
        def process_element(self, value: Any, ctx: Any) -> Any:
            yield value

    assert meaning(Other())["operator"] == "a function of the program"
    rules = MapStateDescriptor("rules", "STRING", "LONG")
    assert meaning(factories.BroadcastFunctions(Other(), (rules,))) == meaning(Other())  # type: ignore[arg-type]
    says = find_changed_meaning(meaning(Other()), meaning(factories.Reducing(one_of_two)))
    assert says == "operator: a function of the program -> Reducing"


# -- a restore ---------------------------------------------------------------------------------------------


Program = Callable[[Any], Any]


def windowed(assigner: Any, **said: Any) -> Program:
    def program(orders: Any) -> Any:
        stream = orders.key_by("user").window(assigner)
        for name, value in said.items():
            stream = getattr(stream, name)(value)
        return stream.sum("amount", uid="op")

    return program


def folded(fold: Fold) -> Program:
    return lambda orders: orders.key_by("user").fold(AggregateColumn("x", fold, "amount"), uid="op")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            windowed(TumblingEventTimeWindows(10)),
            windowed(TumblingProcessingTimeWindows(10)),
            "spec.assigner.clock: event time -> processing time",
        ),
        (folded(Fold.SUM), folded(Fold.COUNT), r"columns: x SUM\(amount\) -> x COUNT\(amount\)"),
        (
            windowed(EventTimeSessionWindows(10)),
            windowed(ProcessingTimeSessionWindows(10)),
            "spec.assigner.clock: event time -> processing time",
        ),
        (
            windowed(TumblingEventTimeWindows(10)),
            windowed(TumblingEventTimeWindows(10), trigger=CountTrigger(2)),
            "spec.trigger: EventTimeTrigger -> CountTrigger",
        ),
        # It would take a window that has not fired, and waits for its clean-up, for one that has.
        (
            windowed(TumblingEventTimeWindows(10), trigger=CountTrigger(2), allowed_lateness=15),
            windowed(TumblingEventTimeWindows(10)),
            "spec.trigger: CountTrigger -> EventTimeTrigger",
        ),
        (
            windowed(TumblingEventTimeWindows(10), trigger=Silent(), allowed_lateness=15),
            windowed(TumblingEventTimeWindows(10)),
            "spec.trigger: EventTimeTrigger of the program -> EventTimeTrigger",
        ),
        (
            lambda orders: orders.key_by("user").max_by("amount", uid="op"),
            lambda orders: orders.key_by("user").min_by("amount", uid="op"),
            "aggregate.fold: max -> min",
        ),
    ],
)
def test_state_that_would_mean_something_else_is_refused(before: Program, after: Program, says: str) -> None:
    harness = ProgramHarness(before, ORDERS)
    harness.push(("ann", 30), 3)
    stored = harness.snapshot()
    with pytest.raises(ConfigError, match=f"operator 'op' would mean something else: .*{says}"):
        ProgramHarness(after, ORDERS, restore=stored)
    ProgramHarness(before, ORDERS, restore=stored)


def test_a_savepoint_says_what_its_state_means_and_what_means_something_else_is_refused() -> None:
    was, now = (
        {"clock": "event time", "operator": "Windows"},
        {"clock": "processing time", "operator": "Windows"},
    )
    operators = {"w": OperatorState(128, ("string",), {}, was), "made": OperatorState(128, ("string",))}
    saved = SavepointMetadata(
        "a", "orders", JobUuid("0" * 32), CheckpointId(1), Lineage(0), BatchId(0), 0, 2, operators, {}, ()
    )
    assert SavepointMetadata.from_json(saved.to_json()) == saved
    assert saved.to_json()["operators"]["w"]["meaning"] == was
    shape = OperatorShape(128, ("string",), now)
    problems = check_restore(saved, JobShape({"w": shape, "made": shape}, {}), RestoreRules()).problems
    assert [(one.misfit, one.subject, one.detail) for one in problems] == [
        (Misfit.MEANING, "w", "clock: event time -> processing time")
    ]


class Declares(KeyedProcessFunction):
    """Has one state, of any kind."""

    def __init__(self, method: str, descriptor: Any) -> None:
        self._method, self._descriptor = method, descriptor

    def open(self, context: Any) -> None:
        self._state = getattr(context, self._method)(self._descriptor)

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        match self._method:
            case "get_state":
                self._state.update(value.amount)
            case "get_list_state":
                self._state.append(value.amount)
            case _:
                self._state.add(value.amount)
        yield (value.amount,)


class Kept(Sum):
    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + int(value)


KINDS: dict[str, tuple[str, Any]] = {
    "value state": ("get_state", ValueStateDescriptor("one", "LONG")),
    "reducing state": ("get_reducing_state", ReducingStateDescriptor("one", one_of_two, "LONG")),
    "aggregating state": ("get_aggregating_state", AggregatingStateDescriptor("one", Kept(), "LONG")),
    "list state": ("get_list_state", ListStateDescriptor("one", "LONG")),
}


@pytest.mark.parametrize("was", KINDS)
@pytest.mark.parametrize("now", KINDS)
def test_a_state_keeps_its_kind(was: str, now: str) -> None:
    def program(kind: str) -> Program:
        return lambda orders: orders.key_by("user").process(Declares(*KINDS[kind]), output="n LONG", uid="op")

    harness = ProgramHarness(program(was), ORDERS)
    harness.push(("ann", 3))
    if was == now:
        ProgramHarness(program(now), ORDERS, restore=harness.snapshot())
        return
    with pytest.raises(StateMismatch, match=f"'one' is stored as {was} and declared as {now}"):
        ProgramHarness(program(now), ORDERS, restore=harness.snapshot())


# -- what may change ---------------------------------------------------------------------------------------


def goes_on(
    before: Program, after: Program, first: list[Any], then: list[Any], fields: str = ORDERS
) -> list[Any]:
    """Return what comes out of elements before and after a change, behind the end of the input."""
    harness = ProgramHarness(before, fields)
    harness.push_all(first)
    harness = ProgramHarness(after, fields, restore=harness.snapshot())
    harness.push_all(then)
    harness.end_of_input()
    return [tuple(row)[:2] for row in harness.take().rows]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # [0, 10) ends with what came before; [0, 20) begins with what comes then.
        (TumblingEventTimeWindows(10), TumblingEventTimeWindows(20), [("ann", 1), ("ann", 2)]),
        (TumblingEventTimeWindows(10), TumblingEventTimeWindows(10, 2), [("ann", 1), ("ann", 2)]),
        # [0, 10), [-5, 5) of 3; [0, 12), [-3, 9), [-6, 6) of 4.
        (
            SlidingEventTimeWindows(10, 5),
            SlidingEventTimeWindows(12, 3),
            [("ann", 1), ("ann", 1), ("ann", 2), ("ann", 2), ("ann", 2), ("ann", 2)],
        ),
        # [3, 13) and [4, 8) are one.
        (EventTimeSessionWindows(10), EventTimeSessionWindows(4), [("ann", 3)]),
        (EventTimeSessionWindows(4), EventTimeSessionWindows(10), [("ann", 3)]),
    ],
)
def test_windows_may_get_another_size_slide_offset_or_gap(
    before: Any, after: Any, expected: list[Any]
) -> None:
    first, then = [(("ann", 1), 3)], [(("ann", 2), 4)]
    assert sorted(goes_on(windowed(before), windowed(after), first, then)) == expected
    in_order = [windowed(one, trigger=PurgingTrigger(EventTimeTrigger())) for one in (before, after)]
    assert sorted(goes_on(*in_order, first, then)) == expected


@pytest.mark.parametrize(("before_ms", "after_ms"), [(0, 20), (20, 0), (5, 20)])
def test_folds_of_windows_may_wait_longer_or_shorter(before_ms: int, after_ms: int) -> None:
    programs = [
        windowed(TumblingEventTimeWindows(10), allowed_lateness=lateness_ms)
        for lateness_ms in (before_ms, after_ms)
    ]
    assert goes_on(*programs, [(("ann", 1), 3)], [(("ann", 2), 4)]) == [("ann", 3)]


def matching(limit: OpenMatches, skip: AfterMatchSkip) -> Program:
    pattern = Pattern.begin("a", skip).where(lambda event: event.amount == 1).followed_by("b")

    def program(orders: Any) -> Any:
        stream = CEP.pattern(orders.key_by("user"), pattern.where(lambda event: event.amount == 2))
        return stream.limit_open_matches(limit).process(Found(), output="amount LONG", uid="op")

    return program


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            (OpenMatches(1, Overflow.DISCARD_NEWEST), AfterMatchSkip.to_first("a")),
            (OpenMatches(5, Overflow.FAIL), AfterMatchSkip.to_first("a")),
        ),
        (
            (OpenMatches(1), AfterMatchSkip.to_last("b")),
            (OpenMatches(1), AfterMatchSkip.to_last("b").raise_on_miss()),
        ),
    ],
)
def test_a_search_may_have_another_limit_and_another_answer_to_a_miss(before: Any, after: Any) -> None:
    found = goes_on(matching(*before), matching(*after), [(("ann", 1), 3)], [(("ann", 2), 4)])
    assert found == [(1,)]


def test_the_inputs_of_a_join_keep_their_places() -> None:
    def program(turned: bool) -> Program:
        def joined(*streams: Any) -> Any:
            left, right = streams[::-1] if turned else streams
            return left.key_by("user").join(right.key_by("user")).interval(lower_ms=0, upper_ms=5, uid="op")

        return joined

    harness = ProgramHarness(program(False), ORDERS, ORDERS)
    harness.push(("ann", 1), 3)
    with pytest.raises(ConfigError, match="elements of 'input-0': left -> right"):
        ProgramHarness(program(True), ORDERS, ORDERS, restore=harness.snapshot())


@pytest.mark.parametrize("before", [JoinType.INNER, JoinType.LEFT])
@pytest.mark.parametrize(("after", "alone"), [(JoinType.INNER, []), (JoinType.LEFT, [("bob", 5)])])
def test_elements_that_wait_join_as_the_program_says_when_they_are_due(
    before: JoinType, after: JoinType, alone: list[Any]
) -> None:
    def program(kind: str, join_type: JoinType) -> Program:
        def joined(orders: Any, rates: Any) -> Any:
            both = orders.key_by("user").join(rates.key_by("user"))
            if kind == "temporal":
                return both.temporal(join_type=join_type, uid="op")
            return both.window(TumblingEventTimeWindows(10), join_type=join_type, uid="op")

        return joined

    for kind in ("temporal", "window"):
        harness = ProgramHarness(program(kind, before), ORDERS, ORDERS)
        harness.push(("ann", 7), 1, source=1)
        harness.push_all([(("ann", 1), 3), (("bob", 5), 4)])
        harness = ProgramHarness(program(kind, after), ORDERS, ORDERS, restore=harness.snapshot())
        harness.end_of_input()
        assert sorted(tuple(row)[:2] for row in harness.take().rows) == [("ann", 1), *alone]


class Total(KeyedProcessFunction):
    TTL: ClassVar[StateTtl | None] = None

    def __init__(self, ttl: StateTtl) -> None:
        self._ttl = ttl

    def open(self, context: Any) -> None:
        self._total = context.get_state(ValueStateDescriptor("total", "LONG", default=0, ttl=self._ttl))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self._total.update(self._total.value() + value.amount)
        yield value.user, self._total.value()


def test_what_counts_as_a_touch_may_change() -> None:
    """What is stored is when an entry was touched last, whichever of the two it was by."""

    def program(update: TtlUpdate) -> Program:
        total = Total(StateTtl(10, update))
        return lambda orders: orders.key_by("user").process(total, output=ORDERS, uid="op")

    for was, now in (tuple(TtlUpdate), tuple(TtlUpdate)[::-1]):
        assert goes_on(program(was), program(now), [(("ann", 1), 3)], [(("ann", 2), 4)]) == [("ann", 3)]
