"""Programs with keys: running aggregates, state, timers, connected and broadcast streams."""

from __future__ import annotations

import pickle
from pathlib import PurePath

import pytest

from flinkish_spark.pyflink.common import Row, Time, TimestampAssigner, Types, WatermarkStrategy
from flinkish_spark.pyflink.datastream import (
    AggregateFunction,
    BroadcastProcessFunction,
    CoFlatMapFunction,
    CoMapFunction,
    FilterFunction,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
    OutputTag,
    ReduceFunction,
    RuntimeContext,
    TimeDomain,
)
from flinkish_spark.pyflink.datastream.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from tests.support.pyflink_run import Programs, run

P = Programs("Keys, state and timers")
PAIR = Types.TUPLE([Types.STRING(), Types.INT()])
TRIPLE = Types.TUPLE([Types.STRING(), Types.INT(), Types.INT()])
PAIRS = [("a", 3), ("b", 5), ("a", 1), ("a", 2)]


class SecondField(TimestampAssigner):
    def extract_timestamp(self, value, record_timestamp):
        return value[1]


BY_SECOND = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(SecondField())


def pairs(env, values=PAIRS):
    return env.from_collection(values, type_info=PAIR)


def by_name(env, values=PAIRS):
    return pairs(env, values).key_by(lambda value: value[0], key_type=Types.STRING())


@P.add("reduce of a lambda", [("a", 3), ("b", 5), ("a", 4), ("a", 6)])
def _(env):
    return by_name(env).reduce(lambda one, two: (one[0], one[1] + two[1]))


@P.add("reduce of single values", [1, 3, 6])
def _(env):
    return env.from_collection([1, 2, 3], Types.INT()).key_by(lambda x: 0).reduce(lambda a, b: a + b)


@P.add("reduce without any type", [("a", [1]), ("a", [1, 2])])
def _(env):
    made = env.from_collection([("a", [1]), ("a", [2])]).map(lambda x: x).key_by(lambda x: x[0])
    return made.reduce(lambda one, two: (one[0], one[1] + two[1]))


@P.add("ReduceFunction with state in open", [("a", 1), ("a", 3)])
def _(env):
    class Sum(ReduceFunction):
        def open(self, runtime_context: RuntimeContext):
            self.calls = runtime_context.get_state(ValueStateDescriptor("calls", Types.INT()))

        def reduce(self, value1, value2):
            self.calls.update((self.calls.value() or 0) + 1)
            return value1[0], value1[1] + value2[1] * self.calls.value()

    return by_name(env, [("a", 1), ("a", 2)]).reduce(Sum())


@P.add("sum(1)", [("a", 3), ("b", 5), ("a", 4), ("a", 6)])
def _(env):
    return by_name(env).sum(1)


@P.add("sum of single values", [1, 3])
def _(env):
    return env.from_collection([1, 2], Types.INT()).key_by(lambda x: True).sum()


@P.add("sum with its keyword", [("a", 3), ("b", 5), ("a", 4), ("a", 6)])
def _(env):
    return by_name(env).sum(position_to_sum=1)


@P.add("sum by a field's name", [Row(k="a", n=1), Row(k="a", n=3)])
def _(env):
    kind = Types.ROW_NAMED(["k", "n"], [Types.STRING(), Types.INT()])
    return env.from_collection([Row(k="a", n=1), Row(k="a", n=2)], kind).key_by(lambda row: row.k).sum("n")


@P.add("min(1)", [("a", 3), ("b", 5), ("a", 1), ("a", 1)])
def _(env):
    return by_name(env).min(1)


@P.add("max(1)", [("a", 3), ("b", 5), ("a", 3), ("a", 3)])
def _(env):
    return by_name(env).max(1)


TRIPLES = [("a", 2, 1), ("a", 1, 2), ("a", 1, 3)]


@P.add("min keeps the other fields of the first", [("a", 2, 1), ("a", 1, 1), ("a", 1, 1)])
def _(env):
    return env.from_collection(TRIPLES, TRIPLE).key_by(lambda x: x[0]).min(1)


@P.add("min_by takes the whole element, of equal ones the first", [("a", 2, 1), ("a", 1, 2), ("a", 1, 2)])
def _(env):
    return env.from_collection(TRIPLES, TRIPLE).key_by(lambda x: x[0]).min_by(1)


@P.add("max_by", [("a", 2, 1), ("a", 2, 1), ("a", 2, 1)])
def _(env):
    return env.from_collection(TRIPLES, TRIPLE).key_by(lambda x: x[0]).max_by(1)


@P.add("a key of a hint", [(1, 1), (2, 2)])
def _(env):
    def length(value) -> int:
        return len(value)

    class WithKey(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield ctx.get_current_key(), len(value)

    return env.from_collection(["a", "bb"], Types.STRING()).key_by(length).process(WithKey())


class Keys(KeyedProcessFunction):
    def process_element(self, value, ctx: KeyedProcessFunction.Context):
        yield ctx.get_current_key()


@P.add("a key without a type", ["a", "b", "a", "a"])
def _(env):
    return pairs(env).key_by(lambda x: x[0]).process(Keys())


@P.add("a key that is a tuple, without a type", [("a", True), ("b", False)])
def _(env):
    return pairs(env, [("a", 1), ("b", 2)]).key_by(lambda x: (x[0], x[1] == 1)).process(Keys())


@P.add("a key that is a tuple, with a type", [("a", 1), ("b", 2)])
def _(env):
    return pairs(env, [("a", 1), ("b", 2)]).key_by(lambda x: x, key_type=PAIR).process(Keys())


@P.add("a key that is a Row", [Row(f0="a"), Row(f0="b")])
def _(env):
    keyed = pairs(env, [("a", 1), ("b", 2)]).key_by(lambda x: Row(x[0]), key_type=Types.ROW([Types.STRING()]))
    return keyed.process(Keys())


@P.add("a key that is None", [None, None])
def _(env):
    return pairs(env, [("a", 1), ("b", 2)]).key_by(lambda x: None).process(Keys())


@P.add("keys of a keyed stream", [1, 2])
def _(env):
    return pairs(env, [("a", 1), ("b", 2)]).key_by(lambda x: x[0]).key_by(lambda x: x[1]).process(Keys())


@P.add("map after key_by", [4, 6, 2, 3])
def _(env):
    return by_name(env).map(lambda x: x[1] + 1)


@P.add("map with state", [("a", 1), ("b", 1), ("a", 2), ("a", 3)])
def _(env):
    class Count(MapFunction):
        def open(self, runtime_context):
            self.count = runtime_context.get_state(ValueStateDescriptor("count", Types.LONG()))

        def map(self, value):
            self.count.update((self.count.value() or 0) + 1)
            return value[0], self.count.value()

    return by_name(env).map(Count(), output_type=PAIR)


@P.add("flat_map with state: averages of two", [("a", 2)])
def _(env):
    class Average(FlatMapFunction):
        def open(self, runtime_context):
            kind = Types.TUPLE([Types.INT(), Types.INT()])
            self.sum = runtime_context.get_state(ValueStateDescriptor("sum", kind))

        def flat_map(self, value):
            count, total = self.sum.value() or (0, 0)
            if count == 1:
                self.sum.clear()
                yield value[0], (total + value[1]) // 2
            else:
                self.sum.update((count + 1, total + value[1]))

    return by_name(env).flat_map(Average(), PAIR)


@P.add("filter with state: the first of each key", [("a", 3), ("b", 5)])
def _(env):
    class First(FilterFunction):
        def open(self, runtime_context):
            self.seen = runtime_context.get_state(ValueStateDescriptor("seen", Types.BOOLEAN()))

        def filter(self, value):
            is_first = not self.seen.value()
            self.seen.update(True)
            return is_first

    return by_name(env).filter(First())


def with_state(make, update):
    """Return a function that has a state, and emits what `update` returns for the state and an element."""

    class WithState(KeyedProcessFunction):
        def open(self, runtime_context: RuntimeContext):
            self.state = make(runtime_context)

        def process_element(self, value, ctx):
            yield update(self.state, value)

    return WithState()


def state_program(name, expected, make, update):
    P.add(name, expected)(lambda env: by_name(env).process(with_state(make, update)))


def changed(state, change):
    change()
    return state


state_program(
    "ValueState of a set, pickled",
    [{3}, {5}, {1, 3}, {1, 2, 3}],
    lambda context: context.get_state(ValueStateDescriptor("seen", Types.PICKLED_BYTE_ARRAY())),
    lambda state, value: changed(state, lambda: state.update((state.value() or set()) | {value[1]})).value(),
)
state_program(
    "ValueState of a Row",
    [3, 5, 4, 6],
    lambda context: context.get_state(
        ValueStateDescriptor("sum", Types.ROW_NAMED(["name", "sum"], [Types.STRING(), Types.INT()]))
    ),
    lambda state, value: (
        changed(
            state,
            lambda: state.update(
                Row(name=value[0], sum=value[1] + (state.value().sum if state.value() else 0))
            ),
        )
        .value()
        .sum
    ),
)
state_program(
    "ListState",
    [[3], [5], [3, 1], [3, 1, 2]],
    lambda context: context.get_list_state(ListStateDescriptor("all", Types.INT())),
    lambda state, value: list(changed(state, lambda: state.add(value[1])).get()),
)
state_program(
    "ListState: iteration, add_all and update",
    [[3, 0], [5, 0], [0, 1], [1, 2]],
    lambda context: context.get_list_state(ListStateDescriptor("two", Types.INT())),
    lambda state, value: list(
        changed(
            state,
            lambda: state.update([*state, value[1]][-2:]) if list(state) else state.add_all([value[1], 0]),
        )
    ),
)
state_program(
    "ListState of tuples",
    [[("a", 3)], [("b", 5)], [("a", 3), ("a", 1)], [("a", 3), ("a", 1), ("a", 2)]],
    lambda context: context.get_list_state(ListStateDescriptor("all", PAIR)),
    lambda state, value: list(changed(state, lambda: state.add(value)).get()),
)
state_program(
    "MapState: put, items, keys, values",
    [{3: "a"}, {5: "b"}, {1: "a", 3: "a"}, {1: "a", 2: "a", 3: "a"}],
    lambda context: context.get_map_state(MapStateDescriptor("map", Types.INT(), Types.STRING())),
    lambda state, value: dict(
        sorted(changed(state, lambda: state.put(value[1], value[0])).items())
        if list(zip(state.keys(), state.values(), strict=True)) == list(state.items())
        else ()
    ),
)
state_program(
    "MapState: contains, remove, is_empty",
    [(True, False, True)] * 4,
    lambda context: context.get_map_state(MapStateDescriptor("map", Types.STRING(), Types.INT())),
    lambda state, value: (
        changed(state, lambda: state.put_all({"x": 1})).contains("x"),
        changed(state, lambda: state.remove("x")).contains("x"),
        state.is_empty(),
    ),
)
state_program(
    "MapState by [], in and get of nothing",
    [(1, True, None)] * 4,
    lambda context: context.get_map_state(MapStateDescriptor("map", Types.STRING(), Types.INT())),
    lambda state, value: (
        changed(state, lambda: state.__setitem__("x", 1))["x"],
        "x" in state,
        state.get("nothing"),
    ),
)
state_program(
    "MapState with tuples as keys and pickled values",
    [
        {("a", 3): [3]},
        {("b", 5): [5]},
        {("a", 3): [3], ("a", 1): [1]},
        {("a", 3): [3], ("a", 1): [1], ("a", 2): [2]},
    ],
    lambda context: context.get_map_state(MapStateDescriptor("map", PAIR, Types.PICKLED_BYTE_ARRAY())),
    lambda state, value: dict(changed(state, lambda: state.put(value, [value[1]])).items()),
)
state_program(
    "ReducingState",
    [3, 5, 4, 6],
    lambda context: context.get_reducing_state(
        ReducingStateDescriptor("sum", lambda one, two: one + two, Types.INT())
    ),
    lambda state, value: changed(state, lambda: state.add(value[1])).get(),
)


class Longest(ReduceFunction):
    def reduce(self, value1, value2):
        return value1 if value1[1] >= value2[1] else value2


state_program(
    "ReducingState of tuples, by a ReduceFunction",
    [("a", 3), ("b", 5), ("a", 3), ("a", 3)],
    lambda context: context.get_reducing_state(ReducingStateDescriptor("most", Longest(), PAIR)),
    lambda state, value: changed(state, lambda: state.add(value)).get(),
)


class Average(AggregateFunction):
    def create_accumulator(self):
        return 0, 0

    def add(self, value, accumulator):
        return accumulator[0] + value[1], accumulator[1] + 1

    def get_result(self, accumulator):
        return accumulator[0] / accumulator[1]

    def merge(self, acc_a, acc_b):
        return acc_a[0] + acc_b[0], acc_a[1] + acc_b[1]


state_program(
    "AggregatingState",
    [3.0, 5.0, 2.0, 2.0],
    lambda context: context.get_aggregating_state(
        AggregatingStateDescriptor("average", Average(), Types.TUPLE([Types.INT(), Types.INT()]))
    ),
    lambda state, value: changed(state, lambda: state.add(value)).get(),
)
state_program(
    "AggregatingState with a pickled accumulator",
    [3.0, 5.0, 2.0, 2.0],
    lambda context: context.get_aggregating_state(
        AggregatingStateDescriptor("average", Average(), Types.PICKLED_BYTE_ARRAY())
    ),
    lambda state, value: changed(state, lambda: state.add(value)).get(),
)


@P.add("StateTtlConfig by its builder", [1, 1, 2, 3])
def _(env):
    class Count(KeyedProcessFunction):
        def open(self, runtime_context):
            config = (
                StateTtlConfig.new_builder(Time.seconds(10))
                .set_update_type(StateTtlConfig.UpdateType.ON_READ_AND_WRITE)
                .never_return_expired()
                .cleanup_full_snapshot()
                .build()
            )
            descriptor = ValueStateDescriptor("count", Types.INT())
            descriptor.enable_time_to_live(config)
            self.count = runtime_context.get_state(descriptor)

        def process_element(self, value, ctx):
            self.count.update((self.count.value() or 0) + 1)
            yield self.count.value()

    return by_name(env).process(Count(), Types.INT())


@P.add("clear of a state", [0, 0, 0, 0])
def _(env):
    class Clear(KeyedProcessFunction):
        def open(self, runtime_context):
            self.count = runtime_context.get_state(ValueStateDescriptor("count", Types.INT()))

        def process_element(self, value, ctx):
            yield self.count.value() or 0
            self.count.update(1)
            self.count.clear()

    return by_name(env).process(Clear(), Types.INT())


@P.add("event-time timers", ["timer at 13 for a", "timer at 15 for b"])
def _(env):
    class Later(KeyedProcessFunction):
        def process_element(self, value, ctx):
            ctx.timer_service().register_event_time_timer(ctx.timestamp() + 10)

        def on_timer(self, timestamp, ctx: KeyedProcessFunction.OnTimerContext):
            yield f"timer at {timestamp} for {ctx.get_current_key()}"

    timed = pairs(env, [("a", 3), ("b", 5)]).assign_timestamps_and_watermarks(BY_SECOND)
    return timed.key_by(lambda x: x[0]).process(Later(), Types.STRING())


@P.add("a timer that is deleted", ["b"])
def _(env):
    class Later(KeyedProcessFunction):
        def process_element(self, value, ctx):
            ctx.timer_service().register_event_time_timer(10)
            if value[0] == "a":
                ctx.timer_service().delete_event_time_timer(10)

        def on_timer(self, timestamp, ctx):
            yield ctx.get_current_key()

    return by_name(env, [("a", 3), ("b", 5)]).process(Later())


@P.add("the domain of a timer, and state in it", [("EVENT_TIME", 4)])
def _(env):
    class Later(KeyedProcessFunction):
        def open(self, runtime_context):
            self.sum = runtime_context.get_state(ValueStateDescriptor("sum", Types.INT()))

        def process_element(self, value, ctx):
            self.sum.update((self.sum.value() or 0) + value[1])
            ctx.timer_service().register_event_time_timer(10)

        def on_timer(self, timestamp, ctx):
            assert ctx.time_domain() is TimeDomain.EVENT_TIME
            yield ctx.time_domain().name, self.sum.value()

    return by_name(env, [("a", 3), ("a", 1)]).process(Later())


@P.add("the watermark between elements", [(1, True), (9, False)], watermarks={1: 5})
def _(env):
    class Look(KeyedProcessFunction):
        def process_element(self, value, ctx):
            yield value[1], ctx.timer_service().current_watermark() < 0

    timed = pairs(env, [("a", 1), ("a", 9)]).assign_timestamps_and_watermarks(BY_SECOND)
    return timed.key_by(lambda x: x[0]).process(Look())


@P.add("a side output of a keyed function", ["a: 3"])
def _(env):
    large = OutputTag("large", Types.STRING())

    class Split(KeyedProcessFunction):
        def process_element(self, value, ctx):
            if value[1] > 2:
                yield large, f"{value[0]}: {value[1]}"
            yield value

    return by_name(env, [("a", 3), ("a", 1)]).process(Split(), PAIR).get_side_output(large)


@P.add("a side output of a timer", [10])
def _(env):
    tag = OutputTag("timers", Types.LONG())

    class Later(KeyedProcessFunction):
        def process_element(self, value, ctx):
            ctx.timer_service().register_event_time_timer(10)

        def on_timer(self, timestamp, ctx):
            yield tag, timestamp

    return by_name(env, [("a", 3)]).process(Later(), PAIR).get_side_output(tag)


@P.add("two keyed operators one after the other", [(3, 1), (5, 1), (4, 1), (6, 1)])
def _(env):
    class Count(KeyedProcessFunction):
        def open(self, runtime_context):
            self.count = runtime_context.get_state(ValueStateDescriptor("count", Types.INT()))

        def process_element(self, value, ctx):
            self.count.update((self.count.value() or 0) + 1)
            yield value[1], self.count.value()

    return by_name(env).sum(1).map(lambda x: x, PAIR).key_by(lambda x: x[1]).process(Count())


@P.add("facts about the task", [(True, True)])
def _(env):
    class Facts(KeyedProcessFunction):
        def open(self, runtime_context):
            self.index = runtime_context.get_index_of_this_subtask()
            self.of = runtime_context.get_number_of_parallel_subtasks()

        def process_element(self, value, ctx):
            yield self.index >= 0, self.index < self.of

    return by_name(env, [("a", 1)]).process(Facts())


NAMES = Types.TUPLE([Types.STRING(), Types.STRING()])


def names(env):
    return env.from_collection([("a", "Ann")], NAMES)


@P.add("KeyedCoProcessFunction with shared state", [("a", "Ann", 4)])
def _(env):
    class Join(KeyedCoProcessFunction):
        def open(self, runtime_context):
            self.sum = runtime_context.get_state(ValueStateDescriptor("sum", Types.INT()))
            self.name = runtime_context.get_state(ValueStateDescriptor("name", Types.STRING()))

        def process_element1(self, value, ctx):
            self.sum.update((self.sum.value() or 0) + value[1])
            ctx.timer_service().register_event_time_timer(1)

        def process_element2(self, value, ctx):
            self.name.update(value[1])

        def on_timer(self, timestamp, ctx):
            yield ctx.get_current_key(), self.name.value(), self.sum.value()

    both = pairs(env, [("a", 3), ("a", 1)]).connect(names(env))
    return both.key_by(lambda x: x[0], lambda x: x[0], key_type=Types.STRING()).process(Join())


@P.add("connect of two keyed streams", ["a3", "aAnn"])
def _(env):
    class Both(KeyedCoProcessFunction):
        def process_element1(self, value, ctx):
            yield f"{ctx.get_current_key()}{value[1]}"

        def process_element2(self, value, ctx):
            yield f"{ctx.get_current_key()}{value[1]}"

    left, right = pairs(env, [("a", 3)]), names(env)
    return left.key_by(lambda x: x[0]).connect(right.key_by(lambda x: x[0])).process(Both(), Types.STRING())


@P.add("a side output of connected streams", ["Ann"])
def _(env):
    tag = OutputTag("names", Types.STRING())

    class Both(KeyedCoProcessFunction):
        def process_element1(self, value, ctx):
            yield value

        def process_element2(self, value, ctx):
            yield tag, value[1]

    both = pairs(env).connect(names(env)).key_by(lambda x: x[0], lambda x: x[0])
    return both.process(Both(), PAIR).get_side_output(tag)


@P.add("keyed CoMapFunction", [4, "Ann!"])
def _(env):
    class Both(CoMapFunction):
        def map1(self, value):
            return value[1] + 1

        def map2(self, value):
            return value[1] + "!"

    return pairs(env, [("a", 3)]).connect(names(env)).key_by(lambda x: x[0], lambda x: x[0]).map(Both())


@P.add("keyed CoFlatMapFunction with state", [("a", 3), ("a", 1)])
def _(env):
    class Known(CoFlatMapFunction):
        def open(self, runtime_context):
            self.waiting = runtime_context.get_list_state(ListStateDescriptor("waiting", PAIR))

        def flat_map1(self, value):
            self.waiting.add(value)

        def flat_map2(self, value):
            yield from self.waiting.get()

    both = pairs(env, [("a", 3), ("a", 1), ("b", 5)]).connect(names(env))
    return both.key_by(lambda x: x[0], lambda x: x[0]).flat_map(Known(), PAIR)


LIMITS = MapStateDescriptor("limits", Types.STRING(), Types.INT())


@P.add("BroadcastProcessFunction", [("b", 5)])
def _(env):
    class AtLeast(BroadcastProcessFunction):
        def process_element(self, value, ctx: BroadcastProcessFunction.ReadOnlyContext):
            if value[1] >= ctx.get_broadcast_state(LIMITS).get("least"):
                yield value

        def process_broadcast_element(self, value, ctx: BroadcastProcessFunction.Context):
            ctx.get_broadcast_state(LIMITS).put(value[0], value[1])

    limits = pairs(env, [("least", 4)]).broadcast(LIMITS)
    return pairs(env).connect(limits).process(AtLeast(), PAIR)


@P.add("KeyedBroadcastProcessFunction with state", [("a", 3), ("b", 5)])
def _(env):
    class UpTo(KeyedBroadcastProcessFunction):
        def open(self, runtime_context):
            self.count = runtime_context.get_state(ValueStateDescriptor("count", Types.INT()))

        def process_element(self, value, ctx: KeyedBroadcastProcessFunction.ReadOnlyContext):
            self.count.update((self.count.value() or 0) + 1)
            if self.count.value() <= ctx.get_broadcast_state(LIMITS)["most"]:
                yield ctx.get_current_key(), value[1]

        def process_broadcast_element(self, value, ctx: KeyedBroadcastProcessFunction.Context):
            ctx.get_broadcast_state(LIMITS)[value[0]] = value[1]

    return by_name(env).connect(pairs(env, [("most", 1)]).broadcast(LIMITS)).process(UpTo(), PAIR)


@P.add("a broadcast state of Rows", ["Ann"])
def _(env):
    people = MapStateDescriptor("people", Types.STRING(), Types.ROW_NAMED(["name"], [Types.STRING()]))

    class Named(BroadcastProcessFunction):
        def process_element(self, value, ctx):
            yield ctx.get_broadcast_state(people).get(value[0]).name

        def process_broadcast_element(self, value, ctx):
            ctx.get_broadcast_state(people).put(value[0], Row(name=value[1]))

    return pairs(env, [("a", 1)]).connect(names(env).broadcast(people)).process(Named(), Types.STRING())


test_programs = P.test()


def test_a_key_that_has_no_text_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"the key \[1\] is a list, and the key has no declared type; give"):
        run(lambda env: env.from_collection([1]).key_by(lambda x: [x]).sum())


def test_a_sink_refuses_elements_without_a_type() -> None:
    from flinkish_spark import MemorySink
    from flinkish_spark.core.errors import SchemaError

    with pytest.raises(SchemaError, match="MemorySink gets a stream whose elements have no declared type"):
        run(lambda env: env.from_collection([1]).map(lambda x: x).sink_to(MemorySink("nothing")))


def test_a_value_without_a_type_runs_no_code_when_it_is_read() -> None:
    with pytest.raises(pickle.UnpicklingError, match="holds a PurePath of pathlib; it may hold"):
        Types.PICKLED_BYTE_ARRAY().decode(pickle.dumps(PurePath))
    with pytest.raises(pickle.UnpicklingError, match="holds a getattr of builtins"):
        Types.PICKLED_BYTE_ARRAY().decode(pickle.dumps(Row.of))
