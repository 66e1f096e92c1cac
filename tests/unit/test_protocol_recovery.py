"""The recovery's rules as literal facts, and its termination over random ones."""

import random

import pytest

from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage
from flinkish_spark.protocol.recovery import (
    AbortStaged,
    Confirm,
    DecidedFact,
    FinishRewind,
    RecoveryFacts,
    RestoreLog,
    Rewind,
    StagedFact,
    StartSpark,
    SweepLeftovers,
    next_step,
)


def batches(*numbers):
    return frozenset(BatchId(n) for n in numbers)


def decided(checkpoint, batch, receipt=True):
    return DecidedFact(CheckpointId(checkpoint), BatchId(batch), receipt)


def staged(batch, dead="", attempt=1):
    return StagedFact(BatchId(batch), f"{batch}-1.{attempt}", dead)


def facts(offsets=(), commits=(), done=(), files=(), rewind=False, swept=True):
    return RecoveryFacts(
        rewind, Lineage(0), batches(*offsets), batches(*commits), tuple(done), tuple(files), swept
    )


@pytest.mark.parametrize(
    "given,step",
    [
        (facts(), StartSpark(BatchId(0), ())),
        (facts(swept=False), SweepLeftovers()),
        (facts(rewind=True, commits=[1], done=[decided(1, 5, receipt=False)]), FinishRewind()),
        (facts([0, 1], [0], [decided(1, 1)]), RestoreLog(CheckpointId(1))),
        (facts([0], [0, 1], [decided(1, 1, receipt=False)]), RestoreLog(CheckpointId(1))),
        (facts([0, 1], [0, 1], [decided(1, 1, receipt=False)]), Confirm(CheckpointId(1))),
        (facts([0, 1, 2], [0, 1], [decided(1, 1)], [staged(2)]), AbortStaged(("2-1.1",), "")),
        (facts([0, 1, 2], [0, 1, 2], [decided(1, 1)], [staged(2)]), StartSpark(BatchId(3), (BatchId(2),))),
        (facts([0, 1, 2], [0, 1, 2], [decided(1, 1)], [staged(2, "gone")]), AbortStaged(("2-1.1",), "")),
        (facts([0, 1, 2], [0, 1, 2], [decided(1, 1)]), Rewind(BatchId(2), "")),
        (facts([0, 1], [0, 1], [], [staged(1)]), AbortStaged(("1-1.1",), "")),
        (facts([0, 1], [1], [], [staged(1)]), AbortStaged(("1-1.1",), "")),
        (facts([0, 1], [1]), Rewind(BatchId(0), "")),
        (facts([0], [0], [], [staged(0), staged(0, attempt=2)]), AbortStaged(("0-1.1", "0-1.2"), "")),
        (facts([0, 1], [0, 1], [decided(1, 0), decided(2, 1)]), StartSpark(BatchId(2), ())),
    ],
)
def test_the_next_step(given, step):
    answer = next_step(given)
    assert type(answer) is type(step)
    for name in answer.__slots__:
        if name != "reason":
            assert getattr(answer, name) == getattr(step, name)
    assert getattr(answer, "reason", "stated") != ""


def carry_out(step, given):
    """Return the facts after a step, as the recovery of the runtime changes them."""
    change = {name: getattr(given, name) for name in given.__slots__}
    match step:
        case FinishRewind():
            change["rewind_is_open"] = False
        case RestoreLog(checkpoint):
            batch = next(d.batch for d in given.decided if d.checkpoint == checkpoint)
            change["commits"], change["offsets"] = given.commits | {batch}, given.offsets | {batch}
        case Confirm(checkpoint):
            change["decided"] = tuple(
                DecidedFact(d.checkpoint, d.batch, d.has_receipt or d.checkpoint == checkpoint)
                for d in given.decided
            )
        case AbortStaged(attempts, _):
            change["staged"] = tuple(s for s in given.staged if s.attempt not in attempts)
        case Rewind(first, _):
            change["commits"] = frozenset(b for b in given.commits if b < first)
            change["offsets"] = frozenset(b for b in given.offsets if b < first)
        case SweepLeftovers():
            change["leftovers_are_swept"] = True
    return RecoveryFacts(**change)


def random_facts(rng):
    newest = rng.randint(0, 6)
    numbers = range(newest + 1)
    done, batch = [], -1
    for checkpoint in range(1, rng.randint(1, 3)):
        batch = rng.randint(batch + 1, batch + 3)
        done.append(decided(checkpoint, batch, rng.random() < 0.7))
    files = [
        staged(n, "dead" if rng.random() < 0.3 else "", attempt)
        for n in range(newest + 2)
        for attempt in range(rng.choice([0, 1, 1, 1, 2]))
        if n > batch
    ]
    return facts(
        [n for n in numbers if rng.random() < 0.95],
        [n for n in numbers if rng.random() < 0.85],
        done,
        files,
        rewind=rng.random() < 0.1,
        swept=False,
    )


def test_every_recovery_ends_and_keeps_only_what_is_alive():
    rng = random.Random(7)
    for _ in range(5_000):
        given = random_facts(rng)
        for _ in range(50):
            step = next_step(given)
            if isinstance(step, StartSpark):
                break
            given = carry_out(step, given)
        assert isinstance(step, StartSpark)
        assert all(d.has_receipt for d in given.decided)
        assert given.leftovers_are_swept and not given.rewind_is_open
        newest = max((d.batch.value for d in given.decided), default=-1)
        assert [b.value for b in step.kept] == list(range(newest + 1, step.next_batch.value))
        for batch in step.kept:
            (only,) = [s for s in given.staged if s.batch == batch]
            assert not only.dead
        assert not [s for s in given.staged if s.batch >= step.next_batch]
