"""Windows in one loop: which they are, errors, ends of time, values of all kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Progress
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.operators.context import close_operator
from flinkish_spark.operators.process import ElementError, TimerError
from flinkish_spark.operators.window_loop import make_looped_windows
from flinkish_spark.operators.windowing import window_operator
from flinkish_spark.state import ValueStateDescriptor
from flinkish_spark.state.codec import StateValueError
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.transport import columns as C
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows import (
    AggregateWindow,
    CountEvictor,
    CountTrigger,
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    EventTimeTrigger,
    GlobalWindows,
    KeyAndWindowBounds,
    ProcessWindow,
    ProcessWindowFunction,
    ReduceWindow,
    SlidingEventTimeWindows,
    TriggerResult,
    TumblingEventTimeWindows,
    WindowBounds,
    WindowSpec,
)
from flinkish_spark.worker.runners import ElementRunner
from tests.support.windows_looped_support import BOUNDS, FIELDS, LATE, Group, both, rows_of, shape_of

KEYED = f"user STRING, total LONG, {BOUNDS}"


class Made(AggregateFunction):
    """Made of functions."""

    def __init__(
        self,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        result: Callable[[Any], Any],
        merge: Any = None,
    ) -> None:
        self.create_accumulator, self.add, self.get_result = create, add, result  # type: ignore[method-assign]
        self.merge = merge

    create_accumulator = add = get_result = merge = None  # type: ignore[assignment]


def totals(**given: Any) -> Made:
    parts = {
        "create": lambda: 0,
        "add": lambda order, total: total + order.n,
        "result": lambda total: total,
        "merge": lambda one, other: one + other,
    }
    return Made(**(parts | given))


class Own(KeyAndWindowBounds):
    """A class of the user's."""


class Opened(KeyAndWindowBounds):
    """Might ask for a state."""

    def open(self, context: Any) -> None:
        pass


class Elements(ProcessWindowFunction):
    def process(self, key: Any, context: Any, elements: Any) -> Any:
        return elements


SESSIONS = EventTimeSessionWindows(7)
TOTALS = AggregateWindow(totals(), "LONG")


@pytest.mark.parametrize(
    ("spec", "computation", "is_looped"),
    [
        (WindowSpec(SESSIONS), TOTALS, True),
        (WindowSpec(SESSIONS, EventTimeTrigger()), TOTALS, True),
        (WindowSpec(SESSIONS), AggregateWindow(totals(), "LONG", WindowBounds()), True),
        (WindowSpec(SESSIONS), ReduceWindow(max, KeyAndWindowBounds()), True),
        (WindowSpec(SESSIONS), AggregateWindow(totals(), "LONG", Own()), True),
        (WindowSpec(SESSIONS), AggregateWindow(totals(), "LONG", Opened()), False),
        (WindowSpec(SESSIONS), ProcessWindow(Elements()), True),
        (WindowSpec(SESSIONS), ProcessWindow(Opened()), False),
        (WindowSpec(SESSIONS, allowed_lateness_ms=1), TOTALS, False),
        (WindowSpec(SESSIONS, CountTrigger(2)), TOTALS, False),
        (WindowSpec(SESSIONS, evictor=CountEvictor(2)), TOTALS, False),
        (WindowSpec(SESSIONS, retraction_field="gone"), TOTALS, False),
        (WindowSpec(DynamicEventTimeSessionWindows(len)), TOTALS, False),
        (WindowSpec(GlobalWindows(), CountTrigger(2)), TOTALS, False),
    ],
)
def test_windows_that_fire_once_at_their_end_are_looped(
    spec: WindowSpec, computation: Any, is_looped: bool
) -> None:
    assert (make_looped_windows(spec, computation, ElementType(FIELDS)) is not None) is is_looped


def outcome(group: Group, steps: Any) -> Any:
    """Return what came out of steps, or what failed."""
    out = []
    for inputs, progress in steps:
        try:
            out.append(group.step(inputs, progress))
        except ElementError as error:
            row = group.runner.find_row(inputs, error)
            out.append(("element", error.at, error.is_before, row, repr(error.error)))
        except TimerError as error:
            out.append(("timer", error.timer, error.domain, repr(error.error)))
        except StateValueError as error:
            out.append(("state", str(error)))
    return out


def failing_at(number: int) -> Any:
    def add(order: Any, total: Any) -> Any:
        return total + (1 // (order.n - number)) * 0 + order.n

    return add


Rows = list[tuple[bool, str, int, int]]
FOUND: Rows = [
    (True, "a", 1, 1),
    (True, "c", 2, 9),
    (False, "b", 4, 12),
    (False, "a", 5, 30),
    (False, "a", 6, 26),
]
MORE: Rows = [(True, "d", 7, 4), (False, "d", 8, 14), (False, "d", 9, 40)]


@pytest.mark.parametrize(
    "aggregate",
    [
        *(totals(add=failing_at(number)) for number in (1, 2, 4, 6, 7, 8, 9)),
        totals(create=lambda: 1 // 0),
        totals(merge=lambda one, other: 1 // 0),
        totals(merge=None),
        totals(result=lambda total: 1 // (total - 15)),
        totals(result=lambda total: "much" if total == 15 else total),
        totals(result=lambda total: (total, total) if total == 15 else total),
        totals(result=lambda total: 1.5),
        totals(add=lambda order, total: "x" if order.n == 9 else 1),
        totals(add=lambda order, total: 1.5 if order.n == 8 else 1),
    ],
)
@pytest.mark.parametrize("assigner", [SESSIONS, SlidingEventTimeWindows(12, 5)])
def test_errors_are_those_of_states_and_timers(assigner: Any, aggregate: Any) -> None:
    computation = AggregateWindow(aggregate, "LONG", KeyAndWindowBounds())
    shape = shape_of(KEYED, late=False)
    given = [rows_of(FOUND, shape), rows_of(MORE, shape)]
    steps = [
        (given, Progress(0, 11, 0)),
        ([rows_of([(False, "a", 3, 33)], shape), None], Progress(11, 20, 0)),
        ([None, None], Progress(20, 90, 0)),
    ]
    found = [outcome(group, steps) for group in both(WindowSpec(assigner), (computation,) * 2, KEYED)]
    assert found[0] == found[1]


class Wrong(ProcessWindowFunction):
    """Is wrong where the elements' numbers add up to that."""

    def __init__(self, total: int, then: Callable[[Any, Any], Any]) -> None:
        self.total, self.then = total, then

    def process(self, key: Any, context: Any, elements: Any) -> Any:
        found = sum(element.n for element in elements)
        return self.then(key, context) if found == self.total else [(key, found)]


def late_and_wrong(key: Any, context: Any) -> Any:
    context.output(LATE, (key, "x"))
    return []


@pytest.mark.parametrize(
    "then",
    [
        lambda key, context: 1 // 0,
        lambda key, context: 5,
        lambda key, context: [(key, 1), (key, "x")],
        lambda key, context: (one for one in [(key, 1), 1 // 0]),
        lambda key, context: context.window_state.get_state(ValueStateDescriptor("n", "LONG")),
        lambda key, context: context.global_state.get_state(ValueStateDescriptor("n", "LONG")),
        late_and_wrong,
    ],
)
@pytest.mark.parametrize("assigner", [SESSIONS, TumblingEventTimeWindows(12, 5)])
def test_errors_of_window_functions_are_those_of_states_and_timers(assigner: Any, then: Any) -> None:
    shape = shape_of(FIELDS, late=True)
    steps = [
        ([rows_of(FOUND, shape), rows_of(MORE, shape)], Progress(0, 11, 0)),
        ([rows_of([(False, "a", 3, 33), (False, "b", 3, -9)], shape), None], Progress(11, 20, 0)),
        ([None, None], Progress(20, 90, 0)),
    ]
    for total in (4, 7, 9, 11, 14):
        computation = ProcessWindow(Wrong(total, then))
        spec = WindowSpec(assigner, late_output=LATE)
        found = [outcome(group, steps) for group in both(spec, (computation,) * 2, FIELDS)]
        assert found[0] == found[1]


def test_a_wrong_accumulator_names_state_field_and_key() -> None:
    pairs = totals(create=lambda: (0, "x"), add=lambda order, pair: (1, 2))
    spec, computation = WindowSpec(SESSIONS), AggregateWindow(pairs, "n LONG, text STRING")
    loop = both(spec, (computation,) * 2, "n LONG, text STRING")[1]
    rows = rows_of([(False, "a", 1, 5)], shape_of(FIELDS, late=False))
    with pytest.raises(StateValueError, match=r"state 'window/open' .*'text' of key 'a'"):
        loop.step([rows, None], Progress(0, 0, 0))


def test_an_element_without_a_time_is_an_error_at_its_place() -> None:
    shape = shape_of("total LONG", late=False)
    rows = rows_of([(False, "a", 1, 5), (False, "a", 2, 6), (False, "a", 3, 7)], shape)
    at = rows.schema.get_field_index(C.TIME)
    rows = rows.set_column(at, C.TIME, pa.array([5, None, 7]))
    seen: list[list[int]] = [[], []]
    computations = [
        AggregateWindow(totals(add=lambda order, total, own=own: own.append(order.n) or total), "LONG")
        for own in seen
    ]
    groups = both(WindowSpec(SESSIONS), (computations[0], computations[1]), "total LONG")
    found = [outcome(group, [([rows, None], Progress(0, 0, 0))]) for group in groups]
    assert found[0] == found[1]
    assert seen[0] == seen[1] == [1]
    assert "NoEventTime" in found[1][0][-1]


@pytest.mark.parametrize(
    "assigner", [SESSIONS, TumblingEventTimeWindows(10, 3), SlidingEventTimeWindows(9, 4)]
)
def test_at_both_ends_of_time(assigner: Any) -> None:
    computation = AggregateWindow(totals(), "LONG", KeyAndWindowBounds())
    shape = shape_of(KEYED, late=False)
    least, most = MIN_WATERMARK_MS, MAX_WATERMARK_MS
    times = [least, least + 3, least + 20, -5, 0, most - 20, most - 9, most - 5, most - 1, most]
    rows = rows_of([(False, "ab"[at % 2], at, time_ms) for at, time_ms in enumerate(times)], shape)
    again = rows_of([(False, "a", at, time_ms) for at, time_ms in enumerate(times)], shape)
    steps = [
        ([rows, None], Progress(least, least, 0)),
        ([again, rows], Progress(least, least + 4, 0)),
        ([again, rows], Progress(least + 4, most - 2, 0)),
        ([again, None], Progress(most - 2, most - 1, 0)),
        ([again, None], Progress(most - 1, most - 1, 0, most)),
        ([again, None], Progress(most, most, 0)),
    ]
    groups = both(WindowSpec(assigner), (computation,) * 2, KEYED)
    found = [outcome(group, steps) for group in groups]
    assert found[0] == found[1]
    assert [group.due(assigner.clock) for group in groups] == [None, None]


@dataclasses.dataclass
class Seen:
    """Changes in place."""

    numbers: list[int]
    by_user: dict[str, int]


def noted(order: Any, seen: Seen) -> Seen:
    seen.numbers.append(order.n)
    seen.by_user[order.user] = order.n
    return seen


def put(order: Any, held: dict[str, int]) -> dict[str, int]:
    held[str(order.n)] = held.get(str(order.n), 0) + 1
    return held


@pytest.mark.parametrize(
    ("aggregate", "kind"),
    [
        (
            totals(
                create=lambda: Seen([], {}),
                add=noted,
                result=lambda seen: sum(seen.numbers) + len(seen.by_user),
                merge=lambda one, other: Seen(one.numbers + other.numbers, one.by_user | other.by_user),
            ),
            Seen,
        ),
        (totals(create=dict, add=put, result=len, merge=lambda one, other: one | other), "MAP<STRING, LONG>"),
        (
            totals(
                create=lambda: (0,),
                add=lambda order, one: (one[0] + order.n,),
                result=lambda one: one[0],
                merge=lambda one, other: (one[0] + other[0],),
            ),
            "n LONG",
        ),
    ],
)
@pytest.mark.parametrize("assigner", [SESSIONS, SlidingEventTimeWindows(12, 5)])
def test_accumulators_of_all_kinds(assigner: Any, aggregate: Any, kind: Any) -> None:
    computation = AggregateWindow(aggregate, kind, KeyAndWindowBounds())
    shape = shape_of(KEYED, late=False)
    given = [rows_of(FOUND, shape), rows_of(MORE, shape)]
    steps = [
        (given, Progress(0, 11, 0)),
        ([rows_of([(False, "a", 3, 33), (False, "d", 5, 27)], shape), None], Progress(11, 20, 0)),
        ([None, None], Progress(20, 90, 0)),
    ]
    found = [outcome(group, steps) for group in both(WindowSpec(assigner), (computation,) * 2, KEYED)]
    assert found[0] == found[1]


def test_the_accumulator_of_another_program_is_refused() -> None:
    shape, spec = shape_of("total LONG", late=False), WindowSpec(SESSIONS)
    pairs = totals(create=lambda: (0, 0), add=lambda order, pair: pair, result=lambda pair: pair[0])
    one = both(spec, (AggregateWindow(totals(), "LONG"),) * 2, "total LONG")[1]
    other = both(spec, (AggregateWindow(pairs, "a LONG, b LONG"),) * 2, "total LONG")[1]
    one.step([rows_of([(False, "a", 1, 5)], shape), None], Progress(0, 0, 0))
    with pytest.raises(StateMismatch, match="no field in common"):
        GroupState(other.runner.layout, one.value, one.bases)


class Rich(AggregateFunction):
    """Notes when it is opened and closed."""

    calls: ClassVar[list[str]] = []

    def open(self, context: Any) -> None:
        self.calls.append("open")
        self.step = 2

    def create_accumulator(self) -> int:
        return 0

    def add(self, order: Any, total: int) -> int:
        return total + self.step

    def get_result(self, total: int) -> int:
        return total

    def close(self) -> None:
        self.calls.append("close")


def test_rich_functions_are_opened_and_closed() -> None:
    Rich.calls.clear()
    shape = shape_of(KEYED, late=False)
    computation = AggregateWindow(Rich(), "LONG", KeyAndWindowBounds())
    spec = WindowSpec(TumblingEventTimeWindows(10))
    operator = make_looped_windows(spec, computation, ElementType(FIELDS))
    loop = both(spec, (computation,) * 2, KEYED)[1]
    ((out, _), (more, _)) = (
        loop.step([rows_of([(False, "a", 1, 5)], shape), None], Progress(0, 0, 0)),
        loop.step([None, None], Progress(0, 30, 0)),
    )
    assert not out
    assert [row["total"] for _, _, rows in more for row in rows] == [2]
    close_operator(operator, "op")
    assert Rich.calls == ["open", "open", "close"]


@pytest.mark.parametrize("later", [15, 13, 27])
def test_of_windows_with_one_end_the_one_that_changed_last_fires_last(later: int) -> None:
    shape = shape_of(KEYED, late=False)
    first: Rows = [(False, "a", 1, 20), (False, "b", 2, 20), (False, "a", 3, later), (False, "b", 4, 27)]
    steps = [
        ([rows_of([*first, (False, "a", 5, 27)], shape), None], Progress(0, 0, 0)),
        ([None, None], Progress(0, 90, 0)),
    ]
    computation = AggregateWindow(totals(), "LONG", KeyAndWindowBounds())
    found = [outcome(group, steps) for group in both(WindowSpec(SESSIONS), (computation,) * 2, KEYED)]
    assert found[0] == found[1]


def test_a_session_that_begins_earlier_fires_behind_others_of_its_end() -> None:
    shape = shape_of(KEYED, late=False)
    rows: Rows = [(False, "a", 1, 20), (False, "b", 2, 20), (False, "a", 3, 15)]
    steps = [([rows_of(rows, shape), None], Progress(0, 0, 0)), ([None, None], Progress(0, 90, 0))]
    computation = AggregateWindow(totals(), "LONG", KeyAndWindowBounds())
    for group in both(WindowSpec(SESSIONS), (computation,) * 2, KEYED):
        _, (((_, _, fired),), _) = outcome(group, steps)
        assert [row["user"] for row in fired] == ["b", "a"]


class EarlyToo(EventTimeTrigger):
    """Fires three milliseconds behind a window's beginning, too."""

    def on_element(self, value: Any, timestamp_ms: Any, window: Any, ctx: Any) -> Any:
        ctx.register_event_time_timer(window.start_ms + 3)
        return super().on_element(value, timestamp_ms, window, ctx)

    def on_event_time(self, time_ms: int, window: Any, ctx: Any) -> Any:
        return TriggerResult.FIRE


@pytest.mark.parametrize(
    "spec",
    [
        WindowSpec(TumblingEventTimeWindows(10), allowed_lateness_ms=15),
        WindowSpec(TumblingEventTimeWindows(10), EarlyToo(), allowed_lateness_ms=15),
        WindowSpec(TumblingEventTimeWindows(10), EarlyToo()),
    ],
)
@pytest.mark.parametrize("policy", [BasePolicy(1 << 60), BasePolicy(0, 0.0, 0)])
def test_windows_of_an_earlier_program_go_on_in_the_loop(spec: WindowSpec, policy: BasePolicy) -> None:
    shape = shape_of(KEYED, late=False)
    computation = AggregateWindow(totals(), "LONG", KeyAndWindowBounds())
    general = ElementRunner(window_operator(spec, computation, FIELDS, KEYED), "op", 4, shape)
    before = Group(general, policy)
    rows: Rows = [(False, "a", 1, 1), (False, "a", 2, 12), (False, "b", 4, 14), (False, "c", 8, 31)]
    before.step([rows_of(rows, shape), None], Progress(0, 0, 0))
    before.step([None, None], Progress(0, 11, 0))
    loop = both(WindowSpec(TumblingEventTimeWindows(10)), (computation,) * 2, KEYED, policy)[1]
    loop.value, loop.bases = before.value, before.bases
    # The window of a that has fired is over, however long it was to wait.
    out, _ = loop.step([rows_of([(False, "a", 16, 15)], shape), None], Progress(11, 11, 0))
    assert out == []
    found = []
    for watermark_ms in (12, 13, 19, 25, 40):
        out, _ = loop.step([None, None], Progress(11, watermark_ms, 0))
        found += [(watermark_ms, row["user"], row["total"]) for _, _, some in out for row in some]
    assert sorted(found) == [(19, "a", 18), (19, "b", 4), (40, "c", 8)]
    left = GroupState(loop.runner.layout, loop.value, loop.bases)
    assert (left.timer_count(), list(left.rows("window/open"))) == (0, [])
