"""Micro-batches of a chained source: literal logs (tests/support/chained_log.py), one line per partition."""

from __future__ import annotations

import pytest

from flinkish_spark.connectors.kafka.chaining import alignment as cut_plan
from flinkish_spark.connectors.kafka.chaining.cut_state import CutState, channel_of, place_of
from flinkish_spark.core.upstream_cut import CutPhase
from flinkish_spark.protocol.input_gate import AlignmentMode, AlignmentSettings, BarrierKind
from tests.support.chained_log import Chained, Log

ALIGNED, UNALIGNED = AlignmentMode.ALIGNED, AlignmentMode.UNALIGNED
AT_LEAST_ONCE, WITH_TIMEOUT = AlignmentMode.AT_LEAST_ONCE, AlignmentMode.ALIGNED_WITH_TIMEOUT
SAVEPOINT = BarrierKind.SAVEPOINT


def at_first_barrier(log: Log, mode: AlignmentMode, upto: int = 1, timeout_ms: int | None = None) -> Chained:
    """A job whose partition 0 is behind its barrier at offset 1, and partition 1 only at `upto`."""
    log.visible = [2, upto]
    job = Chained(log, mode, timeout_ms, behind=0).run()
    assert job.at == [2, upto]
    log.visible = [len(line) for line in log.lines]
    return job


def test_a_checkpoint_is_drawn_where_all_partitions_are_at_their_barriers() -> None:
    """behaviour 96: back to back, and an empty checkpoint."""
    job = Chained(Log.of("a b |1 c |2 |3", "d |1 |2 e |3")).offers(1).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1)]
    assert job.drawn[0].positions == {("t", 0): 3, ("t", 1): 2}
    # It was read on to the next cut, which waits for the next checkpoint: none is passed over.
    assert job.delivered == [["a", "b", "c"], ["d"]]
    assert job.at == [5, 3]
    for offered in (2, 3):
        job.offers(offered).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1), (2, 2), (3, 3)]
    assert job.delivered == [["a", "b", "c"], ["d", "e"]]
    assert job.drawn[1].positions == {("t", 0): 5, ("t", 1): 3}


def test_a_partition_waits_at_its_barrier() -> None:
    """behaviour 96: blocked from its barrier to the last one, while others are read on."""
    log = Log.of("a |1 b c d", "e f g h |1")
    log.visible[1] = 2
    job = Chained(log).offers(1).run()
    assert job.delivered == [["a"], ["e", "f"]]
    assert not job.drawn
    log.visible[1] = 4
    job.run()
    assert job.delivered == [["a"], ["e", "f", "g", "h"]]
    log.visible[1] = 5
    job.run()
    assert [d.upstream for d in job.drawn] == [1]
    assert job.delivered == [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    assert job.drawn[0].positions == {("t", 0): 2, ("t", 1): 5}


def test_a_single_partition_never_waits() -> None:
    """behaviour 95: ids may skip."""
    job = Chained(Log.of("a |1/1 b |4/1 c")).offers(1).run()
    job.offers(2).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1), (2, 4)]


def test_the_cut_waits_for_a_checkpoint_of_this_job() -> None:
    job = Chained(Log.of("a |1 b", "|1 c")).run()
    assert job.delivered == [["a"], []]
    assert job.state.cut is not None
    assert job.state.cut.phase is CutPhase.REACHED
    assert not job.step()
    job.offers(7).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(7, 1)]
    assert job.delivered == [["a", "b"], ["c"]]


def test_a_checkpoint_waits_for_the_cut() -> None:
    log = Log.of("a b |1", "c |1")
    log.visible = [1, 1]
    job = Chained(log).offers(1).run()
    assert (job.delivered, job.drawn) == ([["a"], ["c"]], [])
    log.visible = [3, 2]
    # The one that is drawn is the newest that is offered: the first has expired meanwhile.
    job.offers(3).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(3, 1)]


def test_a_resting_job_draws_checkpoints_where_it_stands() -> None:
    """So it can be stopped while the upstream job is down. Markers are no records."""
    job = Chained(Log.of("a |1 . .", "|1 .")).offers(1).run()
    assert job.at == [2, 1]
    assert not job.step()
    job.offers(2).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1), (2, 1)]


def test_before_anything_is_read_checkpoints_are_drawn_at_the_beginning() -> None:
    log = Log.of("a |1", "|1")
    log.visible = [0, 0]
    job = Chained(log).offers(1).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, None)]
    log.visible = [1, 0]
    job.offers(2).run()
    assert len(job.drawn) == 1
    log.visible = [2, 1]
    job.run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, None), (2, 1)]


def test_an_aborted_checkpoint_lets_the_source_go_on_to_the_next_cut() -> None:
    """Drawn, then declined or expired: the source does not hear of it, the next one is at the next cut."""
    log = Log.of("a |1 b |2", "|1 c |2")
    log.visible = [3, 2]
    job = Chained(log).offers(1).run()
    assert job.delivered == [["a", "b"], ["c"]]
    job.offers(2).run()
    assert len(job.drawn) == 1
    log.visible = [4, 3]
    job.run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1), (2, 2)]


def test_a_micro_batch_has_a_most() -> None:
    job = Chained(Log.of("a b c d e f |1", "g |1")).offers(1)
    sizes = []
    before = job.at
    while job.step(most=3):
        sizes.append(sum(job.at) - sum(before))
        before = job.at
    assert sum(sizes) == 9
    assert max(sizes) <= 4
    assert [d.upstream for d in job.drawn] == [1]


def test_a_barrier_that_a_partition_has_lost_ends_its_checkpoint() -> None:
    """behaviour 97: compaction, or a start in the middle; the newer barrier cancels the older one."""
    job = Chained(Log.of("a |1 b |2 c", "d e |2 f")).offers(1).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 2)]
    assert job.skipped == [1]
    assert job.drawn[0].positions == {("t", 0): 4, ("t", 1): 3}


def test_late_barriers_do_not_disturb() -> None:
    """behaviours 106, 119: those of a checkpoint that is over are passed in one go with what follows."""
    job = Chained(Log.of("a |1 b |2 c |3", "|3 d |4", "|1 e |2 f |3 g |4")).offers(1).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 3)]
    assert sorted(job.skipped) == [1]
    assert job.drawn[0].positions == {("t", 0): 6, ("t", 1): 1, ("t", 2): 5}


def test_a_start_in_the_middle() -> None:
    job = Chained(Log.of("x |1 a |2 b", "|1 y c |2"), start={0: 2, 1: 0}).offers(1).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 2)]
    assert job.delivered == [["a", "b"], ["y", "c"]]


def test_a_source_that_read_without_looking_stands_nowhere() -> None:
    settings = AlignmentSettings(ALIGNED)
    assert not CutState.create_midway({("t", 0): 5}, settings).stands_at_cut
    assert CutState.create_at_start({("t", 0): 5}, settings).stands_at_cut
    assert CutState.from_json({"t": {"0": 5}}, settings) is None


# -- partitions that are added ------------------------------------------------------------------------


def test_a_partition_that_was_added_waits_for_the_cut_that_holds_it() -> None:
    """What it holds was written behind checkpoint 1, so that cut must not have it."""
    log = Log.of("a |1/2 b |2/3 c", "d |1/2 |2/3", "n |2/3 o")
    log.visible = [2, 1, 1]
    job = Chained(log, start={})
    # The job began with two partitions.
    log.lines, third = log.lines[:2], log.lines[2]
    job = Chained(log).offers(1).run()
    log.lines.append(third)
    assert not job.step()
    log.visible[1] = 2
    job.run()
    assert [d.upstream for d in job.drawn] == [1]
    assert job.delivered[2] == []
    assert job.drawn[0].positions[("t", 2)] == 0
    log.visible = [5, 3, 3]
    job.offers(2).run()
    assert [d.upstream for d in job.drawn] == [1, 2]
    assert job.drawn[1].positions == {("t", 0): 4, ("t", 1): 3, ("t", 2): 2}
    assert job.delivered == [["a", "b", "c"], ["d"], ["n", "o"]]


def test_a_cut_waits_for_partitions_that_nobody_has_found_yet() -> None:
    log = Log.of("a |1/3 b", "|1/3 c")
    job = Chained(log).offers(1).run()
    assert (job.delivered, job.drawn) == ([["a"], []], [])
    log.lines.append(["n", "|1/3"])
    log.visible.append(2)
    job.run()
    assert job.drawn[0].positions == {("t", 0): 2, ("t", 1): 1, ("t", 2): 2}
    assert job.delivered == [["a", "b"], ["c"], ["n"]]


def test_a_partition_is_added_while_others_wait() -> None:
    log = Log.of("a |1/3 b", "c d |1/3")
    log.visible = [3, 1]
    job = Chained(log).offers(1).run()
    log.lines.append(["n", "|1/3"])
    log.visible.append(1)
    job.run()
    assert job.delivered == [["a"], ["c"], ["n"]]
    log.visible = [3, 3, 2]
    job.run()
    assert [d.upstream for d in job.drawn] == [1]
    assert job.delivered == [["a", "b"], ["c", "d"], ["n"]]


def test_a_partition_joins_a_barrier_that_others_have_passed() -> None:
    """Others wait at barrier 2, which the added partition has too."""
    log = Log.of("|1/2 a |2/3", "|1/2 b c |2/3")
    log.visible = [3, 3]
    job = Chained(log).offers(1).run()
    # The number of partitions is believed from here on: the third is known, and empty so far.
    log.lines.append(["n", "|2/3"])
    log.visible.append(0)
    job.run()
    assert job.delivered == [["a"], ["b", "c"], []]
    log.visible = [3, 4, 2]
    job.offers(2).run()
    assert [d.upstream for d in job.drawn] == [1, 2]
    assert job.delivered == [["a"], ["b", "c"], ["n"]]


def test_where_barriers_are_only_counted_a_partition_joins_at_once() -> None:
    log = Log.of("a |1/1 b")
    job = Chained(log, AT_LEAST_ONCE).offers(1).run()
    log.lines.append(["n"])
    log.visible.append(1)
    job.run()
    assert job.delivered == [["a", "b"], ["n"]]


# -- unaligned ----------------------------------------------------------------------------------------


def test_unaligned_the_checkpoint_is_drawn_at_the_first_barrier() -> None:
    """behaviour 121: what lies in front of the other barriers is channel state, as offsets."""
    log = Log.of("a |1 b", "c d e |1 f")
    job = at_first_barrier(log, UNALIGNED).offers(1)
    assert job.step(most=0)
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1)]
    assert job.at == [2, 1]
    assert job.channel_state == {1: (1, 3)}
    assert job.drawn[0].cut is not None
    assert job.drawn[0].cut.channel_state == {("t", 1): (1, 3)}
    # While it runs on nothing waits.
    job.step()
    assert job.delivered == [["a", "b"], ["c", "d", "e", "f"]]
    assert job.channel_state == {}


def test_a_restore_replays_the_channel_state_first() -> None:
    log = Log.of("a |1 b |2", "c d e |1 f |2")
    job = at_first_barrier(log, UNALIGNED).offers(1)
    job.run(most=2)
    assert job.delivered[0] == ["a", "b"]
    job.restore(job.drawn[0])
    order = []
    while job.step(most=1):
        order.append([list(part) for part in job.delivered])
    firsts = [part for part in order if part[0] != ["a"]]
    assert firsts[0][1] == ["c", "d", "e"]
    assert job.delivered == [["a", "b"], ["c", "d", "e", "f"]]


def test_a_crash_while_replaying_goes_on_replaying() -> None:
    log = Log.of("a |1 b", "c d e f |1 g")
    job = at_first_barrier(log, UNALIGNED).offers(1)
    job.step(most=0)
    ranges = [job.channel_state]
    job.restart()
    while job.channel_state:
        assert job.step(most=1)
        ranges.append(job.channel_state)
        job.restart()
    assert ranges == [{1: (1, 4)}, {1: (2, 4)}, {1: (3, 4)}, {}]
    assert job.delivered[0] == ["a"]
    job.run()
    assert job.delivered == [["a", "b"], ["c", "d", "e", "f", "g"]]


def test_the_end_of_channel_state_may_be_out_of_sight() -> None:
    log = Log.of("a |1 b |2", "c d |1 e |2")
    log.visible = [4, 1]
    job = Chained(log, UNALIGNED, behind=0).offers(1).run()
    assert [d.upstream for d in job.drawn] == [1]
    assert job.drawn[0].cut is not None
    assert job.drawn[0].cut.channel_state == {("t", 1): (1, None)}
    log.visible = [4, 2]
    # Partition 0 is read on to its next barrier, and waits there.
    job.run()
    assert (job.at, job.channel_state) == ([4, 2], {1: (2, None)})
    job.restore(job.drawn[0]).run()
    assert job.at == [2, 2]
    log.visible = [4, 5]
    # All partitions come to cut 1 first, so the next checkpoint is drawn there too.
    job.offers(2).run().offers(3).run()
    assert [d.upstream for d in job.drawn] == [1, 1, 2]
    assert job.channel_state == {}
    assert job.delivered == [["a", "b"], ["c", "d", "e"]]


def test_the_end_of_channel_state_comes_into_sight() -> None:
    log = Log.of("a |1 b", "c d e |1")
    log.visible = [3, 1]
    job = Chained(log, UNALIGNED, behind=0).offers(1).run()
    assert job.channel_state == {1: (1, None)}
    log.visible = [3, 4]
    job.step(most=1)
    assert job.channel_state == {1: (2, 3)}


def test_an_empty_range_is_no_channel_state() -> None:
    """The barrier is the next element: there is nothing to replay."""
    job = at_first_barrier(Log.of("a |1 b", "c |1"), UNALIGNED)
    job.offers(1).step(most=0)
    assert job.at == [2, 1]
    assert job.channel_state == {}
    assert [d.upstream for d in job.drawn] == [1]
    job.run()
    assert job.delivered == [["a", "b"], ["c"]]


def test_unaligned_waits_like_aligned_until_a_checkpoint_is_offered() -> None:
    job = at_first_barrier(Log.of("a |1 b", "c d e |1 f"), UNALIGNED)
    job.step(most=1)
    assert (job.at, job.drawn) == ([2, 2], [])
    job.offers(1).step(most=0)
    assert job.drawn[0].cut is not None
    assert job.drawn[0].cut.channel_state == {("t", 1): (2, 3)}


def test_a_savepoint_is_aligned_always() -> None:
    """behaviour 59."""
    job = at_first_barrier(Log.of("a |1 b", "c d e |1 f"), UNALIGNED).offers(1, SAVEPOINT)
    while not job.drawn:
        assert job.step(most=1)
    assert job.channel_state == {}
    assert job.drawn[0].positions == {("t", 0): 2, ("t", 1): 4}


def test_the_next_unaligned_checkpoint_takes_over_what_is_left() -> None:
    log = Log.of("|1 a |2 b", "c d e |1 f |2")
    job = Chained(log, UNALIGNED, behind=0).offers(1)
    job.step(most=2)
    assert job.channel_state == {1: (1, 3)}
    job.offers(2)
    while len(job.drawn) < 2:
        assert job.step(most=2)
    assert job.drawn[1].upstream == 2
    start, end = job.channel_state[1]
    assert (start < 5, end) == (True, 5)
    job.restore(job.drawn[1])
    job.run(most=1)
    assert job.delivered == [["a", "b"], ["c", "d", "e", "f"]]


def test_a_job_rests_at_an_unaligned_cut_once_all_partitions_are_there() -> None:
    job = Chained(Log.of("a |1", "c d |1"), UNALIGNED, behind=0).offers(1)
    job.step(most=2)
    job.run()
    job.offers(2).run()
    assert [(d.checkpoint, d.upstream) for d in job.drawn] == [(1, 1), (2, 1)]
    assert job.drawn[1].cut is not None
    assert not job.drawn[1].cut.channel_state


# -- what unaligned must not name ---------------------------------------------------------------------


def test_the_first_cut_is_aligned() -> None:
    """A source may begin behind some of the barriers: nothing says that the others are still ahead."""
    job = Chained(Log.of("a |1 b |2", "c d e |1 f g h i |2"), UNALIGNED).offers(1)
    while not job.drawn:
        assert job.step(most=1)
    assert (job.at, job.channel_state) == ([2, 4], {})
    job.offers(2)
    while len(job.drawn) < 2:
        assert job.step(most=1)
    assert job.at[0] == 4
    assert job.channel_state[1][1] == 8


@pytest.mark.parametrize("mode", [ALIGNED, UNALIGNED, WITH_TIMEOUT, AT_LEAST_ONCE])
def test_a_job_that_begins_to_look_for_cuts_names_only_true_ones(mode: AlignmentMode) -> None:
    """It stands behind barrier 9 in one partition and in front of it in the other."""
    log = Log.of("x |9 " + "a " * 20 + "|10", "y y |9 b |10")
    job = Chained(log, mode, 0 if mode is WITH_TIMEOUT else None, start={0: 3, 1: 1})
    job.without_cuts().offers(1).run(most=4)
    assert [d.upstream for d in job.drawn] == [10]
    if mode is not AT_LEAST_ONCE:
        assert job.drawn[0].positions == {("t", 0): 23, ("t", 1): 5}
        assert job.skipped == [9]


def test_a_start_behind_some_barriers_is_no_unaligned_cut() -> None:
    """Retention took barrier 1 of partition 1, which was not read at all."""
    log = Log.of("a |1 b |2", "|1 " + "c " * 9 + "|2")
    log.visible = [4, 1]
    job = Chained(log, UNALIGNED, start={0: 0, 1: 1}).offers(1).run()
    assert (job.at, job.drawn) == ([2, 1], [])
    log.visible = [4, 11]
    job.run(most=2)
    assert [d.upstream for d in job.drawn] == [2]
    assert job.drawn[0].positions == {("t", 0): 4, ("t", 1): 11}


@pytest.mark.parametrize("mode", [UNALIGNED, WITH_TIMEOUT])
def test_a_barrier_that_a_partition_has_lost_is_never_drawn_ahead_of(mode: AlignmentMode) -> None:
    """behaviour 97: the newer barrier that is in sight says that the older one will not come."""
    log = Log.of("a |1 b |2", "c d e f g h i |2")
    job = Chained(log, mode, 0 if mode is WITH_TIMEOUT else None, behind=0).offers(1)
    while not job.drawn:
        assert job.step(most=1)
    assert (job.drawn[0].upstream, job.skipped) == (2, [1])
    assert job.channel_state[1][1] == 7


@pytest.mark.parametrize("mode", [ALIGNED, UNALIGNED])
def test_nobody_waits_for_a_barrier_that_a_partition_has_lost(mode: AlignmentMode) -> None:
    job = Chained(Log.of("a |1 b c |2", "d e f g h |2"), mode, behind=0)
    while job.at[0] < 2:
        assert job.step(most=1)
    assert (job.state.gate.blocked, job.skipped) == (frozenset(), [1])


def test_a_checkpoint_that_leaves_out_a_partition_is_no_cut() -> None:
    """Its writer was told two partitions by a broker that did not know of the third yet."""
    log = Log.of("a |1/2 b |2/3", "|1/2 c |2/3", "d e |2/3")
    log.visible = [4, 3, 1]
    job = Chained(log, UNALIGNED, behind=0).offers(1).run()
    assert [d.upstream for d in job.drawn] == [2]
    assert job.skipped == [1]
    assert job.channel_state == {2: (1, None)}


def test_a_partition_that_joined_where_barriers_were_counted_is_waited_for() -> None:
    """It was read without a barrier, so nothing says where it stands once cuts may be unaligned."""
    log = Log.of("|1/1 a |2/2 b |3/2", "n o p |2/2 q |3/2")
    log.lines, second = log.lines[:1], log.lines[1]
    log.visible = [2]
    job = Chained(log, AT_LEAST_ONCE).offers(1).run()
    log.lines.append(second)
    log.visible.append(1)
    job.run()
    assert job.delivered[1] == ["n"]
    job.settings = AlignmentSettings(UNALIGNED)
    log.visible = [5, 2]
    job.offers(2).run()
    assert [d.upstream for d in job.drawn] == [1]
    log.visible = [5, 6]
    job.run()
    assert [d.upstream for d in job.drawn] == [1, 2]
    assert not job.drawn[1].cut.channel_state  # type: ignore[union-attr]


def test_a_cut_is_not_drawn_ahead_of_a_partition_that_it_holds_and_nobody_has_joined_yet() -> None:
    """Partition 2 waits for cut 1, which partition 1 has lost: the next barrier is of a cut that holds it."""
    log = Log.of("|1/2 a |2/3", "b |2/3", "n o |2/3")
    log.visible = [1, 1, 0]
    log.lines, third = log.lines[:2], log.lines[2]
    job = Chained(log, UNALIGNED, behind=0).run()
    log.lines.append(third)
    log.visible = [3, 2, 1]
    job.offers(1).run()
    for drawn in job.drawn:
        assert drawn.cut is not None
        left = drawn.cut.channel_state.get(("t", 2))
        assert (drawn.upstream, left is not None) == (2, True)
    log.visible = [3, 2, 3]
    job.run()
    assert [d.upstream for d in job.drawn] == [2]
    assert job.delivered == [["a"], ["b"], ["n", "o"]]


# -- another mode than before -----------------------------------------------------------------------------


def test_cuts_that_were_only_counted_are_no_cuts_for_another_mode() -> None:
    """One that is pending, and one that nobody has drawn yet."""
    log = Log.of("a |1 b c |2 d", "e |1 f g |2")
    log.visible = [3, 3]
    job = Chained(log, AT_LEAST_ONCE).run()
    assert job.state.is_reached
    log.visible = [5, 3]
    job.run()
    assert [int(alignment.checkpoint) for alignment in job.state.gate.pending] == [2]
    job.settings = AlignmentSettings(ALIGNED)
    log.visible = [6, 5]
    job.offers(1).run()
    assert job.drawn == []
    assert job.skipped == [1, 2]
    assert job.delivered == [["a", "b", "c", "d"], ["e", "f", "g"]]
    for line, end in zip(log.lines, ("x |3", "y |3"), strict=True):
        line += end.split()
    log.visible = [8, 7]
    assert [d.upstream for d in job.run().drawn] == [3]


def test_nobody_waits_any_more_where_barriers_are_only_counted_from_now_on() -> None:
    log = Log.of("a |1 b c", "d e |1 f")
    log.visible = [4, 1]
    job = Chained(log, ALIGNED).run()
    assert job.at == [2, 1]
    job.settings = AlignmentSettings(AT_LEAST_ONCE)
    job.run()
    assert job.at == [4, 1]
    log.visible = [4, 4]
    assert [d.upstream for d in job.offers(1).run().drawn] == [1]


def test_a_replay_comes_to_its_end_where_barriers_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many micro-batches it takes: partition 2 has its barrier next, and is held until then."""
    monkeypatch.setattr(cut_plan, "MOST_MICRO_BATCHES", 3)
    log = Log.of("a |1 b", "c d e f g h |1", "i |1")
    log.visible = [2, 1, 1]
    job = Chained(log, UNALIGNED, behind=0).run()
    log.visible = [3, 6, 2]
    job.offers(1).step(most=0)
    assert job.channel_state == {1: (1, None)}
    job.settings = AlignmentSettings(AT_LEAST_ONCE)
    job.restart().run(most=1)
    assert job.delivered == [["a"], ["c", "d", "e", "f"], ["i"]]
    log.visible = [3, 7, 2]
    job.offers(2).run(most=1)
    assert [d.upstream for d in job.drawn] == [1, 1]
    assert job.delivered == [["a", "b"], ["c", "d", "e", "f", "g", "h"], ["i"]]


# -- alignment timeout --------------------------------------------------------------------------------


def test_an_alignment_that_takes_too_long_becomes_unaligned() -> None:
    """behaviour 118."""
    job = at_first_barrier(Log.of("a |1 b", "c d e f |1"), WITH_TIMEOUT, timeout_ms=100).offers(1)
    job.now_ms = 99
    job.step(most=1)
    assert not job.drawn
    job.now_ms = 100
    job.step(most=1)
    assert [d.upstream for d in job.drawn] == [1]
    assert job.channel_state == {1: (3, 4)}


def test_the_timeout_changes_nothing_once_the_last_barrier_is_there() -> None:
    """behaviour 118: never after the last barrier."""
    job = at_first_barrier(Log.of("a |1 b", "c d e f |1"), WITH_TIMEOUT, timeout_ms=100).offers(1)
    job.now_ms = 500
    job.step()
    assert [d.upstream for d in job.drawn] == [1]
    assert job.channel_state == {}


# -- at least once ------------------------------------------------------------------------------------


def test_at_least_once_nothing_waits() -> None:
    """behaviours 110, 112: drawn when the last partition has passed its barrier."""
    log = Log.of("a |1 b c", "d e |1 f")
    log.visible = [4, 1]
    job = Chained(log, AT_LEAST_ONCE).offers(1).run()
    assert (job.delivered, job.drawn) == ([["a", "b", "c"], ["d"]], [])
    log.visible = [4, 4]
    job.run()
    assert [d.upstream for d in job.drawn] == [1]
    assert job.delivered == [["a", "b", "c"], ["d", "e", "f"]]


def test_at_least_once_the_newest_of_several_cuts_is_named() -> None:
    job = Chained(Log.of("a |1 b |2 c", "|1 d |2 e"), AT_LEAST_ONCE).run()
    assert not job.drawn
    job.offers(1).run()
    assert [d.upstream for d in job.drawn] == [2]
    assert job.skipped == [1]
    assert job.delivered == [["a", "b", "c"], ["d", "e"]]


# -- what it took -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(AlignmentMode))
def test_the_time_that_an_alignment_took_is_part_of_its_cut(mode: AlignmentMode) -> None:
    """behaviour 108. The barrier records were written at time 0."""
    log = Log.of("a |1 b", "c d |1")
    log.visible = [2, 1]
    job = Chained(log, mode, 30 if mode is WITH_TIMEOUT else None)
    job.now_ms = 10
    job.run()
    log.visible = [3, 3]
    job.now_ms = 50
    job.offers(1).step()
    cut = job.drawn[0].cut
    assert cut is not None
    assert (cut.start_delay_ms, cut.alignment_ms) == (10, 40)


def test_an_unaligned_alignment_is_over_when_all_barriers_are_in_sight() -> None:
    """behaviour 108."""
    job = at_first_barrier(Log.of("a |1 b", "c d e |1"), UNALIGNED)
    job.now_ms = 7
    job.offers(1).step(most=0)
    assert job.drawn[0].cut is not None
    assert (job.drawn[0].cut.alignment_ms, job.channel_state) == (7, {1: (1, 3)})


# -- bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ALIGNED, AT_LEAST_ONCE])
def test_micro_batches_between_two_checkpoints_are_bounded(
    mode: AlignmentMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_plan, "MOST_MICRO_BATCHES", 5)
    log = Log.of("a " * 30 + "|1 x", "b " * 20 + "|1")
    log.visible = [25, 21]
    job = Chained(log, mode).offers(1).run(most=2)
    # Not before the barriers are there.
    assert job.state.micro_batches == 5
    assert not job.drawn
    log.visible = [32, 21]
    job.run(most=2)
    assert [d.upstream for d in job.drawn] == [1]
    assert job.delivered == [["a"] * 30 + ["x"], ["b"] * 20]


def test_at_least_once_the_bound_looks_only_at_partitions_that_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cut_plan, "MOST_MICRO_BATCHES", 3)
    log = Log.of("|1 a b c d e f g h", "b " * 20 + "|1")
    job = Chained(log, AT_LEAST_ONCE).offers(1).run(most=2)
    assert [d.upstream for d in job.drawn] == [1]
    assert job.delivered == [list("abcdefgh"), ["b"] * 20]


def test_channels_are_named_after_partitions() -> None:
    assert place_of(channel_of(("a.b-c", 12))) == ("a.b-c", 12)
