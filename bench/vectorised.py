"""A running sum, and an alarm per key that each record moves, as vectorised functions of a user."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from bench.timer_peers import ALARM_MS
from flinkish_spark import ValueStateDescriptor, VectorizedProcessFunction
from flinkish_spark.operators.vectorized import count_by_key, greatest_by_key, sum_by_key


class Totals(VectorizedProcessFunction):
    """A row per key and micro-batch."""

    def open(self, context):
        context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))

    def process_batch(self, batch, ctx):
        kept, index = ctx.state("total"), ctx.index
        totals = kept.numbers(0) + sum_by_key(index, batch.column("amount").to_numpy())
        orders = kept.numbers(1) + count_by_key(index)
        kept.put([totals, orders])
        columns = [*index.keys, pa.array(totals), pa.array(orders)]
        yield pa.RecordBatch.from_arrays(columns, names=["user", "total", "orders"])


class Silences(VectorizedProcessFunction):
    """One timer per key, moved on by the latest order of a micro-batch."""

    event_time = "begins"

    def open(self, context):
        context.get_state(ValueStateDescriptor("due", "LONG"))

    def process_batch(self, batch, ctx):
        due, latest = ctx.state("due"), greatest_by_key(ctx.index, ctx.times_ms) + ALARM_MS
        before, there = due.numbers(), due.exists
        # Of two partitions, one may bring what is older.
        moved = ~there | (before < latest)
        ctx.delete_event_time_timers(before, there & moved)
        ctx.register_event_time_timers(latest, moved)
        due.put([latest], moved)

    def on_timers(self, domain, ctx):
        index = ctx.index
        ctx.state("due").remove(np.ones(len(index), dtype=bool))
        users = index.keys[0].take(pa.array(index.of_row))
        zeros = pa.array(np.zeros(len(index.of_row), dtype=np.int64))
        yield pa.RecordBatch.from_arrays([users, ctx.times, zeros], names=["user", "begins", "total"])
