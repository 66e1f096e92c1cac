"""transform() behind keyed operators, in running jobs: between two of them, and in front of sinks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark import DataStream, JobStatus, KeyedProcessFunction, MemorySink, ValueStateDescriptor
from flinkish_spark.core.errors import GraphError, SchemaError
from flinkish_spark.sources import Discovery, FileSource, JsonLines
from flinkish_spark.windows import TumblingEventTimeWindows
from tests.support.jobs import await_that, environment, failure_of, rows, running
from tests.support.two_ways import BY_AT, ODD, ORDERS, ROWS, TOTALS

pytestmark = pytest.mark.timeout(300)


class Noted(KeyedProcessFunction):
    """Running totals; odd amounts go to a side output, and a file says of which amounts it was called."""

    def __init__(self, calls: Path) -> None:
        self.calls = calls

    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        with self.calls.open("a") as calls:
            calls.write(f"{order.amount}\n")
        self.total.update(self.total.value() + order.amount)
        if order.amount % 2:
            ctx.output(ODD, (order.user, order.amount))
        yield order.user, self.total.value()


def calls_in(file: Path) -> list[int]:
    return sorted(map(int, file.read_text().split()))


def guarded(frame: DataFrame) -> DataFrame:
    """Large totals under other names; fails for a row without a user, such as a control row."""
    checked = F.when(F.col("user").isNull(), F.raise_error(F.lit("no user"))).otherwise(F.upper("user"))
    more = frame.where("total > 1").withColumn("who", checked).withColumn("twice", F.col("total") * 2)
    return more.where(F.assert_true(F.col("who").isNotNull()).isNull()).drop("user", "total")


def small(frame: DataFrame) -> DataFrame:
    return frame.where("sum < 30").withColumnRenamed("sum", "total").select("total", "who")


def feed(folder: Path, name: str, part: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(dict(zip(("user", "amount", "at"), row, strict=True))) + "\n" for row in part]
    (folder / f".{name}").write_text("".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def windows_job(spark: Any, tmp_path: Path) -> tuple[Any, dict[str, MemorySink]]:
    env = environment(spark, tmp_path / "job")
    files = FileSource(
        str(tmp_path / "in"), JsonLines(), ORDERS, discovery=Discovery.CONTINUOUS, discover_every_ms=100
    )
    orders = env.from_source(files, BY_AT, uid="orders")
    totals = orders.key_by("user").process(Noted(tmp_path / "calls"), output=TOTALS, uid="totals")
    kept = totals.filter(lambda row: row.user != "dan").transform(guarded).rebalance()
    named = kept.map(lambda row: (row.who.title(), row.twice), output="who STRING, twice LONG")
    plain = named.key_by("who").window(TumblingEventTimeWindows(5)).sum("twice", uid="sums")
    plain = plain.transform(lambda frame: frame.withColumnRenamed("twice", "sum"))
    sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in ("plain", "small", "odd")}
    plain.sink_to(sinks["plain"], uid="plain")
    plain.transform(small).sink_to(sinks["small"], uid="small")
    totals.get_side_output(ODD).transform(lambda frame: frame.where("amount < 9")).sink_to(
        sinks["odd"], uid="odd"
    )
    return env, sinks


@pytest.mark.nightly
def test_windows_behind_a_transform_are_exact_over_a_restart(spark: Any, tmp_path: Path) -> None:
    def run(name: str, part: list[Any], wanted: dict[str, int]) -> dict[str, MemorySink]:
        """Run the job until it has emitted what one more file comes to."""
        feed(tmp_path / "in", name, part)
        env, sinks = windows_job(spark, tmp_path)
        with running(env) as client:
            await_that(lambda: all(rows(client, uid) >= count for uid, count in wanted.items()), client)
            client.stop_with_checkpoint()
            assert client.wait(timeout_ms=100_000) and client.progress.restarts == 0
        return sinks

    parts = ROWS[:5], [*ROWS[5:], ("zoe", 1, 100)]
    run("0", parts[0], {"plain": 2, "odd": 2, "small": 2})
    sinks = run("1", parts[1], {"plain": 3, "odd": 1, "small": 2})
    found = {name: Counter(map(tuple, sink.rows())) for name, sink in sinks.items()}
    sums = [("Ann", 28), ("Ben", 8), ("Ann", 26), ("Ben", 26), ("Cid", 62)]
    assert Counter((row["who"], row["sum"]) for row in sinks["plain"].rows()) == Counter(sums)
    assert found["small"] == Counter((total, who) for who, total in sums if total < 30)
    assert found["odd"] == Counter([("ann", 3), ("cid", 1), ("zoe", 1)])
    # It stands in the chains of two operators whose outputs have sinks, and ran once in each.
    assert calls_in(tmp_path / "calls") == sorted(2 * [row[1] for part in parts for row in part])


#: Totals of each user that a sink shows, and the calls of the operators in front of it.
ONCE = {
    "by-row": {"ann": [3, 11, 13], "ben": [4, 13], "cid": [31], "dan": [20]},
    "apart": {"ann": [3, 11, 13], "ben": [4, 13], "cid": [31], "dan": [20]},
    "between": {"ann": [3, 14, 27], "ben": [4, 17], "cid": [31], "dan": [20]},
}


class Once(NamedTuple):
    """One job, of which each way is a branch; how often the function of its transform was called."""

    folder: Path
    rows: dict[str, list[Any]]
    called: Counter[str]


@pytest.fixture(scope="module")
def once(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Once:
    folder, called = tmp_path_factory.mktemp("once"), Counter[str]()
    env, sinks = environment(spark, folder / "job"), {}
    orders = env.from_collection(ROWS, ORDERS, uid="orders")
    for how in ONCE:

        def doubled(frame: DataFrame, how: str = how) -> DataFrame:
            called[how] += 1
            spread = frame.repartition(2) if how == "apart" else frame
            return spread.withColumn("double", F.col("total") * 2).where("double > 3")

        noted = Noted(folder / f"{how}-calls")
        totals = orders.key_by("user").process(noted, output=TOTALS, uid=f"{how}-totals")
        if how == "between":
            large = totals.transform(
                lambda frame: frame.where("total > 1").withColumnRenamed("total", "amount")
            )
            nobody = F.raise_error(F.lit("a key without a user, as of a control row"))
            named = large.key_by(F.when(F.col("user").isNull(), nobody).otherwise(F.upper("user")))
            totals = named.process(Noted(folder / "more-calls"), output=TOTALS, uid="more-totals")
        sinks[how] = MemorySink(f"{folder}/{how}")
        totals.transform(doubled).sink_to(sinks[how], uid=f"{how}-out")
    with running(env) as client:
        assert client.wait(timeout_ms=200_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    return Once(folder, {how: sink.rows() for how, sink in sinks.items()}, called)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ONCE)
def test_operators_run_once_in_front_of_a_sink_behind_a_transform(once: Once, how: str) -> None:
    """Also where records and control rows are read apart, because a function is not done to single rows."""
    wanted = [(user, total, 2 * total) for user, totals in ONCE[how].items() for total in totals]
    assert Counter(map(tuple, once.rows[how])) == Counter(wanted)
    assert calls_in(once.folder / f"{how}-calls") == sorted(row[1] for row in ROWS)
    if how == "between":
        assert calls_in(once.folder / "more-calls") == [3, 4, 11, 13, 13, 20, 31]
    # Once as the job is checked and once as it starts, but not in each micro-batch.
    assert once.called[how] <= 2 or how == "apart"


class Named:
    """A function of single records that notes them, and fails for a row that is none."""

    def __init__(self, calls: Path) -> None:
        self.calls = calls

    def __call__(self, row: Any) -> tuple[str, int]:
        assert row.user is not None
        with self.calls.open("a") as calls:
            calls.write(f"{row.total}\n")
        return row.user.title(), row.total


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("one pass", marks=pytest.mark.nightly),
        pytest.param("own tasks", marks=pytest.mark.nightly),
        pytest.param("moved", marks=pytest.mark.nightly),
        "not by row",
    ],
)
def test_functions_of_records_in_front_of_sinks_are_done_in_one_pass_with_control_rows(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where it is one pass, the micro-batch is not kept in between; the rows are the same everywhere."""
    # The class that has its own, of a session with a JVM.
    frames: Any = type(spark.range(0))
    kept, persist = [], frames.persist

    def noted_persist(frame: DataFrame, *given: Any) -> DataFrame:
        kept.append(frame.columns)
        return persist(frame, *given)

    monkeypatch.setattr(frames, "persist", noted_persist)
    env = environment(spark, tmp_path / "job")
    orders = env.from_collection(ROWS, ORDERS, uid="orders")
    totals = orders.key_by("user").process(Noted(tmp_path / "calls"), output=TOTALS, uid="totals")
    named = totals.map(Named(tmp_path / "named"), output="who STRING, total LONG")
    if how == "own tasks":
        named = named.set_parallelism(3)
    named = named.rebalance() if how == "moved" else named
    spread = (lambda frame: frame.repartition(2)) if how == "not by row" else (lambda frame: frame)
    large = named.transform(
        lambda frame: (
            spread(frame)
            .where("total > 2")
            .withColumn("half", F.expr("total DIV 2"))
            # Of the same column as another field, and a map, which has no hash of its own.
            .select("*", F.col("who").alias("same"), F.create_map("who", "half").alias("halves"))
        )
    )
    both = large.filter(lambda row: row.half < 15 and row.halves == {row.same: row.half}).flat_map(
        lambda row: [(row.who, row.half), (row.who, -row.half)], output="who STRING, half LONG"
    )
    sink = MemorySink(f"{tmp_path}/out")
    both.transform(lambda frame: frame.withColumnRenamed("half", "amount")).sink_to(sink, uid="out")
    with running(env) as client:
        assert client.wait(timeout_ms=100_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED and client.progress.restarts == 0
    halves = {"Ann": [1, 5, 6], "Ben": [2, 6], "Dan": [10]}
    wanted = [(who, sign * half) for who, found in halves.items() for half in found for sign in (1, -1)]
    assert Counter((row["who"], row["amount"]) for row in sink.rows()) == Counter(wanted)
    assert calls_in(tmp_path / "calls") == sorted(row[1] for row in ROWS)
    assert calls_in(tmp_path / "named") == [1, 3, 4, 11, 13, 13, 20, 31]
    assert bool(kept) is (how != "one pass")


def test_what_cannot_stand_between_is_refused_before_the_start(
    spark: Any, tmp_path: Path, job_dir: Path
) -> None:
    def sorted_by_user(frame: DataFrame) -> DataFrame:
        return frame.where("total > 1").orderBy("user")

    def one_way(totals: DataStream) -> DataStream:
        return totals.transform(small_totals).map(lambda row: row, output=TOTALS).transform(sorted_by_user)

    def two_ways(totals: DataStream) -> DataStream:
        return totals.union(totals.transform(small_totals))

    def fields(totals: DataStream) -> DataStream:
        return totals.transform(lambda frame: frame.select("user", "user", "total"))

    def small_totals(frame: DataFrame) -> DataFrame:
        return frame.where("total < 10")

    def months(frame: DataFrame) -> DataFrame:
        return frame.withColumn("since", F.expr("INTERVAL '1-2' YEAR TO MONTH"))

    def reserved(frame: DataFrame) -> DataFrame:
        return frame.withColumn("_fs_x", F.lit(1))

    for before, says in (
        (months, ("'kept'", "'since'", "Arrow")),
        (reserved, ("'_fs_x'", "control columns")),
    ):
        env = environment(spark, job_dir)
        orders = env.from_collection(ROWS, ORDERS, uid="orders")
        totals = orders.key_by("user").process(Noted(tmp_path / "calls"), output=TOTALS, uid="totals")
        found = totals.transform(before).filter(lambda row: row.total > 1, name="kept")
        found.sink_to(MemorySink(f"{tmp_path}/never"), uid="never")
        error = failure_of(env)
        assert isinstance(error, SchemaError) and all(part in str(error) for part in says), error
        assert not job_dir.exists()
    for between, says in (
        (
            one_way,
            ("keyed operator 'again'", "sorted_by_user' stands", "contains orderBy()", "map(), flat_map()"),
        ),
        (two_ways, ("keyed operator 'again'", "transform() stands", "Several paths", "map(), flat_map()")),
        (fields, ("the result of a transform", "user")),
    ):
        env = environment(spark, job_dir)
        orders = env.from_collection(ROWS, ORDERS, uid="orders")
        totals = orders.key_by("user").process(Noted(tmp_path / "calls"), output=TOTALS, uid="totals")
        again = between(totals).key_by("user").sum("total", uid="again")
        again.sink_to(MemorySink(f"{tmp_path}/never"), uid="never")
        error = failure_of(env)
        assert all(part in str(error) for part in says), error
        assert between is fields or isinstance(error, GraphError)
        assert not job_dir.exists() and not (tmp_path / "calls").exists()
