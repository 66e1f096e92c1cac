"""Aggregates in two steps without Spark: partial rows in front of the shuffle, merged in the key group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.functions.aggregates import AggregateColumn, FieldAggregate, Fold
from flinkish_spark.operators.columnar_aggregates import MergePartials
from flinkish_spark.planning.factories import FoldingColumns, find_fields
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, BlockPacker
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker.combiner import Combiner
from tests.unit.worker.test_keyed_operator import State, emitted, operator, records

INPUT = parse_ddl("user STRING, amount LONG")
CONTROL = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE)]
KEY = T.StructField("c0", T.StringType())


def folding(columns):
    """A packer with a combiner, and the operator behind it."""
    assert isinstance(INPUT, T.StructType)
    aggregation = FoldingColumns(columns).make_aggregation(INPUT, ("user",))
    fields = find_fields(aggregation)
    partials = [T.StructField(f"p{at}", field.dataType) for at, field in enumerate(fields)]
    schema = arrow_schema([*CONTROL, KEY, *partials])
    kept = (C.ROUTE, *(field.name for field in CONTROL), "c0")
    combiner = Combiner(aggregation, kept, ("c0",), (("c0", "user"), ("c1", "amount")))
    op = operator()
    came = replace(
        op.spec.shape.inputs[0],
        schema=schema,
        fields=tuple(aggregation.names),
        field_columns=tuple(field.name for field in partials),
    )
    shape = replace(op.spec.shape, inputs=(came,), outputs=(fields,))
    op.spec = replace(op.spec, operator=MergePartials(aggregation), shape=shape)
    return BlockPacker(schema, combine=combiner), op


def run(packer, op, batches, state):
    frames = [packed.to_pandas() for packed in packer(iter(batches))]
    return [
        tuple(row.values())[4:] for row in emitted(op, frames, state) if row[C.KIND] == int(C.Kind.RECORD)
    ]


def test_a_table_of_folds_begins_with_the_key() -> None:
    columns = (AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("n", Fold.COUNT))
    (packer, op), state = folding(columns), State()
    given = [records([("a", 1), ("b", 2), ("a", 4)]), records([("a", 8), (None, None)], channel=1)]
    assert sorted(run(packer, op, given, state), key=str) == [("a", 13, 3), ("b", 2, 1), (None, None, 1)]
    again = run(packer, op, [records([(None, 5), ("a", 1)])], state)
    assert sorted(again, key=str) == [("a", 14, 4), (None, 5, 2)]


def test_one_row_per_key_travels() -> None:
    packer, _ = folding((AggregateColumn("n", Fold.COUNT),))
    (packed,) = packer(iter([records([("a", n) for n in range(1000)])]))
    (block,) = packed.column(C.BLOCK)
    assert pa.ipc.read_record_batch(pa.py_buffer(block.as_buffer()), packer.schema).num_rows == 1


def test_a_sum_of_elements_keeps_the_first_ones_other_fields() -> None:
    (packer, op), state = folding(FieldAggregate(Fold.SUM, "amount")), State()
    assert run(packer, op, [records([("a", 1), ("a", 4)])], state) == [("a", 5)]
    assert run(packer, op, [records([("a", 1)])], state) == [("a", 6)]


def test_rows_of_keys_that_hardly_repeat_travel_alone_and_come_to_the_same() -> None:
    columns = (AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("n", Fold.COUNT))
    table = FoldingColumns(columns).make_aggregation(INPUT, ("user",))
    combiner = Combiner(table, (C.KEY_HASH, "user"), ("user",), (("user", "user"), ("amount", "amount")))
    chance = np.random.default_rng(3)
    for keys, is_combined in ((1_000_000, False), (30_000, True), (10, True)):
        number = chance.integers(0, keys, 40_000)
        hashes = (number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
        users, amounts = [f"user-{one}" for one in number.tolist()], chance.integers(0, 100, 40_000)
        control = {C.KEY_HASH: hashes, C.SEQUENCE: np.arange(40_000) + BEHIND}
        rows = pa.RecordBatch.from_pydict({**control, "user": users, "amount": amounts})
        made = combiner(rows)
        assert (made.num_rows < 40_000) is is_combined
        together = made.to_pandas().groupby("user")[["p1", "p2"]].sum()
        wanted = rows.to_pandas().groupby("user")["amount"].agg(["sum", "count"])
        assert together.to_numpy().tolist() == wanted.to_numpy().tolist()
        assert made.column("user").to_pylist() == made.column("p0").to_pylist()
