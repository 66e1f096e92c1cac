"""Keyed functions in a running job: side outputs, hints, columns, windows of counts; exact types."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    MemorySink,
    OutputTag,
    ValueStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.functions.aggregates import AggregateColumn, Emit, Fold
from flinkish_spark.functions.stream import CoProcessFunction
from flinkish_spark.operators.vectorized import count_by_key, sum_by_key
from tests.support.jobs import await_that, environment, rows

pytestmark = pytest.mark.timeout(600)
SCHEMA = (
    "user STRING, amount LONG, price DECIMAL(12, 3), at TIMESTAMP, day DATE, share DOUBLE, "
    "tags ARRAY<STRING>, attributes MAP<STRING, LONG>, place STRUCT<x: INT, y: STRING>, raw BINARY, "
    "flag BOOLEAN"
)
AT = datetime.datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=datetime.UTC)


class Echo(KeyedProcessFunction):
    """Emits what it got, so that a round trip shows what is lost on the way; NaN where `flag` says so."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield value._replace(share=math.nan) if value.flag else value


@dataclasses.dataclass
class Big:
    who: str
    amount: int


@dataclasses.dataclass
class Total:
    total: int
    greatest: Big


BIG = OutputTag("big", Big)


class Remembered(NamedTuple):
    """Emitted with its fields in another order than declared."""

    total: int
    seen: list[int]
    by_tag: dict[str, int]
    user: str


REMEMBERED = T.StructType(
    [
        T.StructField("user", T.StringType(), nullable=False),
        T.StructField("total", T.LongType(), nullable=False),
        T.StructField("seen", T.ArrayType(T.LongType())),
        T.StructField("by_tag", T.MapType(T.StringType(), T.LongType())),
    ]
)


class Remembers(KeyedProcessFunction):
    """Three kinds of state, declared in three ways, and a side output for amounts from 5 on."""

    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", Total))
        self.seen = context.get_list_state(ListStateDescriptor("seen", T.LongType()))
        self.by_tag = context.get_map_state(MapStateDescriptor("by_tag", str, "LONG"))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        big = Big(value.user, value.amount)
        before = self.total.value() or Total(0, big)
        greatest = max(before.greatest, big, key=lambda one: one.amount)
        self.total.update(Total(before.total + value.amount, greatest))
        self.seen.add(value.amount)
        for tag in value.tags or ():
            self.by_tag[tag] = self.by_tag.get(tag, 0) + 1
        if value.amount >= 5:
            ctx.output(BIG, self.total.value().greatest)
        yield Remembered(self.total.value().total, list(self.seen), dict(self.by_tag.items()), value.user)


@dataclasses.dataclass
class Half:
    user: str | None
    amount: float


class Sums(VectorizedProcessFunction):
    def open(self, context: Any) -> None:
        context.get_state(ValueStateDescriptor("total", "total LONG, n LONG"))

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        total, index = ctx.state("total"), ctx.index
        sums = total.numbers(0) + sum_by_key(index, batch.column("amount").to_numpy())
        counts = total.numbers(1) + count_by_key(index)
        total.put([sums, counts])
        columns = [*index.keys, pa.array(sums), pa.array(counts)]
        yield pa.RecordBatch.from_arrays(columns, names=["user", "total", "n"])


def feed(folder: Any, name: str, records: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / f".{name}").rename(folder / f"{name}.json")


def memory(tmp_path: Any, name: str) -> MemorySink:
    return MemorySink(f"{tmp_path}/{name}")


def test_a_job_of_many_functions_over_two_micro_batches(spark: Any, tmp_path: Any) -> None:
    feed(tmp_path / "in", "0", [{"user": u, "amount": a, "tags": t} for u, a, t in FIRST])
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    stream = env.from_dataframe(spark.readStream.schema(SCHEMA).json(str(tmp_path / "in")), uid="files")
    known = stream.filter(lambda record: record.user is not None)
    remembered = known.key_by("user").process(
        Remembers(),
        output=REMEMBERED,
        uid="remembers",
    )
    sinks = {name: memory(tmp_path, name) for name in ("main", "big", "halves", "sums", "pairs")}
    remembered.sink_to(sinks["main"], uid="main")
    remembered.get_side_output(BIG).sink_to(sinks["big"], uid="big")

    def halved(record: Any) -> Half:
        return Half(record.user, record.amount / 2)

    stream.map(halved).sink_to(sinks["halves"], uid="halves")
    summed = stream.key_by("user").process(Sums(), output="user STRING, total LONG, n LONG", uid="sums")
    summed.sink_to(sinks["sums"], uid="sums-out")
    pairs = known.transform(lambda df: df.select("user", "amount")).key_by("user").count_window(2)
    added = pairs.reduce(lambda a, b: (a.user, a.amount + b.amount), uid="pairs")
    added.sink_to(sinks["pairs"], uid="pairs-out")
    client = env.execute_async()
    await_that(lambda: rows(client, "halves") == len(FIRST), client)
    feed(tmp_path / "in", "1", [{"user": u, "amount": a, "tags": t} for u, a, t in SECOND])
    await_that(lambda: rows(client, "halves") == len(FIRST + SECOND), client)
    client.stop_with_checkpoint()
    client.wait()

    found = {name: [tuple(row) for row in sink.rows()] for name, sink in sinks.items()}
    of_ann = [row[1:] for row in found["main"] if row[0] == "ann"]
    assert of_ann == [
        (1, [1], {"a": 1}),
        (7, [1, 6], {"a": 2, "b": 1}),
        (17, [1, 6, 10], {"a": 2, "b": 1}),
    ]
    assert sorted(found["big"]) == [("ann", 6), ("ann", 10), ("ben", 5)]
    assert sorted(found["halves"], key=str) == sorted(((u, a / 2) for u, a, _ in FIRST + SECOND), key=str)
    totals = {user: (total, n) for user, total, n in found["sums"]}
    assert totals == {"ann": (17, 3), "ben": (9, 2), None: (8, 2)}
    assert sorted(found["pairs"]) == [("ann", 7), ("ben", 9)]


FIRST = [("ann", 1, ["a"]), ("ben", 4, None), ("ann", 6, ["a", "b"]), (None, 7, [])]
SECOND = [("ben", 5, None), ("ann", 10, None), (None, 1, ["z"])]


class Now(KeyedProcessFunction):
    """Says what it is told of time and of its task; notes when it is opened and closed."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def open(self, context: Any) -> None:
        self.context = context
        self.note("open")

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        c = self.context
        subtask = (c.get_index_of_this_subtask(), c.get_number_of_parallel_subtasks(), c.get_attempt_number())
        yield value.user, ctx.timer_service().current_processing_time(), *subtask, c.get_task_name()

    def close(self) -> None:
        self.note("close")

    def note(self, what: str) -> None:
        with open(self.notes, "a") as notes:
            notes.write(f"{what}\n")


class Sides(CoProcessFunction):
    def process_element1(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield "first", value.user

    def process_element2(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield "second", value.user
        ctx.output(BIG, (value.user, 1))


@pytest.mark.nightly
def test_what_a_function_is_told_of_time_and_of_its_task(spark: Any, tmp_path: Any) -> None:
    """Processing time is that of Spark's log: the same in every task, and when a micro-batch is run again."""
    users = [{"user": f"u{n}"} for n in range(20)]
    feed(tmp_path / "in", "0", users)
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    stream = env.from_dataframe(
        spark.readStream.schema("user STRING").json(str(tmp_path / "in")), uid="files"
    )
    sink = memory(tmp_path, "now")
    told = "user STRING, now LONG, at INT, of INT, attempt INT, name STRING"
    now = stream.key_by("user").process(Now(f"{tmp_path}/notes"), output=told, uid="now").name("here and now")
    now.sink_to(sink, uid="out")
    sides = stream.connect(stream).process(Sides(), output="side STRING, user STRING")
    both, seconds = memory(tmp_path, "both"), memory(tmp_path, "seconds")
    sides.sink_to(both, uid="both")
    sides.get_side_output(BIG).sink_to(seconds, uid="seconds")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 20, client)
    feed(tmp_path / "in", "1", users)
    await_that(lambda: rows(client, "out") == 40, client)
    client.stop_with_checkpoint()
    client.wait()
    (folder,) = (tmp_path / "job" / "spark").glob("*/offsets")
    entries = [entry.read_text().split("\n")[1] for entry in folder.iterdir() if entry.name.isdecimal()]
    logged = {json.loads(entry)["batchTimestampMs"] for entry in entries}
    seen = [row["now"] for row in sink.rows()]
    assert len(set(seen)) == 2 and set(seen) < logged
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions"))
    places = {(row["at"], row["of"], row["attempt"], row["name"]) for row in sink.rows()}
    assert places == {(at, partitions, 0, "here and now") for at in range(partitions)}
    notes = (tmp_path / "notes").read_text().split()
    assert notes.count("open") == notes.count("close") >= 2
    users = [record["user"] for record in users] * 2
    expected = sorted((side, user) for side in ("first", "second") for user in users)
    assert sorted(map(tuple, both.rows())) == expected
    assert sorted(row["who"] for row in seconds.rows()) == sorted(users)


def test_every_type_goes_through_an_operator_unchanged(spark: Any, tmp_path: Any) -> None:
    """In a session whose zone is not UTC, in the hour that its clocks skip."""
    full = {
        "user": "ann", "amount": 2**62 + 1, "price": 123456789.125, "at": AT.isoformat(), "day": "2026-03-29",
        "share": 0.1, "tags": ["x", None], "attributes": {"k": 1, "n": None}, "place": {"x": 1, "y": None},
        "raw": "AAEC", "flag": False,
    }  # fmt: skip
    feed(tmp_path / "in", "0", [full, {"user": None}, {"user": "nan", "flag": True}])
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    env = environment(session, tmp_path / "job", trigger_interval_ms=100)
    stream = env.from_dataframe(session.readStream.schema(SCHEMA).json(str(tmp_path / "in")), uid="files")
    sink = memory(tmp_path, "echo")
    echoed = stream.key_by("user", "day", "price").process(Echo(), output=SCHEMA, uid="echo")
    echoed.sink_to(sink, uid="out")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 3, client)
    client.stop_with_checkpoint()
    client.wait()
    by_user = {row["user"]: row for row in sink.rows()}
    ann = by_user["ann"].asDict(recursive=True)
    assert ann == {
        "user": "ann", "amount": 2**62 + 1, "price": decimal.Decimal("123456789.125"), "at": ann["at"],
        "day": datetime.date(2026, 3, 29), "share": 0.1, "tags": ["x", None],
        "attributes": {"k": 1, "n": None}, "place": {"x": 1, "y": None}, "flag": False,
        "raw": bytearray(b"\x00\x01\x02"),
    }  # fmt: skip
    assert ann["at"].astimezone(datetime.UTC) == AT
    assert set(by_user[None].asDict().values()) == {None}
    assert math.isnan(by_user["nan"]["share"]) and by_user["nan"]["amount"] is None


@pytest.mark.nightly
def test_running_aggregates_one_by_one_and_folded_before_the_shuffle(spark: Any, tmp_path: Any) -> None:
    given = [("ann", 1), ("ben", 4), ("ann", 6), (None, 7), ("ben", None)]
    more = [("ann", 10), (None, 1), ("ann", -2)]
    feed(tmp_path / "in", "0", [{"user": u, "amount": a} for u, a in given])
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    frame = spark.readStream.schema("user STRING, amount LONG").json(str(tmp_path / "in"))
    keyed = env.from_dataframe(frame, uid="files").key_by("user")
    names = ("sums", "folded", "table", "least", "reduced")
    sinks = {name: memory(tmp_path, name) for name in names}
    keyed.sum("amount", uid="sums").sink_to(sinks["sums"], uid="sums-out")
    keyed.sum("amount", uid="folded", emit=Emit.PER_KEY).sink_to(sinks["folded"], uid="folded-out")
    columns = [AggregateColumn("total", Fold.SUM, "amount"), AggregateColumn("n", Fold.COUNT)]
    keyed.fold(*columns, uid="table").sink_to(sinks["table"], uid="table-out")
    keyed.min_by("amount", uid="least", emit=Emit.PER_KEY).sink_to(sinks["least"], uid="least-out")
    # Functions of single records with a key are operators like others.
    same = (
        keyed.filter(lambda record: True, uid="all")
        .key_by("user")
        .map(lambda record: (record.user, record.amount), output="user STRING, amount LONG", uid="same")
    )
    same.key_by("user").reduce(lambda a, b: b, uid="reduced").sink_to(sinks["reduced"], uid="reduced-out")
    client = env.execute_async()
    await_that(lambda: rows(client, "reduced-out") == len(given), client)
    feed(tmp_path / "in", "1", [{"user": u, "amount": a} for u, a in more])
    await_that(lambda: rows(client, "reduced-out") == len(given + more), client)
    client.stop_with_checkpoint()
    client.wait()
    found = {name: [tuple(row) for row in sink.rows()] for name, sink in sinks.items()}
    assert [row[1] for row in found["sums"] if row[0] == "ann"] == [1, 7, 17, 15]
    assert set(found["folded"]) == {("ann", 7), ("ben", 4), (None, 7), ("ann", 15), (None, 8)}
    assert len(found["folded"]) == 5
    assert ("ann", 7, 2) in found["table"] and ("ann", 15, 4) in found["table"]
    assert ("ben", 4, 2) in found["table"]
    assert found["least"][-1] in [("ann", -2), (None, 1)] and ("ann", -2) in found["least"]
    assert sorted(found["reduced"], key=str) == sorted(given + more, key=str)
