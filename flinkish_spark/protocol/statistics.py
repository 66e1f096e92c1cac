"""What one checkpoint cost: durations, rows, bytes, and why it failed if it did.

Written by the coordinator while a checkpoint runs, read by programs and by `flinkish checkpoints`.
Nothing here decides anything. All types are immutable and check themselves when they are made;
`to_json` and `from_json` are exact inverses, use JSON values only, and a value that does not fit
raises ValueError: a process that reads statistics runs no code from them.

`None` means that something was not measured or not reached; 0 means that it took no time. What an
older form did not have is not measured.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from flinkish_spark.protocol.codec import Presence, Stored
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.json_values import measured, text_of
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.protocol.statistics_participants import ParticipantStatistics, listed

#: Characters of a failure's text that are kept; an exception may quote a whole record.
MOST_TEXT = 2_000


class CheckpointStatus(enum.Enum):
    """What has become of a checkpoint."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class CheckpointDurations(Stored):
    """How long the phases of a checkpoint took, in milliseconds.

    Parameters
    ----------
    trigger_ms
        From the request to the moment when the barrier is offered; waiting in the queue included.
    start_delay_ms, alignment_ms
        Of a checkpoint that is one cut with an upstream's: from the writing of the upstream's barrier
        records to the first one that was passed, and from there to the cut. With several upstreams,
        those of the one that took longest. Otherwise the alignment is the time from the first
        micro-batch with a barrier to the last; None where one micro-batch brought all of them, since
        what happens inside of it cannot be seen.
    sync_ms
        From the start of foreachBatch to the staged file: the part that the stream waits for.
    async_ms
        From the staged file to the decision, while the next micro-batch runs.
    commit_ms
        From the decision to the receipt.
    end_to_end_ms
        From the request to the receipt, or to the failure.
    """

    DEFAULTS: ClassVar = Presence.ADDED

    trigger_ms: int | None = None
    start_delay_ms: int | None = None
    alignment_ms: int | None = None
    sync_ms: int | None = None
    async_ms: int | None = None
    commit_ms: int | None = None
    end_to_end_ms: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            measured(field.name, getattr(self, field.name))


@dataclass(frozen=True, slots=True)
class CheckpointFailure(Stored):
    """Why a checkpoint failed: the reason for programs, the text for people."""

    reason: CheckpointFailureReason
    text: str = ""

    def __post_init__(self) -> None:
        text_of(self.text, "text")


#: Members of :class:`CheckpointStatistics` that may be None.
_MEASURED = ("rows", "bytes_staged", "asked", "acknowledged")


@dataclass(frozen=True, slots=True)
class CheckpointStatistics(Stored):
    """One checkpoint, from its trigger to its end.

    Parameters
    ----------
    checkpoint
        Its id.
    purpose
        What it was taken for.
    status
        What has become of it.
    trigger_at_ms
        Wall clock time of the request, for people; durations are measured by another clock.
    durations
        See :class:`CheckpointDurations`.
    rows, bytes_staged
        What all sinks staged for it; None before it is completed, bytes also where a sink does not tell.
    asked, acknowledged
        How many had to acknowledge, and how many did; None where nobody noted it.
    participants
        One entry per operator, sink and master hook, those first that have not acknowledged.
    unlisted
        Participants and channels that are not listed: there were too many.
    failure
        Why it failed; there exactly when the status is FAILED.

    Raises
    ------
    ValueError
        A value is out of range, or status and failure contradict each other.

    Examples
    --------
    >>> begun = CheckpointStatistics.triggered(CheckpointId(7), CheckpointPurpose.USER, trigger_at_ms=1_000)
    >>> done = begun.completed(CheckpointDurations(sync_ms=20, end_to_end_ms=90), rows=12, bytes_staged=340)
    >>> done.status.value, done.durations.sync_ms, CheckpointStatistics.from_json(done.to_json()) == done
    ('COMPLETED', 20, True)
    """

    DEFAULTS: ClassVar = Presence.ADDED

    checkpoint: CheckpointId
    purpose: CheckpointPurpose
    status: CheckpointStatus
    trigger_at_ms: int
    durations: CheckpointDurations = CheckpointDurations()
    rows: int | None = None
    bytes_staged: int | None = None
    asked: int | None = None
    acknowledged: int | None = None
    participants: tuple[ParticipantStatistics, ...] = ()
    unlisted: int = 0
    failure: CheckpointFailure | None = None

    def __post_init__(self) -> None:
        for name in ("trigger_at_ms", "unlisted"):
            checked_whole(name, getattr(self, name), least=0)
        for name in _MEASURED:
            measured(name, getattr(self, name))
        if (self.status is CheckpointStatus.FAILED) != (self.failure is not None):
            raise ValueError(
                f"checkpoint {self.checkpoint} is {self.status.value} with failure {self.failure}"
            )

    @classmethod
    def triggered(
        cls, checkpoint: CheckpointId, purpose: CheckpointPurpose, trigger_at_ms: int
    ) -> CheckpointStatistics:
        """Return the statistics of a checkpoint that has just got its id."""
        return cls(checkpoint, purpose, CheckpointStatus.IN_PROGRESS, trigger_at_ms)

    def completed(
        self,
        durations: CheckpointDurations,
        *,
        rows: int,
        bytes_staged: int | None = None,
        participants: tuple[ParticipantStatistics, ...] = (),
        unlisted: int = 0,
    ) -> CheckpointStatistics:
        """Return the statistics of the same checkpoint, confirmed; called after the receipt."""
        return replace(
            self,
            status=CheckpointStatus.COMPLETED,
            durations=durations,
            rows=rows,
            bytes_staged=bytes_staged,
            unlisted=unlisted,
            **_of(participants),
        )

    def failed(
        self,
        reason: CheckpointFailureReason,
        text: str,
        durations: CheckpointDurations | None = None,
        participants: tuple[ParticipantStatistics, ...] = (),
    ) -> CheckpointStatistics:
        """Return the statistics of the same checkpoint, failed; durations only if there are new ones.

        A text of more than :data:`MOST_TEXT` characters is cut.
        """
        kept = text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."
        return replace(
            self,
            status=CheckpointStatus.FAILED,
            durations=durations or self.durations,
            failure=CheckpointFailure(reason, kept),
            **_of(participants),
        )

    @property
    def detail_count(self) -> int:
        """How many participants and channels are listed."""
        channels = sum(len(one.channels) for one in self.participants if one.channels)
        return len(self.participants) + channels

    def with_details(self, at_most: int) -> CheckpointStatistics:
        """Return the statistics with at most so many participants and channels."""
        count = self.detail_count
        if count <= at_most:
            return self
        kept = listed(self.participants, at_most)
        unlisted = self.unlisted + count - sum(one.detail_count for one in kept)
        return replace(self, participants=kept, unlisted=unlisted)

    def without_details(self) -> CheckpointStatistics:
        """Return the statistics of the checkpoint as a whole."""
        return replace(self, participants=(), unlisted=self.unlisted + self.detail_count)

    @classmethod
    def _of_older(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return an object as it is written today.

        The older form had 0 where nothing was measured, and it never measured bytes.
        """
        if "unlisted" in value:
            return value
        is_completed = value.get("status") == CheckpointStatus.COMPLETED.value
        rows = value.get("rows") if is_completed else None
        return {**value, "rows": rows, "bytes_staged": value.get("bytes_staged") or None}


def _of(participants: tuple[ParticipantStatistics, ...]) -> dict[str, Any]:
    """Return participants and their counts; those who are not known are not counted."""
    acknowledged = sum(participant.is_acknowledged for participant in participants)
    counts = {"asked": len(participants), "acknowledged": acknowledged} if participants else {}
    return {"participants": participants, **counts}
