"""Who evaluates an async operator: whether it is recorded, who shares a scan, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark import AsyncDataStream, AsyncFunction, OutputTag, StreamExecutionEnvironment
from flinkish_spark.async_io.recorded_answers import Readers
from flinkish_spark.async_io.transform import AsyncTransform
from flinkish_spark.contracts.calls import NO_PLACE, Stream
from flinkish_spark.core.errors import GraphError
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.planning.optimizer import optimize
from flinkish_spark.planning.recorded_functions import RecordedFunctions
from flinkish_spark.planning.rules.cut_chains import find_chain_ends
from flinkish_spark.planning.stream_graph import TransformNode, find_paths, find_upstreams
from flinkish_spark.sinks import MemorySink
from tests.support.job_graphs import Session, orders, total

SIDE = OutputTag("../side", "why STRING")


class Asked(AsyncFunction):
    async def async_invoke(self, value: Any) -> list[tuple[str, int]]:
        return []


def environment() -> StreamExecutionEnvironment:
    session: Any = Session()
    return StreamExecutionEnvironment(session, "job", "/jobs/any")


def ask(stream: Any, **settings: Any) -> Any:
    output = "user STRING, amount LONG"
    return AsyncDataStream.ordered_wait(stream, Asked(), 100, output=output, uid="asked", **settings)


def out(stream: Any, *uids: str) -> None:
    for uid in uids:
        stream.sink_to(MemorySink("out"), uid=uid)


def readers(env: StreamExecutionEnvironment, stream: Stream = Stream.OF_SOURCE) -> set[Readers | None]:
    """Who reads the recorded answers on each path on which the operator stands."""
    graph = env.graph
    calls = RecordedFunctions(optimize(graph).evaluations, NO_PLACE)
    paths = [path for sink in graph.sinks for path in find_paths(sink.parent)]
    paths += [
        path for node in graph.operators for upstream in find_upstreams(node) for path in upstream.paths
    ]
    found = set()
    for path in paths:
        for step in path.steps:
            if isinstance(step, TransformNode) and isinstance(step.function, AsyncTransform):
                found.add(calls.place_on_path(step.function, path, stream).readers)
    return found


def chains(env: StreamExecutionEnvironment) -> dict[str, tuple[str, ...]]:
    return {
        sink.uid: end.chain.consumers
        for sink in env.graph.sinks
        for end in find_chain_ends(env.graph, sink.parent)
    }


def test_one_reader_in_the_plan_is_not_recorded_unless_the_program_says_so() -> None:
    env = environment()
    out(ask(orders(env)), "one", "two")
    assert readers(env) == {None} and chains(env) == {"one": ("one", "two"), "two": ("one", "two")}
    env = environment()
    out(ask(orders(env), record_answers=True), "one")
    assert readers(env) == {Readers.ONE_WAY}


def test_sinks_of_several_outputs_share_a_scan_and_come_one_after_the_other() -> None:
    env = environment()
    asked = ask(orders(env).map(lambda row: row, output="user STRING, amount LONG"))
    out(asked, "one")
    out(asked.get_side_output(SIDE), "two")
    out(asked.filter(lambda row: True), "three")
    assert readers(env) == {Readers.ONE_WAY}
    assert set(chains(env).values()) == {("one", "two", "three")}
    # The chain ends behind the function in front, and each sink calls for itself.
    assert [end.deferred_from for end in optimize(env.graph).all_ends] == [1, 1, 1]


def test_a_sink_whose_records_get_times_behind_it_has_a_scan_of_its_own() -> None:
    env = environment()
    asked = ask(orders(env))
    out(asked, "one")
    out(asked.get_side_output(SIDE), "two")
    timed = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("amount")
    out(asked.assign_timestamps_and_watermarks(timed), "three")
    assert readers(env) == {Readers.SEVERAL_WAYS}
    assert chains(env) == {"one": ("one", "two"), "two": ("one", "two"), "three": ("three",)}
    assert [end.deferred_from for end in optimize(env.graph).all_ends] == [0, 0, None]


def test_a_sink_and_a_keyed_operator_are_several_readers() -> None:
    env = environment()
    asked = ask(orders(env))
    out(asked, "one")
    out(total(asked), "two")
    assert readers(env) == {Readers.SEVERAL_WAYS}


def test_between_an_operator_and_a_sink_it_is_recorded() -> None:
    env = environment()
    out(ask(total(orders(env)).map(lambda row: row, output="user STRING, amount LONG")), "one")
    assert readers(env, Stream.OF_MICRO_BATCH) == {Readers.ONE_WAY}


def test_a_sink_that_reads_it_on_two_paths_asks_twice_at_once() -> None:
    env = environment()
    totals = total(orders(env))
    both = totals.filter(lambda row: True).union(totals.filter(lambda row: False))
    out(ask(both), "one", "two")
    assert readers(env, Stream.OF_MICRO_BATCH) == {Readers.SEVERAL_WAYS}


def test_elements_that_are_counted_anew_are_read_in_one_chain() -> None:
    env = environment()
    asked = ask(total(orders(env)))
    out(asked, "one")
    out(asked.key_by("user").sum("amount", uid="sums"), "two")
    assert readers(env, Stream.OF_MICRO_BATCH) == {Readers.SEVERAL_WAYS}
    env.graph.begun_chains = frozenset({"totals", "sums"})
    with pytest.raises(GraphError, match="do not read them together"):
        readers(env, Stream.OF_MICRO_BATCH)


def test_operators_that_meet_read_it_together() -> None:
    env = environment()
    asked = ask(total(orders(env)))
    left = asked.key_by("user").sum("amount", uid="left")
    right = asked.get_side_output(SIDE).map(lambda row: (row.why, 1), output="user STRING, amount LONG")
    out(left.union(right).key_by("user").sum("amount", uid="both"), "out")
    assert readers(env, Stream.OF_MICRO_BATCH) == {Readers.SEVERAL_WAYS}


def test_no_tag_becomes_a_path() -> None:
    env = environment()
    totals = total(orders(env))
    out(ask(totals.get_side_output(SIDE)), "one")
    graph = env.graph
    calls = RecordedFunctions(optimize(graph).evaluations, NO_PLACE)
    (path,) = find_paths(graph.sinks[0].parent)
    (step,) = path.steps
    assert isinstance(step, TransformNode)
    calls.place_on_path(step.function, path, Stream.OF_MICRO_BATCH)
    (recording,) = calls.recordings.values()
    assert recording.folder.startswith("answers/asked/totals.side-") and ".." not in recording.folder
