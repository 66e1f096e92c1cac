"""Keyed work in the bench: sums, session windows, sliding windows, timers per key; our ways and Spark's.

A variant is a workload and an engine: `sum-fold`, `session-native`. All read one topic, up to where it ends
when they start, and write JSON to a topic. What a workload emits differs: Spark's own emit a row per key and
micro-batch or closed window, ours what Flink emits. That counts against us.

The clock starts when the first micro-batch is over and stops when the last is committed.
"""

from __future__ import annotations

import time

from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout

from demo.app import RunningTotal
from flinkish_spark import (
    AggregateColumn,
    CheckpointConfig,
    Fold,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from flinkish_spark.functions import AggregateFunction
from flinkish_spark.job_dir import JobDir
from flinkish_spark.sources.kafka import READER_DEFAULTS
from flinkish_spark.sources.kafka_ends import EndAtLatest
from flinkish_spark.store import LocalStore
from flinkish_spark.windows import (
    WINDOW_BOUNDS,
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    WithKeyAndWindow,
)

#: Engines by workload, ours first. `per-key` is applyInPandasWithState, `tws-*` transformWithState.
WORKLOADS = {
    "sum": ("element", "fold", "native", "per-key", "tws-row", "tws-pandas"),
    "session": ("ours", "fold", "native", "tws-row"),
    "sliding": ("ours", "fold", "native"),
    "timers": ("ours", "tws-row", "tws-pandas"),
}
VARIANTS = tuple(f"{work}-{engine}" for work, engines in WORKLOADS.items() for engine in engines)
#: What is measured together: name, variants, settings. Millions of keys are too much for the pandas forms.
GROUPS = (
    *((work, tuple(f"{work}-{engine}" for engine in engines), {}) for work, engines in WORKLOADS.items()),
    ("sum-1m", ("sum-element", "sum-fold", "sum-native"), {"keys": 1_000_000}),
)
#: Whom each workload is compared with.
PEERS = {
    "sum": ("sum-tws-row", "sum-tws-pandas", "sum-native"),
    "session": ("session-tws-row", "session-native"),
    "sliding": ("sliding-native",),
    "timers": ("timers-tws-row", "timers-tws-pandas"),
}
_OURS = ("element", "fold", "ours")
SCHEMA = "user STRING, product STRING, amount LONG, at TIMESTAMP"
TOTALS, SUMS = "user STRING, total LONG, orders LONG", "user STRING, begins LONG, total LONG"
WINDOWED = f"user STRING, total LONG, {WINDOW_BOUNDS}"
#: An event a millisecond, so that a key of ten thousand comes every ten seconds.
GAP_MS, SIZE_MS, SLIDE_MS, ALARM_MS, LATE_MS = 5_000, 60_000, 20_000, 30_000, 1_000


# -- ours ----------------------------------------------------------------------------------------------
class Amounts(AggregateFunction):
    def create_accumulator(self):
        return 0

    def add(self, order, total):
        return total + order.amount

    def get_result(self, total):
        return total

    def merge(self, one, other):
        return one + other


class Silence(KeyedProcessFunction):
    """One timer per key, moved on by each order."""

    def open(self, context):
        self.at = context.get_state(ValueStateDescriptor("at", "LONG"))

    def process_element(self, order, ctx):
        timers, due_ms = ctx.timer_service(), ctx.timestamp() + ALARM_MS
        before_ms = self.at.value()
        if before_ms is not None:
            timers.delete_event_time_timer(before_ms)
        timers.register_event_time_timer(due_ms)
        self.at.update(due_ms)

    def on_timer(self, time_ms, ctx):
        self.at.clear()
        yield ctx.get_current_key(), time_ms, 0


def _ours(spark, args, folder, work, engine, times_of):
    env = StreamExecutionEnvironment(
        spark, "bench", str(folder), checkpoint=CheckpointConfig(interval_ms=10_000)
    )
    source = KafkaSource(
        args.bootstrap_servers,
        [args.source],
        value=Json(SCHEMA),
        max_offsets_per_trigger=args.batch,
        ending=EndAtLatest(),
    )
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(LATE_MS).with_timestamp_assigner("at")
    orders = env.from_source(source, uid="orders")
    if work != "sum":
        orders = orders.assign_timestamps_and_watermarks(strategy)
    found = _stream(orders.key_by("user"), work, engine)
    found.sink_to(KafkaSink(args.bootstrap_servers, args.sink, key="user"), uid="out")
    times = times_of(JobDir(LocalStore(folder)), "out")
    env.observe(times)
    env.execute()
    return times.summary(args)


def _stream(users, work, engine):
    if work == "timers":
        return users.process(Silence(), output=SUMS, uid="work")
    if work != "sum":
        assigner = EventTimeSessionWindows(GAP_MS)
        if work == "sliding":
            assigner = SlidingEventTimeWindows(SIZE_MS, SLIDE_MS)
        windows = users.window(assigner)
        if engine == "fold":
            return windows.fold(AggregateColumn("total", Fold.SUM, "amount"), uid="work")
        return windows.aggregate(
            Amounts(), WithKeyAndWindow(), accumulator="LONG", output=WINDOWED, uid="work"
        )
    if engine == "fold":
        columns = AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("orders", Fold.COUNT)
        return users.fold(*columns, uid="work")
    return users.process(RunningTotal(), output=TOTALS, uid="work")


# -- Spark's -------------------------------------------------------------------------------------------
class RowSession(StatefulProcessor):
    """The open session of a key, closed by a timer."""

    def init(self, handle):
        self.handle = handle
        self.open = handle.getValueState("session", "begins LONG, ends LONG, total LONG")

    def handleInputRows(self, key, rows, timers):
        begins, ends, total = self.open.get() if self.open.exists() else (None, None, 0)
        before = ends
        for row in sorted(rows, key=lambda one: one.at):
            at = int(row.at.timestamp() * 1000)
            if ends is not None and at >= ends:
                yield Row(user=key[0], begins=begins, total=total)
                begins, total = None, 0
            begins, ends, total = at if begins is None else begins, at + GAP_MS, total + row.amount
        if before is not None:
            self.handle.deleteTimer(before)
        self.handle.registerTimer(ends)
        self.open.update((begins, ends, total))

    def handleExpiredTimer(self, key, timers, expired):
        if self.open.exists():
            begins, _, total = self.open.get()
            self.open.clear()
            yield Row(user=key[0], begins=begins, total=total)

    def close(self):
        pass


class RowSilence(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.at = handle.getValueState("at", "at LONG")

    def handleInputRows(self, key, rows, timers):
        due = max(int(row.at.timestamp() * 1000) for row in rows) + ALARM_MS
        if self.at.exists():
            self.handle.deleteTimer(self.at.get()[0])
        self.handle.registerTimer(due)
        self.at.update((due,))
        return iter(())

    def handleExpiredTimer(self, key, timers, expired):
        self.at.clear()
        yield Row(user=key[0], begins=expired.getExpiryTimeInMs(), total=0)

    def close(self):
        pass


class PandasSilence(RowSilence):
    def handleInputRows(self, key, rows, timers):
        latest = max(frame["at"].max() for frame in rows)
        due = int(latest.timestamp() * 1000) + ALARM_MS
        if self.at.exists():
            self.handle.deleteTimer(self.at.get()[0])
        self.handle.registerTimer(due)
        self.at.update((due,))
        return iter(())

    def handleExpiredTimer(self, key, timers, expired):
        import pandas as pd

        self.at.clear()
        yield pd.DataFrame({"user": [key[0]], "begins": [expired.getExpiryTimeInMs()], "total": [0]})


def _per_key(key, frames, state):
    """The running sum with applyInPandasWithState, a group per key."""
    import pandas as pd

    total, orders = state.get if state.exists else (0, 0)
    for frame in frames:
        total, orders = total + int(frame["amount"].sum()), orders + len(frame)
    state.update((total, orders))
    yield pd.DataFrame({"user": [key[0]], "total": [total], "orders": [orders]})


def _spark_s(events, work, engine):
    """Return the frame of one of Spark's ways, and its output mode."""
    from tests.bench.variants import OUTPUT, PandasTotal, RowTotal

    timed = events.withWatermark("at", f"{LATE_MS} milliseconds")
    if engine == "native":
        if work == "sum":
            totals = events.groupBy("user").agg(F.sum("amount").alias("total"), F.count("*").alias("orders"))
            return totals, "update"
        window = F.session_window("at", f"{GAP_MS} milliseconds")
        if work == "sliding":
            window = F.window("at", f"{SIZE_MS} milliseconds", f"{SLIDE_MS} milliseconds")
        sums = timed.groupBy("user", window.alias("w")).agg(F.sum("amount").alias("total"))
        return sums.select("user", F.unix_millis("w.start").alias("begins"), "total"), "append"
    if engine == "per-key":
        state = "total LONG, orders LONG"
        grouped = events.groupBy("user")
        done = grouped.applyInPandasWithState(_per_key, OUTPUT, state, "update", GroupStateTimeout.NoTimeout)
        return done, "update"
    if work == "sum":
        users = events.groupBy("user")
        if engine == "tws-row":
            return users.transformWithState(RowTotal(), OUTPUT, "Update", "None"), "update"
        return users.transformWithStateInPandas(PandasTotal(), OUTPUT, "Update", "None"), "update"
    users, mode = timed.groupBy("user"), "Append"
    if engine == "tws-pandas":
        return users.transformWithStateInPandas(PandasSilence(), SUMS, mode, "EventTime"), "append"
    processor = RowSession() if work == "session" else RowSilence()
    return users.transformWithState(processor, SUMS, mode, "EventTime"), "append"


def _theirs(spark, args, folder, work, engine):
    state = "spark.sql.streaming.stateStore."
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set(state + "providerClass", provider)
    spark.conf.set(state + "rocksdb.changelogCheckpointing.enabled", "true")
    frame = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", args.bootstrap_servers)
        .option("subscribe", args.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", args.batch)
        .options(**READER_DEFAULTS)
        .load()
    )
    events = frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("e")).select("e.*")
    rows, mode = _spark_s(events, work, engine)
    query = (
        rows.select(F.col("user").alias("key"), F.to_json(F.struct("*")).alias("value"))
        .writeStream.format("kafka")
        .outputMode(mode)
        .option("kafka.bootstrap.servers", args.bootstrap_servers)
        .option("kafka.linger.ms", "20")
        .option("kafka.batch.size", "262144")
        .option("topic", args.sink)
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    first = None
    while query.isActive:
        if first is None and query.lastProgress is not None:
            first = time.monotonic()
        query.awaitTermination(0.02)
    if query.exception():
        raise query.exception()
    return {"events_per_s": (args.events - args.batch) / (time.monotonic() - first)}


def run(spark, args, folder, times_of):
    """Run one variant once."""
    work, _, engine = args.variant.partition("-")
    if engine in _OURS:
        return _ours(spark, args, folder, work, engine, times_of)
    return _theirs(spark, args, folder, work, engine)
