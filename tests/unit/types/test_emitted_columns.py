"""What vectorised functions emit: frames of pandas, values of other types, nulls where none may be."""

from __future__ import annotations

import datetime
import decimal
import re

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import OutputTag, VectorizedProcessFunction
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.rows import OutputError
from tests.support.operator_harness import VectorizedHarness

ORDERS = "user STRING, amount LONG"
REFUSED = OutputTag("refused", ORDERS)


class Emits(VectorizedProcessFunction):
    """Emits what a call makes of the batch, as it is or as a frame."""

    def __init__(self, make, event_time=None):
        self.make, self.event_time = make, event_time

    def process_batch(self, batch, ctx):
        yield self.make(batch)


NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
KINDS = (
    "user STRING, n INT, x DOUBLE, ok BOOLEAN, at TIMESTAMP, day DATE, price DECIMAL(10, 2), raw BINARY, "
    "tags ARRAY<STRING>, counts MAP<STRING, LONG>, place STRUCT<a: LONG, b: STRING>"
)
FULL = (
    "ann",
    3,
    1.5,
    True,
    NOON,
    NOON.date(),
    decimal.Decimal("1.25"),
    b"x",
    ["a"],
    {"k": 1},
    {"a": 1, "b": "y"},
)


@pytest.mark.parametrize("make", [lambda batch: batch, lambda batch: batch.to_pandas()])
def test_a_frame_of_pandas_goes_out_as_the_batch_it_was_made_of(make) -> None:
    run = ProgramHarness.of(Emits(make), KINDS, key="user", output=KINDS, max_parallelism=1)
    nothing = ("ann", *[None] * (len(FULL) - 1))
    for rows in ([FULL, nothing], [FULL], [nothing]):
        run.push_all([(row, None) for row in rows])
        assert [tuple(row) for row in run.take().rows] == rows


def test_texts_that_are_no_objects_go_out_as_declared() -> None:
    """So they are in pandas 3, and in a StringDtype before: Arrow makes large_string of them."""

    def of_texts(batch):
        return batch.to_pandas().astype({"user": "string"})

    run = VectorizedHarness(Emits(of_texts), ORDERS, ORDERS, "user", max_parallelism=1)
    run.push_all([(("ann", 5), 1), (("ben", None), 2)])
    assert run.take().rows == [("ann", 5), ("ben", None)]


def test_a_frame_says_event_times_and_goes_to_side_outputs() -> None:
    class Sides(VectorizedProcessFunction):
        event_time = "at"

        def process_batch(self, batch, ctx):
            frame = batch.to_pandas()
            frame["at"] = [None if amount < 0 else amount for amount in frame["amount"]]
            ctx.output(REFUSED, frame[frame["amount"] < 0])
            yield frame[["amount", "at", "user"]]

    run = VectorizedHarness(Sides(), ORDERS, ORDERS, "user", side_outputs=[REFUSED], max_parallelism=1)
    run.push_all([(("ann", 5), 1), (("ann", -3), 2)])
    output = run.take()
    assert (output.rows, output.times_ms) == ([("ann", 5), ("ann", -3)], [5, None])
    assert output.side["refused"] == [("ann", -3)]
    run.push_all([(("ann", 7), 1)])
    output = run.take()
    assert (output.rows, output.times_ms, output.side.get("refused", [])) == ([("ann", 7)], [7], [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda f: f.assign(amount=f.amount + 0.5),
            r"'amount' of 1.5: .*truncated.*\(row 0 of the batch, key",
        ),
        (
            lambda f: f.assign(amount=f.amount.astype(str)),
            r"field 'amount' of type int64 cannot hold '1': .*\(row 0 of the batch, key 'ann'\)",
        ),
        (lambda f: f.assign(amount=f.amount.astype(object) + 0.5), "cannot hold 1.5: it is a float"),
        (
            lambda f: f.assign(amount=f.amount > 0),
            r"'amount' has the type bool, but the declared type is int64: True \(row 0 of the batch, k",
        ),
        (
            lambda f: f.assign(user=1),
            r"'user' has the type int64, but the declared type is string: 1 \(row 0 of the batch, k",
        ),
        (
            lambda f: f.assign(more=1),
            "emitted the columns user, amount, more, but the declared columns are user, amount",
        ),
        (
            lambda f: f.rename(columns={"amount": 0}),
            "emitted the columns user, 0, but the declared columns are",
        ),
        (lambda f: f.groupby("user").sum(), "'user' in its index; call reset_index"),
        (lambda f: pd.concat([f, f], axis=1), "the column 'amount' twice"),
    ],
)
def test_a_frame_that_is_not_as_it_was_declared_is_named(change, says) -> None:
    run = VectorizedHarness(Emits(lambda batch: change(batch.to_pandas())), ORDERS, ORDERS, "user")
    with pytest.raises(OutputError, match=says):
        run.push_all([(("ann", 1), 1)])


ROWS = [("ann", 1), ("ben", 2), ("ann", 1 << 40), ("cid", 3)]
SIDE = OutputTag("side", "total INT, user STRING")


@pytest.mark.parametrize(
    ("make", "output", "says"),
    [
        (
            lambda f: f,
            "user STRING, amount INT",
            r"'amount' of 1099511627776: .*\(row 2 of the batch, key 'ann'\)",
        ),
        (
            lambda f: f.assign(amount=pd.Series([1, 2, "x", None], dtype=object)),
            ORDERS,
            r"'amount' of type int64 cannot hold 'x': .*\(row 2 of the batch, key 'ann'\)",
        ),
        (
            lambda f: f.assign(more=pd.Series([1, {"a": 1}, 2, 3], dtype=object)),
            ORDERS,
            r"field 'more' of {'a': 1}: .*\(row 1 of the batch, key 'ben'\)",
        ),
        (
            lambda f: f.assign(amount=[1.0, float("inf"), 1e300, 2.0]),
            "user STRING, amount FLOAT",
            r"'amount' of 1e\+300: it is beyond what a FLOAT can be.*\(row 2 of the batch, key 'ann'\)",
        ),
        # The key is where the batch has it under its name, and nowhere else.
        (
            lambda f: f.assign(who=f.user).drop(columns="user"),
            "who STRING, amount INT",
            r"'amount' of 1099511627776: .*\(row 2 of the batch\)",
        ),
        (
            lambda f: f.assign(amount=pd.Series([None, None, "2", "3"], dtype="string")),
            ORDERS,
            r"'amount' (has the type (large_)?string|of type int64 cannot hold).*'2'.* \(row 2 of the batch",
        ),
    ],
)
def test_a_wrong_row_of_a_batch_is_named_with_its_value_and_its_key(make, output, says) -> None:
    for as_batch in (False, True):

        def change(batch, as_batch=as_batch):
            frame = make(batch.to_pandas())
            return pa.RecordBatch.from_pandas(frame, preserve_index=False) if as_batch else frame

        run = VectorizedHarness(Emits(change), ORDERS, output, "user", max_parallelism=1)
        try:
            run.push_all([(row, None) for row in ROWS])
            raise AssertionError("it went out")
        except (OutputError, pa.ArrowException) as error:
            if as_batch and isinstance(error, pa.ArrowException):
                continue  # The function itself has made no batch of it.
            assert re.search(says, str(error)), str(error)


def test_a_wrong_row_of_a_side_output_and_a_key_of_two_columns_are_named() -> None:
    class Sides(VectorizedProcessFunction):
        def process_batch(self, batch, ctx):
            ctx.output(
                SIDE, pa.RecordBatch.from_arrays([batch.column(1), batch.column(0)], ["total", "user"])
            )

    run = VectorizedHarness(Sides(), ORDERS, ORDERS, "user", side_outputs=[SIDE], max_parallelism=1)
    with pytest.raises(
        OutputError, match=r"'side': .*'total' of 1099511627776: .*\(row 2 of the batch, key 'ann'"
    ):
        run.push_all([(row, None) for row in ROWS])

    def program(orders):
        keyed = orders.key_by("user", "amount")
        return keyed.process(Emits(lambda batch: batch), output="user STRING, amount INT", uid="same")

    two = ProgramHarness(program, ORDERS)
    with pytest.raises(Exception, match=r"row 0 of the batch, key \('ann', 1099511627776\)"):
        two.push_all([(("ann", 1 << 40), None)])


def test_event_times_that_are_none_are_named_with_their_row() -> None:
    run = VectorizedHarness(
        Emits(lambda batch: batch.append_column("at", pa.array([None, "x"])), "at"),
        ORDERS,
        ORDERS,
        "user",
        max_parallelism=1,
    )
    says = r"wrong event time: 'at' is string, not LONG or TIMESTAMP: 'x' \(row 1 of the batch, key 'ben'\)"
    with pytest.raises(OutputError, match=says):
        run.push_all([(row, None) for row in ROWS[:2]])


INNER = T.StructType([T.StructField("a", T.LongType(), nullable=False)])


@pytest.mark.parametrize("make", [lambda batch: batch, lambda batch: batch.to_pandas()])
@pytest.mark.parametrize(
    ("kind", "good", "wrong", "says"),
    [
        (T.LongType(), 1, None, r"'v' is None and must not be null \(row 1 of the batch, key 'ann'\)"),
        (INNER, {"a": 1}, {"a": None}, r"field 'v.a' is None .* \(row 1 of the batch, key 'ann'\)"),
        (T.ArrayType(INNER), [{"a": 1}, None], [{"a": None}], "field 'v.element.a' is None"),
        (T.MapType(T.StringType(), INNER), {"k": {"a": 1}}, {"k": {"a": None}}, "field 'v.value.a' is None"),
    ],
)
def test_a_null_where_there_must_be_none_is_named_however_deep(make, kind, good, wrong, says) -> None:
    given = T.StructType([T.StructField("user", T.StringType()), T.StructField("v", _loose(kind))])
    is_deep = kind != T.LongType()
    declared = T.StructType(
        [T.StructField("user", T.StringType()), T.StructField("v", kind, nullable=is_deep)]
    )
    run = ProgramHarness.of(Emits(make), given, key="user", output=declared, max_parallelism=1)
    fine = [("ann", good), ("ann", None if is_deep else good)]
    run.push_all([(row, None) for row in fine])
    assert [tuple(row) for row in run.take().rows] == fine
    with pytest.raises(Exception, match=says):
        run.push_all([(("ann", good), None), (("ann", wrong), None)])
    assert run.take().rows == []


def _loose(kind):
    """Return a type in which everything may be null."""
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(one.name, one.dataType) for one in kind])
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_loose(kind.elementType))
    return T.MapType(kind.keyType, _loose(kind.valueType)) if isinstance(kind, T.MapType) else kind
