"""A table is set back from the version that was looked at: commits of others in between stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from flinkish_spark.connectors.delta import committing
from flinkish_spark.connectors.delta.committing import DeltaCommits
from flinkish_spark.connectors.delta.rows import DeltaRows
from flinkish_spark.protocol.records import Outcome
from tests.support.delta_without_jvm import OURS, CommitRig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommitRig:
    return CommitRig(tmp_path / "t", monkeypatch)


def once_before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, first: Callable[[], object]) -> None:
    """Let something happen right before the first call of a method."""
    original, waiting = getattr(owner, name), [first]

    def method(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.pop()()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("target", [1, 0])
def test_a_table_goes_back_once(rig: CommitRig, target: int) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    assert rig.back(target).outcome is Outcome.COMMITTED
    assert rig.ids() == [1][:target]
    assert rig.back(target).outcome is Outcome.ALREADY_COMMITTED


@pytest.mark.parametrize("target", [1, 0])
def test_a_commit_between_the_look_and_the_restore_stays(
    rig: CommitRig, monkeypatch: pytest.MonkeyPatch, target: int
) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    once_before(monkeypatch, DeltaCommits, "set_back", rig.strange)
    assert rig.back(target).outcome is Outcome.RETRY
    assert rig.ids() == [-1, 1, 2, 3]
    refused = rig.back(target)
    assert refused.outcome is Outcome.LOST and "version 3 (WRITE)" in str(refused.detail)
    assert rig.ids() == [-1, 1, 2, 3]


def test_a_commit_while_the_history_is_read_shifts_no_version(
    rig: CommitRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs numbers what it lists down from the version that it opened."""
    for number in (1, 2, 3):
        rig.checkpoint(number)
    before = rig.tables.open(rig.path)
    assert before is not None
    rig.strange()
    assert [row["version"] for row in before.history()] != [3, 2, 1, 0], "if mended there, look here again"
    once_before(monkeypatch, DeltaTable, "history", rig.strange)
    found = rig.tables.history(rig.path, 3)
    assert [(row.version, row.operation) for row in found][:2] == [(4, "WRITE"), (3, "WRITE")]
    assert found[2].version == 2 and found[2].note.startswith(f"flinkish-commit {OURS} 3 ")


def test_a_plan_is_of_one_version(rig: CommitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    once_before(monkeypatch, DeltaTable, "history", rig.strange)
    refused = rig.back(1)
    assert refused.outcome is Outcome.LOST and "version 3 (WRITE)" in str(refused.detail)
    assert rig.ids() == [-1, 1, 2, 3]


def test_deltas_own_statement_is_not_begun_behind_another_commit(
    rig: CommitRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        rig.checkpoint(number)
    monkeypatch.setattr(committing, "why_by_spark", lambda *_: "deletion vectors")
    asked: list[str] = []
    monkeypatch.setattr(DeltaRows, "set_back", lambda *_: asked.append("restore"))
    once_before(monkeypatch, DeltaCommits, "set_back", rig.strange)
    assert rig.back(1).outcome is Outcome.RETRY and not asked
