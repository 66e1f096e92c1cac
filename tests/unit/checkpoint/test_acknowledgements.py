"""What the acknowledgements of sinks tell about participants and channels, and what they do not."""

from __future__ import annotations

from flinkish_spark.checkpoint.statistics import Acknowledgements
from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Barrier, SinkAck, StagedBatch, TaskAck
from flinkish_spark.protocol.statistics import ChannelStatistics, ParticipantStatistics

K = ParticipantKind
ID = CheckpointId(3)


def task(partition: int, rows: int, *channels: int, checkpoint: int = 3) -> TaskAck:
    barriers = tuple(Barrier(CheckpointId(checkpoint), channel) for channel in channels)
    return TaskAck(partition, rows, 0, barriers)


def staged(number: int, **tasks: tuple[TaskAck, ...]) -> StagedBatch:
    acks = tuple(SinkAck(uid, seen) for uid, seen in tasks.items())
    return StagedBatch(Lineage(0), BatchId(number), OwnerEpoch(1), number, acks, ())


def decided(*batches: StagedBatch, **more) -> Decision:
    return Decision(ID, Verdict.COMMIT, OwnerEpoch(1), 0, batches=batches, **more)


def of(*batches: StagedBatch, at_most: int = 100) -> dict[str, ParticipantStatistics]:
    known = Acknowledgements()
    for number, batch in enumerate(batches):
        if ID in batch.checkpoints:
            known.note_staged(batch, 1_000 + 10 * number)
    return {one.uid: one for one in known.describe_completed(decided(*batches), {}, at_most)[0]}


def test_rows_are_those_of_all_micro_batches_and_of_a_channel_those_that_came_with_its_barrier() -> None:
    """Behind a keyed operator a task of the sink reads one shuffle partition, which is one channel."""
    found = of(
        staged(0, out=(task(0, 100), task(1, 200))),
        staged(1, out=(task(0, 5, 0), task(1, 7, 1))),
    )
    assert (found["out"].rows, found["out"].barriers) == (312, 2)
    assert found["out"].channels == (ChannelStatistics("0", 1, 5), ChannelStatistics("1", 1, 7))


def test_rows_that_came_without_a_barrier_belong_to_no_channel() -> None:
    """The control source is one channel for all partitions of the input: its rows are elsewhere."""
    found = of(staged(0, out=(task(0, 5), task(1, 7), task(2, 0, 0))))
    assert found["out"].channels == (ChannelStatistics("0", 1, None),)
    # Where nothing came at all, nothing came through the channel.
    assert of(staged(0, out=(task(0, 0), task(1, 0, 0))))["out"].channels == (ChannelStatistics("0", 1, 0),)


def test_rows_of_a_task_with_several_channels_cannot_be_told_apart() -> None:
    found = of(staged(0, out=(task(0, 5, 0, 1), task(1, 7, 2))))
    assert [channel.rows for channel in found["out"].channels] == [None, None, None]


def test_barriers_of_other_checkpoints_are_not_counted() -> None:
    found = of(staged(0, out=(task(0, 5, 0), task(1, 1, 1, checkpoint=2))))
    assert (found["out"].barriers, [c.channel for c in found["out"].channels]) == (1, ["0"])


def test_channels_that_wait_for_others_say_how_long() -> None:
    """Behaviour 108 in the mode AT_LEAST_ONCE, where barriers come with several micro-batches."""
    found = of(
        staged(0, a=(task(0, 1, 0),), b=(task(0, 1),)),
        staged(1, a=(task(0, 1),), b=(task(0, 1, 0, 0),)),
    )
    assert found["a"].channels == (ChannelStatistics("0", 1, 1, alignment_ms=10),)
    assert found["b"].channels == (ChannelStatistics("0", 2, None, alignment_ms=0),)
    again = of(staged(0, a=(task(0, 1, 0),)), staged(1, a=(task(0, 4, 0),)))
    assert again["a"].channels == (ChannelStatistics("0", 2, 5, alignment_ms=0),)


def test_channels_beyond_the_limit_are_counted_and_not_looked_at() -> None:
    batch = staged(0, a=(task(0, 0, *range(4)),), b=(task(0, 0, 0),), c=(task(0, 0, *range(3)),))
    known = Acknowledgements()
    participants, unlisted = known.describe_completed(decided(batch), {"a": 4}, 5)
    assert [(one.uid, len(one.channels), one.barriers) for one in participants] == [
        ("a", 0, 4),
        ("b", 1, 1),
        ("c", 0, 3),
    ]
    assert (unlisted, participants[0].commit_ms) == (7, 4)


def test_a_decision_of_another_process_names_its_sinks_and_hooks() -> None:
    decision = decided(staged(0, out=(task(0, 5, 0),)), hook_states={"catalog": None})
    participants, _ = Acknowledgements().describe_completed(decision, {}, 10)
    assert [(one.uid, one.kind, one.ack_ms) for one in participants] == [
        ("out", K.SINK, None),
        ("catalog", K.HOOK, None),
    ]


def test_the_first_acknowledgement_counts() -> None:
    sink = Participant(K.SINK, "out")
    known = Acknowledgements((sink, Participant(K.OPERATOR, "sum")))
    known.note([sink], 30)
    known.note([sink], 90)
    assert [(one.uid, one.ack_ms) for one in known.describe_failed(ID)] == [("sum", None), ("out", 30)]
    assert known.durations(100).alignment_ms is None
