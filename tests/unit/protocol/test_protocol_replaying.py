"""Commit or replay, the rules: what is staged again, and when it counts as the same."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from flinkish_spark.protocol.decisions import Decision, RestagedEpoch, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch, TaskAck
from flinkish_spark.protocol.replay import CannotReplay, ReplayPlan, RestageResult, plan_replay, restage


def one(sink: str, name: str) -> Committable:
    return Committable(sink, {"name": name})


def task_of(committable: Committable) -> int | None:
    """Names are ``<anything><task>``; those that end in no digit belong to no task."""
    last = str(committable.payload["name"])[-1]
    return int(last) if last.isdecimal() else None


def batch(number: int, *committables: Committable, rows: dict[int, int] | None = None) -> StagedBatch:
    """A micro-batch in which every sink saw the same rows: by task, rows whose digest is their number."""
    tasks = tuple(TaskAck(task, count, digest=count) for task, count in (rows or {0: 5, 1: 7}).items())
    acks = (SinkAck("a", tasks), SinkAck("b", tasks))
    return StagedBatch(Lineage(0), BatchId(number), OwnerEpoch(1), 1, acks, committables)


def decision(*batches: StagedBatch) -> Decision:
    return Decision(CheckpointId(4), Verdict.COMMIT, OwnerEpoch(1), 9, batches=batches)


TWO = decision(
    batch(6, one("a", "six-0"), one("a", "six-1"), one("b", "file-6")),
    batch(7, one("a", "seven-0"), one("a", "seven-1"), one("b", "file-7")),
)


def planned(found: Decision, sink: str, position: int) -> ReplayPlan:
    plan = plan_replay(found, sink, position, task_of)
    assert isinstance(plan, ReplayPlan)
    return plan


@pytest.mark.parametrize(
    ("position", "lost"),
    [
        (0, [["six-0", "six-1"], ["seven-0", "seven-1"]]),
        (1, [["six-1"], ["seven-0", "seven-1"]]),
        (2, [[], ["seven-0", "seven-1"]]),
        (3, [[], ["seven-1"]]),
    ],
)
def test_what_is_lost_is_a_suffix_over_all_micro_batches(position: int, lost: list[list[str]]) -> None:
    """Behaviour 128."""
    plan = planned(TWO, "a", position)
    assert [[c.payload["name"] for c in part.lost] for part in plan.batches] == lost
    assert [c.payload["name"] for c in plan.lost] == [*itertools.chain(*lost)]
    assert [int(part.batch) for part in plan.batches] == [6, 7]


def test_micro_batches_behind_the_last_lost_committable_are_not_run_again() -> None:
    found = decision(batch(6, one("a", "six-0")), batch(7, one("b", "file")), batch(8))
    assert [int(part.batch) for part in planned(found, "a", 0).batches] == [6]


def test_nothing_lost_is_nothing_to_replay() -> None:
    assert plan_replay(TWO, "a", 4, task_of) == CannotReplay("nothing of sink 'a' is lost")
    assert plan_replay(TWO, "c", 0, task_of) == CannotReplay("nothing of sink 'c' is lost")


def test_a_half_committed_micro_batch_must_be_told_apart_by_tasks() -> None:
    found = decision(batch(6, one("a", "all-of-it"), one("a", "six-1")))
    refused = plan_replay(found, "a", 1, task_of)
    assert isinstance(refused, CannotReplay)
    assert "a part of micro-batch 6 is committed" in refused.why
    # With nothing committed, it need not be told apart.
    assert isinstance(plan_replay(found, "a", 0, task_of), ReplayPlan)


def again(number: int, *names: str, rows: dict[int, int] | None = None) -> StagedBatch:
    staged = batch(number, *(one("a", name) for name in names), rows=rows)
    return replace(staged, owner_epoch=OwnerEpoch(2), acks=staged.acks[:1])


def names_of(staged: StagedBatch) -> list[str]:
    return [str(c.payload["name"]) for c in staged.committables]


def test_what_was_staged_again_takes_the_place_of_what_was_lost() -> None:
    """Other sinks stay as they are, and so does the order in which sinks commit."""
    plan = planned(TWO, "a", 2)
    result = restage(TWO, plan, {BatchId(7): again(7, "new-0", "new-1")}, task_of)
    assert isinstance(result, RestageResult)
    assert [names_of(b) for b in result.batches] == [
        ["six-0", "six-1", "file-6"],
        ["new-0", "new-1", "file-7"],
    ]
    assert result.surplus == ()
    # Everything else of the micro-batches is what it was: their staged files are found by it.
    assert [replace(b, committables=()) for b in result.batches] == [
        replace(b, committables=()) for b in TWO.batches
    ]


def test_of_a_half_committed_micro_batch_only_the_lost_tasks_are_taken() -> None:
    plan = planned(TWO, "a", 1)
    staged = {BatchId(6): again(6, "new-0", "new-1", "barrier"), BatchId(7): again(7, "newer-0")}
    result = restage(TWO, plan, staged, task_of)
    assert isinstance(result, RestageResult)
    assert names_of(result.batches[0]) == ["six-0", "new-1", "barrier", "file-6"]
    assert names_of(result.batches[1]) == ["newer-0", "file-7"]
    assert [c.payload["name"] for c in result.surplus] == ["new-0"]


def test_the_last_sink_s_committables_stay_last() -> None:
    plan = planned(TWO, "b", 0)
    staged = {BatchId(6): batch(6, one("b", "f6")), BatchId(7): batch(7, one("b", "f7"), one("b", "f8"))}
    result = restage(TWO, plan, staged, task_of)
    assert isinstance(result, RestageResult)
    assert [names_of(b) for b in result.batches] == [
        ["six-0", "six-1", "f6"],
        ["seven-0", "seven-1", "f7", "f8"],
    ]


@pytest.mark.parametrize("rows", [{0: 5, 1: 8}, {0: 12}, {0: 6, 1: 6}])
def test_other_rows_are_never_taken(rows: dict[int, int]) -> None:
    plan = planned(TWO, "a", 3)
    result = restage(TWO, plan, {BatchId(7): again(7, "new-0", "new-1", rows=rows)}, task_of)
    assert isinstance(result, CannotReplay)
    assert "micro-batch 7" in result.why


def test_the_same_rows_in_other_tasks_will_do_where_nothing_is_committed() -> None:
    plan = planned(TWO, "a", 2)
    moved = again(7, "new-0", rows={0: 12, 1: 0})
    moved = replace(moved, acks=(SinkAck("a", (TaskAck(0, 12, digest=12),)),))
    assert isinstance(restage(TWO, plan, {BatchId(7): moved}, task_of), RestageResult)


def test_tasks_without_rows_are_no_difference() -> None:
    plan = planned(TWO, "a", 3)
    staged = again(7, "new-0", "new-1", rows={0: 5, 1: 7, 2: 0})
    assert isinstance(restage(TWO, plan, {BatchId(7): staged}, task_of), RestageResult)


def test_a_finished_replay_is_stored_and_applied() -> None:
    stored = RestagedEpoch(CheckpointId(4), 1, OwnerEpoch(2), 77, "a", "timed out", (again(6, "new-0"),))
    read = RestagedEpoch.from_json(json.loads(json.dumps(stored.to_json())))
    assert read == stored
    applied = read.apply(TWO)
    assert (applied.batches, applied.checkpoint, applied.offsets_text) == (stored.batches, TWO.checkpoint, "")


def test_a_stored_replay_without_micro_batches_is_refused() -> None:
    empty = RestagedEpoch(CheckpointId(4), 1, OwnerEpoch(2), 77, "a", "timed out", ())
    with pytest.raises(ValueError, match="replay of checkpoint 4 without a micro-batch"):
        RestagedEpoch.from_json(empty.to_json())
