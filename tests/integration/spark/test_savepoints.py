"""Savepoints on a real Spark: state taken out by key group, brought in under another plan."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import DeltaSink
from flinkish_spark.bridge.settings import query_conf
from flinkish_spark.connectors.control_source import ControlSource
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.errors import CorruptObjectError, UserError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job import preflight
from flinkish_spark.planning.planner import Planner
from flinkish_spark.protocol.restore import NonRestoredState, UnpositionedSources
from flinkish_spark.protocol.savepoints import ClaimMode
from flinkish_spark.savepoints.files import RestoreSettings, SavepointDir, SavepointNotFoundError
from tests.support.jobs import ORDER, TOTAL, RunningTotal, await_that, environment, read_delta, rows
from tests.support.savepoint_support import COUNT, Count, failure, started, stop, stop_with, take

USERS = 300
ALLOW, TRUST = NonRestoredState.ALLOW, UnpositionedSources.BEGIN_WHERE_THEY_ARE


def feed(folder: Path, name: str, amount: int) -> None:
    """Give every user an order; user 7 of amount 3 gets 21."""
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"user": f"u{n}", "amount": amount * n}) for n in range(USERS))
    (folder / f".{name}").write_text("\n".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def totals_of(env, folder: Path, uid: str = "totals"):
    folder.mkdir(exist_ok=True)
    frame = env.spark.readStream.schema(ORDER).json(str(folder))
    stream = env.from_dataframe(frame, uid="files")
    return stream.key_by("user").process(RunningTotal(), output=TOTAL, uid=uid)


def plain_job(spark, job_dir, folder, table, **settings):
    env = environment(spark, job_dir, **settings)
    totals_of(env, folder).sink_to(DeltaSink(str(table)), uid="table")
    return env


def two_operators(spark, job_dir, folder, table, counts):
    """Totals go to a table and on to a second operator: Spark runs the first one twice."""
    env = environment(spark, job_dir)
    totals = totals_of(env, folder).sink_to(DeltaSink(str(table)), uid="table")
    counted = totals.key_by("user").process(Count(), output=COUNT, uid="counts")
    counted.sink_to(DeltaSink(str(counts)), uid="counted")
    return env


def sums(table: Path) -> Counter:
    return Counter((row["user"], row["total"]) for row in read_delta(table))


def expected(*factors: int) -> Counter:
    return Counter((f"u{n}", factor * n) for n in range(USERS) for factor in factors)


@pytest.mark.nightly
def test_state_restores_into_other_plans_in_other_places(spark, job_dir, tmp_path) -> None:
    """One savepoint, several restores: more partitions, an operator more, one less, moved, claimed."""
    savepoint, rest, first = tmp_path / "savepoint", tmp_path / "rest", tmp_path / "in"
    feed(first, "0", 1)
    feed(rest, "1", 2)
    with started(plain_job(spark, job_dir, first, tmp_path / "table")) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        metadata = take(client, savepoint)
        # The job is not disturbed: it goes on, with its state.
        feed(first, "1", 2)
        await_that(lambda: rows(client, "table") == 2 * USERS, client)
        stop(client)
    assert sums(tmp_path / "table") == expected(1, 3)
    assert (metadata.operators["totals"].max_parallelism, metadata.operators["totals"].key_types) == (
        128,
        ("string",),
    )
    assert 100 < metadata.rows <= 128
    before = sorted(path.relative_to(savepoint) for path in savepoint.rglob("*"))

    # More partitions: every key group lands exactly once (behaviours 84, 85, 91); the savepoint, whose
    # files the job does not own, stays as it is (behaviour 65).
    new = tmp_path / "more"
    env = plain_job(spark, new, rest, tmp_path / "more-table")
    with started(env, RestoreSettings(str(savepoint), unpositioned=TRUST), partitions=5) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        # Behaviour 22: what it began with is its own, and goes when a checkpoint of its own has it.
        again = take(client, tmp_path / "again")
        stop(client)
    assert sums(tmp_path / "more-table") == expected(3)
    assert again.shuffle_partitions == 5
    assert sorted(path.relative_to(savepoint) for path in savepoint.rglob("*")) == before
    assert not list((new / "seeds/0").glob("state/*/*"))

    # It goes on from its own checkpoints, without the savepoint or with it.
    feed(rest, "2", 4)
    with started(env_again(env), RestoreSettings(str(savepoint)), partitions=5) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        stop(client)
    assert sums(tmp_path / "more-table") == expected(3, 7)

    # Moved (behaviour 64), claimed (behaviour 65), and with an operator more (behaviour 87), which
    # the rows of the known one pass on their way to its sink.
    moved = tmp_path / "elsewhere" / "savepoint"
    moved.parent.mkdir()
    shutil.move(savepoint, moved)
    (rest / "2.json").unlink()
    env = two_operators(spark, tmp_path / "two", rest, tmp_path / "two-table", tmp_path / "two-counts")
    claimed = RestoreSettings(str(moved), claim=ClaimMode.CLAIM, unpositioned=TRUST)
    with started(env, claimed, partitions=3) as client:
        await_that(lambda: min(rows(client, "table"), rows(client, "counted")) == USERS, client)
        both = stop_with(client, tmp_path / "both")
    assert sums(tmp_path / "two-table") == expected(3)
    assert Counter(row["n"] for row in read_delta(tmp_path / "two-counts")) == {1: USERS}
    assert not moved.exists()
    assert [chain.chain.name for chain in both.chains] == ["counts"]
    assert {(file.operator, file.chain) for file in both.files} == {
        ("totals", "counts"),
        ("counts", "counts"),
    }

    # Without the second operator: refused, unless that is allowed (behaviour 88).
    feed(rest, "1", 4)
    less = tmp_path / "less"
    env = plain_job(spark, less, rest, tmp_path / "less-table")
    error = failure(env, RestoreSettings(str(tmp_path / "both"), unpositioned=TRUST))
    assert isinstance(error, UserError) and "counts: its operator is not in the job" in str(error)
    assert not less.exists()
    allowed = RestoreSettings(str(tmp_path / "both"), non_restored=ALLOW, unpositioned=TRUST)
    with started(env_again(env), allowed) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        stop(client)
    assert sums(tmp_path / "less-table") == expected(7)


def env_again(env):
    """The same job for another start."""
    again = environment(env.spark, env.job_dir)
    again.graph = env.graph
    return again


def test_what_does_not_fit_is_refused_and_nothing_is_created(spark, job_dir, tmp_path) -> None:
    # behaviours 63, 86
    savepoint, folder = tmp_path / "savepoint", tmp_path / "in"
    feed(folder, "0", 1)
    with started(plain_job(spark, job_dir, folder, tmp_path / "table")) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        stop_with(client, savepoint)

    def refused(restore, **settings):
        new = tmp_path / "new"
        error = failure(plain_job(spark, new, folder, tmp_path / "other", **settings), restore)
        assert not new.exists() and not (tmp_path / "other").exists()
        return error

    assert isinstance(refused(RestoreSettings(str(tmp_path / "nowhere"))), SavepointNotFoundError)
    error = refused(RestoreSettings(str(savepoint)))
    assert isinstance(error, UserError) and "cannot start at a given position" in str(error)
    error = refused(RestoreSettings(str(savepoint), unpositioned=TRUST), max_parallelism=64)
    assert "stored are 128, the job has 64" in str(error)
    env = environment(spark, tmp_path / "new")
    files = env.from_dataframe(spark.readStream.schema(ORDER).json(str(folder)), uid="files")
    files.key_by(F.col("amount") % 3).sum("amount", uid="totals").sink_to(
        DeltaSink(str(tmp_path / "o")), uid="table"
    )
    error = failure(env, RestoreSettings(str(savepoint), unpositioned=TRUST))
    means = ("key of input 1: user -> Column<", "operator: a function of the program -> FoldingElements")
    assert isinstance(error, UserError) and all(one in str(error) for one in means)
    assert not (tmp_path / "new").exists()
    path = savepoint / SavepointDir(savepoint).metadata().files[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    error = refused(RestoreSettings(str(savepoint), unpositioned=TRUST))
    assert isinstance(error, CorruptObjectError) and "cannot be used" in str(error)

    # A DataFrame cannot be told where to go on, so its job keeps its number of partitions.
    path.write_bytes(whole)
    error = failure(plain_job(spark, job_dir, folder, tmp_path / "table"), partitions=3)
    assert isinstance(error, UserError) and "runs with 2 shuffle partitions" in str(error)
    feed(folder, "1", 2)
    with started(plain_job(spark, job_dir, folder, tmp_path / "table")) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
    assert sums(tmp_path / "table")[("u7", 21)] == 1


class OtherTotal(RunningTotal):
    """Declares its state with another type."""

    def open(self, context):
        from flinkish_spark import ValueStateDescriptor

        self.total = context.get_state(ValueStateDescriptor("total", "STRING"))


@pytest.mark.nightly
def test_another_declaration_of_the_state_ends_the_job_before_anything_is_committed(
    spark, job_dir, tmp_path
) -> None:
    feed(tmp_path / "in", "0", 1)
    with started(plain_job(spark, job_dir, tmp_path / "in", tmp_path / "table")) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        stop_with(client, tmp_path / "savepoint")
    env = environment(spark, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    frame = spark.readStream.schema(ORDER).json(str(tmp_path / "empty"))
    stream = env.from_dataframe(frame, uid="files").key_by("user")
    stream.process(OtherTotal(), output=TOTAL, uid="totals").sink_to(
        DeltaSink(str(tmp_path / "t")), uid="table"
    )
    error = failure(env, RestoreSettings(str(tmp_path / "savepoint"), unpositioned=TRUST))
    assert isinstance(error, CorruptObjectError), error
    assert "is stored as int64 but declared as" in str(error)
    assert not (tmp_path / "t" / "_delta_log").exists()


@pytest.mark.nightly
def test_the_layout_of_a_plan_has_sparks_order(spark, job_dir, tmp_path, monkeypatch) -> None:
    """Positions in the offset log and folders of state are found by this order only."""
    apart = frozenset({"totals", "counts"})
    monkeypatch.setattr(preflight, "find_begun_chains", lambda *given: apart)
    env = two_operators(spark, job_dir, tmp_path / "in", tmp_path / "a", tmp_path / "b")
    with query_conf(spark, 2):
        spark.dataSource.register(ControlSource)
        place = JobPlace(StoreSpec(str(tmp_path)), str(tmp_path / "none.json"))
        layout = Planner(spark, place, 2).plan(replace(env.graph, begun_chains=apart)).layout
    feed(tmp_path / "in", "0", 1)
    with started(env) as client:
        await_that(lambda: rows(client, "counted") == USERS, client)
        query = spark.streams.active[0]
        planned = operators_of(query._jsq.streamingQuery().lastExecution().executedPlan())
        logged = (job_dir / "spark" / "1" / "offsets" / "0").read_text().strip().split("\n")[2:]
    fields = {"totals": "total", "counts": "n"}
    assert planned == [(number, fields[run.uid]) for number, run in enumerate(layout.operators)]
    assert [run.chain for run in layout.operators] == ["totals", "counts", "counts"]
    assert [(scan.uid, scan.chain) for scan in layout.scans] == [
        ("files", "totals"),
        ("", "totals"),
        ("files", "counts"),
        ("", "counts"),
    ]
    assert [next(iter(json.loads(line))) for line in logged] == [
        "logOffset",
        "flinkish:checkpoint",
    ] * 2


def operators_of(node, above=None) -> list[tuple[int, str]]:
    """Spark's number of each keyed operator of an executed plan, and the last field of what unpacks it."""
    found = []
    if node.getClass().getSimpleName() == "FlatMapGroupsInPandasWithStateExec":
        found.append((node.stateInfo().get().operatorId(), above.output().last().name()))
    children = node.children()
    for index in range(children.size()):
        found += operators_of(children.apply(index), node)
    return found


@pytest.mark.nightly
def test_a_restored_job_that_dies_in_its_first_micro_batch_begins_again(spark, job_dir, tmp_path) -> None:
    """The seed is read again with the micro-batch, and the state is installed once all the same."""
    feed(tmp_path / "in", "0", 1)
    with started(plain_job(spark, job_dir, tmp_path / "in", tmp_path / "table")) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        stop_with(client, tmp_path / "savepoint")
    feed(tmp_path / "rest", "1", 2)
    new = tmp_path / "new"
    restore = RestoreSettings(str(tmp_path / "savepoint"), unpositioned=TRUST)
    env = plain_job(spark, new, tmp_path / "rest", tmp_path / "other")
    env.observe(Breaks("staged-file", times=2))
    with started(env, restore, partitions=3) as client:
        await_that(lambda: rows(client, "table") == USERS, client)
        stop(client)
    assert client.progress.restarts == 2
    assert sums(tmp_path / "other") == expected(3)
    assert (new / "seeds/0/seed.json").is_file()


class Breaks:
    """Raises right before a step, some times."""

    def __init__(self, step: str, times: int) -> None:
        self.step, self.left = step, times

    def on_step_start(self, step, subject) -> None:
        if step.value == self.step and self.left:
            self.left -= 1
            raise OSError("broken by the test")

    def on_step_end(self, step, subject) -> None:
        pass


@pytest.fixture(autouse=True)
def no_query_is_left(spark):
    yield
    for query in spark.streams.active:
        query.stop()
