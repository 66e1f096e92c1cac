"""Our side of the keyed bench in one process without Spark: what a micro-batch costs in Python, and where.

    python -m bench.in_process session-fold sliding-ours --profile

Each micro-batch has 500,000 events of 10,000 keys, an event a millisecond, in 128 key groups and as many
bundles of them as a job of two partitions has. It goes
through what a worker does with it, packing included; reading, JSON, the shuffle and the sink are Spark's. The
first two micro-batches warm up.
"""

from __future__ import annotations

import argparse
import cProfile
import operator
import pstats
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from bench import rise_peers, vectorised
from bench.checking import FIRST_MS
from bench.groups import LATE_MS, PATTERNS
from bench.keyed import FIELDS, WINDOWED, Amounts, Silence, as_a_row, pattern_of, row_of
from bench.session_peers import GAP_MS
from bench.sliding_peers import SIZE_MS, SLIDE_MS
from bench.sum_peers import OUTPUT as TOTALS
from bench.timer_peers import OUTPUT as ALARMS
from demo.app import RunningTotal
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import ColumnCondition
from flinkish_spark.cep.factories import Patterns
from flinkish_spark.cep.functions import MeasuredMatches
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress
from flinkish_spark.datastream.pattern_stream import _Select
from flinkish_spark.functions.aggregates import AggregateColumn, Fold
from flinkish_spark.operators.columnar_aggregates import MergePartials
from flinkish_spark.operators.process import KeyedProcessOperator
from flinkish_spark.planning.factories import FoldingColumns, FoldingWindows, Windows, find_fields
from flinkish_spark.planning.sent_columns import (
    FoldPlan,
    Transport,
    _find_copied_columns,
    _name_columns,
    _send_partials,
    plan_window_fold,
)
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.state.key_group import BasePolicy, GroupState
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BlockPacker, sort_blocks, to_block
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.windows import EventTimeSessionWindows, KeyAndWindowBounds, SlidingEventTimeWindows
from flinkish_spark.windows.spec import AggregateWindow, WindowSpec
from flinkish_spark.worker.columns_runner import ColumnsRunner
from flinkish_spark.worker.combiner import Combiner
from flinkish_spark.worker.keyed_operator import make_runner as opened
from flinkish_spark.worker.runners import InputShape, RowShape
from tests.support.operator_harness import MemoryBases

GROUPS, PARTITIONS, UID = 128, 2, "work"
BUNDLES = Bundling(GROUPS, PARTITIONS).bundles
_HOLDS = {"<": operator.lt, ">=": operator.ge}
SCHEMA = parse_ddl(FIELDS)
SPECS = {
    "session": WindowSpec(EventTimeSessionWindows(GAP_MS)),
    "sliding": WindowSpec(SlidingEventTimeWindows(SIZE_MS, SLIDE_MS)),
}
OUTPUTS = {"sum": TOTALS, "timers": ALARMS} | dict.fromkeys(PATTERNS, rise_peers.OUTPUT)
SUM = AggregateColumn("total", Fold.SUM, "amount")
VARIANTS = (
    "sum-element",
    "sum-vectorised",
    "sum-fold",
    *(f"{work}-{engine}" for work in SPECS for engine in ("ours", "fold")),
    "timers-ours",
    "timers-vectorised",
    *(f"{work}-{engine}" for work in PATTERNS for engine in ("ours", "text")),
)


def texts_of(work):
    """Return the conditions that Spark evaluates in front of the shuffle."""
    leaves = compile_pattern(pattern_of(work)).leaves if work in PATTERNS else ()
    return tuple(dict.fromkeys(leaf.text for leaf in leaves if isinstance(leaf, ColumnCondition)))


def schema_of(work):
    if work not in PATTERNS:
        return SCHEMA
    answers = "".join(f", __holds_{at} BOOLEAN" for at in range(len(texts_of(work))))
    return parse_ddl(f"{FIELDS}, at_ms LONG{answers}")


def transport_of(work):
    times = [] if work == "sum" else [C.TIME]
    control = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, C.CHANNEL, C.SEQUENCE, *times)]
    schema = schema_of(work)
    names = tuple(f"c{at}" for at in range(len(schema)))
    fields = [T.StructField(name, one.dataType) for name, one in zip(names, schema, strict=True)]
    return Transport((), T.StructType([*control, *fields]), names, (names[0],), (schema[0].dataType,))


def sent_of(work):
    """Return what travels into a fold."""
    transport = transport_of(work)
    if work in SPECS:
        return plan_window_fold(FoldingWindows(SPECS[work], (SUM,)), UID, SCHEMA, ["user"], transport)
    function = FoldingColumns((SUM, AggregateColumn("orders", Fold.COUNT)))
    aggregation = function.make_aggregation(SCHEMA, ("user",))
    output, kept = find_fields(aggregation), _find_copied_columns(transport)
    fields = tuple(zip(transport.field_names, SCHEMA.names, strict=True))
    combiner = Combiner(aggregation, _name_columns(kept), transport.key_names, fields)
    folded = FoldPlan(MergePartials(aggregation, None), tuple(output.names), output, combiner)
    return _send_partials(transport, kept, tuple(output), folded)


def make_runner(work, engine):
    """Return the runner, the schema of its blocks, and what combines in front of the shuffle."""
    if engine == "fold":
        sent = sent_of(work)
        folded, transport = sent.folded, sent.transport
        shape = _shape(transport, folded.fields, folded.output, work)
        return ColumnsRunner(folded.operator, UID, GROUPS, shape), transport, folded.combiner
    transport = transport_of(work)
    if work in SPECS:
        computation = AggregateWindow(Amounts(), "LONG", KeyAndWindowBounds())
        own = Windows(SPECS[work], computation, parse_ddl(WINDOWED)).create(SCHEMA)
        output = WINDOWED
    elif engine == "vectorised":
        function = vectorised.Totals() if work == "sum" else vectorised.Silences()
        shape = _shape(transport, tuple(SCHEMA.names), parse_ddl(OUTPUTS[work]), work)
        return ColumnsRunner(function, UID, GROUPS, shape), transport, None
    elif work in PATTERNS:
        pattern = pattern_of(work, engine)
        wanted = LookedFor("", compile_pattern(pattern), pattern.skip)
        told = MeasuredMatches(row_of(work), None) if engine == "text" else _Select(as_a_row, None, None)
        search = PatternSearch((wanted,), told, column_conditions=texts_of(work))
        own = Patterns(search).create(schema_of(work))
        output = OUTPUTS[work]
    else:
        own = KeyedProcessOperator(RunningTotal() if work == "sum" else Silence())
        output = OUTPUTS[work]
    shape = _shape(transport, tuple(schema_of(work).names), parse_ddl(output), work)
    return opened(own, UID, GROUPS, shape), transport, None


def _shape(transport, fields, output, work):
    own = InputShape(arrow_schema(transport.schema), fields, transport.field_names, transport.key_names)
    return RowShape((own,), transport.key_types, (output,), with_times=work != "sum")


def rows_of(number, batch, keys, work, hot=0.0):
    """Return a micro-batch of users that are drawn, as it comes to the packers."""
    rng = np.random.default_rng(number)
    users = rng.integers(0, keys, batch)
    if hot:
        users[rng.random(batch) < hot] = 0
    return rows_of_users(number, users, work)


def rows_of_users(number, users, work, bundles=BUNDLES):
    """Yield a micro-batch's two tasks, with every second event each."""
    batch = len(users)
    at = np.arange(number * batch, (number + 1) * batch)
    hashes = (users.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    amounts = np.random.default_rng((number, 1)).integers(0, 1000, batch)
    schema = arrow_schema([T.StructField(C.ROUTE, T.IntegerType()), *transport_of(work).schema])
    for channel in (0, 1):
        own = slice(channel, None, 2)
        times = [] if work == "sum" else [at[own] + FIRST_MS]
        count = len(at[own])
        columns = [hashes[own] % GROUPS % bundles, hashes[own], np.full(count, channel), at[own] // 2, *times]
        names = pa.array([f"user-{user}" for user in users[own]])
        arrays = [*map(pa.array, columns), names, pa.array(amounts[own])]
        if work in PATTERNS:
            arrays.append(pa.array(at[own] + FIRST_MS))
            arrays += [
                pa.array(_HOLDS[text.split()[1]](amounts[own], int(text.split()[2])))
                for text in texts_of(work)
            ]
        arrays = [one.cast(field.type) for one, field in zip(arrays, schema, strict=True)]
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
        # Of the three patterns the one of which rows that meet no condition do not travel.
        yield rows.filter(pc.or_(*arrays[-2:])) if work == "unpaid" else rows


class Job:
    """One operator, fed micro-batch by micro-batch."""

    def __init__(self, variant):
        self.work, _, engine = variant.partition("-")
        self.runner, transport, combiner = make_runner(self.work, engine)
        self.schema = arrow_schema(transport.schema)
        self.packer = BlockPacker(self.schema, combine=combiner)
        self.values, self.bases, self.policy = {}, MemoryBases(), BasePolicy()
        self.watermark_ms, self.rows = MIN_WATERMARK_MS, 0

    def pack(self, tasks):
        blocks = {}
        for rows in tasks:
            chunks = (rows.slice(begin, 10_000) for begin in range(0, rows.num_rows, 10_000))
            for packed in self.packer(chunks):
                pairs = zip(
                    packed.column(C.ROUTE).to_pylist(), packed.column(C.BLOCK).to_pylist(), strict=True
                )
                for group, block in pairs:
                    blocks.setdefault(group, []).append(block)
        return blocks

    def run(self, blocks, watermark_ms):
        progress = Progress(self.watermark_ms, watermark_ms, 0)
        self.watermark_ms = watermark_ms
        for group in sorted(blocks.keys() | self.values.keys()):
            state = GroupState(self.runner.layout, self.values.get(group), self.bases)
            rows = sort_blocks(blocks[group], self.schema) if group in blocks else None
            for out in self.runner.process([rows], state, progress):
                self.rows += out.rows.num_rows
                to_block(out.rows)
            if state.is_changed:
                self.values[group] = state.dump(group, self.policy, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", metavar="variant", help=", ".join(VARIANTS))
    parser.add_argument("--batches", type=int, default=3, help="behind the two that warm up")
    parser.add_argument("--batch", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--hot", type=float, default=0.0, help="share of events that one key has besides")
    parser.add_argument("--profile", action="store_true", help="print the functions that take longest")
    args = parser.parse_args()
    for variant in args.variants or VARIANTS:
        measure(variant, args)


def measure(variant, args):
    job, taken, profile = Job(variant), [], cProfile.Profile()
    for number in range(args.batches + 2):
        tasks = list(rows_of(number, args.batch, args.keys, job.work, args.hot))
        watermark_ms = FIRST_MS + number * args.batch - LATE_MS if number else MIN_WATERMARK_MS
        job.rows = 0
        counts = number >= 2
        if counts and args.profile:
            profile.enable()
        begun = time.process_time()
        blocks = job.pack(tasks)
        packed = time.process_time()
        job.run(blocks, watermark_ms)
        done = time.process_time()
        profile.disable()
        if counts:
            taken.append((packed - begun, done - packed))
    packing, running = (sorted(times)[len(times) // 2] for times in zip(*taken, strict=True))
    microseconds = (packing + running) / args.batch * 1e6
    print(
        f"{variant}: packing {packing:.2f} s, operator {running:.2f} s of CPU per micro-batch, "
        f"{microseconds:.2f} microseconds per event; {job.rows:,} rows out",
        flush=True,
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
