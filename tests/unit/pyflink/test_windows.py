"""Programs with windows: assigners, triggers, window functions, lateness, classes of the program."""

from __future__ import annotations

from flinkish_spark.pyflink.common import Duration, Row, Time, TimestampAssigner, Types, WatermarkStrategy
from flinkish_spark.pyflink.datastream import (
    AggregateFunction,
    AllWindowFunction,
    OutputTag,
    ProcessAllWindowFunction,
    ProcessWindowFunction,
    ReduceFunction,
    WindowFunction,
)
from flinkish_spark.pyflink.datastream.state import ReducingStateDescriptor, ValueStateDescriptor
from flinkish_spark.pyflink.datastream.window import (
    ContinuousEventTimeTrigger,
    CountSlidingWindowAssigner,
    CountTrigger,
    CountTumblingWindowAssigner,
    CountWindow,
    EventTimeSessionWindows,
    EventTimeTrigger,
    GlobalWindows,
    MergingWindowAssigner,
    PurgingTrigger,
    SessionWindowTimeGapExtractor,
    SlidingEventTimeWindows,
    TimeWindow,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
    WindowAssigner,
)
from tests.support.pyflink_run import Programs

P = Programs("Windows")
PAIR = Types.TUPLE([Types.STRING(), Types.INT()])
SPAN = Types.TUPLE([Types.STRING(), Types.LONG(), Types.LONG(), Types.INT()])
#: Names and times: two windows of five of "a", one of "b".
EVENTS = [("a", 1), ("a", 2), ("b", 3), ("a", 7)]


class SecondField(TimestampAssigner):
    def extract_timestamp(self, value, record_timestamp) -> int:
        return int(value[1])


def timed(env, values=EVENTS):
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(Duration.of_seconds(5)).with_timestamp_assigner(
        SecondField()
    )
    return env.from_collection(values, type_info=PAIR).assign_timestamps_and_watermarks(strategy)


def by_name(env, values=EVENTS):
    return timed(env, values).key_by(lambda value: value[0], key_type=Types.STRING())


def tumbling(env, values=EVENTS):
    return by_name(env, values).window(TumblingEventTimeWindows.of(Time.milliseconds(5)))


class Span(ProcessWindowFunction[tuple, tuple, str, TimeWindow]):
    def process(self, key: str, context: ProcessWindowFunction.Context, elements):
        yield key, context.window().start, context.window().end, len(list(elements))


class Total(WindowFunction[tuple, tuple, str, TimeWindow]):
    def apply(self, key: str, window: TimeWindow, inputs):
        yield key, sum(value[1] for value in inputs)


class Count(AggregateFunction):
    def create_accumulator(self):
        return 0

    def add(self, value, accumulator):
        return accumulator + 1

    def get_result(self, accumulator):
        return accumulator

    def merge(self, acc_a, acc_b):
        return acc_a + acc_b


@P.add("tumbling windows, ProcessWindowFunction", [("a", 0, 5, 2), ("b", 0, 5, 1), ("a", 5, 10, 1)])
def _(env):
    return tumbling(env).process(Span(), output_type=SPAN)


@P.add("tumbling windows, apply of a WindowFunction", [("a", 3), ("b", 3), ("a", 7)])
def _(env):
    return tumbling(env).apply(Total(), output_type=PAIR)


@P.add("a window function without a declared type", [("a", 3), ("b", 3), ("a", 7)])
def _(env):
    return tumbling(env).apply(Total())


@P.add("the bounds of a window, max_timestamp", [4, 4, 9])
def _(env):
    class Last(WindowFunction):
        def apply(self, key, window, inputs):
            yield window.max_timestamp()

    return tumbling(env).apply(Last(), Types.LONG())


@P.add("a window with an offset", [("a", -3, 2, 1), ("a", 2, 7, 1), ("b", 2, 7, 1), ("a", 7, 12, 1)])
def _(env):
    windows = TumblingEventTimeWindows.of(Time.milliseconds(5), Time.milliseconds(2))
    return by_name(env).window(windows).process(Span(), SPAN)


@P.add("sliding windows", [("a", 0, 10, 2), ("a", -5, 5, 1), ("a", 5, 15, 1)])
def _(env):
    windows = SlidingEventTimeWindows.of(Time.milliseconds(10), Time.milliseconds(5))
    return by_name(env, [("a", 1), ("a", 7)]).window(windows).process(Span(), SPAN)


@P.add("session windows", [("a", 1, 5, 2), ("a", 7, 10, 1), ("b", 3, 6, 1)])
def _(env):
    return by_name(env).window(EventTimeSessionWindows.with_gap(Time.milliseconds(3))).process(Span(), SPAN)


@P.add("session windows with a gap per element", [("a", 1, 9, 2)])
def _(env):
    class Gap(SessionWindowTimeGapExtractor):
        def extract(self, element) -> int:
            return 5 if element[1] == 1 else 3

    sessions = by_name(env, [("a", 1), ("a", 6)]).window(EventTimeSessionWindows.with_dynamic_gap(Gap()))
    return sessions.process(Span(), SPAN)


@P.add("sessions that merge, reduced", [("a", 6)])
def _(env):
    sessions = by_name(env, [("a", 1), ("a", 3), ("a", 2)]).window(
        EventTimeSessionWindows.with_gap(Time.milliseconds(2))
    )
    return sessions.reduce(lambda one, two: (one[0], one[1] + two[1]))


@P.add("sessions that merge, aggregated", [3])
def _(env):
    sessions = by_name(env, [("a", 1), ("a", 3), ("a", 2)]).window(
        EventTimeSessionWindows.with_gap(Time.milliseconds(2))
    )
    return sessions.aggregate(Count(), accumulator_type=Types.INT(), output_type=Types.INT())


@P.add("reduce of a window", [("a", 3), ("b", 3), ("a", 7)])
def _(env):
    return tumbling(env).reduce(lambda one, two: (one[0], one[1] + two[1]))


@P.add("reduce of a window by a ReduceFunction", [("a", 2), ("b", 3), ("a", 7)])
def _(env):
    class Largest(ReduceFunction):
        def reduce(self, value1, value2):
            return max(value1, value2)

    return tumbling(env).reduce(Largest())


@P.add("reduce of a window and a window function", [("a", 3, 0), ("b", 3, 0), ("a", 7, 5)])
def _(env):
    class WithStart(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield key, next(iter(elements))[1], context.window().start

    kind = Types.TUPLE([Types.STRING(), Types.INT(), Types.LONG()])
    return tumbling(env).reduce(
        lambda one, two: (one[0], one[1] + two[1]), window_function=WithStart(), output_type=kind
    )


@P.add("aggregate of a window", [2, 1, 1])
def _(env):
    return tumbling(env).aggregate(Count(), accumulator_type=Types.INT(), output_type=Types.INT())


@P.add("aggregate of a window without types", [2, 1, 1])
def _(env):
    return tumbling(env).aggregate(Count())


@P.add("aggregate with a pickled accumulator", [["a", "a"], ["a"], ["b"]])
def _(env):
    class Names(AggregateFunction):
        def create_accumulator(self):
            return []

        def add(self, value, accumulator):
            return [*accumulator, value[0]]

        def get_result(self, accumulator):
            return accumulator

        def merge(self, acc_a, acc_b):
            return acc_a + acc_b

    return tumbling(env).aggregate(Names(), output_type=Types.LIST(Types.STRING()))


@P.add("aggregate of a window and a window function", [("a", 2, 0), ("b", 1, 0), ("a", 1, 5)])
def _(env):
    class WithStart(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield key, next(iter(elements)), context.window().start

    return tumbling(env).aggregate(Count(), window_function=WithStart(), accumulator_type=Types.INT())


@P.add("count windows", [("a", 3)])
def _(env):
    return by_name(env).count_window(2).apply(Total(), PAIR)


@P.add("count windows reduced", [("a", 3)])
def _(env):
    return by_name(env).count_window(2).reduce(lambda one, two: (one[0], one[1] + two[1]))


COUNTED = [("a", number) for number in (1, 2, 3, 4, 5)]


@P.add("sliding count windows wait for the first full one", [("a", 6), ("a", 12)])
def _(env):
    return by_name(env, COUNTED).count_window(3, 2).apply(Total(), PAIR)


@P.add("CountTumblingWindowAssigner", [("a", 3), ("a", 7)])
def _(env):
    return by_name(env, COUNTED).window(CountTumblingWindowAssigner.of(2)).apply(Total(), PAIR)


@P.add("CountSlidingWindowAssigner", [("a", 3), ("a", 5), ("a", 7), ("a", 9)])
def _(env):
    class Counted(WindowFunction[tuple, tuple, str, CountWindow]):
        def apply(self, key, window: CountWindow, inputs):
            yield key, sum(value[1] for value in inputs)

    return by_name(env, COUNTED).window(CountSlidingWindowAssigner.of(2, 1)).apply(Counted(), PAIR)


@P.add("window_all", [(0, 6), (5, 7)])
def _(env):
    class All(ProcessAllWindowFunction):
        def process(self, context: ProcessAllWindowFunction.Context, elements):
            yield context.window().start, sum(value[1] for value in elements)

    windows = timed(env).window_all(TumblingEventTimeWindows.of(Time.milliseconds(5)))
    return windows.process(All(), Types.TUPLE([Types.LONG(), Types.INT()]))


@P.add("window_all and apply", [6, 7])
def _(env):
    class All(AllWindowFunction):
        def apply(self, window, inputs):
            yield sum(value[1] for value in inputs)

    return timed(env).window_all(TumblingEventTimeWindows.of(Time.milliseconds(5))).apply(All(), Types.INT())


@P.add("window_all reduced", [("a", 6), ("a", 7)])
def _(env):
    windows = timed(env).window_all(TumblingEventTimeWindows.of(Time.milliseconds(5)))
    return windows.reduce(lambda one, two: (one[0], one[1] + two[1]))


@P.add("count_window_all", [3, 7])
def _(env):
    numbers = env.from_collection([1, 2, 3, 4, 5], Types.INT())
    return numbers.count_window_all(2).reduce(lambda one, two: one + two)


@P.add("global windows with a count trigger", [("a", 1), ("a", 3), ("a", 6)])
def _(env):
    windows = by_name(env, COUNTED[:3]).window(GlobalWindows.create()).trigger(CountTrigger.of(1))
    return windows.apply(Total(), PAIR)


@P.add("a purging trigger", [("a", 3), ("a", 7)])
def _(env):
    trigger = PurgingTrigger.of(CountTrigger.of(2))
    return by_name(env, COUNTED).window(GlobalWindows.create()).trigger(trigger).apply(Total(), PAIR)


@P.add("the trigger of event time, named", [("a", 3), ("b", 3), ("a", 7)])
def _(env):
    return tumbling(env).trigger(EventTimeTrigger.create()).apply(Total(), PAIR)


@P.add("a continuous trigger", [("a", 1), ("a", 5)], watermarks={1: 2})
def _(env):
    windows = by_name(env, [("a", 1), ("a", 4)]).window(TumblingEventTimeWindows.of(Time.milliseconds(5)))
    return windows.trigger(ContinuousEventTimeTrigger.of(Time.milliseconds(2))).apply(Total(), PAIR)


@P.add("late elements are dropped", [("a", 1), ("a", 12)], watermarks={2: 6})
def _(env):
    return tumbling(env, [("a", 1), ("a", 12), ("a", 3)]).apply(Total(), PAIR)


@P.add("a side output of late elements", [("a", 3)], watermarks={2: 6})
def _(env):
    late = OutputTag("late", PAIR)
    windows = tumbling(env, [("a", 1), ("a", 12), ("a", 3)]).side_output_late_data(late)
    return windows.apply(Total(), Types.TUPLE([Types.STRING(), Types.LONG()])).get_side_output(late)


@P.add("a side output of late elements without a type", [("a", 3)], watermarks={2: 6})
def _(env):
    late = OutputTag("late")
    windows = tumbling(env, [("a", 1), ("a", 12), ("a", 3)]).side_output_late_data(late)
    return windows.apply(Total()).get_side_output(late)


@P.add("allowed lateness fires again", [("a", 1), ("a", 4), ("a", 12)], watermarks={2: 6})
def _(env):
    return tumbling(env, [("a", 1), ("a", 12), ("a", 3)]).allowed_lateness(5).apply(Total(), PAIR)


@P.add("a side output of a window function", ["a", "b", "a"])
def _(env):
    names = OutputTag("names", Types.STRING())

    class WithName(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield names, key
            yield len(list(elements))

    return tumbling(env).process(WithName(), Types.INT()).get_side_output(names)


@P.add("state of a key over its windows", [("a", 1), ("a", 2), ("b", 1)])
def _(env):
    class Number(ProcessWindowFunction):
        def __init__(self):
            self.descriptor = ValueStateDescriptor("windows", Types.INT())

        def process(self, key, context, elements):
            state = context.global_state().get_state(self.descriptor)
            state.update((state.value() or 0) + 1)
            yield key, state.value()

    return tumbling(env).process(Number(), PAIR)


@P.add("state of a window", [("a", 1), ("a", 2)])
def _(env):
    class Firing(ProcessWindowFunction):
        def __init__(self):
            self.descriptor = ValueStateDescriptor("firings", Types.INT())

        def process(self, key, context, elements):
            state = context.window_state().get_state(self.descriptor)
            state.update((state.value() or 0) + 1)
            yield key, state.value()

        def clear(self, context):
            context.window_state().get_state(self.descriptor).clear()

    windows = by_name(env, [("a", 1), ("a", 2)]).window(TumblingEventTimeWindows.of(Time.milliseconds(5)))
    return windows.trigger(CountTrigger.of(1)).process(Firing(), PAIR)


@P.add("state in open of a window function", [1, 2])
def _(env):
    class Number(ProcessWindowFunction):
        def open(self, runtime_context):
            self.count = runtime_context.get_state(ValueStateDescriptor("count", Types.INT()))

        def process(self, key, context, elements):
            self.count.update((self.count.value() or 0) + 1)
            yield self.count.value()

    return tumbling(env, [("a", 1), ("a", 7)]).process(Number(), Types.INT())


@P.add("windows of windows", [("a", 3), ("a", 7), ("b", 3), ("a", 10), ("b", 3)])
def _(env):
    first = tumbling(env).apply(Total(), PAIR)
    again = first.key_by(lambda x: x[0]).window(TumblingEventTimeWindows.of(Time.milliseconds(10)))
    return first.union(again.apply(Total(), PAIR))


@P.add("windows of Rows", [Row(name="a", n=3)])
def _(env):
    kind = Types.ROW_NAMED(["name", "n"], [Types.STRING(), Types.INT()])
    rows = env.from_collection([Row(name="a", n=1), Row(name="a", n=2)], kind)
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(SecondField())
    windows = rows.assign_timestamps_and_watermarks(strategy).key_by(lambda row: row.name)
    return windows.window(TumblingEventTimeWindows.of(Time.seconds(1))).reduce(
        lambda one, two: Row(name=one.name, n=one.n + two.n)
    )


@P.add("windows without any type", [("a", 2), ("b", 1)])
def _(env):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(SecondField())
    made = env.from_collection([["a", 1], ["a", 2], ["b", 3]]).assign_timestamps_and_watermarks(strategy)

    class Size(ProcessWindowFunction):
        def process(self, key, context, elements):
            yield key, len(list(elements))

    return made.key_by(lambda x: x[0]).window(TumblingEventTimeWindows.of(Time.seconds(1))).process(Size())


@P.add("a trigger of the program with state", [("a", 3), ("a", 12)])
def _(env):
    class EverySum(Trigger):
        """Fires and purges when the values of a window have come to at least three."""

        def __init__(self):
            self.descriptor = ReducingStateDescriptor("sum", lambda one, two: one + two, Types.INT())

        def on_element(self, element, timestamp, window, ctx):
            total = ctx.get_partitioned_state(self.descriptor)
            total.add(element[1])
            if total.get() < 3:
                return TriggerResult.CONTINUE
            total.clear()
            return TriggerResult.FIRE_AND_PURGE

        def on_processing_time(self, time, window, ctx):
            return TriggerResult.CONTINUE

        def on_event_time(self, time, window, ctx):
            return TriggerResult.CONTINUE

        def on_merge(self, window, ctx):
            ctx.merge_partitioned_state(self.descriptor)

        def clear(self, window, ctx):
            ctx.get_partitioned_state(self.descriptor).clear()

    windows = by_name(env, [("a", 1), ("a", 2), ("a", 12)]).window(GlobalWindows.create())
    return windows.trigger(EverySum()).apply(Total(), PAIR)


@P.add("a trigger of the program with timers", [("a", 3)])
def _(env):
    class AtEnd(Trigger):
        def on_element(self, element, timestamp, window, ctx):
            ctx.register_event_time_timer(window.max_timestamp())
            return TriggerResult.CONTINUE

        def on_processing_time(self, time, window, ctx):
            return TriggerResult.CONTINUE

        def on_event_time(self, time, window, ctx):
            return TriggerResult.FIRE if time == window.end - 1 else TriggerResult.CONTINUE

        def clear(self, window, ctx):
            ctx.delete_event_time_timer(window.max_timestamp())

    windows = by_name(env, [("a", 1), ("a", 2)]).window(TumblingEventTimeWindows.of(Time.milliseconds(5)))
    return windows.trigger(AtEnd()).apply(Total(), PAIR)


class ByName(WindowAssigner):
    """Windows of ten for "a", of twenty for others."""

    def assign_windows(self, element, timestamp, context):
        size = 10 if element[0] == "a" else 20
        return [TimeWindow(timestamp - timestamp % size, timestamp - timestamp % size + size)]

    def get_default_trigger(self, env):
        return EventTimeTrigger.create()

    def is_event_time(self):
        return True


@P.add("a window assigner of the program", [("a", 0, 10, 3), ("b", 0, 20, 1)])
def _(env):
    return by_name(env).window(ByName()).process(Span(), SPAN)


@P.add("a merging window assigner of the program", [("a", 1, 5, 2), ("a", 7, 10, 1), ("b", 3, 6, 1)])
def _(env):
    class Sessions(MergingWindowAssigner):
        def assign_windows(self, element, timestamp, context):
            return [TimeWindow(timestamp, timestamp + 3)]

        def get_default_trigger(self, env):
            return EventTimeTrigger.create()

        def is_event_time(self):
            return True

    return by_name(env).window(Sessions()).process(Span(), SPAN)


@P.add("a strategy without an assigner of its own, by a function", [("a", 3), ("b", 3), ("a", 7)])
def _(env):
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(
        lambda value, _: value[1]
    )
    made = env.from_collection(EVENTS, PAIR).assign_timestamps_and_watermarks(strategy)
    windows = made.key_by(lambda x: x[0]).window(TumblingEventTimeWindows.of(Duration.of_millis(5)))
    return windows.apply(Total(), PAIR)


test_programs = P.test()
