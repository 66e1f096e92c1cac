"""Kill points are read as written, and hit once."""

from __future__ import annotations

import pytest

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.testing.crash_points import KillAt, KillPoint, Moment, kill_process_group
from tests.support.killing import observer_from


@pytest.mark.parametrize("text", ["decision:before:2", "sink-commit:after:1:totals-delta"])
def test_a_point_is_its_own_text(text: str) -> None:
    assert str(KillPoint.parse(text)) == text


@pytest.mark.parametrize("text", ["", "decision", "decision:before", "decision:amid:1", "nothing:after:1"])
def test_what_is_no_point_is_refused_with_the_list_of_steps(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the steps are .*staged-file, "):
        KillPoint.parse(text)


def test_occurrences_are_counted_from_one() -> None:
    with pytest.raises(ConfigError):
        KillPoint.parse("decision:before:0")


def test_it_fires_once_at_its_side_of_its_step() -> None:
    shots: list[int] = []
    observer = KillAt(KillPoint(Step.DECISION, Moment.AFTER, 2), kill=lambda: shots.append(1))
    observer.on_step_start(Step.DECISION, "1")
    observer.on_step_end(Step.RECEIPT, "1")
    observer.on_step_end(Step.DECISION, "1")
    assert not shots
    for checkpoint in ("2", "3", "4"):
        observer.on_step_end(Step.DECISION, checkpoint)
    assert len(shots) == 1


def test_a_subject_narrows_it() -> None:
    shots: list[int] = []
    observer = KillAt(KillPoint.parse("sink-commit:before:1:b"), kill=lambda: shots.append(1))
    observer.on_step_start(Step.SINK_COMMIT, "a")
    assert not shots
    observer.on_step_start(Step.SINK_COMMIT, "b")
    assert shots


def test_without_the_variable_nothing_is_watched() -> None:
    assert isinstance(observer_from({}), SilentObserver)
    assert isinstance(observer_from({"FLINKISH_KILL_AT": "receipt:after:1"}), KillAt)


def test_a_group_that_somebody_else_leads_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpgid", lambda pid: 1)
    with pytest.raises(ConfigError, match="does not lead its process group"):
        kill_process_group()
