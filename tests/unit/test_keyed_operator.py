"""The keyed operator without Spark: frames in, frames and state bytes out."""

import datetime
import decimal
import json
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import KeyedProcessFunction, ValueStateDescriptor
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.ddl import DdlError, parse_ddl
from flinkish_spark.runtime.key_groups import Routing, spark_hash_int
from flinkish_spark.runtime.keyed_operator import KeyedOperator, KeyedOperatorSpec, OperatorFailed, Origins
from flinkish_spark.runtime.row_codec import OutputError, RowWriter
from flinkish_spark.runtime.state_codec import StateCodecError, StateLayout, decode_states, encode_states


class State:
    def __init__(self):
        self.value = None

    @property
    def exists(self):
        return self.value is not None

    @property
    def get(self):
        return self.value

    def update(self, value):
        self.value = value


class RunningTotal(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))

    def process_element(self, order, ctx):
        if order.amount == 13:
            raise RuntimeError("unlucky")
        total, orders = self.total.value() or (0, 0)
        self.total.update((total + order.amount, orders + 1))
        yield ctx.get_current_key(), total + order.amount, orders + 1


def operator(function=None, output="user STRING, total LONG, orders LONG", channels=frozenset({0})):
    return KeyedOperator(
        KeyedOperatorSpec(
            uid="totals",
            function=function or RunningTotal(),
            input_schema=parse_ddl("user STRING, amount LONG"),
            output_schema=parse_ddl(output),
            key_columns=("c0",),
            key_types=(T.StringType(),),
            input_columns=("c0", "c1"),
            mask_columns=("m0",),
            upstream_channels=channels,
            group_of_route={7: 5},
            barrier_routes={99: 1},
            origins=Origins(("orders",)),
        )
    )


def frame(rows, channel=0, start=0):
    return pd.DataFrame(
        {
            C.CHANNEL: np.int64(channel),
            C.SEQUENCE: np.arange(start, start + len(rows), dtype=np.int64),
            "m0": [1 if u is None else 0 for u, _ in rows],
            "c0": [u or "" for u, _ in rows],
            "c1": [a for _, a in rows],
        }
    )


def run(op, frames, state):
    return [tuple(r) for f in op((7,), frames, state) for r in f[["user", "total", "orders"]].to_numpy()]


def test_totals_are_kept_per_key_over_batches_and_null_is_a_key():
    op, state = operator(), State()
    assert run(op, [frame([("a", 1), ("b", 5), (None, 7), ("a", 2)])], state) == [
        ("a", 1, 1),
        ("b", 5, 1),
        (None, 7, 1),
        ("a", 3, 2),
    ]
    assert run(operator(), [frame([("a", 10), (None, 1)])], state) == [("a", 13, 3), (None, 8, 2)]


def test_the_order_of_a_channel_is_restored():
    rows = frame([("a", 1), ("a", 2), ("a", 3)]).iloc[[2, 0, 1]]
    other = frame([("a", 100)], channel=1)
    assert [t for _, t, _ in run(operator(), [other, rows], State())] == [1, 3, 6, 106]


def test_large_integers_survive_beside_nulls():
    big = 2**53 + 1
    assert run(operator(), [frame([("a", big), (None, 1)])], State())[0] == ("a", big, 1)


def barrier(channels, checkpoints=(3,)):
    return pd.DataFrame({C.CHANNEL: channels, C.SEQUENCE: list(checkpoints) * len(channels)})


@pytest.mark.parametrize(
    "channels,passes", [([0, 1], True), ([1, 0], True), ([0], False), ([0, 1, 1], False), ([0, 2], False)]
)
def test_a_barrier_passes_only_when_every_channel_showed_it_once(channels, passes):
    op = operator(channels=frozenset({0, 1}))
    out = list(op((99,), [barrier(channels)], State()))
    assert len(out) == passes
    if passes:
        assert out[0][C.KIND].tolist() == [1]
        assert (out[0][C.SEQUENCE][0], out[0][C.CHANNEL][0]) == (3, 1)


def test_a_failing_function_names_the_record():
    with pytest.raises(OperatorFailed) as failed:
        run(operator(), [frame([("a", 1), ("a", 13)], channel=2, start=40)], State())
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert facts == {
        "uid": "totals",
        "topic": "orders",
        "partition": 2,
        "offset": 41,
        "error": "RuntimeError: unlucky",
    }


class Emits(KeyedProcessFunction):
    def __init__(self, row):
        self.row = row

    def process_element(self, value, ctx):
        return [self.row]


@pytest.mark.parametrize(
    "row,says",
    [
        (("a", "many", 1), "field 'total' of type int64 cannot hold 'many'"),
        (("a", 1.5, 1), "field 'total'"),
        (("a", 1), "emitted 2 fields, declared are 3"),
        ({"user": "a", "sum": 1}, "emitted the field 'sum'"),
        ("abc", "emitted a str"),
    ],
)
def test_a_wrong_row_is_refused_with_field_and_value(row, says):
    with pytest.raises(OperatorFailed, match="totals") as failed:
        run(operator(Emits(row)), [frame([("a", 1)])], State())
    assert says in str(failed.value)


def test_a_dict_and_a_missing_field_are_fine():
    assert run(operator(Emits({"user": "a"})), [frame([("a", 1)])], State()) == [("a", None, None)]


def test_nan_and_null_stay_apart_on_the_way_out():
    writer = RowWriter(parse_ddl("a DOUBLE, b FLOAT"), [pa.float64(), pa.float32()])
    columns, nans = writer.write([(math.nan, 1.0), (None, math.nan), (2.0, None)])
    assert nans.tolist() == [1, 2, 0]
    assert list(columns) == ["a", "b"]
    with pytest.raises(OutputError):
        writer.write([("x", 1.0)])


LAYOUT = StateLayout("s", (pa.string(),), (pa.int64(), pa.timestamp("us", tz="UTC")))
ENTRIES = {"a": (1, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)), None: (None, None)}


def test_state_is_exact_and_damage_is_found():
    data = encode_states("op", [LAYOUT], {"s": ENTRIES})
    assert decode_states("op", [LAYOUT], data) == {"s": ENTRIES}
    for at in range(len(data)):
        with pytest.raises(StateCodecError):
            decode_states("op", [LAYOUT], data[:at])
    for at in range(0, len(data), 11):
        with pytest.raises((StateCodecError, KeyError)):
            decode_states("op", [LAYOUT], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])


def test_a_changed_declaration_is_refused():
    data = encode_states("op", [LAYOUT], {"s": ENTRIES})
    with pytest.raises(StateCodecError, match=r"stored as .* but declared as"):
        decode_states("op", [StateLayout("s", (pa.string(),), (pa.int64(),))], data)
    with pytest.raises(StateCodecError, match="belongs to operator 'op', not to 'other'"):
        decode_states("other", [LAYOUT], data)
    with pytest.raises(StateCodecError, match="no longer declared"):
        decode_states("op", [], data)
    with pytest.raises(StateCodecError, match="cannot hold 'x'"):
        encode_states("op", [LAYOUT], {"s": {"a": ("x", None)}})


def test_two_states_of_several_key_columns():
    layouts = [
        StateLayout("one", (pa.string(), pa.int64()), (pa.int64(),)),
        StateLayout("two", (pa.string(), pa.int64()), (pa.decimal128(9, 2),)),
    ]
    entries = {"one": {("a", 1): 5}, "two": {("b", None): decimal.Decimal("1.50")}}
    assert decode_states("op", layouts, encode_states("op", layouts, entries)) == entries


def test_routes_follow_sparks_hash_and_barriers_come_last():
    # Values of SELECT hash(CAST(n AS INT)) in Spark.
    assert [spark_hash_int(n) for n in (0, 1, -1)] == [933211791, -559580957, -1604776387]
    for partitions in (1, 2, 3, 7):
        routing = Routing(128, partitions)
        assert len({*routing.of_group, *routing.of_barrier}) == 128 + partitions
        sizes = [0] * partitions
        for route in routing.of_group:
            partition = spark_hash_int(route) % partitions
            sizes[partition] += 1
            assert route < routing.of_barrier[partition]
        assert max(sizes) - min(sizes) <= 1
        assert [spark_hash_int(r) % partitions for r in routing.of_barrier] == list(range(partitions))


@pytest.mark.parametrize("text", ["", "LONGISH", "a LONG,", "ARRAY<LONG", "a LONG b", "MAP<STRING>", "a !"])
def test_what_is_no_type_is_refused(text):
    with pytest.raises(DdlError):
        parse_ddl(text)


def test_types_are_read():
    text = "a LONG, b DECIMAL(9, 2), c ARRAY<STRUCT<x: INT, y: MAP<STRING, DATE>>>, d timestamp"
    assert parse_ddl(text).simpleString() == (
        "struct<a:bigint,b:decimal(9,2),c:array<struct<x:int,y:map<string,date>>>,d:timestamp>"
    )
