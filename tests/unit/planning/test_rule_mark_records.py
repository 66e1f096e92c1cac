"""Where barriers may come from the source itself."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark.planning.logical_plan import LogicalPlan
from flinkish_spark.planning.rules.cut_chains import cut_chains
from flinkish_spark.planning.rules.mark_records import mark_records
from flinkish_spark.planning.stream_graph import StreamGraph, UnionNode
from flinkish_spark.sources import CollectionSource
from tests.support.stream_graphs import graph, keyed, source, transform

A, B = source("a"), source("b")


def marks(made: StreamGraph) -> bool:
    return mark_records(cut_chains(LogicalPlan(made))).marks_records


def test_one_source_that_is_read_on_straight_paths_may_bring_its_barriers() -> None:
    assert marks(graph(transform(A)))
    assert marks(graph(A, transform(keyed("one", A)), keyed("two", transform(A))))


@pytest.mark.parametrize(
    "ends",
    [
        (A, B),
        (UnionNode((A, transform(A))),),
        (keyed("twice", A, transform(A)),),
        (A, UnionNode((keyed("one", A), transform(A)))),
    ],
    ids=["two sources", "a union", "two scans that meet", "an operator and what it reads"],
)
def test_scans_that_meet_may_not(ends: Any) -> None:
    assert not marks(graph(*ends))


def test_a_source_with_side_outputs_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectionSource, "has_side_outputs", True)
    assert not marks(graph(A))
