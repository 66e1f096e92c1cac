"""From the acknowledgements of a staged micro-batch to the participants that have acknowledged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flinkish_spark.config import CheckpointingMode
from flinkish_spark.protocol.alignment import Alignment, ExpectedChannels, count_barriers, sinks_reached
from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import StagedBatch


class BarriersDoNotAddUp(Exception):
    """A barrier is missing, doubled or strange; says which. Declines the checkpoint."""


class BarrierCounter:
    """Counts the barriers of the checkpoints in flight; owned by the coordinator's thread.

    Parameters
    ----------
    channels
        By sink uid, the channels whose barriers it must see.
    operators
        Uids of the keyed operators. They let a barrier through only when every channel showed it:
        where all sinks have it, all operators had it.
    """

    def __init__(
        self, channels: Mapping[str, ExpectedChannels], operators: Iterable[str], mode: CheckpointingMode
    ) -> None:
        self._channels, self._mode = channels, mode
        self._operators = tuple(Participant(ParticipantKind.OPERATOR, uid) for uid in operators)
        self._reached: dict[CheckpointId, set[str]] = {}

    @property
    def participants(self) -> tuple[Participant, ...]:
        """Return the sinks and operators that have to acknowledge each checkpoint."""
        return (*(Participant(ParticipantKind.SINK, uid) for uid in self._channels), *self._operators)

    def count(self, checkpoint: CheckpointId, staged: StagedBatch) -> tuple[Participant, ...]:
        """Return who acknowledges `checkpoint` with this micro-batch.

        Raises
        ------
        BarriersDoNotAddUp
            In the mode EXACTLY_ONCE, where every barrier belongs into one micro-batch.
        """
        report = count_barriers(checkpoint, staged.acks, self._channels)
        if report.alignment is Alignment.ALIGNED:
            reached = set(self._channels)
        elif self._mode is CheckpointingMode.EXACTLY_ONCE:
            raise BarriersDoNotAddUp(report.detail)
        else:
            reached = sinks_reached(checkpoint, staged.acks, self._channels)
        seen = self._reached.setdefault(checkpoint, set())
        seen |= reached
        sinks = tuple(Participant(ParticipantKind.SINK, uid) for uid in sorted(reached))
        return (*sinks, *self._operators) if seen == set(self._channels) else sinks

    def forget(self, up_to: CheckpointId) -> None:
        """Forget the checkpoints up to one that has ended; what comes late is not counted."""
        self._reached = {one: seen for one, seen in self._reached.items() if one > up_to}
