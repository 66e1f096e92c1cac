"""The plan that the checks before a start look at is the one that starts, where nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import AsyncDataStream, AsyncFunction, MemorySink
from flinkish_spark.job import spark_engine
from flinkish_spark.planning.planner import Planner
from tests.support.jobs import ORDER, TOTAL, RunningTotal, environment


class Doubled(AsyncFunction):
    async def async_invoke(self, value: Any) -> Any:
        return [(value.user, value.amount * 2)]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    plan = Planner.plan

    def noted(planner: Planner, graph: Any) -> Any:
        made.append(plan(planner, graph))
        return made[-1]

    monkeypatch.setattr(Planner, "plan", noted)
    return made


def run(spark: Any, folder: Path, through: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    env = environment(spark, folder / "job")
    sink = MemorySink(f"{folder}/out")
    orders = env.from_collection([("ann", 1), ("ann", 2)], ORDER, uid="orders")
    through(orders).sink_to(sink, uid="out")
    env.execute()
    return [tuple(row) for row in sink.rows()]


def totals(orders: Any) -> Any:
    return orders.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")


def doubled(orders: Any) -> Any:
    return AsyncDataStream.ordered_wait(orders, Doubled(), 5_000, 2, output=TOTAL, uid="doubled")


def test_a_start_uses_the_plan_that_was_checked(spark: Any, tmp_path: Path, plans: list[Any]) -> None:
    assert sorted(run(spark, tmp_path, totals)) == [("ann", 1), ("ann", 3)]
    assert len(plans) == 1


def test_a_plan_that_was_made_long_before_is_made_again(
    spark: Any, tmp_path: Path, plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_engine, "_PLAN_SERVES_MS", -1)
    assert sorted(run(spark, tmp_path, totals)) == [("ann", 1), ("ann", 3)]
    assert len(plans) == 2


def test_calls_go_under_the_id_that_the_first_start_gives(
    spark: Any, tmp_path: Path, plans: list[Any]
) -> None:
    assert sorted(run(spark, tmp_path, doubled)) == [("ann", 2), ("ann", 4)]
    assert len(plans) == 2
    assert sorted(run(spark, tmp_path, doubled)) == [("ann", 2), ("ann", 4)]
    assert len(plans) == 3, "it is known when the job goes on"
