"""Folds of windows where applyInPandasWithState calls them: in the plan, with rows, by a call alone."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import types as T

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS, OutputTag, Progress
from flinkish_spark.core.micro_batch import MicroBatch
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.planning.factories import FoldingWindows
from flinkish_spark.planning.sent_columns import plan_window_fold
from flinkish_spark.protocol.event_time import Watermarks
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BEHIND, EMITTED, BlockPacker, BlockUnpacker, sort_blocks
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.windows import TumblingEventTimeWindows, TumblingProcessingTimeWindows, WindowSpec
from flinkish_spark.worker import keyed_operator
from flinkish_spark.worker.columns_runner import ColumnsRunner
from flinkish_spark.worker.keyed_operator import KeyedOperator, KeyedOperatorSpec
from flinkish_spark.worker.runners import InputShape, RowShape
from tests.support.operator_harness import FoldHarness, MemoryBases
from tests.support.windows_support import INPUT
from tests.unit.worker.test_keyed_operator import State, control

LATE = OutputTag("late", INPUT)
TOTAL = AggregateColumn("total", Fold.SUM, "n")


class Called:
    """An operator of one key group, as it is after its way through the plan."""

    def __init__(self, monkeypatch, late=None):
        spec = WindowSpec(TumblingEventTimeWindows(10), late_output=late)
        self._rows = FoldHarness(spec, [TOTAL], INPUT, "k", max_parallelism=1)
        sent, schema = self._rows.sent, parse_ddl(INPUT)
        came = InputShape(
            arrow_schema(sent.transport.schema),
            sent.folded.fields,
            sent.transport.field_names,
            sent.transport.key_names,
        )
        side = [T.StructType([T.StructField(f"s{at}", field.dataType) for at, field in enumerate(schema)])]
        shape = RowShape(
            (came,),
            sent.transport.key_types,
            (sent.folded.output, *(side if late else [])),
            (late.name,) if late else (),
            with_times=True,
        )
        channels, routes = (frozenset({0}),), ({7: 0}, {99: 1})
        made = KeyedOperatorSpec(
            "sums", Bundling(1, 1), sent.folded.operator, shape, channels, *routes, (Origins(),), 3
        )
        packer = BlockPacker(came.schema, combine=sent.folded.combiner)
        self.operator = KeyedOperator(pickle.loads(cloudpickle.dumps(made)))
        self._packer = pickle.loads(cloudpickle.dumps(packer))
        self.state, self._watermark_ms, self._next_ms = State(), MIN_WATERMARK_MS, MIN_WATERMARK_MS
        monkeypatch.setattr(keyed_operator, "micro_batch_of_task", self._now)

    def _now(self):
        return MicroBatch(Watermarks(self._watermark_ms), Watermarks(self._next_ms), 0)

    def run(self, watermark_ms, *elements, frames=()):
        """Return records (its output's columns behind the side), and what the operator says is due."""
        self._watermark_ms, self._next_ms = self._next_ms, watermark_ms
        given = [(element, time_ms) for *element, time_ms in elements]
        packed = [one.to_pandas() for one in self._packer(iter([self._rows.rows(given, BEHIND)]))]
        out = list(self.operator((7,), [*(packed if elements else []), *frames], self.state))
        outputs = self.operator.spec.shape.outputs
        unpacker = BlockUnpacker(outputs, (True,) * len(outputs))
        batches = [pa.RecordBatch.from_pandas(one, arrow_schema(EMITTED)) for one in out]
        rows = [row for batch in unpacker(iter(batches)) for row in batch.to_pylist()]
        records = [row for row in rows if row[C.KIND] == int(C.Kind.RECORD)]
        due = [row[C.CHECKPOINT] for row in rows if row[C.KIND] == C.FIRST_REPORT + 3]
        return records, due


def test_a_key_group_is_called_when_a_window_is_due_and_says_what_is_due_next(monkeypatch) -> None:
    called = Called(monkeypatch)
    wake = control(C.Kind.WAKE, channel=3)
    assert called.run(0, ("a", 1, 3), ("a", 2, 12), ("b", 4, 4)) == ([], [9])
    assert called.run(8, frames=[control(C.Kind.RECORD).iloc[:0]]) == ([], [])
    fired, due = called.run(9, frames=[wake])
    found = [(row["k"], row["total"], row[C.TIME], row[C.SEQUENCE] < BEHIND) for row in fired]
    assert sorted(found) == [("a", 1, 9, True), ("b", 4, 9, True)]
    assert due == [19]
    # Nothing is due any more: it says so once, and then no more.
    last, due = called.run(MAX_WATERMARK_MS, frames=[wake])
    assert ([row["total"] for row in last], due) == ([2], [MAX_WATERMARK_MS])
    assert called.run(MAX_WATERMARK_MS, frames=[wake]) == ([], [])


@pytest.mark.parametrize("is_read", [True, False])
def test_late_elements_go_to_their_side_output_if_it_is_read(monkeypatch, is_read) -> None:
    called = Called(monkeypatch, LATE)
    if not is_read:
        shape = called.operator.spec.shape
        object.__setattr__(shape, "outputs", shape.outputs[:1])
        object.__setattr__(shape, "side_names", ())
    rows, _ = called.run(50, ("a", 1, 3), ("a", 2, 55), ("b", None, 50))
    found = [(row["s0"], row["s1"], row[C.TIME]) for row in rows if row.get(C.SIDE)]
    assert sorted(found) == ([("a", 1, 3)] if is_read else [])


def without_times(spec, ways):
    """A runner over a stream without event times, with several ways in, and the combiner of each."""
    whole = FoldHarness(spec, [TOTAL], INPUT, "k", max_parallelism=1).transport
    fields = [field for field in whole.schema if field.name != C.TIME]
    transport = replace(whole, schema=T.StructType(fields))
    sent = plan_window_fold(FoldingWindows(spec, (TOTAL,)), "sums", parse_ddl(INPUT), ["k"], transport)
    came = InputShape(
        arrow_schema(sent.transport.schema),
        sent.folded.fields,
        sent.transport.field_names,
        sent.transport.key_names,
    )
    shape = RowShape((came,) * ways, transport.key_types, (sent.folded.output,))
    runner = ColumnsRunner(sent.folded.operator, "sums", 1, shape)
    return runner, BlockPacker(came.schema, combine=sent.folded.combiner)


def test_processing_time_windows_need_no_event_times_and_take_several_ways_in() -> None:
    spec = WindowSpec(TumblingProcessingTimeWindows(10))
    rows = FoldHarness(spec, [TOTAL], INPUT, "k", max_parallelism=1)
    runner, packer = without_times(spec, ways=3)

    def way(*elements):
        given = rows.rows([(element, None) for element in elements], 0).drop_columns([C.TIME])
        (packed,) = packer(iter([given]))
        return sort_blocks(packed.column(C.BLOCK).to_pylist(), packer.schema)

    value = None
    steps = (3, [way(("a", 1), ("b", 2)), None, way(("a", 4))]), (8, [None, way(("b", 8)), None])
    for now_ms, inputs in steps:
        state = GroupState(runner.layout, value, MemoryBases())
        progress = Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, now_ms)
        assert list(runner.process(inputs, state, progress)) == []
        value = state.dump(0, BasePolicy(), 0)
    state = GroupState(runner.layout, value, MemoryBases())
    (out,) = runner.process([None] * 3, state, Progress(MIN_WATERMARK_MS, MIN_WATERMARK_MS, 9))
    assert out.first == 0
    assert sorted(zip(*(out.rows.column(name).to_pylist() for name in ("k", "total")), strict=True)) == [
        ("a", 5),
        ("b", 10),
    ]
