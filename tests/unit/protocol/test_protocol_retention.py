"""What may be deleted of checkpoints, as literal lists and over arbitrary ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.lineage import FinishedRewind, LineageHistory, RewindKind
from flinkish_spark.protocol.retention import (
    CheckpointFact,
    CheckpointPart,
    CheckpointRetention,
    RetentionFacts,
    find_deletions,
    find_deletions_on_cancel,
)
from tests.support.effort import examples

COMMIT, ABORT, OPEN = Verdict.COMMIT, Verdict.ABORT, None
DELETE, RETAIN = CheckpointRetention.DELETE_ON_CANCELLATION, CheckpointRetention.RETAIN_ON_CANCELLATION


def done(number, lineage=0):
    return CheckpointFact(CheckpointId(number), COMMIT, Lineage(lineage), has_receipt=True)


def savepoint(number):
    return CheckpointFact(CheckpointId(number), COMMIT, has_receipt=True, is_savepoint=True)


def unconfirmed(number, lineage=0):
    return CheckpointFact(CheckpointId(number), COMMIT, Lineage(lineage))


def aborted(number):
    return CheckpointFact(CheckpointId(number), ABORT)


def without_decision(number, receipt=False):
    return CheckpointFact(CheckpointId(number), OPEN, has_receipt=receipt)


def ids(*numbers):
    return frozenset(CheckpointId(n) for n in numbers)


def back_to(target, lineage=1):
    rewind = FinishedRewind(Lineage(lineage), RewindKind.TO_CHECKPOINT, CheckpointId(target), BatchId(0))
    return LineageHistory.of([rewind])


def facts(*checkpoints, retained=2, history=None, **more):
    return RetentionFacts(tuple(checkpoints), history or LineageHistory(), retained, **more)


def goes(given):
    return [int(deletion.checkpoint) for deletion in find_deletions(given)]


def test_completed_checkpoints_beyond_the_retained_ones_go():
    """Behaviour 69."""
    assert goes(facts(done(1), done(2), done(3), done(4))) == [1, 2]


def test_nothing_goes_before_there_are_enough():
    assert goes(facts(done(1), done(2))) == [] and goes(facts()) == []


def test_the_order_is_that_of_ids_whatever_the_listing_says():
    """Behaviour 72."""
    assert goes(facts(done(10), done(9), done(2), done(1), done(11))) == [1, 2, 9]


def test_the_newest_is_never_deleted():
    """Behaviour 71."""
    assert goes(facts(done(1), done(2), done(3), retained=1)) == [1, 2]
    with pytest.raises(ValueError, match="at least one"):
        find_deletions(facts(done(1), retained=0))


def test_aborted_ids_use_up_no_place_and_go_with_what_is_older_than_the_oldest_kept():
    given = facts(aborted(1), done(2), aborted(3), done(4), aborted(5), aborted(6), done(7), aborted(8))
    assert goes(given) == [1, 2, 3]


def test_a_job_that_only_aborts_keeps_its_ids():
    assert goes(facts(aborted(1), aborted(2))) == []


def test_the_highest_id_stays_whatever_it_is():
    assert goes(facts(done(1), done(3), done(4), aborted(5))) == [1]
    assert goes(facts(done(1), done(2), done(3, lineage=0), history=back_to(2))) == []


def test_a_decision_without_receipt_is_never_deleted():
    """Behaviour 66: also where the write of a decision had an unknown outcome."""
    given = facts(unconfirmed(1), without_decision(2), done(3), done(4), done(5))
    assert goes(given) == [3]


def test_a_failed_completion_deletes_nothing_older():
    """Behaviour 70."""
    assert goes(facts(done(1), done(2), unconfirmed(3))) == []
    assert goes(facts(done(1), done(2), without_decision(3))) == []


def test_savepoints_use_up_no_place_and_are_dropped_from_the_list_when_they_are_old():
    """Behaviours 45 and 74: their own files are never part of what is deleted."""
    assert goes(facts(done(1), savepoint(2), done(3), savepoint(4), done(5))) == [1, 2]
    assert goes(facts(done(1), savepoint(2), done(3))) == []


def test_the_newest_stays_when_it_is_a_savepoint_and_so_does_the_newest_that_is_none():
    """Behaviour 74."""
    assert goes(facts(done(1), done(2), savepoint(3), savepoint(4), retained=1)) == [1]


def test_dead_checkpoints_take_no_place_and_go():
    given = facts(done(1), done(2), done(3), done(4), done(5, lineage=1), history=back_to(2))
    assert goes(given) == [1, 3, 4]
    # Live are 1, 2 and 5; with three places all of them stay.
    assert goes(facts(*given.checkpoints, retained=3, history=back_to(2))) == [3, 4]


def test_a_dead_checkpoint_that_was_never_confirmed_stays():
    given = facts(done(1), done(2), unconfirmed(3), done(5, lineage=1), history=back_to(2), retained=3)
    assert goes(given) == []


def test_what_an_order_or_an_open_rewind_names_stays():
    assert goes(facts(done(1), done(2), done(3), done(4), referenced=ids(1))) == [2]


def test_deleting_never_passes_an_id_that_is_being_read():
    """Behaviour 77."""
    everything = (done(1), done(2), done(3), done(4), done(5))
    assert goes(facts(*everything, in_use=ids(2))) == [1]
    assert goes(facts(*everything, in_use=ids(1))) == []
    assert goes(facts(*everything, in_use=ids(5))) == [1, 2, 3]


def test_each_deletion_is_complete_and_in_the_order_that_a_crash_may_cut_anywhere():
    (deletion,) = find_deletions(facts(done(1), done(2), done(3)))
    assert deletion.parts == (
        CheckpointPart.TRIGGER,
        CheckpointPart.DECISION,
        CheckpointPart.RECEIPT,
        CheckpointPart.RESTAGED,
        CheckpointPart.PIN,
    )


def test_what_a_crash_left_of_a_deletion_is_deleted():
    # The receipt of 1 is left; of 0 its pin, and perhaps what was staged again.
    given = facts(without_decision(1, receipt=True), done(2), done(3), pinned=ids(0, 2, 3))
    assert [(int(d.checkpoint), d.parts) for d in find_deletions(given)] == [
        (0, (CheckpointPart.RESTAGED, CheckpointPart.PIN)),
        (1, tuple(CheckpointPart)),
    ]
    assert goes(facts(done(2), done(3), pinned=ids(1), referenced=ids(1))) == []


# -- a cancelled job ----------------------------------------------------------------------------------


def test_a_cancelled_job_keeps_its_checkpoints_unless_told_otherwise():
    """Behaviours 60 and 75."""
    given = facts(done(1), savepoint(2), without_decision(4), aborted(5), aborted(6))
    assert find_deletions_on_cancel(given, RETAIN) == ()
    assert [int(d.checkpoint) for d in find_deletions_on_cancel(given, DELETE)] == [1, 2, 5]
    assert find_deletions_on_cancel(facts(), DELETE) == ()


@pytest.mark.parametrize("before", [done(2), savepoint(2)])
def test_what_a_cancelled_job_has_to_finish_can_still_be_replayed(before):
    """A sink that does not answer keeps it unconfirmed, and what it staged may be lost by the next start."""
    given = facts(done(1), before, aborted(3), unconfirmed(4), aborted(5))
    assert [int(d.checkpoint) for d in find_deletions_on_cancel(given, DELETE)] == [1, 3]
    first = facts(aborted(1), unconfirmed(2), aborted(3))
    assert [int(d.checkpoint) for d in find_deletions_on_cancel(first, DELETE)] == [1]
    dead = facts(done(1), done(3), unconfirmed(4, lineage=1), aborted(5), history=back_to(1))
    assert [int(d.checkpoint) for d in find_deletions_on_cancel(dead, DELETE)] == [3]


def test_a_cancelled_job_counts_its_ids_on():
    with pytest.raises(ValueError, match="seal an id above 2"):
        find_deletions_on_cancel(facts(done(1), done(2)), DELETE)


# -- any facts ----------------------------------------------------------------------------------------

ANY = st.builds(
    CheckpointFact,
    st.integers(1, 12).map(CheckpointId),
    st.sampled_from([COMMIT, COMMIT, ABORT, OPEN]),
    st.integers(0, 2).map(Lineage),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(ANY, unique_by=lambda f: f.checkpoint, max_size=10),
    st.integers(1, 4),
    st.sampled_from([LineageHistory(), back_to(4), back_to(6, lineage=2)]),
    st.frozensets(st.integers(1, 12).map(CheckpointId), max_size=2),
    st.frozensets(st.integers(1, 12).map(CheckpointId), max_size=2),
)
def test_whatever_there_is_what_is_needed_stays(checkpoints, retained, past, in_use, referenced):
    given = facts(*checkpoints, retained=retained, history=past, in_use=in_use, referenced=referenced)
    gone = {d.checkpoint for d in find_deletions(given)}
    left = [f for f in checkpoints if f.checkpoint not in gone]
    live = [
        f
        for f in sorted(checkpoints, key=lambda f: f.checkpoint)
        if f.verdict is COMMIT and f.has_receipt and past.find_superseding(f.checkpoint, f.lineage) is None
    ]
    plain = [f for f in live if not f.is_savepoint]
    assert {f.checkpoint for f in (*plain[-retained:], *live[-1:])} <= {f.checkpoint for f in left}
    assert all(f in left for f in checkpoints if f.verdict is COMMIT and not f.has_receipt)
    assert not gone & (in_use | referenced)
    assert not in_use or all(n < min(in_use) for n in gone)
    assert not checkpoints or max(f.checkpoint for f in checkpoints) in {f.checkpoint for f in left}
    # Deleting may stop anywhere and start over: nothing more goes than at once.
    again = facts(*left, retained=retained, history=past, in_use=in_use, referenced=referenced)
    assert find_deletions(again) == ()
