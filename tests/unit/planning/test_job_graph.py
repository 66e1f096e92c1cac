"""Job graphs of twelve programs, as data: operators, edges, vertices, Flink's plan; ids in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from flinkish_spark import AsyncDataStream, AsyncFunction, StreamExecutionEnvironment
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.planning.beginning import Beginning
from flinkish_spark.planning.between import check_tasks_between
from flinkish_spark.planning.job_graph import describe_job, describe_stream
from flinkish_spark.planning.optimizer import optimize
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.planning.stream_graph import find_operator, find_upstreams
from flinkish_spark.protocol.job_graph import ChainingReason, JobGraph, OperatorKind, RunsIn, ShipStrategy
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.sinks import MemorySink
from tests.support.job_graphs import (
    ORDER,
    PROGRAMS,
    ROWS,
    Session,
    graph_of,
    orders,
    out,
    parsed,
    total,
)

EXPECTED = json.loads(Path(__file__).with_name("job_graphs.json").read_text())


def environment() -> StreamExecutionEnvironment:
    session: Any = Session()
    return StreamExecutionEnvironment(session, "job", "/jobs/any")


def seen(graph: JobGraph) -> dict[str, Any]:
    """A graph as the data has it."""
    return {
        "vertices": {
            vertex.name: [f"{way.ship.value} {names(graph)[way.vertex]}" for way in vertex.inputs]
            for vertex in graph.vertices
        },
        "shuffles": graph.shuffles,
        "scans": dict(graph.scans),
        "graph": graph.to_json(),
        "plan": graph.execution_plan(),
    }


def names(graph: JobGraph) -> dict[str, str]:
    return {vertex.id: vertex.name for vertex in graph.vertices}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_this_graph(program: Any) -> None:
    graph = graph_of(program)
    assert seen(graph) == EXPECTED[program.__name__]
    assert JobGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


def test_another_process_finds_the_same_ids() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.job_graphs"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(made.stdout) == {one.__name__: graph_of(one).to_json() for one in PROGRAMS}


def test_the_plan_is_what_flinks_visualiser_reads() -> None:
    nodes = graph_of(PROGRAMS[7]).execution_plan()["nodes"]
    assert [node["pact"] for node in nodes].count("Data Source") == 2
    assert nodes[-1]["pact"] == "Data Sink" and nodes[-1]["type"] == "Sink: out"
    both = next(node for node in nodes if node["type"] == "both")
    assert [(way["ship_strategy"], way["side"]) for way in both["predecessors"]] == [
        ("HASH", "first"),
        ("HASH", "second"),
    ]
    known = set()
    for node in nodes:
        # Flink's own plans name what they refer to before.
        assert all(way["id"] in known for way in node.get("predecessors", ()))
        known.add(node["id"])


def test_the_rest_server_says_the_plan_by_vertex() -> None:
    graph = graph_of(PROGRAMS[1])
    plan = graph.job_plan("a" * 32)
    assert (plan["jid"], plan["name"], plan["type"]) == ("a" * 32, "functions-in-front", "STREAMING")
    first, second, third = plan["nodes"]
    assert first["description"] == "Source: orders -> transform doubled -> map parsed -> filter is_large"
    assert "inputs" not in first and first["parallelism"] == -1
    assert second["inputs"] == [
        {"num": 0, "id": first["id"], "ship_strategy": "HASH", "exchange": "blocking"}
    ]
    assert (third["parallelism"], third["operator"], third["optimizer_properties"]) == (4, "", {})


# -- operators without a uid ----------------------------------------------------------------------------


def derived(program: Any) -> tuple[str, ...]:
    env = environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        program(env)
    return env.graph.uids()


def test_who_leaves_a_uid_out_is_warned_where_he_does() -> None:
    env = environment()
    with pytest.warns(UserWarning, match=r"source has no uid and is called 'source-[0-9a-f]{8}'") as found:
        stream = env.from_collection(ROWS, ORDER)
    assert [Path(one.filename).name for one in found] == [Path(__file__).name]
    with pytest.warns(UserWarning, match="process has no uid"):
        made = total(stream, None)
    with pytest.raises(ConfigError, match="function is None"):
        stream.process_with_state(None)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="sink has no uid"):
        made.sink_to(MemorySink("any"))


def test_a_derived_uid_stays_when_something_is_declared_later() -> None:
    def first(env: Any) -> None:
        out(total(env.from_collection(ROWS, ORDER), None), None)

    def with_more(env: Any) -> None:
        stream = env.from_collection(ROWS, ORDER)
        out(total(stream, None), None)
        out(total(stream.map(parsed, output=ORDER), None), None)
        out(stream, None)

    assert set(derived(first)) < set(derived(with_more))


def test_a_derived_uid_changes_with_what_is_in_front_up_to_the_next_uid() -> None:
    def plain(env: Any) -> None:
        total(orders(env).key_by("user").max("amount", uid="most"), None)

    def mapped(env: Any) -> None:
        most = orders(env).map(parsed, output=ORDER).key_by("user").max("amount", uid="most")
        total(most, None)

    def behind(env: Any) -> None:
        most = orders(env).key_by("user").max("amount", uid="most")
        total(most.map(parsed, output=ORDER), None)

    assert derived(plain) == derived(mapped)
    assert derived(plain)[-1] != derived(behind)[-1]


def test_operators_at_the_same_place_are_told_apart() -> None:
    def twice(env: Any) -> None:
        stream = orders(env)
        total(stream, None)
        total(stream, None)

    _, one, other = derived(twice)
    assert one != other


# -- what may be said of vertices -------------------------------------------------------------------------


def test_a_function_may_begin_a_vertex_or_be_alone_in_one() -> None:
    env = environment()
    first = orders(env).map(parsed, output=ORDER, name="first").start_new_chain()
    second = first.map(parsed, output=ORDER, name="second").disable_chaining().rescale(1)
    out(second.map(parsed, output=ORDER, name="third"))
    graph = describe_job("job", env.graph, 4)
    assert [vertex.name for vertex in graph.vertices] == [
        "Source: orders",
        "first",
        "second",
        "third",
        "Sink: out",
    ]
    third = graph.operators[3].inputs[0]
    assert (third.ship, third.why, third.moved) == (
        ShipStrategy.REBALANCE,
        ChainingReason.SAID,
        (ShipStrategy.RESCALE,),
    )


def test_what_is_moved_anyway_is_not_moved_twice() -> None:
    env = environment()
    stream = orders(env).rebalance(3).map(parsed, output=ORDER).disable_chaining()
    out(stream.rebalance(2).map(parsed, output=ORDER))
    graph = describe_job("job", env.graph, 4)
    assert graph.shuffles == 2
    assert [one.parallelism for one in graph.operators] == [None, 3, 2, 2]


def test_between_keyed_operators_no_function_has_tasks_of_its_own() -> None:
    env = environment()
    between = total(orders(env), "first").map(lambda row: row, output=ORDER, name="between")
    out(total(between.start_new_chain(), "second"))
    with pytest.raises(GraphError, match=r"'between' stands between the keyed operator 'second'"):
        check_tasks_between(env.graph, 4)


def test_who_has_its_own_tasks_anyway_may_be_told_so_or_is_refused() -> None:
    env = environment()
    source = orders(env)
    keyed = total(source)
    assert keyed.start_new_chain() is keyed and source.start_new_chain() is source
    for refused in (
        keyed.disable_chaining,
        source.disable_chaining,
        orders(env, "third").rebalance().disable_chaining,
    ):
        with pytest.raises(GraphError, match="Only a function of single records"):
            refused()


def test_resources_are_for_functions_of_single_records() -> None:
    env = environment()
    resources = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    stream = orders(env)
    scored = stream.map(parsed, output=ORDER)
    assert scored.set_resources(resources) is scored
    # Nothing else gets them: the function has tasks of its own.
    (edge,) = next(
        one for one in describe_stream("job", env.graph, scored._node, 4).operators if one.uid == ""
    ).inputs
    assert (edge.ship, edge.why) == (ShipStrategy.REBALANCE, ChainingReason.SAID)
    for refused in (stream, total(scored)):
        with pytest.raises(GraphError, match=r"Only functions of single records.*spark\.task\.cpus"):
            refused.set_resources(resources)
    with pytest.raises(ConfigError, match="resources"):
        scored.set_resources("1 GB")  # type: ignore[arg-type]


def test_only_operators_with_state_have_slot_sharing_groups() -> None:
    stream = orders(environment())
    assert stream.slot_sharing_group("default") is stream
    with pytest.raises(GraphError, match="Only operators with state share tasks"):
        stream.slot_sharing_group("heavy")
    assert total(stream).slot_sharing_group("heavy")._node.uid == "totals"


# -- parts ------------------------------------------------------------------------------------------------


def test_the_graph_of_a_stream_ends_with_it() -> None:
    env = environment()
    made = total(orders(env).map(parsed, output=ORDER))
    out(made, "elsewhere")
    graph = describe_stream("job", env.graph, made._node, 4)
    assert [one.title for one in graph.operators] == ["Source: orders", "map parsed", "totals"]
    assert (
        made._repr_markdown_().startswith("```mermaid\nflowchart LR") and "totals" in made._repr_markdown_()
    )


def test_functions_that_follow_each_other_are_one_pass_also_where_records_move_behind_them() -> None:
    env = environment()
    made = total(orders(env)).map(lambda row: row, output=ORDER, name="one")
    made = made.map(lambda row: row, output=ORDER, name="two")
    out(made)
    out(made.rebalance(2), "moved-out")
    graph = describe_job("job", env.graph, 4)
    (edge,) = next(one for one in graph.operators if one.name == "two").inputs
    assert (edge.why, edge.runs) == (ChainingReason.SAME_PASS, 2)


def test_dead_letters_of_a_source_are_a_sink_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment()
    stream = orders(env)
    monkeypatch.setattr(type(env.graph.sources[0].source), "side_uids", lambda self, uid: (f"{uid}-letters",))
    out(stream)
    graph = describe_job("job", env.graph, 4)
    assert graph.scans == {"orders": 2}
    last = graph.operators[-1]
    assert (last.uid, last.kind, last.does) == ("orders-letters", OperatorKind.SINK, "dead letters")
    assert last.inputs[0].source == graph.by_uid["orders"].id


def test_an_empty_graph_has_no_picture_and_wrong_forms_are_refused() -> None:
    env = environment()
    assert env._repr_markdown_() == "`job`: no sink yet"
    with pytest.raises(GraphError, match="no sink"):
        env.get_job_graph()
    with pytest.raises(ConfigError, match="PlanForm"):
        env.get_execution_plan("svg")  # type: ignore[arg-type]


def test_where_the_work_is_done() -> None:
    runs_in = {one.title: one.runs_in for one in graph_of(PROGRAMS[1]).operators}
    assert runs_in == {
        "Source: orders": RunsIn.PYTHON,
        "transform doubled": RunsIn.JVM,
        "map parsed": RunsIn.PYTHON,
        "filter is_large": RunsIn.PYTHON,
        "totals": RunsIn.PYTHON,
        "Sink: out": RunsIn.PYTHON,
    }


def test_a_transform_in_the_pass_that_reads_records_runs_in_python() -> None:
    """All were said to run in the JVM."""
    env = environment()
    PROGRAMS[1](env)
    logical = optimize(env.graph)
    operator = find_operator(logical.all_ends[0].paths[0].base)
    assert operator is not None
    (upstream,) = find_upstreams(operator)
    step = upstream.paths[0].steps[0]
    frame: Any = None
    planned = PlannedJob(frame, (), in_arrow=frozenset({step}), logical=logical)
    doubled, mapped = describe_job("job", env.graph, 4, planned).operators[1:3]
    assert (doubled.does, doubled.runs_in) == ("DataFrame function", RunsIn.PYTHON)
    assert [edge.why for edge in mapped.inputs] == [ChainingReason.SAME_PASS]


def test_scans_are_those_of_the_plan_where_chains_begin_at_different_places() -> None:
    """They went by the streams alone, and said one."""

    class Begun(Beginning):
        def find_input_label(self, chain: Chain, name: str) -> str:
            return chain.name

    env = environment()
    source = orders(env)
    out(total(source), "one")
    out(total(source, "again"), "two")
    frame: Any = None
    planned = PlannedJob(frame, (), logical=optimize(env.graph, Begun()))
    assert describe_job("job", env.graph, 4, planned).scans == {"orders": 2}
    assert describe_job("job", env.graph, 4).scans == {"orders": 1}


def test_an_operator_that_others_read_on_several_ways_runs_once() -> None:
    def meeting(env: Any) -> None:
        totals = total(orders(env))
        more = totals.key_by("user").sum("total", uid="more")
        last = totals.union(more.map(lambda row: (row.user, row.total), output="user STRING, total LONG"))
        out(last.key_by("user").sum("total", uid="last"))

    runs = {one.uid: one.runs for one in graph_of(meeting).operators if one.uid}
    assert runs == {"orders": 1, "totals": 1, "more": 1, "last": 1, "out": 1}


def test_sinks_of_an_async_operator_share_what_is_in_front_of_it() -> None:
    class Asked(AsyncFunction):
        async def async_invoke(self, value: Any) -> list[tuple[str, int]]:
            return [(value.user, 1)]

    def shared(env: Any) -> None:
        stream = orders(env).map(parsed, output="user STRING, amount LONG")
        asked = AsyncDataStream.ordered_wait(
            stream, Asked(), 1_000, output="user STRING, n LONG", uid="asked"
        )
        out(asked, "one")
        out(asked.filter(lambda row: row.n > 0), "two")

    found = graph_of(shared)
    assert {one.name: one.runs for one in found.operators} == {
        "orders": 1,
        "map parsed": 1,
        "asked": 2,
        "filter": 1,
        "one": 1,
        "two": 1,
    }
    (asked,) = (one for one in found.operators if one.name == "asked")
    assert asked.does == "async function" and [edge.why for edge in asked.inputs] == [
        ChainingReason.EVALUATED
    ]


def test_an_operator_is_found_by_its_id_and_its_uid() -> None:
    graph = graph_of(PROGRAMS[0])
    assert graph.by_id[graph.by_uid["orders"].id] is graph.by_uid["orders"]
