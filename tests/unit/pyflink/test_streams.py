"""Programs over streams without state: types, single values, tuples, rows, side outputs, unions."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal

from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.pyflink.common import Row, Types, WatermarkStrategy
from flinkish_spark.pyflink.common.typeinfo import RowTypeInfo
from flinkish_spark.pyflink.datastream import (
    CoFlatMapFunction,
    CoMapFunction,
    CoProcessFunction,
    FilterFunction,
    FlatMapFunction,
    KeySelector,
    MapFunction,
    OutputTag,
    Partitioner,
    ProcessFunction,
    RuntimeExecutionMode,
)
from tests.support.pyflink_run import Programs

P = Programs("Streams without state")
PAIR = Types.TUPLE([Types.STRING(), Types.INT()])


@P.add("bare ints in and out", [2, 3, 4])
def _(env):
    return env.from_collection([1, 2, 3], type_info=Types.INT()).map(lambda x: x + 1, output_type=Types.INT())


@P.add("bare strings without a type", ["A", "B"])
def _(env):
    return env.from_collection(["a", "b"]).map(lambda x: x.upper())


@P.add("a source of floats", [0.5, 1.0])
def _(env):
    return env.from_collection([1.0, 2.0], Types.DOUBLE()).map(lambda x: x / 2, Types.DOUBLE())


@P.add("an int where DOUBLE is declared", [1.0, 2.0])
def _(env):
    return env.from_collection([1, 2], Types.INT()).map(lambda x: x, Types.DOUBLE())


@P.add("booleans", [True, False])
def _(env):
    return env.from_collection([1, 2], Types.INT()).map(lambda x: x % 2 == 1, Types.BOOLEAN())


@P.add("an empty collection", [])
def _(env):
    return env.from_collection([], Types.INT()).map(lambda x: x, Types.INT())


@P.add("a collection that is a generator", [1, 4])
def _(env):
    return env.from_collection((x * x for x in (1, 2)), Types.LONG())


@P.add("a collection of mixed values", [1, "a", (2, 3)])
def _(env):
    return env.from_collection([1, "a", (2, 3)])


@P.add("ints beyond 64 bits", [2**70])
def _(env):
    return env.from_collection([2**69], Types.BIG_INT()).map(lambda x: x * 2)


@P.add("tuples by position", [("a", 2), ("b", 3)])
def _(env):
    return env.from_collection([("a", 1), ("b", 2)], type_info=PAIR).map(
        lambda t: (t[0], t[1] + 1), output_type=PAIR
    )


@P.add("tuples that are unpacked in a call", ["a1"])
def _(env):
    def join(value):
        name, number = value
        return f"{name}{number}"

    return env.from_collection([("a", 1)], PAIR).map(join, Types.STRING())


@P.add("tuples in tuples", [("a", (2, "x"))])
def _(env):
    kind = Types.TUPLE([Types.STRING(), Types.TUPLE([Types.INT(), Types.STRING()])])
    return env.from_collection([("a", (1, "x"))], kind).map(lambda t: (t[0], (t[1][0] + 1, t[1][1])), kind)


@P.add("tuples in lists", [[(1, "a"), (2, "b")]])
def _(env):
    kind = Types.LIST(Types.TUPLE([Types.INT(), Types.STRING()]))
    return env.from_collection([1], Types.INT()).map(lambda x: [(x, "a"), (x + 1, "b")], kind)


@P.add("rows by name", [Row(name="ann", age=31)])
def _(env):
    kind = Types.ROW_NAMED(["name", "age"], [Types.STRING(), Types.INT()])
    people = env.from_collection([Row(name="ann", age=30)], kind)
    return people.map(lambda row: Row(name=row.name, age=row["age"] + 1), kind)


@P.add("rows by name in another order", [Row(name="ann", age=30)])
def _(env):
    kind = Types.ROW_NAMED(["name", "age"], [Types.STRING(), Types.INT()])
    return env.from_collection([1], Types.INT()).map(lambda x: Row(age=30, name="ann"), kind)


@P.add("rows by position", [Row(f0=2, f1="a")])
def _(env):
    kind = Types.ROW([Types.INT(), Types.STRING()])
    return env.from_collection([Row(1, "a")], kind).map(lambda row: Row(row[0] + 1, row[1]), kind)


@P.add("rows without a declared type", [Row(name="ann", age=31)])
def _(env):
    return env.from_collection([Row(name="ann", age=30)]).map(lambda r: Row(name=r.name, age=r.age + 1))


@P.add("rows in rows", [Row(id=1, at=Row(x=2, y=3))])
def _(env):
    point = Types.ROW_NAMED(["x", "y"], [Types.INT(), Types.INT()])
    kind = Types.ROW_NAMED(["id", "at"], [Types.INT(), point])
    return env.from_collection([Row(id=1, at=Row(x=2, y=3))], kind).map(lambda r: r, kind)


@P.add("a Row as a template", [Row(name="ann", age=1)])
def _(env):
    person = Row("name", "age")
    return env.from_collection([1], Types.INT()).map(lambda x: person("ann", x))


@P.add("a Row as a dict", [{"a": 1, "b": {"c": 2}}])
def _(env):
    return env.from_collection([Row(a=1, b=Row(c=2))]).map(lambda row: row.as_dict(True))


@P.add("a field of a Row that is set", [Row(a=5)])
def _(env):
    def change(row):
        row["a"] = 5
        return row

    return env.from_collection([Row(a=1)]).map(change)


@P.add("lists", [[1, 2], [3]])
def _(env):
    return env.from_collection([[1], [3]], Types.LIST(Types.INT())).map(
        lambda one: [1, 2] if one == [1] else one, Types.LIST(Types.INT())
    )


@P.add("arrays", [[1, 2]])
def _(env):
    return env.from_collection([[1, 2]], Types.PRIMITIVE_ARRAY(Types.LONG())).map(
        lambda x: x, Types.BASIC_ARRAY(Types.LONG())
    )


@P.add("maps", [{"a": 2}])
def _(env):
    kind = Types.MAP(Types.STRING(), Types.INT())
    return env.from_collection([{"a": 1}], kind).map(lambda one: {key: one[key] + 1 for key in one}, kind)


@P.add("maps with tuples as keys", [{(1, 2): "a"}])
def _(env):
    kind = Types.MAP(Types.TUPLE([Types.INT(), Types.INT()]), Types.STRING())
    return env.from_collection([{(1, 2): "a"}], kind)


@P.add("bytes", [b"abc"])
def _(env):
    return env.from_collection([b"ab"], Types.PRIMITIVE_ARRAY(Types.BYTE())).map(
        lambda x: x + b"c", Types.PRIMITIVE_ARRAY(Types.BYTE())
    )


@P.add("decimals, dates and timestamps", [(Decimal("1.5"), datetime.date(2024, 1, 2))])
def _(env):
    kind = Types.TUPLE([Types.BIG_DEC(), Types.SQL_DATE(), Types.SQL_TIMESTAMP()])
    moment = datetime.datetime(2024, 1, 1, 23)
    return env.from_collection([(Decimal("1.5"), moment.date(), moment)], kind).map(
        lambda t: (t[0].normalize(), (t[2] + datetime.timedelta(hours=1)).date())
    )


@P.add("times of day", [datetime.time(1, 3)])
def _(env):
    return env.from_collection([datetime.time(1, 2)], Types.SQL_TIME()).map(lambda x: x.replace(minute=3))


@P.add("null fields", [("a", None)])
def _(env):
    return env.from_collection([("a", None)], PAIR).map(lambda t: t, PAIR)


@P.add("None as an element of a stream without a type", [None, 1])
def _(env):
    return env.from_collection([None, 1]).map(lambda x: x)


@P.add("any Python object, pickled", ["2024"])
def _(env):
    made = env.from_collection([datetime.datetime(2024, 1, 1)], Types.PICKLED_BYTE_ARRAY())
    return made.map(lambda x: {"year": x.year, "set": {1}}).map(lambda x: str(x["year"]))


@P.add("a type from a hint", [("a", 1)])
def _(env):
    def parse(text: str) -> tuple[str, int]:
        return text[0], int(text[1])

    made = env.from_collection(["a1"]).map(parse)
    assert made.get_type() == Types.TUPLE([Types.STRING(), Types.LONG()])
    return made


@P.add("a type from a hint of a generator", ["a", "b"])
def _(env):
    def words(text: str) -> Iterator[str]:
        yield from text.split()

    made = env.from_collection(["a b"]).flat_map(words)
    assert made.get_type() == Types.STRING()
    return made


@P.add("a type from the elements of a collection", ["f0 f1"])
def _(env):
    made = env.from_collection([("a", 1), ("b", 2)])
    return env.from_collection([" ".join(made.get_type().names)])


@P.add("a declared type is asked for", ["name age"])
def _(env):
    kind = Types.ROW_NAMED(["name", "age"], [Types.STRING(), Types.INT()])
    assert isinstance(kind, RowTypeInfo)
    return env.from_collection([" ".join(kind.get_field_names())], Types.STRING())


@P.add("MapFunction", [10])
def _(env):
    class TenTimes(MapFunction):
        def open(self, runtime_context):
            self.factor = 10

        def map(self, value):
            return value * self.factor

    return env.from_collection([1], Types.INT()).map(TenTimes(), Types.INT())


@P.add("a subscripted class, MapFunction[int, str]", ["1"])
def _(env):
    class AsText(MapFunction[int, str]):
        def map(self, value: int) -> str:
            return str(value)

    return env.from_collection([1], Types.INT()).map(AsText())


@P.add("flat_map of a lambda that returns a list", ["a", "b", "c"])
def _(env):
    return env.from_collection(["a b", "c"], Types.STRING()).flat_map(lambda x: x.split(), Types.STRING())


@P.add("flat_map of a generator", [0, 0, 1])
def _(env):
    def below(value):
        yield from range(value)

    return env.from_collection([1, 2], Types.INT()).flat_map(below, output_type=Types.INT())


@P.add("flat_map that returns None for an element", [2])
def _(env):
    return env.from_collection([1, 2], Types.INT()).flat_map(lambda x: [x] if x > 1 else None, Types.INT())


@P.add("FlatMapFunction", [("a", 1), ("b", 1)])
def _(env):
    class Words(FlatMapFunction):
        def flat_map(self, value):
            for word in value.split(","):
                yield word, 1

    return env.from_collection(["a,b"], Types.STRING()).flat_map(Words(), PAIR)


@P.add("filter", [2, 4])
def _(env):
    return env.from_collection([1, 2, 3, 4], Types.INT()).filter(lambda x: x % 2 == 0)


@P.add("FilterFunction", [("b", 5)])
def _(env):
    class Large(FilterFunction):
        def filter(self, value):
            return value[1] > 3

    return env.from_collection([("a", 1), ("b", 5)], PAIR).filter(Large())


@P.add("a chain of map, filter and flat_map", ["x6", "x6"])
def _(env):
    numbers = env.from_collection([1, 2, 3], Types.INT())
    return numbers.map(lambda x: x * 2).filter(lambda x: x > 4).flat_map(lambda x: [f"x{x}"] * 2)


@P.add("project", [(3, "a")])
def _(env):
    kind = Types.TUPLE([Types.STRING(), Types.INT(), Types.INT()])
    return env.from_collection([("a", 2, 3)], kind).project(2, 0)


@P.add("union of two streams", [1, 2, 3])
def _(env):
    return env.from_collection([1], Types.INT()).union(env.from_collection([2, 3], Types.INT()))


@P.add("union of three streams", ["a", "b", "c"])
def _(env):
    one, two, three = (env.from_collection([text], Types.STRING()) for text in "abc")
    return one.union(two, three)


@P.add("union with itself", [1, 1])
def _(env):
    numbers = env.from_collection([1], Types.INT())
    return numbers.union(numbers)


@P.add("union of streams of different types", [1, "a"])
def _(env):
    return env.from_collection([1], Types.INT()).union(env.from_collection(["a"], Types.STRING()))


@P.add("union of keyed streams", [1, 2])
def _(env):
    one = env.from_collection([1], Types.INT()).key_by(lambda x: x)
    return one.union(env.from_collection([2], Types.INT()).key_by(lambda x: x))


@P.add("two branches of one stream", [1, 2, 10, 20])
def _(env):
    numbers = env.from_collection([1, 2], Types.INT())
    return numbers.map(lambda x: x, Types.INT()).union(numbers.map(lambda x: x * 10, Types.INT()))


@P.add("ProcessFunction", ["1", "2"])
def _(env):
    class Text(ProcessFunction):
        def process_element(self, value, ctx: ProcessFunction.Context):
            yield str(value)

    return env.from_collection([1, 2], Types.INT()).process(Text(), output_type=Types.STRING())


@P.add("a side output by yield tag, value", ["odd 1", "odd 3"])
def _(env):
    odd = OutputTag("odd", Types.STRING())

    class Split(ProcessFunction):
        def process_element(self, value, ctx):
            if value % 2:
                yield odd, f"odd {value}"
            else:
                yield value

    return env.from_collection([1, 2, 3], Types.INT()).process(Split(), Types.INT()).get_side_output(odd)


@P.add("the main output beside a side output", [2])
def _(env):
    odd = OutputTag("odd", Types.INT())

    class Split(ProcessFunction):
        def process_element(self, value, ctx):
            yield (odd, value) if value % 2 else value

    return env.from_collection([1, 2, 3], Types.INT()).process(Split(), Types.INT())


@P.add("two side outputs, one of tuples", [("a", 1), ("n", 0)])
def _(env):
    known, unknown = OutputTag("known", PAIR), OutputTag("unknown", PAIR)

    class Split(ProcessFunction):
        def process_element(self, value, ctx):
            yield (known, (value, 1)) if value == "a" else (unknown, (value, 0))

    made = env.from_collection(["a", "n"], Types.STRING()).process(Split(), Types.STRING())
    return made.get_side_output(known).union(made.get_side_output(unknown))


@P.add("a side output without a type", [{"bad": 1}])
def _(env):
    tag = OutputTag("bad")

    class Split(ProcessFunction):
        def process_element(self, value, ctx):
            yield tag, {"bad": value}

    return env.from_collection([1], Types.INT()).process(Split()).get_side_output(tag)


@P.add("ctx.output(tag, value)", [1])
def _(env):
    tag = OutputTag("all", Types.INT())

    class Copy(ProcessFunction):
        def process_element(self, value, ctx):
            ctx.output(tag, value)

    return env.from_collection([1], Types.INT()).process(Copy(), Types.INT()).get_side_output(tag)


@P.add("CoMapFunction", ["a!", 2])
def _(env):
    class Both(CoMapFunction):
        def map1(self, value):
            return value + 1

        def map2(self, value):
            return value + "!"

    return (
        env.from_collection([1], Types.INT()).connect(env.from_collection(["a"], Types.STRING())).map(Both())
    )


@P.add("CoFlatMapFunction", ["1", "1", "a"])
def _(env):
    class Both(CoFlatMapFunction):
        def flat_map1(self, value):
            yield from [str(value)] * 2

        def flat_map2(self, value):
            yield value

    numbers, texts = env.from_collection([1], Types.INT()), env.from_collection(["a"], Types.STRING())
    return numbers.connect(texts).flat_map(Both(), output_type=Types.STRING())


@P.add("CoProcessFunction", [("n", 1), ("t", 5)])
def _(env):
    class Both(CoProcessFunction):
        def process_element1(self, value, ctx: CoProcessFunction.Context):
            yield "n", value

        def process_element2(self, value, ctx: CoProcessFunction.Context):
            yield "t", len(value)

    numbers, texts = env.from_collection([1], Types.INT()), env.from_collection(["hello"], Types.STRING())
    return numbers.connect(texts).process(Both(), PAIR)


@P.add("shuffle, rebalance, rescale and forward", [1, 2, 3])
def _(env):
    return env.from_collection([1, 2, 3], Types.INT()).shuffle().rebalance().rescale().forward()


@P.add("partition_custom", [1, 2])
def _(env):
    class Modulo(Partitioner):
        def partition(self, key, num_partitions):
            return key % num_partitions

    return env.from_collection([1, 2], Types.INT()).partition_custom(Modulo(), lambda x: x)


@P.add("name, uid and parallelism of operators", [2])
def _(env):
    made = env.from_collection([1], Types.INT()).map(lambda x: x + 1, Types.INT())
    return made.name("plus one").uid("plus-one").set_parallelism(2).set_max_parallelism(8).disable_chaining()


@P.add("settings of the environment", [1])
def _(env):
    env.set_parallelism(1)
    env.set_runtime_mode(RuntimeExecutionMode.BATCH)
    env.enable_checkpointing(1000)
    env.set_buffer_timeout(10)
    return env.from_collection([1], Types.INT())


@P.add("execute_and_collect in a with", [1, 2])
def _(env):
    with env.from_collection([1, 2], Types.INT()).execute_and_collect() as results:
        return list(results)


@P.add("execute_and_collect with a limit", [1, 2])
def _(env):
    return env.from_collection([1, 2, 3], Types.INT()).execute_and_collect("job", limit=2)


@P.add("execute_and_collect twice", [1, 1])
def _(env):
    numbers = env.from_collection([1], Types.INT())
    return [*numbers.execute_and_collect(), *numbers.execute_and_collect()]


@P.add("a KeySelector class", [("a", 1), ("a", 3)])
def _(env):
    class First(KeySelector):
        def get_key(self, value):
            return value[0]

    return env.from_collection([("a", 1), ("a", 2)], PAIR).key_by(First(), key_type=Types.STRING()).sum(1)


@P.add("a source of this package, as Rows", [("ann", 4)])
def _(env):
    source = CollectionSource([("ann", 1), ("ben", 0), ("ann", 3)], "user STRING, amount LONG")
    orders = env.from_source(source, WatermarkStrategy.no_watermarks(), "the orders")
    large = orders.filter(lambda row: row.amount > 0)
    pairs = large.map(lambda row: (row["user"], row.amount))
    return pairs.key_by(lambda x: x[0]).count_window(2).reduce(lambda one, two: (one[0], one[1] + two[1]))


@P.add("a source of this package, with a type", [("ann", 1), ("ben", 0)])
def _(env):
    source = CollectionSource([("ann", 1), ("ben", 0)], "user STRING, amount LONG")
    by_amount = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(
        lambda row, _: row.amount
    )
    return env.from_source(source, by_amount, "orders", type_info=PAIR)


@P.add("a source with one field, as bare values", ["a!"])
def _(env):
    source = CollectionSource(["a"], "value STRING")
    lines = env.from_source(source, WatermarkStrategy.for_monotonous_timestamps(), "lines")
    return lines.map(lambda line: line + "!")


test_programs = P.test()


def test_print_shows_elements_as_java_does(capsys) -> None:
    from tests.support.pyflink_run import run

    def program(env):
        env.from_collection([("a", 1)], PAIR).print()
        env.from_collection([Row(name="b", n=Row(1))]).print("rows")
        env.from_collection([1], Types.INT()).key_by(lambda x: x).print()
        env.execute("prints")

    run(program)
    assert capsys.readouterr().out.splitlines() == ["(a,1)", "rows> +I[b, +I[1]]", "1"]
