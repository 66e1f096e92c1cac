"""Which request goes first, and which one has no room."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.checkpoint import CheckpointRequest, RequestQueue
from flinkish_spark.protocol.ids import CheckpointPurpose

P = CheckpointPurpose


def request(number, purpose=P.USER) -> CheckpointRequest:
    return CheckpointRequest(number, purpose, number)


def queue_of(limit, *requests) -> tuple[list[int], list[int]]:
    """Offer requests one after the other; return the numbers that wait and those turned away."""
    queue, turned_away = RequestQueue(limit), []
    for one in requests:
        queue, rejected = queue.offer(one)
        turned_away += [] if rejected is None else [rejected.number]
    return [one.number for one in queue.waiting], turned_away


def test_savepoints_and_last_checkpoints_go_before_users_and_users_before_the_timer() -> None:
    """Behaviours 27, 28."""
    by_rank = {rank: {p for p in P if p.rank == rank} for rank in range(3)}
    assert by_rank == {
        0: {P.SAVEPOINT, P.FINAL, P.FINAL_SAVEPOINT, P.DRAINED_SAVEPOINT},
        1: {P.USER, P.FOLLOW_UP},
        2: {P.PERIODIC},
    }
    waiting, _ = queue_of(9, request(1, P.PERIODIC), request(2, P.USER), request(3, P.SAVEPOINT))
    assert waiting == [3, 2, 1]


def test_purposes_say_what_becomes_of_the_checkpoint() -> None:
    assert {p for p in P if p.is_savepoint} == {P.SAVEPOINT, P.FINAL_SAVEPOINT, P.DRAINED_SAVEPOINT}
    assert {p for p in P if p.is_final} == {P.FINAL, P.FINAL_SAVEPOINT, P.DRAINED_SAVEPOINT}
    assert {p for p in P if p.stops_with_savepoint} == {P.FINAL_SAVEPOINT, P.DRAINED_SAVEPOINT}


def test_within_a_rank_the_older_request_goes_first() -> None:
    """Behaviours 27, 28."""
    same_rank = [request(4, P.DRAINED_SAVEPOINT), request(5, P.SAVEPOINT), request(6, P.FINAL_SAVEPOINT)]
    for order in itertools.permutations(same_rank):
        assert queue_of(9, *order) == ([4, 5, 6], [])


def test_within_a_rank_a_forced_request_goes_first() -> None:
    """Behaviour 26: it must not wait behind one that waits for the limits."""
    assert queue_of(9, request(1, P.FINAL), request(2, P.SAVEPOINT)) == ([2, 1], [])


@pytest.mark.parametrize(
    "offered,waiting,turned_away",
    [
        ([request(1), request(2), request(3)], [1, 2], [3]),
        ([request(1, P.PERIODIC), request(2), request(3)], [2, 3], [1]),
        ([request(1), request(2), request(3, P.PERIODIC)], [1, 2], [3]),
        ([request(1, P.FINAL), request(2), request(3, P.FINAL)], [1, 3], [2]),
    ],
    ids=["newest", "least important", "the one that came", "user for a last one"],
)
def test_a_full_queue_turns_away_the_newest_of_the_least_important(offered, waiting, turned_away) -> None:
    """Behaviour 29."""
    assert queue_of(2, *offered) == (waiting, turned_away)


def test_a_forced_request_has_always_room_and_is_never_turned_away() -> None:
    """Behaviours 26, 29."""
    forced = [request(n, P.SAVEPOINT) for n in (2, 3)]
    assert queue_of(1, request(1), *forced) == ([2, 3, 1], [])
    assert queue_of(1, *forced, request(4)) == ([2, 3], [4])


def test_requests_can_be_taken_out() -> None:
    """Behaviour 12."""
    queue, _ = RequestQueue().offer(request(1, P.PERIODIC))
    queue, _ = queue.offer(request(2))
    assert (queue.holds(P.PERIODIC), queue.holds(P.SAVEPOINT)) == (True, False)
    left, gone = queue.remove(lambda one: one.purpose is P.PERIODIC)
    assert [one.number for one in left.waiting] == [2]
    assert [one.number for one in gone] == [1]
    assert left.head is not None
    assert left.remove(lambda one: True)[0].head is None


def test_a_queue_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        RequestQueue(limit=0)


@settings(deadline=None)
@given(
    limit=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(P), max_size=12),
)
def test_no_request_is_lost_or_doubled(limit, kinds) -> None:
    """Behaviour 29: each waits or is turned away; nobody more important goes for somebody less so."""
    requests = [request(n, kind) for n, kind in enumerate(kinds)]
    waiting, turned_away = queue_of(limit, *requests)
    assert sorted(waiting + turned_away) == list(range(len(requests)))
    assert waiting == sorted(waiting, key=lambda n: requests[n].order)
    normal = [n for n in waiting if not requests[n].is_forced]
    assert len(normal) <= limit
    assert not any(requests[n].is_forced for n in turned_away)
