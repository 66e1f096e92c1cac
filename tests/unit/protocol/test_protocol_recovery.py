"""The recovery's rules as literal facts, and its termination over arbitrary ones."""

from dataclasses import replace

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.recovery import (
    RULES,
    AbortStagedFiles,
    Confirm,
    DecidedFact,
    FinishRewind,
    OrderFact,
    Pin,
    RecoveryFacts,
    RefuseOrder,
    Replay,
    Reseed,
    RestoreLog,
    Rewind,
    StagedFact,
    StartSpark,
    SweepLeftovers,
    TrimLog,
    drop_leftovers,
    next_step,
)
from tests.support.effort import examples
from tools.tables import recovery_table

EVERY_ID = frozenset(CheckpointId(n) for n in range(1, 20))


def batches(*numbers):
    return frozenset(BatchId(n) for n in numbers)


def decided(checkpoint, batch, receipt=True, lineage=0):
    return DecidedFact(CheckpointId(checkpoint), BatchId(batch), receipt, Lineage(lineage))


def staged(batch, dead="", attempt=1):
    return StagedFact(BatchId(batch), f"{batch}-1.{attempt}", dead)


def ahead(batch):
    return replace(staged(batch), overtakes="topic")


def ordered(target, refusal=""):
    return OrderFact("order", CheckpointId(target), refusal)


def test_of_decisions_without_receipt_only_the_newest_counts() -> None:
    """The others are a zombie's: n+1 is never decided before n's receipt is durable."""
    zombie, complete, newest = decided(3, 7, receipt=False), decided(4, 8), decided(5, 9, receipt=False)
    assert drop_leftovers([newest, zombie, complete]) == (complete, newest)
    assert drop_leftovers([]) == ()


def facts(offsets=(), commits=(), done=(), files=(), rewind=False, swept=True, **more):
    more.setdefault("pinned", EVERY_ID)
    return RecoveryFacts(
        rewind, Lineage(0), batches(*offsets), batches(*commits), tuple(done), tuple(files), swept, **more
    )


LOST_2 = {"lost": frozenset({CheckpointId(2)})}
RESEEDED = {"log_began_in": Lineage(3)}


@pytest.mark.parametrize(
    "given,step",
    [
        # Nothing was ever decided; behaviour 89.
        (facts(), StartSpark(BatchId(0), ())),
        (facts(swept=False), SweepLeftovers()),
        (facts([0, 1, 3, 4], [0, 1], [decided(1, 1)]), TrimLog((BatchId(4), BatchId(3)))),
        (facts(rewind=True, commits=[1], done=[decided(1, 5, receipt=False)]), FinishRewind()),
        (facts(rewind=True, order=ordered(1)), FinishRewind()),
        # The log.
        (facts([0, 1], [0], [decided(1, 1)]), RestoreLog(CheckpointId(1))),
        (facts([0], [0, 1], [decided(1, 1, receipt=False)]), RestoreLog(CheckpointId(1))),
        (facts([1], [0, 1], [decided(1, 1)]), RestoreLog(CheckpointId(1))),
        (facts([0], [0], [decided(1, 0)]), StartSpark(BatchId(1), ())),
        # Receipts, behaviour 133, and pins.
        (facts([0, 1], [0, 1], [decided(1, 1, receipt=False)]), Confirm(CheckpointId(1))),
        (facts([0, 1], [0, 1], [decided(1, 0, receipt=False), decided(2, 1)]), Confirm(CheckpointId(1))),
        (facts([0, 1], [0, 1], [decided(1, 1)], pinned=frozenset()), Pin(CheckpointId(1))),
        (
            facts([0, 1], [0, 1], [decided(1, 1, receipt=False)], pinned=frozenset()),
            Confirm(CheckpointId(1)),
        ),
        # What is not decided; behaviours 127, 143.
        (facts([0, 1, 2], [0, 1], [decided(1, 1)], [staged(2)]), AbortStagedFiles(("2-1.1",), "")),
        (facts([0, 1, 2], [0, 1, 2], [decided(1, 1)], [staged(2)]), StartSpark(BatchId(3), (BatchId(2),))),
        (facts([0, 1, 2], [0, 1, 2], [decided(1, 1)], [staged(2, "gone")]), AbortStagedFiles(("2-1.1",), "")),
        (facts([0, 1, 2], [0, 1, 2], [decided(1, 1)]), Rewind(BatchId(2), "", CheckpointId(1))),
        (facts([0, 1], [0, 1], [], [staged(1)]), AbortStagedFiles(("1-1.1",), "")),
        (facts([0, 1], [1], [], [staged(1)]), AbortStagedFiles(("1-1.1",), "")),
        (facts([0, 1], [1]), Rewind(BatchId(0), "")),
        (facts([0], [0], [], [staged(0), staged(0, attempt=2)]), AbortStagedFiles(("0-1.1", "0-1.2"), "")),
        (facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1)]), StartSpark(BatchId(2), ())),
        # A staged file that a crash left behind a receipt is no reason to abort anything.
        (facts([0, 1], [0, 1], [decided(1, 1)], [staged(1)], swept=False), SweepLeftovers()),
        # Orders.
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1)], order=ordered(1)),
            Rewind(BatchId(1), "", CheckpointId(1), "order"),
        ),
        (
            facts([0, 1], [0, 1], [decided(1, 1)], order=ordered(1)),
            Rewind(BatchId(2), "", CheckpointId(1), "order"),
        ),
        (
            facts([0, 1, 2], [0, 1, 2], [decided(1, 1)], [staged(2)], order=ordered(1)),
            AbortStagedFiles(("2-1.1",), ""),
        ),
        (facts([0, 1], [0, 1], [decided(1, 1)], order=ordered(1, "no")), RefuseOrder("order", "no")),
        (facts([0, 1], [0, 1], [decided(1, 1)], order=ordered(7)), RefuseOrder("order", "")),
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1, False)], order=ordered(1)),
            Confirm(CheckpointId(2)),
        ),
        # An order leaves a lost checkpoint behind, if it goes back to before it; behaviour 128.
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1, False)], order=ordered(1), **LOST_2),
            Rewind(BatchId(1), "", CheckpointId(1), "order"),
        ),
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1, False)], order=ordered(2), **LOST_2),
            Replay(CheckpointId(2)),
        ),
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1, False)], order=ordered(1, "no"), **LOST_2),
            RefuseOrder("order", "no"),
        ),
        # Without an order it is replayed, before anything that needs it confirmed.
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1, False)], [staged(2)], **LOST_2),
            Replay(CheckpointId(2)),
        ),
        (
            facts([0, 1], [0, 1], [decided(1, 0, False), decided(2, 1, False)], **LOST_2),
            Confirm(CheckpointId(1)),
        ),
        # What readers would see before it goes first, and whatever is staged behind that, too.
        (
            facts([0, 1, 2], [0, 1, 2], [decided(2, 0, False)], [staged(1), ahead(2)], **LOST_2),
            AbortStagedFiles(("1-1.1", "2-1.1"), "sink 'topic' must stage earlier data again"),
        ),
        (
            facts([0, 1], [0, 1], [decided(2, 0, False)], [ahead(1)], pinned=frozenset(), **LOST_2),
            Pin(CheckpointId(2)),
        ),
        (
            facts([0, 1], [0], [decided(2, 0, False)], [ahead(1)], **LOST_2),
            AbortStagedFiles(("1-1.1",), "sink 'topic' must stage earlier data again"),
        ),
        (
            facts([0, 1], [0, 1], [decided(2, 0, False)], [ahead(1)], order=ordered(7), **LOST_2),
            RefuseOrder("order", ""),
        ),
        (facts([0, 1], [0, 1], [decided(2, 0)], [ahead(1)], **LOST_2), StartSpark(BatchId(2), (BatchId(1),))),
        # A log that began anew counts micro-batches from 0 again.
        (facts([], [], [decided(4, 57)], **RESEEDED), StartSpark(BatchId(0), ())),
        (facts([], [], [decided(4, 57, False)], **RESEEDED), Confirm(CheckpointId(4))),
        (
            facts([0], [0], [decided(4, 57), decided(5, 0, lineage=3)], **RESEEDED),
            StartSpark(BatchId(1), ()),
        ),
        (
            facts([0], [0], [decided(4, 57), decided(5, 0, lineage=3)], order=ordered(4), **RESEEDED),
            RefuseOrder("order", ""),
        ),
        (facts([0], [0], [decided(4, 57)], [staged(0)], **RESEEDED), StartSpark(BatchId(1), (BatchId(0),))),
        # Beginning anew.
        (
            facts([0, 1], [0, 1], [decided(1, 1)], reseed_is_wanted=True),
            Reseed(BatchId(2), CheckpointId(1)),
        ),
        (facts(reseed_is_wanted=True), Reseed(BatchId(0), None)),
        (
            facts([0, 1, 2], [0, 1, 2], [decided(1, 1)], [staged(2)], reseed_is_wanted=True),
            AbortStagedFiles(("2-1.1",), ""),
        ),
        (
            facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1)], order=ordered(1), reseed_is_wanted=True),
            Rewind(BatchId(1), "", CheckpointId(1), "order"),
        ),
    ],
)
def test_the_next_step(given, step):
    answer = next_step(given)
    assert type(answer) is type(step)
    for name in answer.__slots__:
        if name != "reason" or getattr(step, name):
            assert getattr(answer, name) == getattr(step, name)
    assert getattr(answer, "reason", "stated") != ""


# -- any facts ----------------------------------------------------------------------------------------


class World:
    """Facts that change as the runtime changes them when it carries a step out."""

    def __init__(self, given):
        self.facts = given
        self.intent = None
        #: What was staged again; on disk.
        self.restaged = set()

    def change(self, **what):
        self.facts = replace(self.facts, **what)

    def carry_out(self, step):
        now = self.facts
        match step:
            case FinishRewind():
                self.finish()
            case RestoreLog(checkpoint):
                at = next(d.batch for d in now.decided if d.checkpoint == checkpoint)
                before = batches(*([at.value - 1] if at.value else []))
                self.change(commits=now.commits | {at}, offsets=now.offsets | {at} | before)
            case Confirm(checkpoint):
                # Some of them have lost something: a valid order leaves them behind, else they are replayed.
                if checkpoint.value % 3 == 0 and checkpoint not in self.restaged:
                    self.change(lost=now.lost | {checkpoint})
                    return
                marked = [
                    replace(d, has_receipt=d.has_receipt or d.checkpoint == checkpoint) for d in now.decided
                ]
                self.change(decided=tuple(marked))
            case Replay(checkpoint):
                assert not [s for s in now.undecided if s.overtakes]
                self.restaged.add(checkpoint)
                self.change(lost=now.lost - {checkpoint})
            case Pin(checkpoint):
                self.change(pinned=now.pinned | {checkpoint})
            case RefuseOrder(order_id, reason):
                assert order_id == now.order.order_id and reason
                self.change(order=None)
            case AbortStagedFiles(attempts, _):
                assert attempts
                self.change(staged=tuple(s for s in now.staged if s.attempt not in attempts))
            case Rewind() | Reseed():
                self.intent = step
                self.change(rewind_is_open=True)
            case TrimLog(entries):
                assert list(entries) == sorted(entries, reverse=True)
                self.change(offsets=now.offsets - set(entries))
            case SweepLeftovers():
                self.change(leftovers_are_swept=True)

    def finish(self):
        now, intent, self.intent = self.facts, self.intent, None
        self.change(rewind_is_open=False)
        if intent is None:
            return
        lineage = now.lineage.next()
        self.change(lineage=lineage, staged=())
        if isinstance(intent, Reseed):
            none = frozenset()
            self.change(offsets=none, commits=none, pinned=none, log_began_in=lineage, reseed_is_wanted=False)
            return
        below = {"offsets": now.offsets, "commits": now.commits}
        self.change(**{k: frozenset(b for b in v if b < intent.first_removed) for k, v in below.items()})
        if intent.order_id:
            alive = tuple(d for d in now.decided if d.checkpoint <= intent.target)
            self.change(decided=alive, order=None)


def counts(cls, least=0, most=8):
    return st.integers(least, most).map(cls)


ANY_FACTS = st.builds(
    RecoveryFacts,
    rewind_is_open=st.booleans(),
    lineage=st.just(Lineage(5)),
    offsets=st.frozensets(counts(BatchId)),
    commits=st.frozensets(counts(BatchId)),
    decided=st.lists(
        st.builds(
            DecidedFact, counts(CheckpointId, 1, 7), counts(BatchId), st.booleans(), counts(Lineage, 0, 5)
        ),
        unique_by=lambda d: d.checkpoint,
        max_size=4,
    ).map(tuple),
    staged=st.lists(
        st.builds(
            StagedFact,
            counts(BatchId),
            st.uuids().map(str),
            st.sampled_from(["", "", "dead"]),
            st.sampled_from(["", "", "topic"]),
        ),
        max_size=5,
    ).map(tuple),
    leftovers_are_swept=st.booleans(),
    log_began_in=counts(Lineage, 0, 5),
    pinned=st.frozensets(counts(CheckpointId, 1, 7)),
    order=st.none()
    | st.builds(OrderFact, st.just("order"), counts(CheckpointId, 1, 7), st.sampled_from(["", "", "no"])),
    reseed_is_wanted=st.booleans(),
    lost=st.frozensets(counts(CheckpointId, 1, 7)),
)


def run(world, steps=40):
    """Carry out steps until Spark may start, or until there were `steps` of them; return the last."""
    for _ in range(steps):
        step = next_step(world.facts)
        if isinstance(step, StartSpark):
            return step
        world.carry_out(step)
    return None


@settings(max_examples=examples(400), deadline=None)
@for_all(ANY_FACTS)
def test_whatever_the_facts_recovery_comes_to_an_end_and_keeps_only_what_is_alive(given):
    world = World(given)
    step = run(world)
    assert isinstance(step, StartSpark)
    now = world.facts
    assert all(d.has_receipt for d in now.decided)
    assert now.leftovers_are_swept and not now.rewind_is_open and not now.order and not now.reseed_is_wanted
    newest = now.newest
    if newest is not None:
        assert newest.batch in now.offsets & now.commits and newest.checkpoint in now.pinned
        assert newest.batch == BatchId(0) or BatchId(newest.batch.value - 1) in now.offsets
    assert [b.value for b in step.kept] == list(range(now.first_open.value, step.next_batch.value))
    for batch in step.kept:
        (only,) = [s for s in now.staged if s.batch == batch]
        assert not only.dead
    assert not [s for s in now.staged if s.batch >= step.next_batch]


@settings(max_examples=examples(250), deadline=None)
@for_all(ANY_FACTS, st.integers(0, 12))
def test_a_recovery_that_is_cut_off_anywhere_ends_the_same(given, steps):
    given = replace(given, lost=frozenset())
    straight, cut_off = World(given), World(given)
    run(cut_off, steps)
    # What a process has in memory goes with it.
    cut_off.change(lost=frozenset(), leftovers_are_swept=False)
    assert run(cut_off) == run(straight)
    assert cut_off.facts == replace(straight.facts, lost=cut_off.facts.lost)


# -- the table ----------------------------------------------------------------------------------------


def test_the_table_prints_every_rule_in_order():
    lines = recovery_table().splitlines()
    assert len(lines) == 2 + len(RULES)
    assert lines[2].startswith("| 1 | a rewind was begun (`rewinding/<lineage>.json`) | finish")
    assert lines[-1].startswith(f"| {len(RULES)} | nothing left | start Spark")
    assert all(line.count(" | ") == 3 for line in lines[2:])
