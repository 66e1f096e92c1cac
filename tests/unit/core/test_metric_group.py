"""Metrics as functions see them, and how a task's part of them comes to the driver."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from flinkish_spark import MapFunction
from flinkish_spark.core import metric_group
from flinkish_spark.core.accumulators import Tally, TallyParam, TaskMetric, merge_metrics
from flinkish_spark.core.metric_group import MetricGroup
from flinkish_spark.core.subtask import counting_as
from flinkish_spark.protocol.user_metrics import UserMetric, UserMetricKind
from flinkish_spark.state.keyed_states import KeyedStates
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.worker.functions import StatelessContext

COUNTER, GAUGE = UserMetricKind.COUNTER, UserMetricKind.GAUGE


@pytest.fixture
def tallies(monkeypatch: pytest.MonkeyPatch) -> list[Tally]:
    """The tallies of tasks, the newest last; a task is begun by adding one."""
    found = [Tally()]
    monkeypatch.setattr(metric_group, "tally_of_task", lambda: found[-1])
    return found


def sent(tally: Tally) -> dict[str, dict[str, UserMetric]]:
    """Return what the driver sees."""
    return merge_metrics(TallyParam().addInPlace(Tally(), pickle.loads(pickle.dumps(tally))))


def test_what_a_function_measures_reaches_the_driver(tallies: list[Tally]) -> None:
    group = MetricGroup("parse", lambda: "function 1/000003")
    broken, marks = group.counter("broken"), group.add_group("kafka", "orders").meter("marks")
    lengths = group.distribution("lengths")
    broken.inc()
    broken.inc(4)
    broken.dec(2)
    marks.mark_event(10)
    for value in (2, 7.5):
        lengths.update(value)
    assert (broken.get_count(), marks.get_count()) == (3, 10)
    assert sent(tallies[-1]) == {
        "parse": {
            "broken": UserMetric(COUNTER, 3),
            "kafka.orders.marks": UserMetric(UserMetricKind.METER, 10),
            "lengths": UserMetric(UserMetricKind.DISTRIBUTION, 2, 9.5, 2.0, 7.5),
        }
    }


def test_a_task_that_runs_twice_counts_once() -> None:
    param, tally = TallyParam(), Tally()
    for place in ("a/0", "a/1", "a/0"):
        own = Tally(metrics={(place, "f"): {"n": TaskMetric(COUNTER, 2)}})
        tally = param.addInPlace(tally, pickle.loads(pickle.dumps(own)))
    assert merge_metrics(tally) == {"f": {"n": UserMetric(COUNTER, 4)}}


def test_a_gauge_is_asked_at_the_end_of_each_task_of_its_operator(tallies: list[Tally]) -> None:
    cache: dict[int, int] = {}
    MetricGroup("totals", lambda: "totals/000001").gauge("cached", lambda: len(cache))
    cache.update({1: 1, 2: 2})
    assert sent(tallies[-1]) == {"totals": {"cached": UserMetric(GAUGE, 1, 2.0, 2.0, 2.0)}}
    tallies.append(Tally())
    # Another operator has its turn, then this one: it was opened in an earlier task.
    with counting_as("other"):
        assert sent(tallies[-1]) == {}
    with counting_as("totals"):
        cache[3] = 3
    assert sent(tallies[-1]) == {"totals": {"cached": UserMetric(GAUGE, 1, 3.0, 3.0, 3.0)}}


@pytest.mark.parametrize("show", [lambda: 1 / 0, lambda: float("nan"), lambda: "many", lambda: None])
def test_a_gauge_that_shows_nothing_is_left_out(show: Any, tallies: list[Tally]) -> None:
    group = MetricGroup("totals", lambda: "shows nothing/000000")
    group.gauge("odd", show)
    group.counter("n").inc()
    assert sent(tallies[-1]) == {"totals": {"n": UserMetric(COUNTER, 1)}}


def test_mistakes_are_named() -> None:
    group = MetricGroup("f", lambda: None)
    for name in ("", " ", "a\nb", 5, "x" * 201):
        with pytest.raises(ValueError, match="'f'"):
            group.counter(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 200 characters"):
        group.add_group("x" * 150).counter("y" * 60)
    with pytest.raises(TypeError, match="nothing that can be called"):
        group.gauge("g", 5)  # type: ignore[arg-type]
    for value in (True, "3", 1.5):
        with pytest.raises(TypeError, match="whole number"):
            group.counter("n").inc(value)  # type: ignore[arg-type]
    for odd in (True, "3", float("inf")):
        with pytest.raises(TypeError, match="finite numbers"):
            group.distribution("d").update(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "context", [StatelessContext("f"), KeyedStates("f", 4).view_for_function()], ids=["stateless", "keyed"]
)
def test_where_there_is_no_task_a_function_sees_its_own_counts(context: Any) -> None:
    counter = context.get_metrics_group().counter("n")
    counter.inc(3)
    assert counter.get_count() == 3
    context.why_no_accumulators = "there is no job"
    context.get_metrics_group().counter("n").inc()


def test_a_harness_runs_functions_with_metrics() -> None:
    class Measures(MapFunction):
        def open(self, context: Any) -> None:
            self.seen = context.get_metrics_group().counter("seen")

        def map(self, value: Any) -> Any:
            self.seen.inc()
            return (value.user, self.seen.get_count())

    harness = ProgramHarness(
        lambda stream: stream.map(Measures(), output="user STRING, n LONG"), "user STRING"
    )
    harness.push_all([(("ann",), 0), (("ann",), 1)])
    assert [row.n for row in harness.take().rows] == [1, 2]
