"""Which checkpoints a rewind leaves behind, and which the job can go back to."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.decisions import RewindIntent
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import (
    FinishedRewind,
    LineageHistory,
    RetainedCheckpoint,
    RewindKind,
    RewindOrder,
    Tables,
    why_not_rewindable,
)
from tests.support.effort import examples

PLAIN, BACK, ANEW = RewindKind.PLAIN, RewindKind.TO_CHECKPOINT, RewindKind.RESEED


def rewind(lineage, kind, target, first_removed=0):
    return FinishedRewind(
        Lineage(lineage), kind, None if target is None else CheckpointId(target), BatchId(first_removed)
    )


def history(*rewinds):
    return LineageHistory.of(rewinds)


def is_live(past, checkpoint, lineage):
    return past.find_superseding(CheckpointId(checkpoint), Lineage(lineage)) is None


def test_a_job_that_was_never_rewound():
    past = history()
    assert (past.live, past.log_began_in) == (Lineage(0), Lineage(0))
    assert is_live(past, 3, 0)


def test_a_rewind_leaves_behind_what_came_after_its_target():
    past = history(rewind(1, BACK, 2))
    assert [is_live(past, n, 0) for n in (1, 2, 3, 4)] == [True, True, False, False]
    # Ids go on rising: what is decided after the rewind has an id above those left behind.
    assert is_live(past, 5, 1)


def test_rewinds_add_up_in_whatever_order_they_are_listed():
    past = history(rewind(3, BACK, 6), rewind(1, BACK, 2), rewind(2, PLAIN, 5))
    assert past.live == Lineage(3)
    decided = {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 2, 7: 2, 8: 3}
    assert [n for n, lineage in decided.items() if is_live(past, n, lineage)] == [1, 2, 5, 6, 8]


def test_a_plain_rewind_leaves_nothing_behind():
    past = history(rewind(1, PLAIN, None), rewind(2, PLAIN, 4))
    assert all(is_live(past, n, 0) for n in range(1, 5))


def test_a_dead_checkpoint_stays_dead_when_a_later_rewind_goes_beyond_it():
    past = history(rewind(1, BACK, 2), rewind(2, BACK, 9))
    assert not is_live(past, 3, 0)


def test_the_log_begins_anew_where_it_was_last_reseeded():
    past = history(rewind(1, BACK, 2), rewind(2, ANEW, 4), rewind(3, PLAIN, 5))
    assert past.log_began_in == Lineage(2)
    assert is_live(past, 4, 1)


# -- going back ---------------------------------------------------------------------------------------

PAST = history(rewind(1, BACK, 2), rewind(2, ANEW, 6))
KNOWN = [CheckpointId(n) for n in (9, 3, 4, 5, 6, 7, 8, 10)]
COMMITS = [
    RetainedCheckpoint(CheckpointId(n), Lineage(lineage), receipt, pinned)
    for n, lineage, receipt, pinned in [
        (3, 0, True, True),
        (6, 1, True, True),
        (7, 2, True, True),
        (8, 2, True, False),
        (10, 2, False, True),
    ]
]


@pytest.mark.parametrize(
    "target,why",
    [
        (7, ""),
        (2, "not retained any more"),
        (3, "the rewind to checkpoint 2, which began lineage 1, left it behind"),
        (6, "taken in lineage 1, and Spark's checkpoint was begun anew in lineage 2"),
        (8, "the state that it needs is not kept"),
        (9, "it was not completed"),
        (10, "not every sink has confirmed it yet"),
        (11, "it does not exist; the newest id is 10"),
    ],
)
def test_where_the_job_can_go_back_to(target, why):
    answer = why_not_rewindable(CheckpointId(target), KNOWN, COMMITS, PAST)
    assert (why in answer) if why else answer == ""


def test_a_job_without_checkpoints_cannot_go_back():
    assert "no checkpoints" in why_not_rewindable(CheckpointId(1), [], [], history())


# -- what is stored -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        RewindOrder("a1", CheckpointId(4), Tables.RESTORE, "wrong prices", 17),
        RewindIntent(BatchId(3), Lineage(1), "dead", {"commits/3": "v1\n{}"}),
        RewindIntent(BatchId(3), Lineage(1), "ordered", {}, BACK, CheckpointId(2), Tables.RESTORE, "a1"),
    ],
)
def test_orders_and_intents_survive_their_stored_form(value):
    assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value


def test_an_order_with_an_unusable_id_is_refused():
    good = RewindOrder("a1", CheckpointId(4), Tables.KEEP, "", 17).to_json()
    with pytest.raises(ValueError, match="order id"):
        RewindOrder.from_json({**good, "order_id": "../x"})


# -- a model: replaying what happened -----------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_what_is_live_is_what_a_list_cut_at_each_rewind_would_hold(data):
    live, everything, rewinds, next_id = [], [], [], 1
    for lineage in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 3))):
            live.append(next_id)
            everything.append((next_id, lineage))
            next_id += data.draw(st.integers(1, 2))
        if live and data.draw(st.booleans()):
            target = data.draw(st.sampled_from(live))
            live = [n for n in live if n <= target]
            rewinds.append(rewind(lineage + 1, BACK, target))
        else:
            rewinds.append(rewind(lineage + 1, PLAIN, live[-1] if live else None))
    past = history(*reversed(rewinds))
    assert [n for n, lineage in everything if is_live(past, n, lineage)] == live
