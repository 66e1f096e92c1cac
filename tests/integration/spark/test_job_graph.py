"""The job graph beside Spark's own plan: scans, shuffles, operators and passes through Python."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    Fate,
    MemorySink,
    NonRestoredState,
    NoRestart,
    PlanForm,
    QuietListener,
    RestoreSettings,
    StreamExecutionEnvironment,
    TaskState,
    TaskStateChange,
)
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.core.job_dir import job_place, open_job_dir
from flinkish_spark.planning.job_graph import describe_job
from flinkish_spark.planning.partitioning import shuffle_partitions
from flinkish_spark.planning.planner import Planner
from flinkish_spark.protocol.job_graph import (
    ChainingReason,
    JobEdge,
    JobGraph,
    OperatorKind,
    RunsIn,
    ShipStrategy,
)
from flinkish_spark.protocol.plan_layout import ScanRole, source_of
from flinkish_spark.sources import DataGeneratorSource, RandomChoice, RandomLong, RateLimit
from tests.support.job_graphs import PROGRAMS, branches, doubled, functions_in_front, out, parsed, total
from tests.support.jobs import (
    ORDER,
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    eventually,
    failure_of,
)


def kinds(frame: Any) -> Counter[str]:
    """How often each kind of node stands in the plan that Spark has analysed."""
    found: Counter[str] = Counter()
    waiting = [frame._jdf.queryExecution().analyzed()]
    while waiting:
        node = waiting.pop()
        found[node.getClass().getSimpleName()] += 1
        children = node.children()
        waiting += [children.apply(at) for at in range(children.size())]
    return found


def in_one_pass(graph: JobGraph, edge: JobEdge) -> bool:
    """Whether what is behind a way runs in the pass of what is in front."""
    if edge.why is not ChainingReason.STREAMS_MEET:
        return edge.why in (ChainingReason.BRANCHES, ChainingReason.SAME_PASS)
    front = next(one for one in graph.operators if one.id == edge.source)
    return front.kind is OperatorKind.FUNCTION


def passes(graph: JobGraph) -> int:
    """How often rows go through Python in the query: what waits for the evaluated micro-batch left out."""
    # A source reads in a pass, and what is behind it runs in that until the JVM has the rows: in a transform,
    # or to move them. An operator unpacks in one, and what is behind that runs in it, too.
    by_id = {one.id: one for one in graph.operators}
    behind_state, number = set[str](), 0

    def begins(edge: JobEdge, *, packs: bool = False) -> bool:
        front = by_id[edge.source]
        is_in_python = front.has_state or front.runs_in is RunsIn.PYTHON
        is_moved = bool(edge.moved) or (edge.ship is not ShipStrategy.FORWARD and not packs)
        return not is_in_python or is_moved

    for one in graph.operators:
        fronts = {edge.source for edge in one.inputs}
        if one.kind is OperatorKind.SOURCE:
            number += graph.scans[one.uid]
        elif one.has_state and not one.shares:
            number += one.runs + sum(edge.runs for edge in one.inputs if begins(edge, packs=True))
            behind_state.add(one.id)
        elif fronts & behind_state:
            behind_state.add(one.id)
        elif one.kind is OperatorKind.SINK:
            # It takes its rows of the evaluated micro-batch.
            continue
        elif one.runs_in is RunsIn.PYTHON and not one.has_state:
            number += sum(edge.runs for edge in one.inputs if begins(edge))
    # Where a DataFrame function is one of the branches of a stem, all of them come out of the JVM.
    edges = [(one, edge) for one in graph.operators for edge in one.inputs]
    stems = {edge.source for _, edge in edges if edge.why is ChainingReason.BRANCHES}
    return number + len(stems & {edge.source for one, edge in edges if one.runs_in is RunsIn.JVM})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_the_graph_says_is_in_the_plan(spark: Any, tmp_path: Path, program: Any) -> None:
    env = environment(spark, tmp_path / "job")
    program(env)
    tasks = shuffle_partitions(spark)
    planned = Planner(spark, NO_JOB, tasks).plan(env.graph)
    graph = describe_job(env.job, env.graph, tasks, planned)
    assert graph == env.get_job_graph()
    layout, found = planned.layout, kinds(planned.frame)
    scans = Counter(source_of(scan.uid) for scan in layout.scans if scan.role is ScanRole.RECORDS)
    assert scans == graph.scans
    of_state = {one.uid: one.runs for one in graph.operators if one.has_state}
    assert Counter(one.uid for one in layout.operators) == of_state
    # What moves rows in front of a sink waits for the evaluated micro-batch.
    last = sum(
        edge.ship.is_shuffle
        for one in graph.operators
        for edge in one.inputs
        if one.kind is OperatorKind.SINK and edge.ship is not ShipStrategy.FORWARD
    )
    moves = found["RepartitionByExpression"] + found["RebalancePartitions"]
    own = sum(one.runs for one in graph.operators if one.has_state and not one.shares)
    assert moves + own + last == graph.shuffles
    assert found["MapInArrow"] == passes(graph)


def test_a_transform_in_the_pass_that_reads_records_runs_in_python(spark: Any, tmp_path: Path) -> None:
    """All were said to run in the JVM."""
    env = environment(spark, tmp_path / "job")
    fields = {"user": RandomChoice(["ann", "bob"]), "amount": RandomLong(1, 9)}
    records = env.from_source(DataGeneratorSource(fields), uid="orders")
    chosen = records.transform(lambda frame: frame.where("amount > 1").select("user", "amount"))
    out(total(chosen.map(parsed, output=ORDER).transform(doubled)))
    tasks = shuffle_partitions(spark)
    planned = Planner(spark, NO_JOB, tasks).plan(env.graph)
    graph = describe_job(env.job, env.graph, tasks, planned)
    transforms = [one.runs_in for one in graph.operators if one.kind is OperatorKind.TRANSFORM]
    assert transforms == [RunsIn.PYTHON, RunsIn.JVM]
    assert [edge.why for one in graph.operators if one.name == "map parsed" for edge in one.inputs] == [
        ChainingReason.SAME_PASS
    ]
    assert kinds(planned.frame)["MapInArrow"] == passes(graph)


def test_a_running_query_shuffles_as_often_as_the_graph_says(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    branches(env)
    client = env.execute_async()
    try:
        assert eventually(lambda: any(one.lastProgress for one in spark.streams.active))
        text = str(spark.streams.active[0]._jsq.explainInternal(False))
    finally:
        client.cancel()
        client.wait()
    graph = env.get_job_graph()
    assert text.count("Exchange hashpartitioning") == graph.shuffles == 1
    assert text.count("FlatMapGroupsInPandasWithState") == 1
    assert text.count("MapInArrow") == passes(graph)


def test_a_job_writes_its_graph_down_and_says_what_it_cost(spark: Any, tmp_path: Path, capsys: Any) -> None:
    env = environment(spark, tmp_path / "job")
    functions_in_front(env)
    env.explain()
    assert "checkpoint" not in capsys.readouterr().out
    env.execute()
    assert open_job_dir(job_place(str(tmp_path / "job"), {})).job_graph() == env.get_job_graph()
    env.explain()
    shown = capsys.readouterr().out
    assert re.search(r"the newest checkpoint with rows, \d+: 3 rows, .*staged in \d+ ms", shown)
    assert re.search(r"Sink: out: MemorySink; in Python\n.*checkpoint \d+: 3 rows", shown)
    assert env._repr_markdown_() == f"```mermaid\n{env.get_execution_plan(PlanForm.MERMAID)}\n```"
    assert json.loads(env.get_execution_plan()) == env.get_job_graph().execution_plan()


def test_a_savepoint_is_compared_before_anything_starts(spark: Any, tmp_path: Path) -> None:
    fields = {"user": RandomChoice(["ann", "bob"]), "amount": RandomLong(1, 9)}
    source = DataGeneratorSource(fields, rate=RateLimit(50))

    def program(name: str, *uids: str, **settings: Any) -> StreamExecutionEnvironment:
        env = environment(spark, tmp_path / name)
        orders = env.from_source(source, uid="orders")
        for uid in uids:
            made = orders.key_by("user").process(RunningTotal(), output=TOTAL, uid=uid, **settings)
            made.sink_to(MemorySink(uid), uid=f"{uid}-out")
        return env

    client = program("first", "totals", "alarms").execute_async()
    try:
        await_that(MemorySink("totals").rows, client)
        assert client.trigger_savepoint(str(tmp_path / "savepoint")).wait(60_000).is_completed
    finally:
        client.cancel()
        client.wait()
    second = program("second", "totals", "average")
    found = second.compare(str(tmp_path / "savepoint"))
    assert {one.uid: one.fate for one in found.parts} == {
        "orders": Fate.RESTORED,
        "totals": Fate.RESTORED,
        "average": Fate.NEW,
        "alarms": Fate.DROPPED,
    }
    assert found.is_refused
    assert second.compare(program("third", "totals", "alarms")).parts == found.parts
    allowed = RestoreSettings(str(tmp_path / "savepoint"), non_restored=NonRestoredState.ALLOW)
    assert not second.compare(allowed).is_refused
    fewer = program("fourth", "totals", max_parallelism=8).compare(allowed)
    assert fewer.uids(Fate.REFUSED) == ("totals",) and fewer.is_refused
    assert not (tmp_path / "second").exists()


class Changes(QuietListener):
    """Keeps what it is told of tasks."""

    def __init__(self) -> None:
        self.of_tasks: list[TaskStateChange] = []

    def on_change(self, change: Any) -> None:
        if isinstance(change, TaskStateChange):
            self.of_tasks.append(change)


def test_a_failure_belongs_to_the_vertex_of_its_function(spark: Any, tmp_path: Path) -> None:
    """Two functions of one name, in front of state and behind it."""
    env, changes = environment(spark, tmp_path / "job", restart_strategy=NoRestart()), Changes()
    env.add_listener(changes)
    orders = env.from_collection([("ann", 1), ("bob", 0)], ORDER, uid="orders")
    given = orders.map(lambda order: (order.user, order.amount), output=ORDER)
    totals = given.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    shares = totals.map(lambda total: (total.user, 12 // total.total), output=TOTAL)
    shares.sink_to(MemorySink(f"{tmp_path}"), uid="out")
    error = failure_of(env)
    assert isinstance(error, UserFunctionError) and "ZeroDivisionError" in error.why
    client = env._client
    assert client is not None
    before, state, behind = client.vertices
    assert [one.name for one in client.vertices] == ["Source: orders -> map", "totals", "map -> Sink: out"]
    assert [one.state for one in client.vertices] == [
        TaskState.CANCELED,
        TaskState.CANCELED,
        TaskState.FAILED,
    ]
    assert behind.cause == before.cause == state.cause == str(error)
    told = [(one.before.value, one.after.value) for one in changes.of_tasks if one.vertex == behind.vertex]
    assert told == [("CREATED", "SCHEDULED"), ("SCHEDULED", "INITIALIZING"), ("INITIALIZING", "FAILED")]
    last = changes.of_tasks[-1]
    assert (last.attempt, last.at_ms > 0) == (1, True)
    assert sorted(one.at_ms for one in changes.of_tasks) == [one.at_ms for one in changes.of_tasks]


@pytest.mark.parametrize("is_kept", [False, True])
def test_workers_run_in_one_pass_and_what_is_kept_is_not_made_again(spark: Any, is_kept: bool) -> None:
    calls = spark.sparkContext.accumulator(0)

    def counted(batches: Any) -> Any:
        for batch in batches:
            calls.add(batch.num_rows)
            yield batch

    made = map_in_arrow(spark.range(5, numPartitions=1), counted, "id LONG")
    if is_kept:
        made.persist()
    behind = map_in_arrow(made, lambda batches: batches, "id LONG")
    assert kinds(behind)["MapInArrow"] == (2 if is_kept else 1)
    assert made.count() == behind.count() == 5
    assert calls.value == (5 if is_kept else 10)
    made.unpersist()
