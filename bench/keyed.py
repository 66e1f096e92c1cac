"""Keyed work in the bench: sums, session and sliding windows, timers, patterns; our ways and Spark's.

A variant is a workload and an engine: `sum-fold`, `session-native`. All read one topic, up to where it ends
when they start, with the same fields of its records, and write JSON to a topic. What a workload emits
differs: Spark's own emit a row per key and micro-batch or closed window, ours what Flink emits. That counts
against us.

The clock starts when the first micro-batch is over and stops when the last is committed.
"""

from __future__ import annotations

import time

from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

from bench import (
    login_peers,
    rise_peers,
    session_peers,
    sliding_peers,
    sum_peers,
    timer_peers,
    unpaid_peers,
    vectorised,
)
from bench.groups import LATE_MS, OURS, PATTERNS
from bench.session_peers import GAP_MS
from bench.sliding_peers import SIZE_MS, SLIDE_MS
from bench.spark_kafka import READER_DEFAULTS
from bench.timer_peers import ALARM_MS
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
from flinkish_spark.cep import CEP, Pattern, SqlCondition
from flinkish_spark.connectors.kafka.offsets import EndAtLatest
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.functions.keyed import AggregateFunction
from flinkish_spark.windows import (
    WINDOW_BOUNDS,
    EventTimeSessionWindows,
    KeyAndWindowBounds,
    SlidingEventTimeWindows,
)

#: What a workload needs of a record: all engines parse this and nothing more.
FIELDS = "user STRING, amount LONG"
TIMED_FIELDS = f"{FIELDS}, at TIMESTAMP"
WINDOWED = f"user STRING, total LONG, {WINDOW_BOUNDS}"

#: By workload: the peers' module, and their forms with rows and with pandas.
_PEERS = {
    "sum": (sum_peers, sum_peers.RowTotal, sum_peers.PandasTotal),
    "session": (session_peers, session_peers.RowSession, session_peers.PandasSession),
    "sliding": (sliding_peers, sliding_peers.RowSliding, sliding_peers.PandasSliding),
    "timers": (timer_peers, timer_peers.RowSilence, timer_peers.PandasSilence),
    "rises": (rise_peers, rise_peers.RowRise, rise_peers.PandasRise),
    "logins": (login_peers, login_peers.RowLogin, login_peers.PandasLogin),
    "unpaid": (unpaid_peers, unpaid_peers.RowUnpaid, unpaid_peers.PandasUnpaid),
}


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
        self.due = context.get_state(ValueStateDescriptor("due", "LONG"))

    def process_element(self, order, ctx):
        timers, due_ms = ctx.timer_service(), ctx.timestamp() + ALARM_MS
        before_ms = self.due.value()
        if before_ms is not None:
            # Of two partitions, one may bring what is older.
            if before_ms >= due_ms:
                return
            timers.delete_event_time_timer(before_ms)
        timers.register_event_time_timer(due_ms)
        self.due.update(due_ms)

    def on_timer(self, time_ms, ctx):
        self.due.clear()
        yield ctx.get_current_key(), time_ms, 0


def _ours(spark, args, folder, work, engine, times_of):
    env = StreamExecutionEnvironment(
        spark, "bench", str(folder), checkpoint=CheckpointConfig(interval_ms=10_000)
    )
    source = KafkaSource(
        args.bootstrap_servers,
        [args.source],
        value=Json(FIELDS if work == "sum" else TIMED_FIELDS),
        max_offsets_per_trigger=args.batch,
        ending=EndAtLatest(),
    )
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(LATE_MS).with_timestamp_assigner("at")
    orders = env.from_source(source, uid="orders")
    if work != "sum":
        orders = orders.assign_timestamps_and_watermarks(strategy)
    if work in PATTERNS:
        orders = orders.transform(_as_numbers)
    found = _stream(orders.key_by("user"), work, engine)
    found.sink_to(KafkaSink(args.bootstrap_servers, args.sink, key="user"), uid="out")
    times = times_of(JobDir(LocalStore(folder)), "out")
    env.observe(times)
    env.execute()
    return times.summary(args)


def _stream(users, work, engine):
    if work == "timers":
        function = vectorised.Silences() if engine == "vectorised" else Silence()
        return users.process(function, output=timer_peers.OUTPUT, uid="work")
    if work in PATTERNS:
        matches = CEP.pattern(users, pattern_of(work, engine))
        if engine == "text":
            return matches.select(row_of(work), uid="work")
        return matches.select(as_a_row, output=rise_peers.OUTPUT, uid="work")
    if work != "sum":
        assigner = EventTimeSessionWindows(GAP_MS)
        if work == "sliding":
            assigner = SlidingEventTimeWindows(SIZE_MS, SLIDE_MS)
        windows = users.window(assigner)
        if engine == "fold":
            found = windows.fold(AggregateColumn("total", Fold.SUM, "amount"), uid="work")
        else:
            found = windows.aggregate(
                Amounts(), KeyAndWindowBounds(), accumulator="LONG", output=WINDOWED, uid="work"
            )
        return found.transform(_as_others_write_it)
    if engine == "fold":
        columns = AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("orders", Fold.COUNT)
        return users.fold(*columns, uid="work")
    function = vectorised.Totals() if engine == "vectorised" else RunningTotal()
    return users.process(function, output=sum_peers.OUTPUT, uid="work")


def pattern_of(work, engine="ours"):
    """Return the pattern of a workload: which of its rows begins, and which ends it, is `as_a_row`'s."""
    if work == "rises":
        is_more = SqlCondition("amount > first.amount") if engine == "text" else _is_more
        return Pattern.begin("first").next("last").where(is_more).within(rise_peers.WITHIN_MS)
    if work == "logins":
        failed = Pattern.begin("first").where(f"amount < {login_peers.FAILS_BELOW}").times(3).consecutive()
        success = failed.next("last").where(f"amount >= {login_peers.FAILS_BELOW}")
        return success.within(login_peers.WITHIN_MS)
    ordered = Pattern.begin("first").where(f"amount >= {unpaid_peers.ORDERS_FROM}")
    paid = ordered.not_followed_by("paid").where(f"amount < {unpaid_peers.PAYS_BELOW}")
    return paid.within(unpaid_peers.WITHIN_MS)


def _is_more(order, ctx):
    return order.amount > ctx.events_for("first")[0].amount


def row_of(work):
    """Return what `as_a_row` makes of a match, as SQL text."""
    last = "first" if work == "unpaid" else "last"
    return f"FIRST(first.user) AS user, FIRST(first.at_ms) AS begins, {last}.amount AS total"


def as_a_row(match):
    first, last = match["first"][0], match.get("last", match["first"])[0]
    return first.user, first.at_ms, last.amount


def _as_numbers(orders):
    """Return records without times that Python would have to make objects of."""
    return orders.withColumn("at_ms", F.unix_millis("at")).drop("at")


def _as_others_write_it(windows):
    return windows.select("user", F.unix_millis("window_start").alias("begins"), "total")


# -- Spark's -------------------------------------------------------------------------------------------
def _native(timed, work):
    """Return the frame of Spark's own aggregate, which is done in the JVM."""
    if work == "sum":
        return timed.groupBy("user").agg(F.sum("amount").alias("total"), F.count("*").alias("orders"))
    window = F.session_window("at", f"{GAP_MS} milliseconds")
    if work == "sliding":
        window = F.window("at", f"{SIZE_MS} milliseconds", f"{SLIDE_MS} milliseconds")
    sums = timed.groupBy("user", window.alias("w")).agg(F.sum("amount").alias("total"))
    return sums.select("user", F.unix_millis("w.start").alias("begins"), "total")


def _in_python(timed, work, engine, mode):
    """Return the frame of one of Spark's ways to keep state in Python."""
    module, in_rows, in_pandas = _PEERS[work]
    if work != "sum":
        # A number made in the JVM costs Python nothing; a timestamp has to be converted for each record.
        at = "at" if engine == "per-key" else F.unix_millis("at").alias("at_ms")
        timed = timed.select("user", at, "amount")
    if work == "unpaid":
        neither = F.col("amount").between(unpaid_peers.PAYS_BELOW, unpaid_peers.ORDERS_FROM - 1)
        timed = timed.where(~neither)
    users, of_time = timed.groupBy("user"), "None" if work == "sum" else "EventTime"
    if engine == "per-key":
        timeout = GroupStateTimeout.NoTimeout if work == "sum" else GroupStateTimeout.EventTimeTimeout
        return users.applyInPandasWithState(module.per_key, module.OUTPUT, module.STATE, mode, timeout)
    if engine == "tws-row":
        return users.transformWithState(in_rows(), module.OUTPUT, mode, of_time)
    return users.transformWithStateInPandas(in_pandas(), module.OUTPUT, mode, of_time)


#: What Spark's guides say of a store that is to be fast.
_STORE = {
    "providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "rocksdb.changelogCheckpointing.enabled": "true",
    "rocksdb.trackTotalNumberOfRows": "false",
}


def _theirs(spark, args, folder, work, engine):
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    for name, value in _STORE.items():
        spark.conf.set(f"spark.sql.streaming.stateStore.{name}", value)
    frame = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", args.bootstrap_servers)
        .option("subscribe", args.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", args.batch)
        .options(**READER_DEFAULTS)
        .load()
    )
    fields = FIELDS if work == "sum" else TIMED_FIELDS
    events = frame.select(F.from_json(F.col("value").cast("string"), fields).alias("e")).select("e.*")
    timed = events if work == "sum" else events.withWatermark("at", f"{LATE_MS} milliseconds")
    mode = "update" if work == "sum" else "append"
    rows = _native(timed, work) if engine == "native" else _in_python(timed, work, engine, mode)
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
    if engine in OURS:
        return _ours(spark, args, folder, work, engine, times_of)
    return _theirs(spark, args, folder, work, engine)
