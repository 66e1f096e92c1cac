"""Who acknowledged a checkpoint, when, and what each participant did: noted while it runs.

Sinks report rows and barriers with the staged micro-batch. Operators and hooks report nothing but
that they have acknowledged: what an operator does inside a micro-batch cannot be seen from here.
A job may have thousands of participants and channels, so no more of them are looked at than are
listed in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.late_records import late_of
from flinkish_spark.protocol.records import SinkAck, StagedBatch
from flinkish_spark.protocol.statistics_participants import ChannelStatistics, ParticipantStatistics

#: What a sink reported, and the monotonic milliseconds at which it was staged; None if it brought no
#: barrier, or an earlier process staged it.
_Reported = tuple[SinkAck, int | None]


@dataclass(slots=True)
class _Channel:
    """What one channel brought to a sink."""

    barriers: int = 0
    rows: int | None = 0
    staged_ms: int | None = None


class Acknowledgements:
    """Of one checkpoint in flight; owned by the coordinator's thread.

    Parameters
    ----------
    asked
        Who has to acknowledge; empty for a checkpoint that another process began.
    """

    def __init__(self, asked: Collection[Participant] = ()) -> None:
        self._asked = asked
        self._after_ms: dict[Participant, int] = {}
        #: What carried a barrier, and when it was staged.
        self._staged: list[tuple[StagedBatch, int]] = []

    def note(self, participants: Iterable[Participant], after_ms: int) -> None:
        """Note who has acknowledged, so many milliseconds after the request; the first time counts."""
        for participant in participants:
            self._after_ms.setdefault(participant, after_ms)

    def note_hooks(self, after_ms: int) -> None:
        """Note that all hooks have acknowledged: the barrier goes out."""
        self.note((p for p in self._asked if p.kind is ParticipantKind.HOOK), after_ms)

    def note_staged(self, staged: StagedBatch, now_ms: int) -> None:
        """Note a micro-batch that carried a barrier."""
        self._staged.append((staged, now_ms))

    @property
    def alignment_ms(self) -> int | None:
        """From the first micro-batch with a barrier to the last; None for fewer than two."""
        return None if len(self._staged) < 2 else max(0, self._staged[-1][1] - self._staged[0][1])

    def of_failed(self, checkpoint: CheckpointId) -> Iterator[ParticipantStatistics]:
        """Yield who had not acknowledged, then who had, with the barriers that came."""
        reported = _by_sink(self._staged)
        for one in sorted(self._asked, key=lambda p: (p in self._after_ms, p.kind.value, p.uid)):
            seen = reported.get(one.uid, []) if one.kind is ParticipantKind.SINK else None
            yield ParticipantStatistics(
                one.uid,
                one.kind,
                is_acknowledged=one in self._after_ms,
                ack_ms=self._after_ms.get(one),
                sync_ms=_sync_ms_in(seen) if seen else None,
                barriers=None if seen is None else len(_rows_and_channels(checkpoint, seen)[1]),
                channels=() if seen is None else self._channels(checkpoint, seen),
            )

    def of_completed(
        self, decision: Decision, commit_ms: Mapping[str, int], at_most: int
    ) -> tuple[tuple[ParticipantStatistics, ...], int]:
        """Return what each participant did, and how many more channels there are; all have acknowledged.

        Parameters
        ----------
        commit_ms
            How long the commits took, by sink, as far as it was measured.
        at_most
            How many participants and channels are wanted; all participants come in any case.
        """
        checkpoint, unlisted = decision.checkpoint, 0
        staged_ms = {int(staged.batch): now_ms for staged, now_ms in self._staged}
        reported = _by_sink((batch, staged_ms.get(int(batch.batch))) for batch in decision.batches)
        known = self._after_ms or dict.fromkeys(_hooks_of(decision))
        of_sinks = {p.uid: after_ms for p, after_ms in known.items() if p.kind is ParticipantKind.SINK}
        others = [item for item in known.items() if item[0].kind is not ParticipantKind.SINK]
        room = at_most - len(reported) - len(others)
        result = []
        for uid, seen in reported.items():
            rows, shown = _rows_and_channels(checkpoint, seen)
            count = len(shown) if len(shown) < 2 else len(set(shown))
            fits = count <= room
            room, unlisted = (room - count, unlisted) if fits else (room, unlisted + count)
            result.append(
                ParticipantStatistics(
                    uid,
                    ParticipantKind.SINK,
                    ack_ms=of_sinks.get(uid),
                    rows=rows,
                    bytes=_bytes_in(seen),
                    sync_ms=_sync_ms_in(seen),
                    commit_ms=commit_ms.get(uid),
                    barriers=len(shown),
                    channels=self._channels(checkpoint, seen) if fits else (),
                )
            )
        late = late_of(decision.batches)
        for one, after_ms in others:
            dropped = late.get(one.uid) if one.kind is ParticipantKind.OPERATOR else None
            result.append(ParticipantStatistics(one.uid, one.kind, ack_ms=after_ms, late_dropped=dropped))
        return tuple(result), unlisted

    def _channels(self, checkpoint: CheckpointId, seen: Sequence[_Reported]) -> tuple[ChannelStatistics, ...]:
        channels: dict[int, _Channel] = {}
        for ack, staged_ms in seen:
            _add_channels(channels, checkpoint, ack, staged_ms)
        last_ms = self._staged[-1][1] if len(self._staged) > 1 else None
        return tuple(
            ChannelStatistics(
                str(number),
                one.barriers,
                one.rows,
                alignment_ms=None if last_ms is None or one.staged_ms is None else last_ms - one.staged_ms,
            )
            for number, one in sorted(channels.items())
        )


def _by_sink(batches: Iterable[tuple[StagedBatch, int | None]]) -> dict[str, list[_Reported]]:
    found: dict[str, list[_Reported]] = {}
    for staged, staged_ms in batches:
        for ack in staged.acks:
            found.setdefault(ack.sink, []).append((ack, staged_ms))
    return found


def _bytes_in(seen: Sequence[_Reported]) -> int | None:
    """Return what a sink staged; None if one of its micro-batches does not tell."""
    total = 0
    for ack, _ in seen:
        if ack.bytes is None:
            return None
        total += ack.bytes
    return total


def _sync_ms_in(seen: Sequence[_Reported]) -> int | None:
    """Return how long a sink took to stage the last micro-batch: the one that completed the barrier."""
    return seen[-1][0].sync_ms


def _rows_and_channels(checkpoint: CheckpointId, seen: Sequence[_Reported]) -> tuple[int, list[int]]:
    """Return the rows that a sink reported, and the channel of every barrier of the checkpoint."""
    number, rows, channels = checkpoint.value, 0, []
    for ack, _ in seen:
        for task in ack.tasks:
            rows += task.rows
            for barrier in task.barriers:
                if barrier.checkpoint.value == number:
                    channels.append(barrier.channel)
    return rows, channels


def _add_channels(
    channels: dict[int, _Channel], checkpoint: CheckpointId, ack: SinkAck, staged_ms: int | None
) -> None:
    """Add what a sink reported of each channel with one micro-batch."""
    # A task that showed one channel's barrier read that channel and no other. Rows of a task that
    # showed none, or several, cannot be told apart.
    rows: dict[int, int] = {}
    is_told_apart = True
    for task in ack.tasks:
        shown = [barrier.channel for barrier in task.barriers if barrier.checkpoint == checkpoint]
        is_told_apart = is_told_apart and (len(shown) == 1 or not task.rows)
        for number in shown:
            rows[number] = rows.get(number, 0) + task.rows
            channel = channels.setdefault(number, _Channel())
            channel.barriers += 1
            channel.staged_ms = staged_ms
    for number, count in rows.items():
        channel = channels[number]
        channel.rows = channel.rows + count if is_told_apart and channel.rows is not None else None


def _hooks_of(decision: Decision) -> list[Participant]:
    """Return the hooks that a decision names; the operators of another process are not known."""
    return [Participant(ParticipantKind.HOOK, name) for name in sorted(decision.hook_states)]
