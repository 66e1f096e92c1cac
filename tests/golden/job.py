"""A job of which a directory and a savepoint are kept; `README.md` says what for.

Everything that it declares is stored: uids, names and types of states, sinks, places of its sources. What is
kept is read by this program, so it must not change in any of that. Paths are fixed: some are in what Spark
and Delta store. One job of it can exist on a machine; see `place.py`.

What comes out does not depend on how the input falls into micro-batches; `expected.py` computes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from flinkish_spark import (
    AggregateColumn,
    AggregateFunction,
    AggregatingStateDescriptor,
    CheckpointConfig,
    CommitAnswer,
    DataStream,
    DeltaSink,
    FileFormat,
    FileSink,
    FixedDelay,
    Fold,
    JdbcSink,
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Outcome,
    OutputTag,
    ReducingStateDescriptor,
    RefusedRecordError,
    RestoreSettings,
    SinkWithDeadLetters,
    StateTtl,
    StreamExecutionEnvironment,
    TimeDomain,
    TwoPhaseCommitSink,
    ValueStateDescriptor,
    VectorizedProcessFunction,
    WatermarkStrategy,
)
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.operators.vectorized import sum_by_key
from flinkish_spark.sources import CollectionSource, CsvFiles, CsvHeader, Discovery, FileSource, JsonLines
from flinkish_spark.state.operator_state import OperatorListDescriptor
from flinkish_spark.windows import (
    EventTimeSessionWindows,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
)

JOB = "golden"
ORDER = "user STRING, n LONG, amount LONG, at LONG"
PAYMENT = "payer STRING, of LONG, paid LONG, at LONG"
#: What users may spend at most, told to every partition.
RULES = [("ann", 6, 0), ("ben", 3, 0)]

#: Windows, and how near payments are.
SIZE_MS, GAP_MS, LONG_GAP_MS, NEAR_MS = 10_000, 35_000, 80_000, 3_000
#: Windows that wait for late elements, of which there are none, are kept for so long.
LATENESS_MS = 600_000
ALARM_MS = 4_500
#: Orders with a timer by the wall clock: what is kept waits for some of them.
CALLED_BELOW, CALL_MS = 24, 180_000
#: Orders that are read when the job goes on later: the short time to live of what is kept is over then.
LATER_FROM = 60
SHORT_TTL_MS, LONG_TTL_MS = 10_000, 1_000 * 365 * 24 * 3_600_000
#: A text per order, long enough that key groups move into base files.
TEXT_LENGTH = 20_000
REFUSED_ONE_IN = 5

RECENT = OperatorListDescriptor("recent", "user STRING, n LONG")
LIMITS = MapStateDescriptor("limits", "STRING", "LONG")
ALARM = OutputTag("alarms", "user STRING, due LONG")
REMEMBERED = "user STRING, n LONG, amount LONG, recent LONG"
LIMITED = f"{REMEMBERED}, above LONG, oldest STRING, texts LONG"
SESSION = "user STRING, since LONG, until LONG, amounts ARRAY<LONG>, most ARRAY<LONG>"


class Remembering(CheckpointedProcessFunction):
    """Puts beside each order how many of the last five were of the same user."""

    def open(self, context: Any) -> None:
        self.recent = context.get_operator_list_state(RECENT)

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        recent = self.recent.get()
        yield order.user, order.n, order.amount, sum(user == order.user for user, _ in recent)
        self.recent.update([*recent, (order.user, order.n)][-5:])


class Limited(KeyedBroadcastProcessFunction):
    """Counts a user's orders above what is allowed; keeps a long text for each order.

    Of the texts it says what the first one ends with, and how many there are.
    """

    def open(self, context: Any) -> None:
        self.above = context.get_state(ValueStateDescriptor("above", "LONG", default=0))
        self.texts = context.get_map_state(MapStateDescriptor("texts", "LONG", "STRING"))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        if order.amount > ctx.get_broadcast_state(LIMITS).get(order.user, 10):
            self.above.update(self.above.value() + 1)
        self.texts[order.n] = f"{order.n:04d}" * (TEXT_LENGTH // 4)
        oldest = next(iter(self.texts))
        yield (*order, self.above.value(), self.texts[oldest][-4:], len(self.texts))

    def process_broadcast_element(self, rule: Any, ctx: Any) -> None:
        ctx.get_broadcast_state(LIMITS)[rule.name] = rule.most


class Largest:
    def reduce(self, first: Any, second: Any) -> Any:
        return max(first, second)


class Mean(AggregateFunction):
    """Of amounts, whole."""

    def create_accumulator(self) -> Any:
        return 0, 0

    def add(self, value: Any, accumulator: Any) -> Any:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: Any) -> Any:
        return accumulator[0] // accumulator[1]

    def merge(self, first: Any, second: Any) -> Any:
        return first[0] + second[0], first[1] + second[1]


class States(KeyedProcessFunction):
    """All kinds of keyed state, and timers of both clocks."""

    def open(self, context: Any) -> None:
        self.last = context.get_state(ValueStateDescriptor("last", "n LONG, amount LONG"))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))
        self.counts = context.get_map_state(MapStateDescriptor("counts", "LONG", "LONG"))
        self.largest = context.get_reducing_state(ReducingStateDescriptor("largest", Largest(), "LONG"))
        mean = AggregatingStateDescriptor("mean", Mean(), "total LONG, n LONG")
        self.mean = context.get_aggregating_state(mean)
        self.kept = context.get_list_state(ListStateDescriptor("kept", "LONG", StateTtl(LONG_TTL_MS)))
        self.short = context.get_state(ValueStateDescriptor("short", "LONG", ttl=StateTtl(SHORT_TTL_MS)))
        self.calls = context.get_map_state(MapStateDescriptor("calls", "LONG", "ARRAY<LONG>"))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        before = self.last.value()
        self.last.update((order.n, order.amount))
        self.seen.add(order.n)
        self.counts[order.amount] = self.counts.get(order.amount, 0) + 1
        self.largest.add(order.amount)
        self.mean.add(order.amount)
        self.kept.add(order.n)
        timers = ctx.timer_service()
        timers.register_event_time_timer(ctx.timestamp() + ALARM_MS)
        short = self.short.value() if order.n >= LATER_FROM else None
        if order.n < CALLED_BELOW:
            self.short.update(order.n)
            due_ms = timers.current_processing_time() + CALL_MS
            self.calls[due_ms] = [*self.calls.get(due_ms, []), order.n]
            timers.register_processing_time_timer(due_ms)
        said = {
            "limited": [order.recent, order.above, order.oldest, order.texts],
            "before": None if before is None else list(before),
            "seen": list(self.seen),
            "counts": sorted([amount, count] for amount, count in self.counts.items()),
            "largest": self.largest.get(),
            "mean": self.mean.get(),
            "kept": len(self.kept),
            "short": short,
        }
        yield order.user, "order", order.n, json.dumps(said)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        user = ctx.get_current_key()
        if ctx.time_domain() is TimeDomain.EVENT_TIME:
            ctx.output(ALARM, (user, time_ms))
            return
        for number in self.calls[time_ms]:
            yield user, "call", number, None
        del self.calls[time_ms]


class Totals(VectorizedProcessFunction):
    """What each user has paid up to each payment, over columns."""

    def open(self, context: Any) -> None:
        context.get_state(ValueStateDescriptor("total", "LONG"))

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        total, index = ctx.state("total"), ctx.index
        paid = batch.column("paid").to_numpy()
        before = total.numbers()
        total.put([before + sum_by_key(index, paid)])
        running = before.copy()
        sums = []
        for key, amount in zip(index.of_row.tolist(), paid.tolist(), strict=True):
            running[key] += amount
            sums.append(int(running[key]))
        columns = [batch.column("user"), batch.column("n"), pa.array(sums)]
        yield pa.RecordBatch.from_arrays(columns, names=["user", "n", "total"])


class Spent(AggregateFunction):
    """Amounts and how many, of orders or of earlier sums."""

    def create_accumulator(self) -> Any:
        return 0, 0

    def add(self, value: Any, accumulator: Any) -> Any:
        return accumulator[0] + value.amount, accumulator[1] + 1

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        return first[0] + second[0], first[1] + second[1]


class WithKey(ProcessWindowFunction):
    """What was made of a window, behind its user."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        for element in elements:
            yield (key, *element)


class Session(ProcessWindowFunction):
    """A window's bounds and what is in it."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        pairs = sorted((element.amount, element.most) for element in elements)
        yield key, *context.window, [amount for amount, _ in pairs], [most for _, most in pairs]


class Ledger(TwoPhaseCommitSink):
    """Records as files of JSON lines: staged in one folder, committed by a rename into another."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def begin(self, transaction: Any) -> Any:
        staged = Path(self.folder) / "staged"
        staged.mkdir(parents=True, exist_ok=True)
        return (staged / transaction.name).open("w")

    def write(self, handle: Any, record: Any) -> None:
        if record.total % REFUSED_ONE_IN == 0:
            raise RefusedRecordError("divisible")
        handle.write(json.dumps(list(record)) + "\n")

    def flush(self, handle: Any) -> Any:
        handle.flush()
        os.fsync(handle.fileno())
        handle.close()
        return Path(handle.name).name

    def commit(self, committable: Any, checkpoint: Any) -> Any:
        committed = Path(self.folder) / "committed" / committable
        if committed.exists():
            return Outcome.ALREADY_COMMITTED
        committed.parent.mkdir(exist_ok=True)
        try:
            (Path(self.folder) / "staged" / committable).rename(committed)
        except FileNotFoundError:
            return CommitAnswer(Outcome.LOST, f"{committable} is gone", is_proven_aborted=True)
        return None

    def abort(self, committable: Any) -> Any:
        with suppress(FileNotFoundError):
            (Path(self.folder) / "staged" / committable).unlink()
        return None

    def list_open(self, prefix: str) -> Any:
        found = Path(self.folder, "staged").glob(f"{prefix}*")
        return {file.name: file.name for file in found}


def _by_time() -> WatermarkStrategy:
    return WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")


def build(
    spark: Any, root: Path, name: str = JOB, restore: RestoreSettings | None = None
) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it.

    Parameters
    ----------
    root
        Input is read from there, by every job.
    name
        Of the folder for this job's directory and outputs.
    """
    out = root / name
    out.mkdir(exist_ok=True)
    env = StreamExecutionEnvironment(
        spark,
        job=JOB,
        job_dir=str(out / "job"),
        # Checkpoints are asked for.
        checkpoint=CheckpointConfig(interval_ms=3_600_000, retained=2),
        restart_strategy=FixedDelay(attempts=2, delay_ms=100),
        max_parallelism=8,
        trigger_interval_ms=100,
        restore=restore,
    )
    often = {"discovery": Discovery.CONTINUOUS, "discover_every_ms": 100, "max_files_per_batch": 1}
    orders = env.from_source(
        FileSource(str(root / "orders"), JsonLines(), ORDER, **often), _by_time(), uid="orders"
    )
    csv = CsvFiles(header=CsvHeader.NAMES)
    payments = env.from_source(
        FileSource(str(root / "payments"), csv, PAYMENT, **often), _by_time(), uid="payments"
    )
    rules = env.from_source(
        CollectionSource(RULES, "name STRING, most LONG, at LONG"), _by_time(), uid="rules"
    )
    by_user, by_payer = orders.key_by("user"), payments.key_by("payer")

    remembered = orders.process_with_state(Remembering(), output=REMEMBERED, uid="remembering")
    limited = remembered.key_by("user").connect(rules.broadcast(LIMITS))
    checked = limited.process(Limited(), output=LIMITED, uid="limited").key_by("user")
    states = checked.process(States(), output="user STRING, what STRING, n LONG, said STRING", uid="states")
    states.sink_to(DeltaSink(str(out / "delta")), uid="delta")
    alarms = JdbcSink(f"jdbc:sqlite:{out / 'database'}", "alarms", create_table=True)
    states.get_side_output(ALARM).sink_to(alarms, uid="alarms-out")

    _windows(by_user).sink_to(FileSink(str(out / "files"), FileFormat.PARQUET), uid="files")

    near = by_user.interval_join(by_payer, lower_ms=0, upper_ms=NEAR_MS, uid="near")
    paid = near.key_by("user").process(Totals(), output="user STRING, n LONG, total LONG", uid="paid")
    refused = FileSink(str(out / "refused"), FileFormat.JSON)
    paid.sink_to(SinkWithDeadLetters(Ledger(out / "ledger"), refused), uid="ledger")
    return env


def _windows(orders: Any) -> DataStream:
    """Return windows of windows: of one loop, over columns, and with states and timers, which wait."""
    spent = orders.window(SlidingEventTimeWindows(2 * SIZE_MS, SIZE_MS)).aggregate(
        Spent(),
        WithKey(),
        accumulator="amount LONG, n LONG",
        output="user STRING, amount LONG, n LONG",
        uid="looped-sliding",
    )
    tumbling = spent.key_by("user").window(TumblingEventTimeWindows(2 * SIZE_MS))
    total = AggregateColumn("amount", Fold.SUM, "amount")
    folded = tumbling.fold(total, AggregateColumn("windows", Fold.COUNT), uid="columnar-tumbling")
    sessions = folded.key_by("user").window(EventTimeSessionWindows(GAP_MS))
    most = AggregateColumn("most", Fold.MAX, "amount")
    merged = sessions.fold(total, most, uid="columnar-session")
    longer = merged.key_by("user").window(EventTimeSessionWindows(LONG_GAP_MS)).allowed_lateness(LATENESS_MS)
    return longer.process(Session(), output=SESSION, uid="element-session")
