"""Types as text: what is read, as Spark reads it; what NOT NULL means; what states cannot hold."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    AggregatingStateDescriptor,
    FlatMapFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    ValueStateDescriptor,
)
from flinkish_spark.connectors.plain_formats import parse_fields
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.joins import JoinType
from flinkish_spark.joins.spec import IntervalJoin
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.ddl import DdlError, ddl_of, is_field_list, parse_ddl
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.schemas import output_schema
from tests.support.ddl_table import ONLY_SPARKS, READ, REFUSED
from tests.support.operator_harness import OperatorHarness


@pytest.mark.parametrize("text", READ)
def test_a_declaration_is_read_as_spark_reads_it(text: str) -> None:
    assert parse_ddl(text) == READ[text]


@pytest.mark.parametrize("text", [*REFUSED, *ONLY_SPARKS])
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(DdlError):
        parse_ddl(text)


@pytest.mark.parametrize("text", READ)
def test_a_type_as_text_is_read_again_without_what_it_says_of_nulls(text: str) -> None:
    kind = READ[text]
    again = parse_ddl(ddl_of(kind))
    assert again == loose(kind)
    if isinstance(kind, T.StructType):
        assert is_field_list(ddl_of(kind))


def loose(kind: T.DataType) -> T.DataType:
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(one.name, loose(one.dataType)) for one in kind])
    return T.ArrayType(loose(kind.elementType)) if isinstance(kind, T.ArrayType) else kind


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("LONG NOT NULL", "unexpected 'not' in the type"),
        ("a LONGISH", "unknown type 'longish' in 'a LONGISH'"),
        ("STRING(3)", r"unexpected '\(' in the type"),
        ("ARRAY<STRING", "expected > in the type"),
        ("a LONG, b VARCHAR", r"expected \( in the type"),
        ("a DECIMAL(40)", r"DECIMAL\(40, 0\) must have 1 to 38 digits"),
        ("a LONG COMMENT b", "a text in quotes after COMMENT"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_text(text: str, says: str) -> None:
    with pytest.raises(DdlError, match=says):
        parse_ddl(text)


def test_fields_with_names_like_a_types_are_fields() -> None:
    assert [is_field_list(text) for text in ("structure LONG", "struct LONG, b INT", "STRUCT<a LONG>")] == [
        True,
        True,
        False,
    ]
    assert ElementType("structs LONG, `a b` INT").stored_fields == "structs bigint, `a b` int"


class Emits(KeyedProcessFunction):
    """Emits the user, and what the amount stands for."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def process_element(self, order: Any, ctx: Any) -> Any:
        yield order.user, self.values[order.amount]


def run(declared: str, *values: Any) -> ProgramHarness:
    def program(orders: Any) -> Any:
        return orders.key_by("user").process(Emits(*values), output=f"user STRING, {declared}", uid="emits")

    return ProgramHarness(program, "user STRING, amount INT")


@pytest.mark.parametrize(
    ("declared", "good", "wrong", "path"),
    [
        ("v LONG NOT NULL", 1, None, "v"),
        ("v STRUCT<a: LONG NOT NULL>", (1,), (None,), "v.a"),
        ("v STRUCT<a LONG NOT NULL> COMMENT 'or none'", None, {"a": None}, "v.a"),
        ("v ARRAY<STRUCT<a: LONG NOT NULL>>", [{"a": 1}, None], [None, (1,), (None,)], "v.element.a"),
        ("v MAP<STRING, STRUCT<a: LONG NOT NULL>>", {"x": (1,)}, {"x": (1,), "y": (None,)}, "v.value.a"),
    ],
)
def test_not_null_is_true_of_what_is_emitted_however_deep(
    declared: str, good: Any, wrong: Any, path: str
) -> None:
    harness = run(declared, good, wrong)
    harness.push_all([(("ann", 0), None), (("ben", 0), None)])
    assert len(harness.take().rows) == 2
    with pytest.raises(Exception, match=f"field '{path}' is None and must not be null") as failure:
        harness.push_all([(("ann", 0), None), (("ben", 1), None), (("ann", 0), None)])
    assert str(failure.value).startswith("operator 'emits': the function emitted a wrong value")
    assert harness.take().rows == []


def test_parts_that_a_type_of_sparks_says_are_never_null_are_not() -> None:
    kind = T.StructType(
        [
            T.StructField("user", T.StringType()),
            T.StructField("v", T.ArrayType(T.LongType(), containsNull=False)),
        ]
    )

    def program(orders: Any) -> Any:
        return orders.key_by("user").process(Emits([1], [1, None]), output=kind, uid="emits")

    harness = ProgramHarness(program, "user STRING, amount INT")
    harness.push_all([(("ann", 0), None)])
    with pytest.raises(Exception, match=r"field 'v\.element' is None and must not be null"):
        harness.push_all([(("ann", 1), None)])


def test_not_null_is_true_of_side_outputs_and_single_records() -> None:
    tag = OutputTag("side", "user STRING NOT NULL")
    assert output_schema(tag.output, "x") == parse_ddl("user STRING NOT NULL")

    class Users(FlatMapFunction):
        def flat_map(self, order: Any) -> Any:
            yield (order.user,)

    harness = ProgramHarness(
        lambda orders: orders.flat_map(Users(), output="user STRING NOT NULL"), "user STRING, amount INT"
    )
    harness.push_all([(("ann", 0), None)])
    with pytest.raises(Exception, match="field 'user' is None and must not be null"):
        harness.push_all([((None, 7), None)])


class Average:
    def create_accumulator(self) -> Any:
        return 0, 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("VARCHAR(3)", "declare STRING"),
        ("CHAR(3)", "declare STRING"),
        ("INTERVAL YEAR TO MONTH", "a number of months as INT"),
        ("INTERVAL", "INTERVAL DAY TO SECOND"),
        ("VOID", "the type that a value will have"),
        ("VARIANT", "STRING with JSON"),
    ],
)
def test_what_states_cannot_hold_is_refused_where_it_is_declared(kind: str, why: str) -> None:
    for text in (kind, f"a LONG, b {kind}", f"ARRAY<STRUCT<a: {kind}>>", f"MAP<STRING, {kind}>"):
        for given in (text, parse_ddl(text)):
            for declare in (ValueStateDescriptor, ListStateDescriptor):
                with pytest.raises(SchemaError, match=f"the state 's' cannot have the type.*\n?.*{why}"):
                    declare("s", given)
            with pytest.raises(SchemaError, match=why):
                MapStateDescriptor("s", "STRING", given)
            with pytest.raises(SchemaError, match=why):
                AggregatingStateDescriptor("s", Average(), given)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", ["a LONG, a STRING", "s STRUCT<a: INT, b: INT, a: INT>"])
def test_fields_of_one_name_are_refused_in_states(fields: str) -> None:
    for declare in (ValueStateDescriptor, ListStateDescriptor):
        with pytest.raises(SchemaError, match=r"the state 's' cannot have.* The field 'a' is there 2 times"):
            declare("s", fields)


@pytest.mark.parametrize("name", ["__time_ms", "__is_joined"])
def test_an_element_with_a_field_that_a_join_keeps_itself_is_refused_at_the_start(name: str) -> None:
    # It waited in state, which then could not be read.
    def program(orders: Any, payments: Any) -> Any:
        both = orders.key_by("user").join(payments.key_by("user"))
        return both.interval(lower_ms=0, upper_ms=1, join_type=JoinType.LEFT, uid="x")

    with pytest.raises(SchemaError, match=f"The field '{name}' is there 2 times"):
        ProgramHarness(program, f"user STRING, `{name}` LONG", "user STRING")


@pytest.mark.parametrize("kind", ["VARCHAR(3)", "CHAR(3)", "INTERVAL YEAR", "INTERVAL", "VARIANT"])
def test_what_rows_cannot_have_is_refused_where_an_output_is_declared(kind: str) -> None:
    for given in (f"user STRING, v {kind}", parse_ddl(f"user STRING, v ARRAY<{kind}>")):
        with pytest.raises(SchemaError, match="the output of 'x' cannot be read") as refused:
            output_schema(given, "x")
        assert kind.lower() in str(refused.value).lower()


def test_not_null_is_refused_where_it_would_not_be_true() -> None:
    for text in ("a LONG NOT NULL, b INT", "STRUCT<a: LONG NOT NULL>", "ARRAY<STRUCT<a: LONG NOT NULL>>"):
        with pytest.raises(SchemaError, match="'a' is NOT NULL, but a field that is declared later"):
            ValueStateDescriptor("s", text)
        with pytest.raises(ConfigError, match="'a' is NOT NULL, which counts in what a function emits"):
            IntervalJoin(text, "INT", 0, 0)
    with pytest.raises(SchemaError, match="'a' is NOT NULL"):
        parse_fields("a LONG NOT NULL")
    # A frame's schema says it by the way.
    whole = T.StructType([T.StructField("a", T.LongType(), nullable=False)])
    assert ValueStateDescriptor("s", whole).value_type == "a bigint"


def test_states_and_rows_have_times_and_distances_in_time() -> None:
    at, distance = datetime.time(1, 2, 3, 4), datetime.timedelta(days=2, microseconds=5)

    class Keeps(KeyedProcessFunction):
        def open(self, context: Any) -> None:
            declared = "at TIME COMMENT 'of the day', distance INTERVAL DAY TO SECOND"
            self.kept = context.get_state(ValueStateDescriptor("kept", declared))

        def process_element(self, value: Any, ctx: Any) -> Any:
            yield self.kept.value()
            self.kept.update((at, distance))

    harness = OperatorHarness(Keeps(), key=lambda value: 1, key_type="INT")
    harness.push(1)
    harness.push(2)
    assert harness.take().rows == [None, (at, distance)]
